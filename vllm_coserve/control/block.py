"""The control block: the shared memory through which the processes of a co-serving pair see each other.

It is an anonymous memory file (memfd) of the `vllm serve` process. The others open it through that process's
`/proc/PID/fd`, so nothing has a name that could be left behind: the memory goes with the last process that maps it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_coserve.api.errors import ContractError
from vllm_coserve.control.events import EVENT_BYTES, EventRings
from vllm_coserve.control.futex import futex_wait, futex_wake
from vllm_coserve.control.words import Bell, Note, Word
from vllm_coserve.memory.ledger import Owner

_MAGIC = 0x76636F7365727631  # "vcoserv1"
_HEADER_WORDS = 16
_WORDS = 256
_BELLS = 64
QUEUE_BELLS = 4096  # futex words for vLLM's message queues, picked by a hash of the queue's address
_MEMBERS, _MEMBER_WORDS = 64, 4
RING_TURNS = 8192
RING_RECLAIMS = 1024
# Upper bounds of the latency histograms, in seconds; a last bucket holds what lies above.
LATENCY_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_HISTOGRAM_WORDS = len(LATENCY_BOUNDS_S) + 2
_NOTE_BYTES = 512
_CACHE_LINE = 64

WHO_SERVING, WHO_ROLLOUT = 1, 2


class Histogram:
    """Counts of latencies by bucket, and their sum; one writer."""

    def __init__(self, cells: np.ndarray) -> None:
        """`cells`: int64[buckets + 1], the last one the sum in ns."""
        self._cells = cells

    def observe(self, duration_ns: int) -> None:
        """Count one latency; its one writer only."""
        self._cells[bisect.bisect_left(LATENCY_BOUNDS_S, duration_ns / 1e9)] += 1
        self._cells[-1] += duration_ns

    def read(self) -> tuple[list[int], float]:
        """(counts per bucket, the last one without an upper bound; sum in seconds)."""
        *counts, total_ns = self._cells.tolist()
        return counts, total_ns / 1e9


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine step on the device. Times are CLOCK_MONOTONIC seconds."""

    seq: int
    who: str
    start_s: float
    end_s: float
    tokens: int


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


class ControlBlock:
    """A mapping of the control block; `create` in the owner, `attach` everywhere else.

    Attributes:
        pool_pages: physical pages of the pool that are there at any time.
        weight_pages: further ones, the last, in place of the rollout's weights: there while those are off the device.
        all_pages: both.
        page_bytes: bytes of a page.
        owners: uint8[all_pages], see `memory.ledger`.
        serving_table, rollout_table: int32[all_pages] and int32[pool_pages], virtual slot to physical page, -1 when
            unmapped.
    """

    def __init__(self, mm: mmap.mmap) -> None:
        self._mm = mm
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(mm))
        header = memoryview(mm)[: _HEADER_WORDS * 8].cast("q")
        if header[0] != _MAGIC:
            raise ContractError("the control block is not one of this version of vllm-coserve")
        self.pool_pages, self.page_bytes, self.weight_pages = (int(n) for n in header[1:4])
        self.all_pages = self.pool_pages + self.weight_pages
        offsets = _layout(self.pool_pages, self.weight_pages)
        self.words = memoryview(mm)[offsets["words"] : offsets["bells"]].cast("q")
        self._bells_offset = offsets["bells"]
        self._bells = memoryview(mm)[offsets["bells"] : offsets["members"]].cast("I")
        self._members = self._array(offsets["members"], np.int64, _MEMBERS * _MEMBER_WORDS).reshape(_MEMBERS, -1)
        self.owners = self._array(offsets["owners"], np.uint8, self.all_pages)
        self.serving_table = self._array(offsets["serving_table"], np.int32, self.all_pages)
        self.rollout_table = self._array(offsets["rollout_table"], np.int32, self.pool_pages)
        rings = self._array(offsets["turns"], np.int64, 2 * (1 + RING_TURNS * 3))
        self._turn_rings = {WHO_SERVING: rings[: rings.size // 2], WHO_ROLLOUT: rings[rings.size // 2 :]}
        self._reclaims = self._array(offsets["reclaims"], np.int64, 1 + RING_RECLAIMS)
        cells = self._array(offsets["histograms"], np.int64, 2 * _HISTOGRAM_WORDS)
        self.reclaim_latency, self.handover_latency = (Histogram(c) for c in cells.reshape(2, -1))
        self.events = EventRings(memoryview(mm)[offsets["events"] : offsets["events"] + EVENT_BYTES])
        self._notes = memoryview(mm)[offsets["notes"] : offsets["notes"] + len(Note) * _NOTE_BYTES]

    def _array(self, offset: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self._mm, dtype=dtype, count=count, offset=offset)

    @classmethod
    def create(cls, pool_pages: int, page_bytes: int, weight_pages: int = 0) -> tuple[ControlBlock, int]:
        """Make a fresh control block; returns it and its file descriptor, which the owner keeps open."""
        fd = os.memfd_create("coserve-control", os.MFD_CLOEXEC)
        size = _layout(pool_pages, weight_pages)["size"]
        os.ftruncate(fd, size)
        mm = mmap.mmap(fd, size)
        header = memoryview(mm)[: _HEADER_WORDS * 8].cast("q")
        header[1], header[2], header[3] = pool_pages, page_bytes, weight_pages
        header[0] = _MAGIC
        block = cls(mm)
        block.serving_table[:] = -1
        block.rollout_table[:] = -1
        block.owners[pool_pages:] = Owner.WEIGHTS
        return block, fd

    @classmethod
    def attach(cls, fd: int) -> ControlBlock:
        """Map an existing control block. The descriptor may be closed afterwards."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size))

    # ---- words and bells

    def get(self, word: Word) -> int:
        """Read a word."""
        return self.words[word]

    def set(self, word: Word, value: int) -> None:
        """Store a word; only its one writer may."""
        self.words[word] = value

    def add(self, word: Word, delta: int = 1) -> int:
        """Add to a word; only its one writer may. Returns the new value."""
        self.words[word] = value = self.words[word] + delta
        return value

    def bell(self, bell: Bell) -> int:
        """The value of a bell now; pass it to `wait`."""
        return self._bells[bell]

    def ring(self, bell: Bell) -> None:
        """Wake those who wait on a bell."""
        self.ring_at(int(bell))

    def wait(self, bell: Bell, seen: int, timeout_s: float) -> int:
        """Sleep until a bell differs from `seen` or the bound passes; returns its value."""
        return self.wait_at(int(bell), seen, timeout_s)

    def queue_bell_index(self, key: str) -> int:
        """The bell of a message queue. A collision costs a spurious wake-up, nothing else."""
        digest = int.from_bytes(key.encode()[-32:], "little") % 1_000_003
        return _BELLS + digest % QUEUE_BELLS

    def bell_at(self, index: int) -> int:
        """`bell`, by index."""
        return self._bells[index]

    def ring_at(self, index: int) -> None:
        """`ring`, by index."""
        self._bells[index] = (self._bells[index] + 1) & 0xFFFFFFFF
        futex_wake(self._base + self._bells_offset + 4 * index)

    def wait_at(self, index: int, seen: int, timeout_s: float) -> int:
        """`wait`, by index."""
        now = self._bells[index]
        if now == seen and timeout_s > 0:
            futex_wait(self._base + self._bells_offset + 4 * index, seen, timeout_s)
            now = self._bells[index]
        return now

    # ---- notes: short texts

    def note(self, note: Note) -> str:
        """Read a text; empty at first."""
        at = note * _NOTE_BYTES
        length = int.from_bytes(self._notes[at : at + 2], "little")
        return bytes(self._notes[at + 2 : at + 2 + length]).decode(errors="replace")

    def set_note(self, note: Note, text: str) -> None:
        """Store a text of at most 510 bytes; only its one writer may, or who holds the lock that guards it."""
        data, at = text.encode()[: _NOTE_BYTES - 2], note * _NOTE_BYTES
        self._notes[at : at + 2] = bytes(2)  # a reader in between finds nothing rather than a mixture
        self._notes[at + 2 : at + 2 + len(data)] = data
        self._notes[at : at + 2] = len(data).to_bytes(2, "little")

    # ---- members: who has proved itself active

    def join(self, side: int, kind: int, pid: int) -> None:
        """Record that the plugin is active in this process; slots are per (side, kind), last writer wins."""
        row = self._members[(side - 1) * 16 + kind]
        row[1], row[2] = side, kind
        row[0] = pid

    def member_pid(self, side: int, kind: int) -> int:
        """The process that joined as (side, kind), 0 when none has."""
        return int(self._members[(side - 1) * 16 + kind][0])

    def clear_members(self, side: int) -> None:
        """Forget the members of a side whose processes are gone."""
        self._members[(side - 1) * 16 : side * 16] = 0

    # ---- rings for people and reports

    def record_turn(self, who: int, start_ns: int, end_ns: int, tokens: int) -> None:
        """Append one step to the ring of its engine (single writer each)."""
        ring = self._turn_rings[who]
        n = int(ring[0])
        at = 1 + (n % RING_TURNS) * 3
        ring[at], ring[at + 1], ring[at + 2] = start_ns, end_ns, tokens
        ring[0] = n + 1

    def turns(self, who: int, after: int) -> tuple[int, list[Turn]]:
        """Steps of one engine with a sequence number above `after`; returns (last number, steps)."""
        ring = self._turn_rings[who]
        last = int(ring[0])
        name = "serving" if who == WHO_SERVING else "rollout"
        first = max(after, last - RING_TURNS + 64)  # the oldest are being overwritten
        rows = [ring[1 + (i % RING_TURNS) * 3 : 4 + (i % RING_TURNS) * 3].tolist() for i in range(first, last)]
        return last, [Turn(first + i + 1, name, r[0] / 1e9, r[1] / 1e9, r[2]) for i, r in enumerate(rows)]

    def record_reclaim(self, duration_ns: int) -> None:
        """Append the latency of one reclaim (serving engine core only)."""
        n = int(self._reclaims[0])
        self._reclaims[1 + n % RING_RECLAIMS] = duration_ns
        self._reclaims[0] = n + 1
        self.reclaim_latency.observe(duration_ns)

    def reclaim_latencies_ms(self) -> Sequence[float]:
        """The latest reclaim latencies, in ms, oldest first only while fewer than the ring holds."""
        n = min(int(self._reclaims[0]), RING_RECLAIMS)
        return (self._reclaims[1 : 1 + n] / 1e6).tolist()


def _layout(pool_pages: int, weight_pages: int) -> dict[str, int]:
    all_pages = pool_pages + weight_pages
    sizes = (
        ("header", _HEADER_WORDS * 8),
        ("words", _WORDS * 8),
        ("bells", (_BELLS + QUEUE_BELLS) * 4),
        ("members", _MEMBERS * _MEMBER_WORDS * 8),
        ("owners", all_pages),
        ("serving_table", all_pages * 4),
        ("rollout_table", pool_pages * 4),
        ("turns", 2 * (1 + RING_TURNS * 3) * 8),
        ("reclaims", (1 + RING_RECLAIMS) * 8),
        ("histograms", 2 * _HISTOGRAM_WORDS * 8),
        ("events", EVENT_BYTES),
        ("notes", len(Note) * _NOTE_BYTES),
    )
    offsets, at = {}, 0
    for name, size in sizes:
        offsets[name] = at
        at = _round_up(at + size, _CACHE_LINE)
    offsets["size"] = _round_up(at, mmap.PAGESIZE)
    return offsets
