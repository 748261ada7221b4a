"""The step-cost law: recovers, stays sane, survives what comes in."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.latency import LatencyModel, StepShape

_TRUE = (3e-3, 2.2e-4, 1.1e-7, 3.5e-4, 2e-7)


def _true_s(shape: StepShape) -> float:
    return sum(c * x for c, x in zip(_TRUE, shape.features(), strict=True))


def _random_shape(rng: random.Random) -> StepShape:
    prefill = rng.choice([0, 0, rng.randrange(1, 512)])
    context = rng.randrange(0, 1000)
    decodes = rng.randrange(0, 32)
    return StepShape(prefill, prefill * context + prefill * prefill // 2, decodes, decodes * rng.randrange(16, 800))


def _trained(seed: int) -> LatencyModel:
    rng, model = random.Random(seed), LatencyModel()
    for _ in range(256):
        shape = _random_shape(rng)
        hiccup = 10 if rng.random() < 0.03 else 1
        model.observe(shape, _true_s(shape) * rng.gauss(1, 0.05) * hiccup)
    return model


@pytest.mark.parametrize("seed", range(5))
def test_recovers_a_law_from_noise_and_outliers(seed):
    model, rng = _trained(seed), random.Random(1000 + seed)
    errors = []
    for _ in range(200):
        shape = _random_shape(rng)
        errors.append(abs(model.predict_s(shape) / _true_s(shape) - 1))
    assert sorted(errors)[180] < 0.10
    assert 1.0 <= model.margin() < 1.4


def test_follows_a_change_of_the_machine():
    model, rng = _trained(1), random.Random(5)
    for _ in range(256):
        shape = _random_shape(rng)
        model.observe(shape, 2 * _true_s(shape))
    shape = StepShape(0, 0, 16, 16 * 300)
    assert model.predict_s(shape) == pytest.approx(2 * _true_s(shape), rel=0.1)


_counts = st.integers(-5, 1 << 40)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.tuples(_counts, _counts, _counts, _counts), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=60,
    )
)
def test_survives_anything_and_stays_monotone(observations):
    model = LatencyModel()
    for shape, duration in observations:
        model.observe(StepShape(*shape), duration)
    base = StepShape(10, 100, 4, 400)
    value = model.predict_s(base)
    assert math.isfinite(value) and 1e-5 <= value <= 60
    for more in (StepShape(11, 100, 4, 400), StepShape(10, 101, 4, 400), StepShape(10, 100, 5, 401)):
        assert model.predict_s(more) >= value
    assert 1.0 <= model.margin() <= 3.0
    assert model.per_prefill_token_s() > 0


def test_json_round_trip():
    model = _trained(3)
    again = LatencyModel.from_json(model.to_json())
    shape = StepShape(64, 4096, 8, 2000)
    assert again.predict_s(shape) == model.predict_s(shape)


@pytest.mark.parametrize(
    "bad", [{}, [], {"format": 1}, {"format": 1, "coefficients": [1, 2]}, {"format": 1, "coefficients": [-1] * 5}]
)
def test_bad_json_is_refused(bad):
    with pytest.raises(ValueError):
        LatencyModel.from_json(bad)
