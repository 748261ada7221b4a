"""Which worker takes the next turn of a trajectory (ROSE 4.3): affinity first, then the least loaded, else a queue.

Turns, not trajectories, are placed: what does not fit the dedicated GPUs spills over to borrowed ones, and comes back
when there is room. Placing costs O(log workers): loads are kept in heaps whose stale entries are dropped when met.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

Kind = Literal["dedicated", "borrowed"]
Reason = Literal["affinity", "least_loaded", "overflow", "round_robin"]

DEDICATED_TURNS_MAX = 16  # per GPU; beyond it throughput is flat and KV memory short (ROSE, appendix A)
_AFFINITIES_KEPT = 1 << 17
_OVERTAKEN_MAX = 8  # how often a waiting turn lets another go first that has its prefix where there is room
_LOOKED_AT = 4  # waiting turns of a worker that are looked at before one without its prefix there gets the room


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of a worker. `turns_max`: most turns that it should have at a time."""

    worker_id: str
    kind: Kind
    turns_max: int = DEDICATED_TURNS_MAX
    weight_version: int = 0
    eligible: bool = True  # alive, active and not cooling down


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a trajectory; only workers with weights of at least `min_version` may take it.

    None of `avoid` takes it while there is another that may: these have just failed it or had no room for it.
    """

    turn_id: str
    trajectory_id: str
    min_version: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker that takes a turn, and why it."""

    turn: Turn
    worker_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Queued:
    """No worker can take the turn now: "full" (all have their share), or "no_worker" (none is eligible)."""

    turn: Turn
    reason: Literal["full", "no_worker"]
    position: int  # in the queue, from 0


_Needs = tuple[int, frozenset[str]]  # what says which workers may take a turn: min_version, avoid


class _LoadIndex:
    """Workers of one kind and weight version, the least loaded first; ties go to the smaller id."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._load: dict[str, int] = {}

    def put(self, worker_id: str, load: int) -> None:
        if self._load.get(worker_id) != load:
            self._load[worker_id] = load
            heapq.heappush(self._heap, (load, worker_id))
            if len(self._heap) > 64 + 4 * len(self._load):
                self._heap = [(n, w) for w, n in self._load.items()]
                heapq.heapify(self._heap)

    def drop(self, worker_id: str) -> None:
        self._load.pop(worker_id, None)

    def least(self, avoid: frozenset[str]) -> tuple[int, str] | None:
        if not avoid.isdisjoint(self._load):  # seldom: a turn that a worker has failed
            return min(((n, w) for w, n in self._load.items() if w not in avoid), default=None)
        heap = self._heap
        while heap and self._load.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def __bool__(self) -> bool:
        return bool(self._load)


class Router:
    """Places turns and remembers who has them. Not thread-safe: one event loop owns it."""

    def __init__(self, *, affinity: bool = True) -> None:
        self._affinity = affinity
        self._workers: dict[str, Worker] = {}
        self._turns: dict[str, dict[str, Turn]] = {}  # worker -> its turns
        self._holder: dict[str, str] = {}  # turn -> its worker
        self._index: dict[tuple[Kind, int], _LoadIndex] = {}
        self._last_worker: OrderedDict[str, str] = OrderedDict()  # trajectory -> who has its prefix
        self._eligible: Counter[int] = Counter()  # weight version -> eligible workers
        self._queues: dict[_Needs, OrderedDict[str, tuple[int, Turn]]] = {}  # turn -> (number, turn)
        self._queue_of: dict[str, _Needs] = {}  # queued turn -> its queue
        self._home: dict[str, str] = {}  # queued turn -> the worker that has its prefix
        self._waiting_for: dict[str, OrderedDict[str, Turn]] = {}  # worker -> queued turns whose prefix it has
        self._overtaken: Counter[str] = Counter()  # queued turn -> how often another was placed before it
        self._number = 0

    # ---- workers

    def put_worker(self, worker: Worker) -> None:
        """Add a worker, or take note of what has changed; turns that it has stay with it."""
        old = self._workers.get(worker.worker_id)
        if old is not None:
            self._unlist(old)
            self._count(old, -1)
        self._workers[worker.worker_id] = worker
        self._count(worker, 1)
        self._turns.setdefault(worker.worker_id, {})
        self._list(worker)

    def remove_worker(self, worker_id: str) -> list[Turn]:
        """Forget a worker; returns the turns that it had, to be placed anew."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        self._unlist(worker)
        self._count(worker, -1)
        turns = list(self._turns.pop(worker_id).values())
        for turn in turns:
            del self._holder[turn.turn_id]
        return turns

    @property
    def eligible(self) -> int:
        """Workers that may be given turns."""
        return self._eligible.total()

    def load_of(self, worker_id: str) -> int:
        """Turns that a worker has."""
        return len(self._turns.get(worker_id, ()))

    @property
    def queued(self) -> int:
        """Turns that wait for a worker."""
        return len(self._queue_of)

    # ---- turns

    def submit(self, turn: Turn) -> Placement | Queued:
        """Place a turn, or queue it behind those that wait already.

        Raises:
            ValueError: a turn of that id is placed or queued.
        """
        if turn.turn_id in self._holder or turn.turn_id in self._queue_of:
            raise ValueError(f"turn {turn.turn_id!r} was submitted already")
        # Nobody overtakes a turn that the same workers could serve.
        waits = any(version <= turn.min_version and avoid <= turn.avoid for version, avoid in self._queues)
        placed = None if waits else self._try(turn)
        if placed is not None:
            return self._take(placed)
        self._number += 1
        needs = turn.min_version, turn.avoid
        self._queues.setdefault(needs, OrderedDict())[turn.turn_id] = (self._number, turn)
        self._queue_of[turn.turn_id] = needs
        if self._affinity and (last := self._last_worker.get(turn.trajectory_id)) is not None:
            self._home[turn.turn_id] = last
            self._waiting_for.setdefault(last, OrderedDict())[turn.turn_id] = turn
        some = any(version >= turn.min_version for version in self._eligible)
        return Queued(turn, "full" if some else "no_worker", len(self._queue_of) - 1)

    def finish(self, turn_id: str) -> None:
        """A turn has ended or left its worker; unknown ones are no error: a worker may answer after its removal."""
        self._unqueue(turn_id)
        worker_id = self._holder.pop(turn_id, None)
        if worker_id is not None:
            del self._turns[worker_id][turn_id]
            self._reload(worker_id)

    def place_queued(self, limit: int = 64) -> list[Placement]:
        """Place waiting turns, first come first served; call it when a turn has ended or a worker has changed.

        A turn that only newer weights may serve does not hold up those behind it. And the room of a worker goes to a
        turn whose prefix it has, if one waits, before the first one that would have to compute its own anew; a turn is
        overtaken so a few times at most.
        """
        out: list[Placement] = []
        waiting = set(self._queues)
        while waiting and len(out) < limit:
            needs = min(waiting, key=lambda n: next(iter(self._queues[n].values()))[0])
            _, turn = next(iter(self._queues[needs].values()))
            placed = self._try(turn)
            if placed is None:
                waiting.discard(needs)
                continue
            if placed.reason != "affinity" and (at_home := self._waiting_at_home(placed)) is not None:
                self._overtaken[turn.turn_id] += 1
                placed = at_home
            self._unqueue(placed.turn.turn_id)
            out.append(self._take(placed))
            waiting &= self._queues.keys()
        return out

    def _waiting_at_home(self, placed: Placement) -> Placement | None:
        """A waiting turn that has its prefix where another one is about to be placed, and may go first."""
        if self._overtaken[placed.turn.turn_id] >= _OVERTAKEN_MAX:
            return None
        for turn in islice(self._waiting_for.get(placed.worker_id, {}).values(), _LOOKED_AT):
            moved = self._last_worker.get(turn.trajectory_id) != placed.worker_id  # with another turn, meanwhile
            if not moved and self._has_room(placed.worker_id, turn):
                return Placement(turn, placed.worker_id, "affinity")
        return None

    def begun(self, turn_id: str) -> None:
        """A placed turn has got its first tokens; policies that tell pending from executing ones want to know."""

    def observe(self, worker_id: str, tokens_per_s: float) -> None:
        """How fast a worker was of late; policies that learn from it want to know."""

    def begin_step(self) -> None:
        """An RL step begins."""

    def migrations(self) -> list[str]:
        """Turns that should leave their worker now for another one; none, unless a policy balances continuously."""
        return []

    def forget_trajectory(self, trajectory_id: str) -> None:
        """A trajectory has ended: nobody needs its prefix any more."""
        self._last_worker.pop(trajectory_id, None)

    # ---- internals

    def choose(self, turn: Turn) -> Placement | None:
        """A worker with room for a turn, none of `turn.avoid`; other policies override this."""
        if self._affinity:
            last = self._last_worker.get(turn.trajectory_id)
            if last is not None and self._has_room(last, turn):
                return Placement(turn, last, "affinity")
        for kind, reason in (("dedicated", "least_loaded"), ("borrowed", "overflow")):
            if (worker_id := self._least_loaded(kind, turn)) is not None:
                return Placement(turn, worker_id, reason)
        return None

    def _try(self, turn: Turn) -> Placement | None:
        """Whatever the policy: workers to be avoided are not, when there is no other."""
        if turn.avoid and not self._has_other(turn):
            turn = replace(turn, avoid=frozenset())
        return self.choose(turn)

    def _has_other(self, turn: Turn) -> bool:
        """Whether a worker that need not be avoided may take the turn, now or later."""
        count = sum(n for version, n in self._eligible.items() if version >= turn.min_version)
        return count > sum(1 for worker_id in turn.avoid if self._may_take(worker_id, turn))

    def _may_take(self, worker_id: str, turn: Turn) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.eligible and worker.weight_version >= turn.min_version

    def _has_room(self, worker_id: str, turn: Turn) -> bool:
        return (
            self._may_take(worker_id, turn)
            and worker_id not in turn.avoid
            and len(self._turns[worker_id]) < self._workers[worker_id].turns_max
        )

    def _least_loaded(self, kind: str, turn: Turn) -> str | None:
        best: tuple[int, str] | None = None
        for (index_kind, version), index in self._index.items():
            if index_kind == kind and version >= turn.min_version:
                least = index.least(turn.avoid)
                if least is not None and (best is None or least < best):
                    best = least
        return best[1] if best else None

    def _unqueue(self, turn_id: str) -> None:
        needs = self._queue_of.pop(turn_id, None)
        if needs is None:
            return
        del self._queues[needs][turn_id]
        if not self._queues[needs]:
            del self._queues[needs]
        self._overtaken.pop(turn_id, None)
        if (home := self._home.pop(turn_id, None)) is not None:
            del self._waiting_for[home][turn_id]
            if not self._waiting_for[home]:
                del self._waiting_for[home]

    def _count(self, worker: Worker, by: int) -> None:
        if worker.eligible:
            self._eligible[worker.weight_version] += by
            if not self._eligible[worker.weight_version]:
                del self._eligible[worker.weight_version]

    def _take(self, placed: Placement) -> Placement:
        turn, worker_id = placed.turn, placed.worker_id
        self._turns[worker_id][turn.turn_id] = turn
        self._holder[turn.turn_id] = worker_id
        self._last_worker[turn.trajectory_id] = worker_id
        self._last_worker.move_to_end(turn.trajectory_id)
        if len(self._last_worker) > _AFFINITIES_KEPT:
            self._last_worker.popitem(last=False)
        self._reload(worker_id)
        return placed

    def _list(self, worker: Worker) -> None:
        """Workers with room are in the index of their kind and version; the others in none."""
        load = len(self._turns[worker.worker_id])
        if worker.eligible and load < worker.turns_max:
            key = (worker.kind, worker.weight_version)
            self._index.setdefault(key, _LoadIndex()).put(worker.worker_id, load)

    def _unlist(self, worker: Worker) -> None:
        key = (worker.kind, worker.weight_version)
        index = self._index.get(key)
        if index is not None:
            index.drop(worker.worker_id)
            if not index:
                del self._index[key]

    def _reload(self, worker_id: str) -> None:
        worker = self._workers[worker_id]
        if len(self._turns[worker_id]) < worker.turns_max:
            self._list(worker)
        else:
            self._unlist(worker)
