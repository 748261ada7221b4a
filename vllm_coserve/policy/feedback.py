"""How much of a latency budget may be spent, learned from what serving's users got."""

from __future__ import annotations


class SpendController:
    """Tracks the largest share of a budget whose spending keeps nearly all requests within it.

    A request that missed the budget takes the share down at once, one that met it takes it up a little. The share comes
    to rest where the two balance, with one miss in `1 + down / up` requests (stochastic approximation of a quantile,
    Robbins and Monro 1951). The model of costs cannot know what else lengthens a request: bursts of prefills, other
    programs on the machine.
    """

    def __init__(self, lowest: float, start: float, highest: float, *, up: float = 0.0004, down: float = 0.08) -> None:
        """With the default steps, one request in 201 misses at rest."""
        if not (0 <= lowest <= start <= highest <= 1 and up > 0 and down > 0):
            raise ValueError(f"want 0 <= {lowest} <= {start} <= {highest} <= 1 and positive steps: {up}, {down}")
        self._highest, self._lowest, self._up, self._down = highest, lowest, up, down
        self.spend = start

    def observe(self, met: bool) -> None:
        """A request has ended; `met`: within the budget."""
        step = self._up if met else -self._down
        self.spend = min(self._highest, max(self._lowest, self.spend + step))
