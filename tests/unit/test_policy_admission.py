"""What fits the slack is granted, no more; odd numbers are refused without an exception."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.admission import (
    Denial,
    Grant,
    RolloutOffer,
    admit,
    guard_s,
    idle_chunk_tokens,
    turn_wait_bound_s,
)
from vllm_coserve.policy.slack import Slo

_offers = st.builds(RolloutOffer, st.floats(0, 0.2), st.floats(1e-7, 1e-2), st.integers(0, 5000), st.integers(0, 64))
_slacks = st.floats(-1.0, 5.0) | st.sampled_from([math.inf, -math.inf])


def _admit(slack_s, offer, **kw):
    return admit(slack_s, offer, **{"margin": 1.0, "handover_s": 0.0, "max_chunk_tokens": 512, **kw})


@settings(max_examples=300, deadline=None)
@given(_slacks, _offers, st.floats(1.0, 3.0), st.floats(0.0, 0.01), st.integers(1, 1024))
def test_a_grant_fits_with_its_guard(slack_s, offer, margin, handover_s, most):
    got = _admit(slack_s, offer, margin=margin, handover_s=handover_s, max_chunk_tokens=most)
    if isinstance(got, Denial):
        assert got.reason == ("slack" if offer.decode_requests or offer.prefill_tokens else "no_work")
        return
    assert 0 <= got.chunk_tokens <= min(most, offer.prefill_tokens)
    assert got.chunk_tokens or offer.decode_requests
    assert got.expected_s >= offer.decode_step_s * margin
    assert got.expected_s + guard_s(handover_s) <= slack_s + 1e-9


@settings(max_examples=200, deadline=None)
@given(_offers, st.floats(-0.1, 1.0), st.floats(0.0, 1.0))
def test_more_slack_never_grants_less(offer, slack_s, more_s):
    small, large = _admit(slack_s, offer), _admit(slack_s + more_s, offer)
    if isinstance(small, Grant):
        assert isinstance(large, Grant) and large.chunk_tokens >= small.chunk_tokens


@settings(max_examples=100, deadline=None)
@given(_offers, st.floats(0.0, 0.5))
def test_a_larger_margin_never_grants_more(offer, slack_s):
    plain, careful = _admit(slack_s, offer), _admit(slack_s, offer, margin=1.5)
    if isinstance(careful, Grant):
        assert isinstance(plain, Grant) and plain.chunk_tokens >= careful.chunk_tokens


def test_decodes_run_without_a_chunk_that_would_be_too_small():
    offer = RolloutOffer(0.006, 1e-4, 1000, 8)
    assert _admit(0.006 + 0.002 + 15.5e-4, offer) == Grant(0, 0.006)
    assert _admit(0.006 + 0.002 + 16.5e-4, offer).chunk_tokens == 16


def test_prefills_alone_need_the_smallest_chunk():
    assert _admit(0.002 + 15.5e-4, RolloutOffer(0.0, 1e-4, 1000, 0)) == Denial("slack")
    assert _admit(0.002 + 16.5e-4, RolloutOffer(0.0, 1e-4, 1000, 0)).chunk_tokens == 16
    assert _admit(0.002 + 5.5e-4, RolloutOffer(0.0, 1e-4, 5, 0)).chunk_tokens == 5  # all there is


@pytest.mark.parametrize(
    ("slack_s", "offer", "margin"),
    [
        (math.nan, RolloutOffer(0.006, 1e-4, 1000, 8), 1.0),
        (math.inf, RolloutOffer(math.inf, 1e-4, 1000, 8), math.nan),
        (1.0, RolloutOffer(math.nan, 1e-4, 1000, 8), 1.0),
        (1.0, RolloutOffer(0.006, 1e-4, 1000, 8), math.nan),
    ],
)
def test_what_is_not_a_number_is_denied(slack_s, offer, margin):
    assert _admit(slack_s, offer, margin=margin) == Denial("slack")


def test_a_vast_slack_and_a_free_token_give_the_largest_chunk():
    assert _admit(1.7e308, RolloutOffer(0.006, 0.0, 1000, 8)).chunk_tokens == 512
    assert _admit(math.inf, RolloutOffer(0.006, 1e-4, 1000, 8)).chunk_tokens == 512


@settings(max_examples=100, deadline=None)
@given(_offers, st.floats(0.001, 10.0), st.integers(1, 2048))
def test_an_idle_chunk_stays_within_its_limits(offer, ttft_s, most):
    chunk = idle_chunk_tokens(offer, Slo(ttft_s, None), max_chunk_tokens=most)
    assert min(16, most) <= chunk <= most
    if chunk > 16:
        assert offer.decode_step_s + chunk * offer.per_prefill_token_s <= ttft_s / 4 + 1e-9


def test_an_idle_chunk_without_a_usable_price_is_the_largest():
    assert idle_chunk_tokens(RolloutOffer(0.006, 0.0, 10, 1), Slo(0.1, None), max_chunk_tokens=512) == 512


def test_guard_and_turn_bound():
    assert guard_s(0.0) == 0.002
    assert guard_s(0.001) == pytest.approx(0.003)
    assert guard_s(-1.0) == 0.002
    assert turn_wait_bound_s(0.1) == pytest.approx(0.155)
    assert turn_wait_bound_s(-1.0) == 0.005
