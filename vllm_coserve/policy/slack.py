"""How long serving can wait: slack under the TTFT and TPOT SLOs (ROSE 4.1, equations 1 and 2), aware of the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vllm_coserve.policy.latency import LatencyModel, StepShape

_LONGEST_GAP = 2.0  # gaps that a request may wait for one token, however short those before were


@dataclass(frozen=True, slots=True)
class Slo:
    """What serving promises its users; None: nothing."""

    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """A request without its first token. `context_tokens` are computed or cached already."""

    arrival_s: float
    remaining_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request between its first and its last token: times of its first and latest token, and tokens so far."""

    first_s: float
    last_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """The serving engine between two steps. Times are on one monotonic clock."""

    now_s: float
    prefills: tuple[PendingPrefill, ...]  # in the order in which they will run
    decodes: tuple[Decoding, ...]  # as far as known; a request without a token yet is not among them
    decode_requests: int
    decode_context_tokens: int
    interruption_s: float = 0.0  # what the prefill of another request typically adds to a step


@dataclass(frozen=True, slots=True)
class Slack:
    """Seconds that serving can wait now, and what bounds them: "ttft", "tpot", "no_slo" or "none" (+inf)."""

    seconds: float
    reason: str


def serving_slack(
    facts: ServingFacts,
    slo: Slo,
    model: LatencyModel,
    *,
    policy: Literal["dual", "ttft", "tpot"],
    role: Literal["collocated", "prefill", "decode"],
    chunk_tokens: int,
    ttft_spend: float = 0.5,
    tpot_spend: float = 0.85,
) -> Slack:
    """The smallest slack over serving's requests.

    Args:
        chunk_tokens: serving's own prefill budget per step.
        ttft_spend: share of the TTFT budget that waiting for the rollout may use up. Spending all of it leaves nothing
            for requests that arrive later and queue behind: it overran the SLO where half of it did not.
        tpot_spend: the same for the time between tokens. What is left pays for prefills of others that come between,
            and for what users measure but the engine core does not see (detokenising, HTTP).

    Returns:
        Negative slack means that serving is late already; -inf "no_slo" when a bound is needed that nobody gave.
    """
    best = Slack(math.inf, "none")
    if facts.prefills and policy in ("dual", "ttft") and role in ("collocated", "prefill"):
        best = _ttft_slack(facts, slo, model, chunk_tokens, ttft_spend)
    if facts.decode_requests and policy in ("dual", "tpot") and role in ("collocated", "decode"):
        tpot = _tpot_slack(facts, slo, model, chunk_tokens, tpot_spend)
        if tpot.seconds < best.seconds:
            best = tpot
    return best


def _ttft_slack(facts: ServingFacts, slo: Slo, model: LatencyModel, chunk_tokens: int, spend: float) -> Slack:
    """Equation 1, with T_prf of a request including the prefills ahead of it and the decodes its chunks carry.

    A request of prefill time T has B - T to wait in; `spend` of that may go to the rollout:
    slack = arrival + spend * (B - T_i) - now - T_ahead, where T_ahead are the prefills before it.
    """
    if slo.ttft_s is None:
        return Slack(-math.inf, "no_slo")
    base_s = model.predict_s(StepShape(0, 0, facts.decode_requests, facts.decode_context_tokens))
    ahead_s, smallest, chunk_tokens = 0.0, math.inf, max(1, chunk_tokens)
    for p in facts.prefills:
        n = p.remaining_tokens
        steps = max(1, -(-n // chunk_tokens))
        own_s = base_s * steps + model.prefill_work_s(n, n * p.context_tokens + n * n // 2)
        wait_s = spend * max(0.0, slo.ttft_s - own_s)
        smallest = min(smallest, p.arrival_s + wait_s - facts.now_s - ahead_s)
        ahead_s += own_s
    return Slack(smallest, "ttft")


def _tpot_slack(facts: ServingFacts, slo: Slo, model: LatencyModel, chunk_tokens: int, spend: float) -> Slack:
    """Equation 2 over each request's mean time between tokens, which is what TPOT means to its user.

    A gap may be as long as the step itself and the share `spend` of what the budget leaves beside it. A request whose
    gaps were longer so far (prefills of others came between) is caught up with: it lends nothing until its mean is back
    within that. One whose gaps were shorter may wait longer, up to two such gaps at a time. And it first saves up for
    one prefill of another request: a short answer that is held up near its end could not be caught up with. The step
    that gives the next tokens also computes the prefill chunk that is scheduled with them.
    """
    if slo.tpot_s is None:
        return Slack(-math.inf, "no_slo")
    tokens, pairs = 0, 0
    for p in facts.prefills:
        n = min(p.remaining_tokens, chunk_tokens - tokens)
        if n <= 0:
            break
        tokens += n
        pairs += n * p.context_tokens + n * n // 2
    step_s = model.predict_s(StepShape(tokens, pairs, facts.decode_requests, facts.decode_context_tokens))
    gap_s = step_s + spend * max(0.0, slo.tpot_s - step_s)
    saved_s = min(facts.interruption_s, slo.tpot_s)
    due_s = min(
        (min(d.first_s + d.tokens * gap_s - saved_s, d.last_s + _LONGEST_GAP * gap_s) for d in facts.decodes),
        default=facts.now_s + gap_s,
    )
    return Slack(due_s - step_s - facts.now_s, "tpot")
