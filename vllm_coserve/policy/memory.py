"""Preemptive memory sharing (ROSE 4.1): a budget per RL step, one emergency cut in a burst, then a freeze."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from vllm_coserve.api.config import MemoryMode


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Knobs of the policy."""

    headroom_fraction: float = 0.2  # of the pool, kept free for serving
    high_watermark: float = 0.5  # share of the headroom that serving may eat before it is a burst
    freeze_s: float = 10.0  # ends a freeze where no RL step does
    usage_window_s: float = 30.0
    reclaim_batch_pages: int = 8
    budget_interval_s: float = 5.0
    mode: MemoryMode = "preemptive"


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The pool now; `now_s` is on a monotonic clock."""

    now_s: float
    pool_pages: int
    free_pages: int
    serving_used_pages: int  # with blocks in use
    serving_cached_pages: int  # with nothing but unreferenced prefix cache, or nothing
    rollout_pages: int
    rollout_wanted_pages: int  # further pages it could use now
    rl_step: int
    rollout_alive: bool
    rollout_active: bool


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """What the arbiter does next."""

    budget_pages: int
    grant_pages: int  # hand to the rollout now
    reclaim_to_pages: int  # the rollout comes down to this; its own count when nothing is reclaimed
    serving_release_pages: int  # pages without blocks in use that serving gives back
    pressure: bool
    cut: bool  # this decision made the emergency cut
    reason: str


def headroom_pages(pool_pages: int, config: MemoryConfig) -> int:
    """Pages kept free for serving."""
    return math.ceil(config.headroom_fraction * pool_pages)


def serving_limit_pages(pool_pages: int, config: MemoryConfig, weight_pages: int = 0) -> int:
    """Most pages that serving may hold, of the pool and in place of the rollout's weights."""
    return pool_pages - pool_pages // 2 if config.mode == "static" else pool_pages + weight_pages


def can_spare_weight_pages(serving_used_pages: int, pool_pages: int, config: MemoryConfig, begun: bool) -> bool:
    """Whether serving gives the memory of the rollout's weights back, which it has while they are off the device.

    Args:
        serving_used_pages: with blocks in use.
        pool_pages: of the pool that remains.
        config: its headroom must remain too; half of it once serving has `begun` to give back.
    """
    headroom = headroom_pages(pool_pages, config)
    return serving_used_pages <= pool_pages - (headroom // 2 if begun else headroom)


def urgent_reclaim_to(facts: MemoryFacts, needed_pages: int, config: MemoryConfig) -> int:
    """What the rollout must come down to when a serving allocation lacks pages right now: the need and a batch more."""
    short = needed_pages - facts.free_pages
    if short <= 0:
        return facts.rollout_pages
    return max(0, facts.rollout_pages - short - config.reclaim_batch_pages)


class MemoryPolicy:
    """State: the budget, recent serving usage and the freeze. `decide` is deterministic in the facts it was given."""

    def __init__(self, config: MemoryConfig, pool_pages: int) -> None:
        self._config, self._pool = config, pool_pages
        self._headroom = headroom_pages(pool_pages, config)
        self._usage: deque[tuple[float, int]] = deque()  # decreasing usage: the head is the window's maximum
        self._budget = 0
        self._budget_at_s = -math.inf
        self._rl_step: int | None = None
        self._frozen_until_s = -math.inf

    def decide(self, facts: MemoryFacts) -> MemoryDecision:
        """One decision; call it often."""
        self._note_usage(facts)
        self._renew_budget(facts)
        if self._config.mode == "static":
            return self._halve(facts)
        if not (facts.rollout_alive and facts.rollout_active):
            return MemoryDecision(self._budget, 0, 0, self._for_headroom(facts), False, False, "inactive")
        burst_below = (1 - self._config.high_watermark) * self._headroom
        used_up = self._pool - facts.serving_used_pages - facts.rollout_pages < self._headroom
        pressure = facts.rollout_pages > 0 and facts.free_pages < burst_below and used_up
        if pressure and self._config.mode == "preemptive":
            return self._relieve(facts)
        return self._share(facts)

    def _halve(self, facts: MemoryFacts) -> MemoryDecision:
        half, lends = self._pool // 2, facts.rollout_alive and facts.rollout_active
        grant = min(facts.rollout_wanted_pages, half - facts.rollout_pages, facts.free_pages) if lends else 0
        return MemoryDecision(half, max(0, grant), facts.rollout_pages if lends else 0, 0, False, False, "static")

    def _relieve(self, facts: MemoryFacts) -> MemoryDecision:
        cut = facts.now_s >= self._frozen_until_s
        if cut:
            self._budget = min(self._budget, facts.rollout_pages) // 2
            self._frozen_until_s = facts.now_s + self._config.freeze_s
        restore = facts.rollout_pages - max(
            self._headroom - facts.free_pages - facts.serving_cached_pages, self._config.reclaim_batch_pages
        )
        # Also while frozen: the pages of the cut may not be back yet, and the target must not rise above it again.
        target = max(0, min(self._budget, restore))
        return MemoryDecision(self._budget, 0, target, self._for_headroom(facts), True, cut, "burst")

    def _share(self, facts: MemoryFacts) -> MemoryDecision:
        held = facts.rollout_pages
        if held > self._budget and facts.free_pages < self._headroom and self._config.mode == "preemptive":
            batch = max(held - self._budget, min(held, self._config.reclaim_batch_pages))
            return MemoryDecision(self._budget, 0, held - batch, self._for_headroom(facts), False, False, "over budget")
        room = min(self._budget - held, facts.rollout_wanted_pages)
        spare = max(0, facts.free_pages - self._headroom)
        grant = max(0, min(room, spare))
        lacking = max(0, room - spare) + max(0, self._headroom - facts.free_pages)
        release = min(facts.serving_cached_pages, lacking)
        return MemoryDecision(self._budget, grant, held, release, False, False, "share")

    def _for_headroom(self, facts: MemoryFacts) -> int:
        return min(facts.serving_cached_pages, max(0, self._headroom - facts.free_pages))

    def _renew_budget(self, facts: MemoryFacts) -> None:
        new_step = facts.rl_step != self._rl_step
        frozen = facts.now_s < self._frozen_until_s
        due = facts.now_s >= self._budget_at_s + self._config.budget_interval_s
        if new_step or (due and not frozen):
            peak = self._usage[0][1] if self._usage else 0
            self._budget = max(0, self._pool - peak - self._headroom)
            self._budget_at_s, self._rl_step = facts.now_s, facts.rl_step
            self._frozen_until_s = -math.inf

    def _note_usage(self, facts: MemoryFacts) -> None:
        usage = self._usage
        while usage and usage[-1][1] <= facts.serving_used_pages:
            usage.pop()
        usage.append((facts.now_s, facts.serving_used_pages))
        while usage[0][0] < facts.now_s - self._config.usage_window_s:
            usage.popleft()
