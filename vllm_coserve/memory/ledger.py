"""Who owns each physical page. The state of a page says who may change it, so that there is no lock to die with.

    FREE_DIRTY --S: zeroed--> FREE_CLEAN --S--> SERVING --S: its worker has unmapped--> FREE_DIRTY
                              FREE_CLEAN --S--> ROLLOUT --R: its worker has unmapped--> FREE_DIRTY
                                                ROLLOUT --S: every rollout process is gone--> FREE_DIRTY
    WEIGHTS --R: weights are off the device--> FREE_DIRTY --S: memory had, zeroed--> FREE_CLEAN
                                   FREE_DIRTY, FREE_CLEAN --S: memory given back--> WEIGHTS

S is the serving engine core, R the rollout engine core. A page changes hands only through FREE_DIRTY, and each step is
one aligned byte store: a process killed between any two instructions leaves every page with exactly one owner.
Serving never waits for the rollout here; the rollout is given pages, it does not take them.

The last pages of the ledger are weight pages: while the rollout's weights are off the device, their memory is the
pool's, and serving's alone. The weights come back only when all of them are WEIGHTS again.
"""

from __future__ import annotations

import fcntl
import math
import threading
import time
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np

_LOCKED_S = 0.0002  # about how long an allocation may wait for pages that are being zeroed
_DISCARDED_AT_ONCE = 4  # weight pages, for the same reason


class Owner(IntEnum):
    """State of a physical page."""

    FREE_DIRTY = 0
    FREE_CLEAN = 1
    SERVING = 2
    ROLLOUT = 3
    WEIGHTS = 4  # none of the pool's now: the memory is that of the rollout's weights


class ServingLedger:
    """The serving engine core's hand on the ledger (main thread and arbiter thread)."""

    def __init__(
        self,
        owners: np.ndarray,
        erase: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
        weight_pages: int = 0,
        discard: Callable[[int, int], None] = lambda page, count: None,
    ) -> None:
        """Nothing is changed yet.

        Args:
            owners: uint8[pages] in shared memory.
            erase: `erase(page, count)` zeroes pages nobody maps.
            clock: seconds that never run backwards.
            weight_pages: so many last pages are weight pages; to zero one is to get its memory first.
            discard: `discard(page, count)` gives the memory of weight pages back that nobody maps.
        """
        self._owners, self._erase, self._clock, self._discard = owners, erase, clock, discard
        self._pool_pages = owners.size - weight_pages
        self._withholding, self._out_of_memory = True, False
        self._lock = threading.Lock()  # between the threads of this process only

    def count(self, owner: Owner) -> int:
        """Pages in a state now."""
        return int(np.count_nonzero(self._owners == np.uint8(owner)))

    @property
    def free_pages(self) -> int:
        """Pages that nobody maps and serving could be handed."""
        return self._count_free(self._open_to(Owner.SERVING))

    def _open_to(self, owner: Owner) -> np.ndarray:
        """States of the pages that `owner` may have when they are free."""
        return self._owners if owner == Owner.SERVING and not self._withholding else self._owners[: self._pool_pages]

    def _count_free(self, owners: np.ndarray) -> int:
        """Weight pages are free only when they are clean: their memory may not be there to be had."""
        of_pool, of_weights = owners[: self._pool_pages], owners[self._pool_pages :]
        return int(
            np.count_nonzero(of_pool <= np.uint8(Owner.FREE_CLEAN))
            + np.count_nonzero(of_weights == np.uint8(Owner.FREE_CLEAN))
        )

    def take(self, count: int, owner: Owner, keep_free: int = 0) -> list[int]:
        """Hand up to `count` free pages to `owner`, lowest numbers first so that runs stay contiguous.

        Clean pages are preferred; dirty ones are zeroed here when there are not enough. With `keep_free` so many pages
        stay free, whatever another thread takes meanwhile. Weight pages are for serving only, when nothing else is
        left: what lies on them is in the way of the weights.
        """
        if count <= 0:
            return []
        with self._lock:
            owners = self._open_to(owner)
            count = max(0, min(count, self._count_free(owners) - keep_free))
            of_pool, of_weights = owners[: self._pool_pages], owners[self._pool_pages :]
            pages = _in_state(of_pool, Owner.FREE_CLEAN)[:count]
            if short := count - pages.size:
                dirty = _in_state(of_pool, Owner.FREE_DIRTY)[:short]
                for first, run in runs(dirty.tolist()):
                    self._erase(first, run)
                pages = np.sort(np.concatenate((pages, dirty)))
            if short := count - pages.size:
                last = self._pool_pages + _in_state(of_weights, Owner.FREE_CLEAN)[:short]
                pages = np.concatenate((pages, last))
            self._owners[pages] = owner
        return pages.tolist()

    def put(self, pages: Iterable[int]) -> None:
        """Serving gives pages back; its worker has unmapped them."""
        with self._lock:
            _release(self._owners, pages, Owner.SERVING)

    def put_all_of_rollout(self) -> int:
        """Take back everything of a rollout engine of which no process is left; returns how many pages."""
        with self._lock:
            pages = _in_state(self._owners, Owner.ROLLOUT)
            _release(self._owners, pages, Owner.ROLLOUT)
        return pages.size

    def withhold(self, wanted: bool) -> int:
        """Keep weight pages from serving from now on, or not; those that are free go back to the weights at once.

        Returns:
            How many serving still has, 0 unless `wanted`.

        Raises:
            OSError: memory cannot be given back now. Its pages stay free, and serving is not handed them.
        """
        with self._lock:
            self._withholding = wanted
            if not wanted:
                return 0
            self._out_of_memory = False
        of_weights = self._owners[self._pool_pages :]
        while (free := np.flatnonzero(of_weights <= np.uint8(Owner.FREE_CLEAN))).size:
            first, count = runs(free[:_DISCARDED_AT_ONCE].tolist())[0]
            with self._lock:
                of_weights[first : first + count] = Owner.FREE_DIRTY  # what has no memory is never clean
                self._discard(self._pool_pages + first, count)
                of_weights[first : first + count] = Owner.WEIGHTS
        return int(np.count_nonzero(of_weights != np.uint8(Owner.WEIGHTS)))

    @property
    def reserve_pages(self) -> int:
        """Weight pages that serving may have, once `make_weight_pages` has got their memory."""
        if self._withholding or self._out_of_memory:
            return 0
        return _in_state(self._owners[self._pool_pages :], Owner.FREE_DIRTY).size

    def make_weight_pages(self, count: int, bound_s: float = math.inf) -> int:
        """Get the memory of up to `count` weight pages that may be had, for about `bound_s` seconds; see `clean_some`.

        Returns:
            How many are free now that were not.

        Raises:
            OSError: the device has none to spare. It is not asked again until they were withheld.
        """
        if count <= 0 or not self.reserve_pages:
            return 0
        try:
            return self._clean(self._pool_pages, self._owners.size, count, bound_s)
        except OSError:
            self._out_of_memory = True
            raise

    def clean_some(self, limit: int, bound_s: float = math.inf) -> int:
        """Zero up to `limit` dirty pages of the pool, for about `bound_s` seconds, off everybody's critical path.

        In runs of neighbours, one at a time under the lock, as an allocation must not wait for a long sweep. They grow
        while they are quick: a device zeroes hundreds of pages in the time that it takes to be told so.

        Returns:
            How many.
        """
        return self._clean(0, self._pool_pages, limit, bound_s)

    def _clean(self, start: int, end: int, limit: int, bound_s: float) -> int:
        done, longest = 0, 1
        now_s = self._clock()
        end_s = now_s + bound_s
        while done < limit and now_s < end_s:
            with self._lock:
                first, count = self._dirty_run(start, end, min(longest, limit - done))
                if not count:
                    break
                self._erase(first, count)
                self._owners[first : first + count] = Owner.FREE_CLEAN
            done += count
            since_s, now_s = now_s, self._clock()
            if now_s - since_s < _LOCKED_S / 2:
                longest *= 2
        return done

    def _dirty_run(self, start: int, end: int, most: int) -> tuple[int, int]:
        """(first page, pages) of the first run of dirty pages of some, cut to `most`; 0 pages when there is none."""
        dirty = self._owners[start:end] == np.uint8(Owner.FREE_DIRTY)
        first = int(dirty.argmax())
        run = dirty[first : first + most]
        stop = int(run.argmin())
        return start + first, (run.size if run[stop] else stop)


class RolloutLedger:
    """The rollout engine core's hand on the ledger: it sees what it was given and may give it back."""

    def __init__(self, owners: np.ndarray) -> None:
        self._owners = owners
        self._known = np.zeros(owners.size, dtype=bool)  # seen by `newly_granted` and not put since

    def newly_granted(self) -> list[int]:
        """The rollout's pages that no call before has returned, or that were put and granted again since."""
        fresh = np.flatnonzero((self._owners == np.uint8(Owner.ROLLOUT)) & ~self._known)
        self._known[fresh] = True
        return fresh.tolist()

    def put(self, pages: Iterable[int]) -> None:
        """Give pages back; the rollout's worker has unmapped them."""
        self._known[_release(self._owners, pages, Owner.ROLLOUT)] = False

    def lend_weight_pages(self, first: int, count: int) -> int:
        """Have serving use the memory of weights that are off the device; returns how many pages were not lent yet."""
        pages = first + _in_state(self._owners[first : first + count], Owner.WEIGHTS)
        self._owners[pages] = Owner.FREE_DIRTY
        return pages.size


def has_weight_pages(owners: np.ndarray, first: int) -> bool:
    """Whether all weight pages, those from `first` on, are the weights': their memory can be taken."""
    return bool(np.all(owners[first:] == np.uint8(Owner.WEIGHTS)))


def _in_state(owners: np.ndarray, state: Owner) -> np.ndarray:
    """Pages in a state now, ascending. Compared as bytes: with an enum numpy makes integers of all of them first."""
    return np.flatnonzero(owners == np.uint8(state))


def _release(owners: np.ndarray, pages: Iterable[int], owner: Owner) -> np.ndarray:
    """Mark pages of `owner` as free, with one store a page; nothing when one of them is not its own."""
    given = np.fromiter(pages, dtype=np.intp)
    if (wrong := given[owners[given] != np.uint8(owner)]).size:
        page = int(wrong[0])
        raise ValueError(f"page {page} is {Owner(owners[page]).name}, not {owner.name}")
    owners[given] = Owner.FREE_DIRTY
    return given


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
