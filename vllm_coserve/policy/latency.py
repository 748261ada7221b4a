"""What a step of an engine costs: a linear law, fitted online (ROSE 4.1 profiles; this one corrects itself too)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

_MIN_S, _MAX_S = 1e-5, 60.0
_MAX_FEATURE = 1e15  # beyond any step; larger values would overflow the normal equations
_REFIT_EVERY = 16
_EARLY_REFITS = (4, 8)
_RIDGE = 0.02  # pull towards the prior, relative to the data's own scale
_ROBUST_ROUNDS = 5
_RATIO_WINDOW = 64
_FORMAT = 1
_TWO_DEVIATIONS_IN_Q90 = 2 / 1.2816  # the 90 % quantile of a normal law lies 1.2816 deviations above its mean


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one engine step computes."""

    prefill_tokens: int  # prompt tokens computed in this step, all requests
    prefill_context_tokens: int  # attention pairs: sum over prefills of chunk * (context before it + chunk / 2)
    decode_requests: int  # requests that decode one token
    decode_context_tokens: int  # sum of their context lengths

    def features(self) -> tuple[float, float, float, float, float]:
        """The law's inputs."""
        return (
            1.0,
            float(self.prefill_tokens),
            float(self.prefill_context_tokens),
            float(self.decode_requests),
            float(self.decode_context_tokens),
        )


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per step, prefill token, attention pair, decoding request and token of decode context."""

    step_s: float = 2e-3
    prefill_token_s: float = 1e-4
    prefill_pair_s: float = 2e-8
    decode_request_s: float = 2e-4
    decode_context_s: float = 5e-8

    def values(self) -> tuple[float, ...]:
        """In the order of `StepShape.features`."""
        return (
            self.step_s,
            self.prefill_token_s,
            self.prefill_pair_s,
            self.decode_request_s,
            self.decode_context_s,
        )


def _learnable(prior: np.ndarray) -> np.ndarray:
    """Terms near zero, given so or fitted so in an earlier run, lifted to a tenth of their usual share of the cost.

    The ridge works in units of the prior, and in units of nothing a term could not be learned again.
    """
    usual = np.array(Coefficients().values())
    positive = prior > 0
    speed = float(np.median(prior[positive] / usual[positive])) if positive.any() else 1.0
    return np.maximum(prior, 0.1 * speed * usual)


class LatencyModel:
    """Nonnegative linear cost law over a window of steps.

    Windowed ridge regression on the RELATIVE error, robust to outliers by reweighting. Recursive least squares with
    forgetting diverged on real engines, so every fit starts from the window and the prior. The prior says how the
    terms relate; how fast the device is comes from the window, so a device far from the prior is no harder to fit.

    Raises:
        ValueError: the prior is not finite and nonnegative, or the window is empty.
    """

    def __init__(self, prior: Coefficients | None = None, window: int = 256) -> None:
        values = (prior or Coefficients()).values()
        if not all(math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"prior coefficients must be finite and nonnegative: {values}")
        if window < 1:
            raise ValueError(f"the window must hold at least one step, not {window}")
        self._prior = _learnable(np.array(values))
        self._coef: tuple[float, ...] = tuple(float(v) for v in values)
        self._samples: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)
        self._ratios: deque[float] = deque(maxlen=_RATIO_WINDOW)
        self._seen = 0
        self._learned = np.zeros(len(values), dtype=bool)  # terms that some fit had data for

    @property
    def samples(self) -> int:
        """Observations in the window."""
        return len(self._samples)

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from a step; cheap, never raises, ignores impossible values."""
        try:
            if not (isinstance(duration_s, float | int) and _MIN_S < duration_s < _MAX_S):
                return
            x = shape.features()
        except (OverflowError, TypeError, ValueError):  # not numbers, or beyond a float: teaches nothing
            return
        if not all(0 <= v <= _MAX_FEATURE for v in x):  # NaN fails too
            return
        self._ratios.append(duration_s / self.predict_s(shape))
        self._samples.append((x, float(duration_s)))
        self._seen += 1
        if self._seen % _REFIT_EVERY == 0 or self._seen in _EARLY_REFITS:
            self._refit()

    def predict_s(self, shape: StepShape) -> float:
        """Expected length of a step in seconds, within [1e-5, 60]."""
        c = self._coef
        value = (
            c[0]
            + c[1] * shape.prefill_tokens
            + c[2] * shape.prefill_context_tokens
            + c[3] * shape.decode_requests
            + c[4] * shape.decode_context_tokens
        )
        return _MIN_S if value < _MIN_S else _MAX_S if value > _MAX_S else value

    def margin(self) -> float:
        """Factor on predictions that covers nearly all steps: 1.25 until eight were seen, within [1, 3].

        The mean and two deviations of actual over predicted, estimated from quantiles: a hiccup of the machine is not
        the model's error.
        """
        if len(self._ratios) < 8:
            return 1.25
        ratios = sorted(self._ratios)
        middle, high = ratios[len(ratios) // 2], ratios[int(len(ratios) * 0.9)]
        return max(1.0, min(3.0, middle + _TWO_DEVIATIONS_IN_Q90 * (high - middle)))

    def per_prefill_token_s(self) -> float:
        """Marginal cost of one more prefill token, in seconds."""
        return max(1e-9, self._coef[1])

    def prefill_work_s(self, tokens: int, pairs: int) -> float:
        """Seconds that prefill adds to steps that run anyway: tokens and attention pairs, without the fixed cost."""
        return self._coef[1] * tokens + self._coef[2] * pairs

    def _refit(self) -> None:
        x = np.array([s[0] for s in self._samples])
        y = np.array([s[1] for s in self._samples])
        # The speed of this device relative to the prior; the median does not see outliers. Without it the ridge holds
        # a device that is 10 times slower far below its true cost, and slack is overestimated.
        prior = self._prior * max(1e-9, float(np.median(y / np.maximum(x @ self._prior, 1e-12))))
        coef = np.array(self._coef)
        # A window of decodes says nothing about prefills: what was learned of them stays, or the next burst would be
        # judged by the prior.
        in_window = x.any(axis=0)
        prior = np.where(self._learned & ~in_window, coef, prior)
        for _ in range(_ROBUST_ROUNDS):
            relative = np.abs(x @ coef - y) / y
            spread = max(0.05, 2.5 * float(np.median(relative)))
            robust = np.minimum(1.0, spread / np.maximum(relative, 1e-9))
            try:
                coef = self._solve(x, y, np.sqrt(robust) / y, prior, coef)
            except np.linalg.LinAlgError:  # the law of the last fit stays
                return
        if np.all(np.isfinite(coef)):
            self._coef = tuple(float(v) for v in coef)
            self._learned |= in_window

    @staticmethod
    def _solve(x: np.ndarray, y: np.ndarray, weight: np.ndarray, prior: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Ridge towards the prior; coefficients that would be negative are held at zero.

        The pull is in units of the larger of the prior and the last solution, so that it stays bounded for a term
        which the data puts far above the prior.
        """
        scale = np.maximum(np.maximum(prior, last), 1e-18)  # what was learned may be zero
        a = x * scale * weight[:, None]
        b = y * weight
        active = np.ones(len(scale), dtype=bool)
        strength = _RIDGE * max(1.0, len(b) / 64)
        for _ in range(len(scale)):
            aa, pull = a[:, active], strength * (prior / scale)[active]
            got = np.linalg.solve(aa.T @ aa + strength * np.eye(len(pull)), aa.T @ b + pull)
            if (got >= 0).all():
                break
            active[np.flatnonzero(active)[got < 0]] = False
            if not active.any():
                return prior
        full = np.zeros(len(scale))
        full[active] = got
        return full * scale

    def to_json(self) -> dict[str, object]:
        """For the cache on disk."""
        return {"format": _FORMAT, "coefficients": list(self._coef), "samples": self._seen}

    @classmethod
    def from_json(cls, d: dict[str, object]) -> LatencyModel:
        """Raises ValueError for anything but the result of `to_json`."""
        coef = d.get("coefficients") if isinstance(d, dict) and d.get("format") == _FORMAT else None
        if not isinstance(coef, list) or len(coef) != 5:
            raise ValueError("not a latency model of this version")
        # Compared before any conversion: JSON holds integers that no float can.
        if not all(isinstance(v, float | int) and not isinstance(v, bool) and 0 <= v < _MAX_S for v in coef):
            raise ValueError(f"latency coefficients must be seconds within [0, {_MAX_S:.0f})")
        if not any(coef):
            raise ValueError("latency coefficients are all zero")
        return cls(Coefficients(*(float(v) for v in coef)))
