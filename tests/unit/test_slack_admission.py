"""Slack under both SLOs, and what is admitted into it."""

import math

import pytest

from vllm_coserve.policy.admission import Denial, Grant, RolloutOffer, admit, guard_s, idle_chunk_tokens
from vllm_coserve.policy.latency import Coefficients, LatencyModel
from vllm_coserve.policy.slack import Decoding, PendingPrefill, ServingFacts, Slo, serving_slack

_MODEL = LatencyModel(Coefficients(1e-3, 1e-4, 0.0, 1e-3, 0.0))
_SLO = Slo(0.5, 0.05)


def _facts(prefills=(), decodes=0, last=None, now=10.0):
    tokens = () if last is None else (Decoding(last, last, 1),)
    return ServingFacts(now, tuple(prefills), tokens, decodes, decodes * 100)


def _slack(facts, slo=_SLO, policy="dual", role="collocated", **kw):
    return serving_slack(facts, slo, _MODEL, policy=policy, role=role, chunk_tokens=512, **kw)


def test_nothing_to_serve_binds_nothing():
    assert _slack(_facts()).seconds == math.inf


def test_equation_1_for_one_request():
    prefill_s = 1e-3 + 100 * 1e-4
    got = _slack(_facts([PendingPrefill(10.0, 100, 0)]), ttft_spend=1.0)
    assert got.reason == "ttft"
    assert got.seconds == pytest.approx(0.5 - prefill_s)
    half = _slack(_facts([PendingPrefill(10.0, 100, 0)]))
    assert half.seconds == pytest.approx((0.5 - prefill_s) / 2)


def test_requests_behind_others_have_less_slack():
    one = [PendingPrefill(10.0, 500, 0)]
    slacks = [_slack(_facts(one * n)).seconds for n in (1, 2, 4, 8)]
    assert slacks == sorted(slacks, reverse=True) and slacks[0] > slacks[-1]


def test_waiting_uses_slack_up_until_it_is_negative():
    early, late = (_slack(_facts([PendingPrefill(a, 100, 0)])).seconds for a in (10.0, 9.6))
    assert early - late == pytest.approx(0.4)
    assert _slack(_facts([PendingPrefill(1.0, 100, 0)])).seconds < 0


def test_equation_2_counts_the_step_and_its_prefill_chunk():
    step_s = 1e-3 + 4 * 1e-3
    got = _slack(_facts(decodes=4, last=9.99), tpot_spend=1.0)
    assert (got.reason, got.seconds) == ("tpot", pytest.approx(0.05 - 0.01 - step_s))
    with_prefill = _slack(_facts([PendingPrefill(10.0, 200, 0)], decodes=4, last=9.99), tpot_spend=1.0)
    assert with_prefill.seconds == pytest.approx(0.05 - 0.01 - step_s - 200 * 1e-4)


@pytest.mark.parametrize(
    ("policy", "role", "reason"),
    [
        ("dual", "collocated", "tpot"),
        ("ttft", "collocated", "ttft"),
        ("tpot", "collocated", "tpot"),
        ("dual", "prefill", "ttft"),
        ("dual", "decode", "tpot"),
    ],
)
def test_policy_and_role_choose_the_bound(policy, role, reason):
    facts = _facts([PendingPrefill(10.0, 50, 0)], decodes=2, last=9.99)
    assert _slack(facts, policy=policy, role=role).reason == reason


def test_no_slo_means_idle_windows_only():
    got = _slack(_facts(decodes=1, last=10.0), slo=Slo(0.5, None))
    assert (got.seconds, got.reason) == (-math.inf, "no_slo")


_OFFER = RolloutOffer(decode_step_s=0.006, per_prefill_token_s=1e-4, prefill_tokens=1000, decode_requests=8)


def _admit(slack_s, offer=_OFFER, **kw):
    return admit(slack_s, offer, **{"margin": 1.0, "handover_s": 0.0, "max_chunk_tokens": 512, **kw})


def test_the_chunk_shrinks_to_what_fits():
    chunks = [_admit(s).chunk_tokens for s in (0.012, 0.02, 0.04, 1.0, math.inf)]
    assert chunks == sorted(chunks) and chunks[-1] == 512 and chunks[0] < 100
    for slack in (0.012, 0.02, 0.04):
        grant = _admit(slack)
        assert grant.expected_s + guard_s(0.0) <= slack + 1e-12


def test_denials_say_why():
    assert _admit(1.0, RolloutOffer(0, 0, 0, 0)) == Denial("no_work")
    assert _admit(0.005) == Denial("slack")
    assert _admit(-math.inf) == Denial("slack")
    assert _admit(0.003, RolloutOffer(0.0, 1e-3, 500, 0)) == Denial("slack")


def test_margin_and_handover_cost_slack():
    assert isinstance(_admit(0.0085), Grant)
    assert _admit(0.0085, margin=1.5) == Denial("slack")
    assert _admit(0.0085, handover_s=0.002) == Denial("slack")


def test_idle_chunk_is_bounded_by_a_quarter_of_the_ttft_budget():
    chunk = idle_chunk_tokens(_OFFER, Slo(0.1, None), max_chunk_tokens=512)
    assert _OFFER.decode_step_s + chunk * _OFFER.per_prefill_token_s <= 0.025 + 1e-9
    assert idle_chunk_tokens(_OFFER, Slo(None, None), max_chunk_tokens=512) == 512
