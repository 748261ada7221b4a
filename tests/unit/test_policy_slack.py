"""Equations 1 and 2 over queues: what binds, what a bound that nobody gave means, and the promise of the formula."""

import math
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.latency import Coefficients, LatencyModel, StepShape
from vllm_coserve.policy.slack import Decoding, PendingPrefill, ServingFacts, Slo, serving_slack

_MODEL = LatencyModel(Coefficients(1e-3, 1e-4, 2e-8, 1e-3, 5e-8))
_CHUNK = 512


def _facts(prefills=(), decodes=0, last=None, now=10.0):
    tokens = () if last is None else (Decoding(last, last, 1),)
    return ServingFacts(now, tuple(prefills), tokens, decodes, decodes * 100)


def _slack(facts, ttft_s=0.5, tpot_s=0.05, policy="dual", role="collocated", chunk=_CHUNK, **kw):
    return serving_slack(facts, Slo(ttft_s, tpot_s), _MODEL, policy=policy, role=role, chunk_tokens=chunk, **kw)


_prefill = st.builds(PendingPrefill, st.floats(9.0, 10.0), st.integers(1, 3000), st.integers(0, 3000))
_queues = st.lists(_prefill, min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(_queues, st.integers(0, 16), st.floats(0.0, 1.0), st.floats(0.05, 5.0))
def test_who_waits_for_the_slack_is_served_in_time_by_the_model(queue, decodes, spend, ttft_s):
    """The worst user: serving stands still for all of the slack and then runs the queue in order."""
    facts = _facts(queue, decodes)
    slack = _slack(facts, ttft_s, policy="ttft", ttft_spend=spend)
    if slack.seconds <= 0:  # nothing is lent; a prompt that alone outlasts the budget ends here too
        return
    step_s = _MODEL.predict_s(StepShape(0, 0, decodes, decodes * 100))
    at_s = facts.now_s + slack.seconds
    for p in queue:
        n = p.remaining_tokens
        at_s += math.ceil(n / _CHUNK) * step_s + _MODEL.prefill_work_s(n, n * p.context_tokens + n * n // 2)
        assert at_s <= p.arrival_s + ttft_s + 1e-9


@settings(max_examples=100, deadline=None)
@given(_queues, _prefill, st.integers(0, 16))
def test_more_work_never_gives_more_slack(queue, extra, decodes):
    before = _slack(_facts(queue, decodes), policy="ttft").seconds
    assert _slack(_facts([*queue, extra], decodes), policy="ttft").seconds <= before
    assert _slack(_facts([extra, *queue], decodes), policy="ttft").seconds <= before
    assert _slack(_facts(queue, decodes + 1), policy="ttft").seconds <= before


@settings(max_examples=100, deadline=None)
@given(_queues, st.floats(0.0, 2.0))
def test_waiting_costs_its_own_length(queue, wait_s):
    """Slack falls as fast as time passes: turns cannot spend more of the budget than one long turn could."""
    early, late = (_slack(_facts(queue, now=t), policy="ttft").seconds for t in (10.0, 10.0 + wait_s))
    assert early - late == pytest.approx(wait_s, abs=1e-9)


def test_decodes_ride_on_every_chunk_of_a_prefill():
    prefill = [PendingPrefill(10.0, 4 * _CHUNK, 0)]
    alone, beside = (_slack(_facts(prefill, n), 5.0, policy="ttft", ttft_spend=1.0).seconds for n in (0, 8))
    per_step = _MODEL.predict_s(StepShape(0, 0, 8, 800)) - _MODEL.predict_s(StepShape(0, 0, 0, 0))
    assert alone - beside == pytest.approx(4 * per_step)


def test_attention_over_the_context_counts():
    fresh, long = (_slack(_facts([PendingPrefill(10.0, 500, c)]), policy="ttft").seconds for c in (0, 20_000))
    assert long < fresh


def test_only_what_fits_beside_the_decodes_delays_the_next_token():
    facts = [_facts([PendingPrefill(10.0, n, 0)] * 3, 4, 10.0) for n in (_CHUNK, 10 * _CHUNK)]
    full = [_slack(f, tpot_s=1.0, policy="tpot").seconds for f in facts]
    assert full[0] == pytest.approx(full[1])


def test_the_oldest_token_binds():
    assert _slack(_facts(decodes=2, last=9.97)).seconds < _slack(_facts(decodes=2, last=9.99)).seconds


def _mean_slack(*decodes, now=10.0, tpot_s=0.05):
    return _slack(ServingFacts(now, (), decodes, len(decodes), 100), tpot_s=tpot_s, policy="tpot").seconds


def test_a_request_that_was_held_up_is_caught_up_with():
    fresh, even, late = Decoding(10.0, 10.0, 1), Decoding(9.0, 9.99, 24), Decoding(9.0, 10.0, 11)
    assert _mean_slack(late) < 0 < _mean_slack(fresh)
    assert _mean_slack(fresh, late) == pytest.approx(_mean_slack(late), abs=2e-3)
    assert _mean_slack(even) < _mean_slack(fresh)


def test_short_gaps_are_saved_up_but_no_user_waits_for_more_than_two():
    quick = [Decoding(9.9, 10.0, n) for n in (3, 10, 1000)]
    slacks = [_mean_slack(d) for d in quick]
    assert slacks == sorted(slacks)
    assert slacks[1] == slacks[2] <= 2 * 0.05


def test_an_answer_first_saves_up_for_one_prefill_of_another():
    def slack(decoding, interruption_s):
        return _slack(ServingFacts(10.0, (), (decoding,), 1, 100, interruption_s), tpot_s=0.05, policy="tpot").seconds

    fresh, saved = Decoding(10.0, 10.0, 1), Decoding(9.97, 10.0, 4)
    assert slack(fresh, 0.02) == pytest.approx(slack(fresh, 0.0) - 0.02)
    assert slack(fresh, 9.0) == pytest.approx(slack(fresh, 0.0) - 0.05), "never more than one gap"
    assert slack(saved, 0.02) > slack(fresh, 0.0), "who has saved lends as before"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=40), st.floats(0.01, 0.2))
def test_whoever_waits_for_the_slack_keeps_the_mean(held_up_s, tpot_s):
    """Gaps as long as the slack allows, with hold-ups in between: the mean is within the budget once they are paid."""
    step_s = _MODEL.predict_s(StepShape(0, 0, 1, 100))
    first = now = 100.0
    last, tokens = now, 1
    for held_s in [*held_up_s, *[0.0] * 400]:
        slack = _mean_slack(Decoding(first, last, tokens), now=now, tpot_s=tpot_s)
        assert slack <= 2 * tpot_s
        now += max(0.0, slack) + step_s + held_s
        last, tokens = now, tokens + 1
    if tpot_s > 3 * step_s and sum(held_up_s) < 0.5 * 0.15 * (tpot_s - step_s) * 400:
        assert (last - first) / (tokens - 1) <= tpot_s


def test_the_smaller_of_both_binds():
    facts = _facts([PendingPrefill(10.0, 50, 0)], decodes=2, last=10.0)
    single = [_slack(facts, policy=p).seconds for p in ("ttft", "tpot")]
    assert _slack(facts).seconds == min(single)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "policy", "role", "prefills", "decodes", "bound"),
    [
        (None, 0.05, "dual", "collocated", 1, 0, True),
        (0.5, None, "dual", "collocated", 0, 1, True),
        (0.5, None, "dual", "collocated", 1, 1, True),
        (None, None, "dual", "collocated", 0, 0, False),
        (0.5, None, "ttft", "collocated", 1, 1, False),
        (None, 0.05, "tpot", "collocated", 1, 1, False),
        (0.5, None, "dual", "prefill", 1, 1, False),
        (None, 0.05, "dual", "decode", 1, 1, False),
        (None, 0.05, "dual", "prefill", 1, 0, True),
    ],
)
def test_idle_windows_only_where_a_needed_bound_is_missing(ttft_s, tpot_s, policy, role, prefills, decodes, bound):
    facts = _facts([PendingPrefill(10.0, 50, 0)] * prefills, decodes, 10.0)
    got = _slack(facts, ttft_s, tpot_s, policy, role)
    assert (got.reason == "no_slo") == bound
    assert (got.seconds == -math.inf) == bound


@pytest.mark.parametrize("chunk", [-1, 0, 1])
def test_an_absurd_chunk_does_not_raise(chunk):
    assert math.isfinite(_slack(_facts([PendingPrefill(10.0, 50, 0)], 2, 10.0), chunk=chunk).seconds)


def test_a_full_queue_is_cheap():
    facts = _facts([PendingPrefill(9.9, 300, 100)] * 64, 64, 9.99)
    assert min(timeit.repeat(lambda: _slack(facts), number=20, repeat=5)) / 20 < 1e-3
