"""Keeps rollout engines evenly busy while they generate (RLBoost 4.2.1, Algorithm 2).

A request goes to the engine with the fewest requests that have not begun, and to none when all have their share of such
(delayed dispatch). Later, requests move: a pending one to an engine without any, executing ones from the most loaded
engine to an idle one, down to the batch size at which throughput is flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests of an engine: sent and not begun, and executing."""

    worker_id: str
    pending: int
    executing: int


@dataclass(frozen=True, slots=True)
class Migration:
    """Move `count` requests; "pending" ones have made no progress, "executing" ones take their tokens along."""

    source: str
    target: str
    count: int
    what: str


def select_engine(engines: Sequence[EngineLoad], max_pending: int) -> str | None:
    """The engine for a new request; None: hold it back until one ends. Ties go to fewer executing, then the id."""
    open_ = [e for e in engines if e.pending < max_pending]
    if not open_:
        return None
    return min(open_, key=lambda e: (e.pending, e.executing, e.worker_id)).worker_id


def rebalance(engines: Sequence[EngineLoad], plateau: int | None) -> Migration | None:
    """The next migration, None: all is well.

    Args:
        plateau: batch size beyond which an engine's throughput hardly grows; None while it is not known yet.
    """
    if len(engines) < 2:
        return None
    most_pending = max(engines, key=lambda e: (e.pending, e.worker_id))
    if most_pending.pending > 0:
        without = [e for e in engines if e.pending == 0]
        if without:
            target = min(without, key=lambda e: (e.executing, e.worker_id))
            return Migration(most_pending.worker_id, target.worker_id, 1, "pending")
        return None
    idle = min((e.worker_id for e in engines if e.executing == 0), default=None)
    if idle is None or plateau is None:
        return None
    source = max(engines, key=lambda e: (e.executing, e.worker_id))
    count = source.executing - max(1, plateau)
    return Migration(source.worker_id, idle, count, "executing") if count > 0 else None


class BatchProfile:
    """Throughput by batch size, learned while requests run; tells where it becomes flat.

    Each step's observations replace the last one's, so the profile follows the length of contexts, as the paper has it.
    """

    def __init__(self, *, flat_gain: float = 0.05, min_samples: int = 8) -> None:
        """`flat_gain`: relative gain of throughput for a doubled batch below which it counts as flat, per doubling."""
        self._flat_gain, self._min_samples = flat_gain, min_samples
        self._sums: dict[int, tuple[float, int]] = {}  # batch size, rounded to a power of two -> (sum, count)
        self._plateau: int | None = None

    @property
    def plateau(self) -> int | None:
        """From the step before; None until one has ended."""
        return self._plateau

    def observe(self, batch: int, tokens_per_s: float) -> None:
        """An engine ran a batch of so many requests at so many tokens/s."""
        if batch > 0 and 0 < tokens_per_s < float("inf"):
            size = 1 << (batch - 1).bit_length()
            total, count = self._sums.get(size, (0.0, 0))
            self._sums[size] = (total + tokens_per_s, count + 1)

    def end_step(self) -> int | None:
        """A step has ended: take its profile; returns the plateau, the old one where the step taught nothing."""
        known = sorted(
            (size, total / count) for size, (total, count) in self._sums.items() if count >= self._min_samples
        )
        self._sums = {}
        if len(known) < 2:
            return self._plateau
        plateau = known[-1][0]
        for (size, rate), (following, next_rate) in pairwise(known):
            doublings = math.log2(following / size)
            if next_rate < rate * (1 + self._flat_gain * doublings):
                plateau = size
                break
        self._plateau = plateau
        return plateau
