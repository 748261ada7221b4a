"""Whether the rollout's next step fits into serving's slack, and how much of it (ROSE 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_coserve.policy.slack import Slo

_GUARD_S = 0.002
_IDLE_SHARE_OF_TTFT = 0.25


@dataclass(frozen=True, slots=True)
class RolloutOffer:
    """What the rollout engine would compute next."""

    decode_step_s: float  # predicted cost of a step with its decodes only
    per_prefill_token_s: float
    prefill_tokens: int  # prompt tokens that could be computed
    decode_requests: int


@dataclass(frozen=True, slots=True)
class Grant:
    """One rollout step: all its decodes and up to `chunk_tokens` prompt tokens."""

    chunk_tokens: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class Denial:
    """No step now: "no_work", or it does not fit ("slack")."""

    reason: str


def guard_s(handover_s: float) -> float:
    """Slack that is left alone: 2 ms and the hand-over. What a step may cost beyond its estimate is in the margin."""
    return _GUARD_S + max(0.0, handover_s)


def admit(
    slack_s: float,
    offer: RolloutOffer,
    *,
    margin: float,
    handover_s: float,
    max_chunk_tokens: int,
    min_chunk_tokens: int = 16,
) -> Grant | Denial:
    """Fit the rollout's step into the slack: the prefill chunk shrinks to what fits (the paper: all or nothing).

    Args:
        margin: safety factor of the rollout's estimates, >= 1.
        handover_s: how long it takes the rollout to start.
    """
    if not (offer.decode_requests or offer.prefill_tokens):
        return Denial("no_work")
    usable_s = slack_s - guard_s(handover_s)
    decode_s = offer.decode_step_s * margin
    if not decode_s <= usable_s:  # NaN is denied too
        return Denial("slack")
    per_token_s = max(1e-9, offer.per_prefill_token_s * margin)
    limit = min(max_chunk_tokens, offer.prefill_tokens)
    chunk = limit if usable_s == float("inf") else int(min(limit, (usable_s - decode_s) / per_token_s))
    if chunk < min(min_chunk_tokens, limit):
        chunk = 0
    if chunk == 0 and not offer.decode_requests:
        return Denial("slack")
    return Grant(chunk, decode_s + chunk * per_token_s)


def idle_chunk_tokens(offer: RolloutOffer, slo: Slo, *, max_chunk_tokens: int, min_chunk_tokens: int = 16) -> int:
    """Prefill chunk of steps while serving is idle.

    A request that arrives waits for the step in flight, so with a TTFT SLO that costs at most a quarter of the budget.
    """
    if slo.ttft_s is None or offer.per_prefill_token_s <= 0:
        return max_chunk_tokens
    room_s = slo.ttft_s * _IDLE_SHARE_OF_TTFT - offer.decode_step_s
    fits = int(min(max_chunk_tokens, room_s / offer.per_prefill_token_s))
    return min(max_chunk_tokens, max(min_chunk_tokens, fits))


def turn_wait_bound_s(expected_s: float) -> float:
    """How long serving waits for the device to be returned. A bound by slack instead overlapped 87 times in 12 s."""
    return 1.5 * max(0.0, expected_s) + 0.005
