"""When a worker may be used: heartbeats, and a breaker over its failures. The caller passes the time in.

What the client did wrong (HTTP 4xx) is no failure of the worker: do not report it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """`failures` within `window_s` open it; it lets one call through after `cool_s`, doubled at each relapse."""

    failures: int = 3
    window_s: float = 10.0
    cool_s: float = 1.0
    cool_max_s: float = 30.0


class Breaker:
    """Keeps calls away from a worker that fails again and again."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failed_s: list[float] = []
        self._open_until_s: float | None = None
        self._cool_s = config.cool_s
        self._trial = False  # the one call of the half-open state is under way

    def state(self, now_s: float) -> State:
        """closed: use it; open: do not; half_open: one call may try."""
        if self._open_until_s is None:
            return "closed"
        return "open" if now_s < self._open_until_s else "half_open"

    def allows(self, now_s: float) -> bool:
        """Whether a call may go to the worker now."""
        state = self.state(now_s)
        return state == "closed" or (state == "half_open" and not self._trial)

    def started(self, now_s: float) -> None:
        """A call goes to the worker."""
        self._trial = self.state(now_s) == "half_open"

    def succeeded(self, now_s: float) -> None:
        """A call ended well, or the client gave it up: the worker is fine."""
        if self.state(now_s) != "open":
            self._failed_s.clear()
            self._open_until_s, self._cool_s, self._trial = None, self._config.cool_s, False

    def failed(self, now_s: float) -> None:
        """A call failed by the worker's doing: 5xx, disconnect, no answer."""
        if self.state(now_s) == "half_open":
            self._cool_s = min(2 * self._cool_s, self._config.cool_max_s)
            self._open(now_s)
            return
        self._failed_s = [t for t in self._failed_s if t > now_s - self._config.window_s] + [now_s]
        if self._open_until_s is None and len(self._failed_s) >= self._config.failures:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._open_until_s, self._trial = now_s + self._cool_s, False
        self._failed_s.clear()


class Heartbeats:
    """Who has shown a sign of life lately."""

    def __init__(self, lost_after_s: float) -> None:
        if not lost_after_s > 0:
            raise ValueError(f"lost_after_s must be above 0, not {lost_after_s}")
        self._lost_after_s = lost_after_s
        self._seen_s: dict[str, float] = {}

    def seen(self, worker_id: str, now_s: float) -> None:
        """A worker answered; an answer that was overtaken by a later one changes nothing."""
        self._seen_s[worker_id] = max(now_s, self._seen_s.get(worker_id, now_s))

    def forget(self, worker_id: str) -> None:
        """A worker was taken off the list."""
        self._seen_s.pop(worker_id, None)

    def lost(self, now_s: float) -> list[str]:
        """Workers without a sign of life for longer than allowed, in the order of their ids."""
        return sorted(w for w, t in self._seen_s.items() if now_s - t > self._lost_after_s)
