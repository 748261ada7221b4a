"""How much better each trajectory of a group did than its fellows (GRPO), and what DAPO changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-4  # as TRL has it


def group_advantages(rewards: Sequence[float], scale_by_std: bool = True) -> list[float]:
    """Rewards less their mean, in standard deviations (of the sample); all 0 where they are equal."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [r - mean for r in rewards]
    if not scale_by_std or count < 2:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (count - 1))
    return [c / (std + _EPSILON) for c in centred]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group teaches anything: with equal rewards all advantages are 0 (DAPO's dynamic sampling drops it)."""
    return max(rewards) - min(rewards) > 1e-9


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to `limit - buffer` tokens, then down to -1 at `limit`."""
    if buffer <= 0:
        return -1.0 if length >= limit else 0.0
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
