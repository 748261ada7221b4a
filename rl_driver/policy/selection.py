"""Which of the serving clusters' engines to borrow (ROSE 4.3): those whose KV memory serving uses least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could be borrowed.

    Args:
        kv_usage: share of its pool that serving has used of late, 0 to 1.
        held: it is held by this job already.
    """

    worker_id: str
    kv_usage: float
    held: bool = False


def select_borrowed(candidates: Sequence[Candidate], count: int, *, keep_within: float = 0.15) -> list[str]:
    """The engines to hold: up to `count` with the lowest usage; ties go to the smaller id.

    One that is held already stays unless another is emptier by more than `keep_within`: to change costs its prefix
    cache.
    """
    ranked = sorted(candidates, key=lambda c: (c.kv_usage - (keep_within if c.held else 0.0), c.worker_id))
    return [c.worker_id for c in ranked[:count]]
