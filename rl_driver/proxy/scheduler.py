"""Gives turns to workers: drives a placement policy with what happens, and lets turns wait, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rl_driver.policy.routing import Placement, Queued, Router, Turn, Worker
from rl_driver.proxy.continuation import MovedError, OverloadedError
from rl_driver.proxy.upstream import Chunk

_OBSERVE_S = 1.0
_RATE_WINDOW = 64  # ended turns from which the pace is estimated


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue."""

    turns: int = 4096  # turns that wait at a time; further ones are refused
    wait_s: float = 600.0  # longest wait for room on a worker
    no_worker_s: float = 30.0  # longest wait for any worker at all


class Place:
    """A turn's place on a worker; see `continuation.Lease`."""

    def __init__(self, scheduler: Scheduler, turn: Turn, worker_id: str) -> None:
        self.turn, self.worker_id = turn, worker_id
        self._scheduler = scheduler
        self._begun = False
        self._moving = ""
        self._bound: asyncio.Timeout | None = None

    async def next_chunk(self, chunks: AsyncIterator[Chunk], bound_s: float) -> Chunk:
        """See `continuation.Lease`."""
        if self._moving:
            raise MovedError(self._moving)
        try:
            async with asyncio.timeout(bound_s) as self._bound:
                chunk = await anext(chunks)
        except TimeoutError:
            if self._moving:
                raise MovedError(self._moving) from None
            raise
        finally:
            self._bound = None
        if chunk.token_ids:
            self._scheduler.note_tokens(self.worker_id, len(chunk.token_ids))
            if not self._begun:
                self._begun = True
                self._scheduler.begun(self.turn)
        return chunk

    def move(self, why: str) -> None:
        """Have the turn leave its worker and go on elsewhere."""
        self._moving = why
        if self._bound is not None:
            self._bound.reschedule(asyncio.get_running_loop().time())

    def release(self, outcome: str) -> None:
        """See `continuation.Lease`."""
        self._scheduler.released(self, outcome)


class Scheduler:
    """See `continuation.Places`. One event loop owns it."""

    def __init__(
        self,
        policy: Router,
        limits: QueueLimits,
        *,
        on_start: Callable[[str], None] = lambda worker_id: None,
        on_end: Callable[[str, str], None] = lambda worker_id, outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_start(worker)` and `on_end(worker, outcome)` tell of each turn that a worker gets and has had."""
        self._policy, self._limits, self._clock = policy, limits, clock
        self._on_start, self._on_end = on_start, on_end
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._places: dict[str, Place] = {}
        self._ended_s: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._tokens: dict[str, int] = {}  # by worker, since it was looked at last
        self._tokens_before: dict[str, int] = {}  # by worker, until then
        self._looked_s = clock()

    # ---- turns

    async def acquire(self, turn: Turn) -> Place:
        """See `continuation.Places`."""
        if self._policy.queued >= self._limits.turns:
            raise OverloadedError(f"{self._policy.queued} calls wait already", self.retry_after_s())
        placed = self._policy.submit(turn)
        worker_id = placed.worker_id if isinstance(placed, Placement) else await self._wait(turn, placed)
        place = self._places[turn.turn_id] = Place(self, turn, worker_id)
        self._on_start(worker_id)
        return place

    async def _wait(self, turn: Turn, queued: Queued) -> str:
        bound_s = self._limits.wait_s if queued.reason == "full" else self._limits.no_worker_s
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[turn.turn_id] = future
        try:
            async with asyncio.timeout(bound_s):
                return await future
        except BaseException as exc:
            # Also when a place was found in the very moment in which the caller went away.
            self._waiting.pop(turn.turn_id, None)
            self._policy.finish(turn.turn_id)
            self.place_waiting()
            if isinstance(exc, TimeoutError):
                if self._policy.eligible == 0:
                    raise OverloadedError("no worker is available", self.retry_after_s(), 503) from None
                raise OverloadedError(f"no room on any worker within {bound_s:g} s", self.retry_after_s()) from None
            raise

    def begun(self, turn: Turn) -> None:
        """A turn has got its first tokens from its worker."""
        self._policy.begun(turn.turn_id)

    def released(self, place: Place, outcome: str) -> None:
        """A turn has left its worker."""
        self._places.pop(place.turn.turn_id, None)
        self._policy.finish(place.turn.turn_id)
        self._ended_s.append(self._clock())
        self._on_end(place.worker_id, outcome)
        self.place_waiting()

    def place_waiting(self) -> None:
        """Give places to waiting turns as far as there are some."""
        while placements := self._policy.place_queued():
            for placed in placements:
                future = self._waiting.pop(placed.turn.turn_id)
                if not future.done():
                    future.set_result(placed.worker_id)

    def retry_after_s(self) -> float:
        """When a refused caller may find room, by the pace of late: between 1 and 60 s."""
        if len(self._ended_s) < 2:
            return 1.0
        pace = len(self._ended_s) / max(1e-3, self._clock() - self._ended_s[0])
        return min(60.0, max(1.0, self._policy.queued / pace))

    # ---- workers

    def put_worker(self, worker: Worker) -> None:
        """Add a worker, or note what has changed of it."""
        self._policy.put_worker(worker)
        self.place_waiting()

    def remove_worker(self, worker_id: str, why: str) -> None:
        """Take a worker off; its turns go on elsewhere."""
        self._policy.remove_worker(worker_id)
        self.move_all(worker_id, why)

    def move_all(self, worker_id: str, why: str) -> None:
        """Have all turns of a worker go on elsewhere: it shows no sign of life, or was taken away."""
        for place in [p for p in self._places.values() if p.worker_id == worker_id]:
            place.move(why)

    def note_tokens(self, worker_id: str, count: int) -> None:
        """A worker has made tokens."""
        self._tokens[worker_id] = self._tokens.get(worker_id, 0) + count

    def begin_step(self) -> None:
        """An RL step begins."""
        self._policy.begin_step()

    def balance(self) -> None:
        """Tell the policy how fast workers are, and move turns where it wants that; call it some times a second."""
        now_s = self._clock()
        if now_s - self._looked_s >= _OBSERVE_S:
            for worker_id, tokens in self._tokens.items():
                self._policy.observe(worker_id, tokens / (now_s - self._looked_s))
                self._tokens_before[worker_id] = self._tokens_before.get(worker_id, 0) + tokens
            self._tokens.clear()
            self._looked_s = now_s
        for turn_id in self._policy.migrations():
            if place := self._places.get(turn_id):
                place.move("moved to a worker with less to do")

    def tokens_of(self, worker_id: str) -> int:
        """Tokens that a worker has made so far."""
        return self._tokens_before.get(worker_id, 0) + self._tokens.get(worker_id, 0)

    def load_of(self, worker_id: str) -> int:
        """Turns that a worker has."""
        return self._policy.load_of(worker_id)

    @property
    def queued(self) -> int:
        """Turns that wait."""
        return self._policy.queued
