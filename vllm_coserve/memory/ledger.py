"""Who owns each physical page. The state of a page says who may change it, so that there is no lock to die with.

    FREE_DIRTY --S: zeroed--> FREE_CLEAN --S--> SERVING --S: its worker has unmapped--> FREE_DIRTY
                              FREE_CLEAN --S--> ROLLOUT --R: its worker has unmapped--> FREE_DIRTY
                                                ROLLOUT --S: every rollout process is gone--> FREE_DIRTY

S is the serving engine core, R the rollout engine core. A page changes hands only through FREE_DIRTY, and each step is
one aligned byte store: a process killed between any two instructions leaves every page with exactly one owner.
Serving never waits for the rollout here; the rollout is given pages, it does not take them.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np


class Owner(IntEnum):
    """State of a physical page."""

    FREE_DIRTY = 0
    FREE_CLEAN = 1
    SERVING = 2
    ROLLOUT = 3


class ServingLedger:
    """The serving engine core's hand on the ledger (main thread and arbiter thread)."""

    def __init__(self, owners: np.ndarray, erase: Callable[[int, int], None]) -> None:
        """`owners`: uint8[pool_pages] in shared memory; `erase(page, count)` zeroes pages nobody maps."""
        self._owners = owners
        self._erase = erase
        self._lock = threading.Lock()  # between the threads of this process only

    def count(self, owner: Owner) -> int:
        """Pages in a state now."""
        return int(np.count_nonzero(self._owners == owner))

    @property
    def free_pages(self) -> int:
        """Pages that nobody maps."""
        return int(np.count_nonzero(self._owners <= Owner.FREE_CLEAN))

    def take(self, count: int, owner: Owner, keep_free: int = 0) -> list[int]:
        """Hand up to `count` free pages to `owner`, lowest numbers first so that runs stay contiguous.

        Clean pages are preferred; dirty ones are zeroed here when there are not enough. With `keep_free` so many pages
        stay free, whatever another thread takes meanwhile.
        """
        if count <= 0:
            return []
        with self._lock:
            count = max(0, min(count, self.free_pages - keep_free))
            pages = np.flatnonzero(self._owners == Owner.FREE_CLEAN)[:count].tolist()
            short = count - len(pages)
            dirty = np.flatnonzero(self._owners == Owner.FREE_DIRTY)[:short].tolist() if short else []
            for first, run in runs(dirty):
                self._erase(first, run)
            pages = sorted(pages + dirty)
            for page in pages:
                self._owners[page] = owner
        return pages

    def put(self, pages: Iterable[int]) -> None:
        """Serving gives pages back; its worker has unmapped them."""
        self._release(pages, Owner.SERVING)

    def put_all_of_rollout(self) -> int:
        """Take back everything of a rollout engine of which no process is left; returns how many pages."""
        pages = np.flatnonzero(self._owners == Owner.ROLLOUT).tolist()
        self._release(pages, Owner.ROLLOUT)
        return len(pages)

    def _release(self, pages: Iterable[int], owner: Owner) -> None:
        with self._lock:
            for page in pages:
                if self._owners[page] != owner:
                    raise ValueError(f"page {page} is {Owner(self._owners[page]).name}, not {owner.name}")
                self._owners[page] = Owner.FREE_DIRTY

    def clean_some(self, limit: int) -> int:
        """Zero up to `limit` dirty pages, off everybody's critical path; returns how many."""
        done = 0
        while done < limit:
            # One page at a time under the lock: an allocation must not wait for a long sweep.
            with self._lock:
                dirty = np.flatnonzero(self._owners == Owner.FREE_DIRTY)
                if not dirty.size:
                    break
                page = int(dirty[0])
                self._erase(page, 1)
                self._owners[page] = Owner.FREE_CLEAN
            done += 1
        return done


class RolloutLedger:
    """The rollout engine core's hand on the ledger: it sees what it was given and may give it back."""

    def __init__(self, owners: np.ndarray) -> None:
        self._owners = owners

    def granted(self) -> list[int]:
        """All pages that are the rollout's now, mapped or not."""
        return np.flatnonzero(self._owners == Owner.ROLLOUT).tolist()

    def put(self, pages: Iterable[int]) -> None:
        """Give pages back; the rollout's worker has unmapped them."""
        for page in pages:
            if self._owners[page] != Owner.ROLLOUT:
                raise ValueError(f"page {page} is {Owner(self._owners[page]).name}, not the rollout's")
            self._owners[page] = Owner.FREE_DIRTY


def runs(sorted_numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group ascending numbers into (first, count) runs of neighbours."""
    out: list[tuple[int, int]] = []
    for n in sorted_numbers:
        if out and out[-1][0] + out[-1][1] == n:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((n, 1))
    return out


def nobody_holds(members_fd: int) -> bool:
    """Whether no rollout process has the pool mapped: each holds a shared lock from before its first mapping."""
    try:
        fcntl.flock(members_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(members_fd, fcntl.LOCK_UN)
    return True
