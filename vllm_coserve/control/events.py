"""What happened to a pair: rings of events in the control block, one a writer, read by the sidecar's event stream.

They outlive the sidecar, so a client that was cut off by a restart can go on where it was.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum

_RING_EVENTS = 512
_RECORD = struct.Struct("<qqiiq96s")  # number, CLOCK_REALTIME ns, kind, text length, value, text
_MARGIN = 8  # the oldest records may be overwritten while they are read


class Writer(IntEnum):
    """Who writes a ring: the serving engine core, the rollout engine core, the supervisor, the sidecar's API."""

    SERVING = 0
    ROLLOUT = 1
    SUPERVISOR = 2
    API = 3


class EventKind(IntEnum):
    """What happened; `value` of the event in brackets."""

    CUT = 1  # emergency cut [pages of the new budget]
    RECLAIM = 2  # pages taken back [pages]
    ABORT = 3  # a rollout request ended early; text is "reason request-id" [tokens it had]
    STALL = 4  # a rollout request made no progress; text is its id [tokens it had]
    ACTIVATE = 5  # the rollout engine takes requests (again) [ms it took]
    DEACTIVATE = 6  # pages and weights were given back [ms it took]
    WEIGHTS = 7  # new weights are in use; text is the version's name [number of the version]
    RESTART = 8  # the rollout engine is started again [generation]
    REGISTER = 9  # an RL job took the engine; text is its id
    RELEASE = 10  # it left, or its lease ran out; text is its id


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `time_s` is Unix time."""

    writer: Writer
    number: int
    time_s: float
    kind: EventKind
    value: int
    text: str


EVENT_BYTES = len(Writer) * (8 + _RING_EVENTS * _RECORD.size)


class EventRings:
    """The rings in a buffer of EVENT_BYTES bytes, zero at first."""

    def __init__(self, buffer: memoryview) -> None:
        self._lock = threading.Lock()  # between the threads of this process only
        size = EVENT_BYTES // len(Writer)
        self._rings = [buffer[i * size : (i + 1) * size] for i in range(len(Writer))]

    def put(self, writer: Writer, kind: EventKind, value: int = 0, text: str = "") -> None:
        """Append an event; only the ring's one writer may."""
        with self._lock:
            self._put(self._rings[writer], kind, value, text)

    def _put(self, ring: memoryview, kind: EventKind, value: int, text: str) -> None:
        number = int.from_bytes(ring[:8], "little") + 1
        data = text.encode()[:96]
        at = 8 + (number - 1) % _RING_EVENTS * _RECORD.size
        _RECORD.pack_into(ring, at, number, time.time_ns(), kind, len(data), value, data)
        ring[:8] = number.to_bytes(8, "little")  # published once it is whole

    def last(self) -> tuple[int, ...]:
        """Number of the latest event of each writer: the cursor that leads to nothing but what comes now."""
        return tuple(int.from_bytes(ring[:8], "little") for ring in self._rings)

    def after(self, cursor: tuple[int, ...]) -> list[Event]:
        """Events behind a cursor in the order of time; those that were overwritten meanwhile are missing."""
        out: list[Event] = []
        for writer, ring, seen in zip(Writer, self._rings, cursor, strict=True):
            last = int.from_bytes(ring[:8], "little")
            for number in range(max(seen, last - _RING_EVENTS + _MARGIN) + 1, last + 1):
                at = 8 + (number - 1) % _RING_EVENTS * _RECORD.size
                found, time_ns, kind, length, value, data = _RECORD.unpack_from(ring, at)
                if found == number:  # else its writer was killed within a record, or lapped us
                    text = data[:length].decode(errors="replace")
                    out.append(Event(writer, number, time_ns / 1e9, EventKind(kind), value, text))
        return sorted(out, key=lambda e: e.time_s)
