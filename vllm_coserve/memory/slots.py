"""Bookkeeping of an elastic block pool: which slots are mapped, how many blocks in use or cached lie on each.

Pure but for the clock: it knows blocks and slots by number only, and neither vLLM nor the ledger. The engine's block
pool drives it. A pool may have tens of thousands of slots, so nothing loops over all of them in Python: what is looked
for is found in C (`bytearray.find`), within microseconds at that size, and the rest is kept in order.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from vllm_coserve.memory.geometry import Geometry

NULL_BLOCK = 0  # vLLM's placeholder: never used, never free


class SlotTable:
    """Counts per slot, and free blocks grouped by slot.

    Every usable block (all its slots mapped) is in exactly one state: in use, cached (unreferenced prefix cache) or
    free. A block that straddles slots counts on each of them; its first slot is its home.
    """

    def __init__(self, geometry: Geometry, kept_slots: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is mapped at first.

        Args:
            geometry: of blocks over slots.
            kept_slots: so many first slots never get a page of the pool (`memory.devices.kept_slots`).
            clock: seconds that never run backwards.
        """
        self.geometry, self.kept_slots, self._clock = geometry, kept_slots, clock
        n = geometry.num_slots
        self.page_of = [-1] * n
        self.used = [0] * n
        self.cached = [0] * n
        self.num_mapped = 0
        self.num_used_slots = 0  # slots with blocks in use
        self.num_used_blocks = 0
        self.num_free = 0  # free blocks, cached ones not counted
        self._mapped = bytearray(n)
        self._vacant = bytearray(n)  # mapped, with nothing in use and nothing cached
        self._idle: OrderedDict[int, float] = OrderedDict()  # mapped, with nothing in use: since when, oldest first
        self._usable = bytearray(geometry.num_blocks)
        self._lacking = array("H", (len(geometry.slots_of(b)) for b in range(geometry.num_blocks)))  # slots unmapped
        self._free: dict[int, dict[int, None]] = {}  # home slot -> its free blocks
        # Ordered ones where the first is asked for: a dict that loses its first entries is slow to say which is first.
        self._empty: OrderedDict[int, None] = OrderedDict()  # slots with free blocks and nothing else on them
        self._partial: OrderedDict[int, None] = OrderedDict()  # slots with free blocks beside others

    # ---- mapping

    def unmapped_slots(self, count: int) -> list[int]:
        """`count` slots without a page, the lowest first, so that ranges stay contiguous.

        Blocks larger than a page need neighbouring slots, so there whole blocks are completed first.
        """
        if self.geometry.block_bytes > self.geometry.page_bytes:
            return self._slots_of_whole_blocks(count)
        out: list[int] = []
        slot = self.kept_slots - 1
        while len(out) < count and (slot := self._mapped.find(0, slot + 1)) >= 0:
            out.append(slot)
        return out

    def _slots_of_whole_blocks(self, count: int) -> list[int]:
        chosen: dict[int, None] = {}
        # Blocks before it lie on kept slots, and can never be completed.
        first = -(-self.kept_slots * self.geometry.page_bytes // self.geometry.block_bytes)
        block = self._usable.find(0, max(NULL_BLOCK + 1, first))
        while block >= 0 and len(chosen) < count:
            lacking = [s for s in self.geometry.slots_of(block) if self.page_of[s] < 0 and s not in chosen]
            if len(chosen) + len(lacking) <= count:
                chosen.update(dict.fromkeys(lacking))
                block = self._usable.find(0, block + 1)
            else:
                block = self._next_that_lacks(count - len(chosen), block + 1)
        return sorted(chosen)

    def _next_that_lacks(self, most: int, start: int) -> int:
        """The first block from `start` on that 1 to `most` pages complete, -1 for none."""
        lacking = np.frombuffer(self._lacking, dtype=np.uint16)[start:]
        found = np.flatnonzero((lacking > 0) & (lacking <= most))
        return start + int(found[0]) if found.size else -1

    def map(self, slots: Iterable[int], pages: Iterable[int]) -> list[int]:
        """Put pages under slots; returns the blocks that became usable (and free)."""
        slots, now_s = list(slots), self._clock()
        for slot, page in zip(slots, pages, strict=True):
            if slot < self.kept_slots:
                raise ValueError(f"slot {slot} is kept for the placeholder block")
            if self.page_of[slot] >= 0:
                raise ValueError(f"slot {slot} already has page {self.page_of[slot]}")
            self.page_of[slot] = page
            self.num_mapped += 1
            self._mapped[slot] = self._vacant[slot] = 1
            self._idle[slot] = now_s
        gained = []
        for slot in slots:
            for block in self.geometry.blocks_of(slot):
                self._lacking[block] -= 1
                if not self._lacking[block] and block != NULL_BLOCK:
                    self._usable[block] = 1
                    self._add_free(block)
                    gained.append(block)
        return gained

    def unmap(self, slot: int) -> tuple[int, list[int]]:
        """Take the page from a slot that nothing uses; returns (page, blocks that are no longer usable).

        The caller has uncached the blocks on it before.
        """
        if not self._vacant[slot]:
            raise ValueError(f"slot {slot} is not free to go: used {self.used[slot]}, cached {self.cached[slot]}")
        lost = []
        for block in self.geometry.blocks_of(slot):
            self._lacking[block] += 1
            if self._usable[block]:
                self._remove_free(block)
                self._usable[block] = 0
                lost.append(block)
        page, self.page_of[slot] = self.page_of[slot], -1
        self.num_mapped -= 1
        self._mapped[slot] = self._vacant[slot] = 0
        del self._idle[slot]
        return page, lost

    def usable_on(self, slot: int) -> Iterator[int]:
        """Usable blocks that touch a slot."""
        return (b for b in self.geometry.blocks_of(slot) if self._usable[b])

    # ---- state changes of a usable block

    def use_free(self, block: int) -> None:
        """free -> in use"""
        self._remove_free(block)
        self._count_used(block, 1)

    def use_cached(self, block: int) -> None:
        """cached -> in use"""
        self._count_cached(block, -1)
        self._count_used(block, 1)

    def release(self, block: int, keep_cached: bool) -> None:
        """in use -> cached or free"""
        self._count_used(block, -1)
        if keep_cached:
            self._count_cached(block, 1)
        else:
            self._add_free(block)

    def uncache(self, block: int) -> None:
        """cached -> free"""
        self._count_cached(block, -1)
        self._add_free(block)

    # ---- choosing

    def pick_free(self, slot: int | None, prefer_empty: bool) -> int | None:
        """A free block: on `slot` when it has one, else on an empty or a partly used slot, by preference."""
        if slot is not None and (free := self._free.get(slot)):
            return next(iter(free))
        first, second = (self._empty, self._partial) if prefer_empty else (self._partial, self._empty)
        for slots in (first, second):
            if slots:
                return next(iter(self._free[next(iter(slots))]))
        return None

    def slots_to_give(self, count: int) -> list[int]:
        """Up to `count` mapped slots with nothing in use that cost least to give.

        First those on which nothing is cached either, the highest first; then those that were in use longest ago.
        """
        out: dict[int, None] = {}
        slot = len(self._vacant)
        while len(out) < count and (slot := self._vacant.rfind(1, 0, slot)) >= 0:
            out[slot] = None
        for slot in self._idle:
            if len(out) >= count:
                break
            out[slot] = None
        return list(out)

    def idle_slots(self, older_than_s: float) -> list[int]:
        """Mapped slots with nothing in use since so many seconds, the longest first."""
        limit_s = self._clock() - older_than_s
        return [slot for slot, _ in itertools.takewhile(lambda idle: idle[1] < limit_s, self._idle.items())]

    # ---- internals

    def _add_free(self, block: int) -> None:
        home = self.geometry.slots_of(block)[0]
        self._free.setdefault(home, {})[block] = None
        self.num_free += 1
        self._classify_all(block)

    def _remove_free(self, block: int) -> None:
        home = self.geometry.slots_of(block)[0]
        free = self._free[home]
        del free[block]
        if not free:
            del self._free[home]
        self.num_free -= 1
        self._classify_all(block)

    def _count_used(self, block: int, delta: int) -> None:
        used = self.used
        for slot in self.geometry.slots_of(block):
            before = used[slot]
            used[slot] = after = before + delta
            if not before:
                self.num_used_slots += 1
                del self._idle[slot]
            elif not after:
                self.num_used_slots -= 1
                self._idle[slot] = self._clock()
        self.num_used_blocks += delta
        self._classify_all(block)

    def _count_cached(self, block: int, delta: int) -> None:
        for slot in self.geometry.slots_of(block):
            self.cached[slot] += delta
        self._classify_all(block)

    def _classify_all(self, block: int) -> None:
        for slot in self.geometry.slots_of(block):
            busy = self.used[slot] > 0 or self.cached[slot] > 0
            self._vacant[slot] = not busy
            if slot not in self._free:
                self._empty.pop(slot, None)
                self._partial.pop(slot, None)
            elif busy:
                self._empty.pop(slot, None)
                self._partial[slot] = None
            else:
                self._partial.pop(slot, None)
                self._empty[slot] = None
