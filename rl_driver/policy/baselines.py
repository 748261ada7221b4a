"""Other ways to place turns, to compare with and to choose from: what public routers do, and RLBoost's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rl_driver.policy.balancing import BatchProfile, EngineLoad, rebalance, select_engine
from rl_driver.policy.routing import Placement, Router, Turn


class RoundRobin(Router):
    """Each worker in turn, as long as it has room."""

    def __init__(self) -> None:
        super().__init__(affinity=False)
        self._next = 0

    def choose(self, turn: Turn) -> Placement | None:
        ids = sorted(self._workers)
        for i in range(len(ids)):
            worker_id = ids[(self._next + i) % len(ids)]
            if self._has_room(worker_id, turn):
                self._next = (self._next + i + 1) % len(ids)
                return Placement(turn, worker_id, "round_robin")
        return None


class LeastLoaded(Router):
    """The worker with the fewest turns, dedicated or borrowed alike."""

    def __init__(self) -> None:
        super().__init__(affinity=False)

    def choose(self, turn: Turn) -> Placement | None:
        with_room = [(self.load_of(w), w) for w in self._workers if self._has_room(w, turn)]
        return Placement(turn, min(with_room)[1], "least_loaded") if with_room else None


class Pinned(Router):
    """Trajectories are dealt out to the workers and stay where they are, as long as that is there: ROSE's baseline."""

    def __init__(self) -> None:
        super().__init__()
        self._dealt: Counter[str] = Counter()  # trajectories that each worker was given

    def choose(self, turn: Turn) -> Placement | None:
        last = self._last_worker.get(turn.trajectory_id)
        if last is not None and self._may_take(last, turn) and last not in turn.avoid:
            return Placement(turn, last, "affinity") if self._has_room(last, turn) else None
        with_room = [(self._dealt[w], w) for w in self._workers if self._has_room(w, turn)]
        return Placement(turn, min(with_room)[1], "least_loaded") if with_room else None

    def _take(self, placed: Placement) -> Placement:
        if self._last_worker.get(placed.turn.trajectory_id) != placed.worker_id:
            self._dealt[placed.worker_id] += 1
        return super()._take(placed)


class Balanced(Router):
    """RLBoost, Algorithm 2: join the shortest queue with delayed dispatch, and move turns while they run."""

    def __init__(self, *, max_pending: int = 4) -> None:
        """`max_pending`: turns without a first token that a worker may have."""
        super().__init__(affinity=False)
        self._max_pending = max_pending
        self._begun: set[str] = set()
        self.profile = BatchProfile()

    def choose(self, turn: Turn) -> Placement | None:
        worker_id = select_engine(self._loads(lambda w: self._has_room(w, turn)), self._max_pending)
        return None if worker_id is None else Placement(turn, worker_id, "least_loaded")

    def begun(self, turn_id: str) -> None:
        if turn_id in self._holder:
            self._begun.add(turn_id)

    def finish(self, turn_id: str) -> None:
        self._begun.discard(turn_id)
        super().finish(turn_id)

    def observe(self, worker_id: str, tokens_per_s: float) -> None:
        executing = sum(t in self._begun for t in self._turns.get(worker_id, ()))
        self.profile.observe(executing, tokens_per_s)

    def begin_step(self) -> None:
        self.profile.end_step()

    def migrations(self) -> list[str]:
        move = rebalance(self._loads(lambda w: self._workers[w].eligible), self.profile.plateau)
        if move is None:
            return []
        begun = move.what == "executing"
        turns = [t for t in self._turns[move.source] if (t in self._begun) == begun]
        return turns[-move.count :]  # the youngest have the least to compute anew

    def _loads(self, usable: Callable[[str], bool]) -> list[EngineLoad]:
        loads = []
        for worker_id, turns in self._turns.items():
            if usable(worker_id):
                executing = sum(t in self._begun for t in turns)
                loads.append(EngineLoad(worker_id, len(turns) - executing, executing))
        return loads


POLICIES: dict[str, Callable[[], Router]] = {
    "turnwise": Router,
    "turnwise_no_affinity": lambda: Router(affinity=False),
    "pinned": Pinned,
    "balanced": Balanced,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
