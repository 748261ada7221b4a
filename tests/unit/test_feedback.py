"""The share of a latency budget that may be spent."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_coserve.policy.feedback import SpendController


@given(st.lists(st.booleans(), max_size=300))
def test_the_share_stays_within_its_bounds(outcomes):
    controller = SpendController(0.2, 0.5, 0.8)
    for met in outcomes:
        before = controller.spend
        controller.observe(met)
        assert 0.2 <= controller.spend <= 0.8
        assert (controller.spend > before) <= met and (controller.spend < before) <= (not met)


@pytest.mark.parametrize("most", [0.45, 0.6])
def test_it_rests_where_few_requests_miss(most):
    """A machine on which requests miss ever more often above a share of `most`."""
    rng, controller = random.Random(1), SpendController(0.1, 0.9, 0.9)
    missed = []
    for _ in range(20_000):
        met = rng.random() > max(0.0, controller.spend - most) * 2
        missed.append(not met)
        controller.observe(met)
    assert sum(missed[10_000:]) / 10_000 < 0.01
    assert abs(controller.spend - most) < 0.1


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError):
        SpendController(0.5, 0.4, 0.6)
    with pytest.raises(ValueError):
        SpendController(0.2, 0.4, 0.6, up=0.0)
