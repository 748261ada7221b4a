"""Brings an engine's virtual range in line with its slot table: what the engine core wrote, the worker maps."""

from __future__ import annotations

import numpy as np

from vllm_coserve.memory.driver import PageDriver

_UNKNOWN = -2  # no state a table asks for, so the next `apply` sets the slot whatever is wanted by then


def table_difference(have: np.ndarray, want: np.ndarray) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """What must change to get from table `have` to `want` (int32[slots], page or -1).

    Returns:
        ([(slot, count)] to unmap, [(slot, page, count)] to map), in runs that are contiguous in slots and pages.
    """
    changed = np.flatnonzero(have != want)
    unmap: list[tuple[int, int]] = []
    put: list[tuple[int, int, int]] = []
    for slot in changed.tolist():
        page = int(want[slot])
        if page < 0:
            if unmap and sum(unmap[-1]) == slot:
                unmap[-1] = (unmap[-1][0], unmap[-1][1] + 1)
            else:
                unmap.append((slot, 1))
        elif put and put[-1][0] + put[-1][2] == slot and put[-1][1] + put[-1][2] == page:
            put[-1] = (put[-1][0], put[-1][1], put[-1][2] + 1)
        else:
            put.append((slot, page, 1))
    return unmap, put


class TableMapper:
    """Applies a slot table to a driver; idempotent, so it may look at any moment."""

    def __init__(self, driver: PageDriver, table: np.ndarray) -> None:
        """`table`: int32[slots] in shared memory, written by the engine core."""
        self._driver, self._table = driver, table
        self._have = np.full(driver.num_slots, -1, dtype=np.int32)

    def apply(self) -> int:
        """Map and unmap what differs; returns how many slots changed.

        A failed driver call may have done part of its run. Its slots are unknown until a later `apply` sets them anew,
        so the driver must take slots out that are not mapped, and put pages where some are.
        """
        want = self._table.copy()  # one look: the core may write on while the runs are applied
        unmap, put = table_difference(self._have, want)
        for slot, count in unmap:
            self._have[slot : slot + count] = _UNKNOWN
            self._driver.unmap_run(slot, count)
            self._have[slot : slot + count] = -1
        for slot, page, count in put:
            self._have[slot : slot + count] = _UNKNOWN
            self._driver.map_run(slot, page, count)
            self._have[slot : slot + count] = want[slot : slot + count]
        return sum(c for _, c in unmap) + sum(c for *_, c in put)
