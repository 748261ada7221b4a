"""The cost law on devices of any speed, over changing traffic, and with input that no engine should send."""

import math
import random
import timeit
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.latency import Coefficients, LatencyModel, StepShape

_TRUE = (3e-3, 2.2e-4, 1.1e-7, 3.5e-4, 2e-7)


def _law(speed=1.0, without=None):
    values = [0.0 if i == without else c * speed for i, c in enumerate(_TRUE)]
    return lambda shape: sum(c * x for c, x in zip(values, shape.features(), strict=True))


def _mixed(rng):
    prefill = rng.choice([0, 0, rng.randrange(1, 512)])
    decodes = rng.randrange(0, 32)
    pairs = prefill * rng.randrange(0, 1000) + prefill * prefill // 2
    return StepShape(prefill, pairs, decodes, decodes * rng.randrange(16, 800))


def _decodes(rng):
    n = rng.randrange(1, 32)
    return StepShape(0, 0, n, n * rng.randrange(16, 800))


def _train(model, law, seed, steps=256, shapes=_mixed):
    rng = random.Random(seed)
    for _ in range(steps):
        shape = shapes(rng)
        hiccup = 10 if rng.random() < 0.03 else 1
        model.observe(shape, law(shape) * max(0.5, rng.gauss(1, 0.05)) * hiccup)
    return model


def _worst_of_90_percent(model, law, seed=99):
    rng = random.Random(seed)
    shapes = [_mixed(rng) for _ in range(200)]
    return sorted(abs(model.predict_s(s) / law(s) - 1) for s in shapes)[180]


@pytest.mark.parametrize("speed", [0.01, 0.1, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_recovers_the_law_of_a_device_of_any_speed(speed, seed):
    model = _train(LatencyModel(), _law(speed), seed)
    assert _worst_of_90_percent(model, _law(speed)) < 0.05
    assert 1.0 <= model.margin() < 1.4


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_a_long_decode_phase_does_not_unlearn_prefill(speed):
    law, burst = _law(speed), StepShape(256, 256 * 128, 8, 3200)
    model = _train(_train(LatencyModel(), law, 1), law, 2, 304, _decodes)
    assert model.predict_s(burst) == pytest.approx(law(burst), rel=0.2)


def test_a_term_never_seen_follows_the_speed_of_the_device():
    fast, slow = (_train(LatencyModel(), _law(s), 3, 64, _decodes) for s in (0.1, 10.0))
    assert slow.per_prefill_token_s() > 30 * fast.per_prefill_token_s()


@pytest.mark.parametrize("without", range(5))
def test_a_cached_zero_is_learned_again(without):
    cached = _train(LatencyModel(), _law(without=without), 4).to_json()
    again = _train(LatencyModel.from_json(cached), _law(), 5)
    assert _worst_of_90_percent(again, _law()) < 0.05


def test_a_cache_of_a_faster_device_is_corrected():
    again = _train(LatencyModel.from_json(_train(LatencyModel(), _law(0.02), 6).to_json()), _law(), 7)
    assert _worst_of_90_percent(again, _law()) < 0.05


def test_a_prior_with_zeros_predicts_as_given_and_learns():
    model = LatencyModel(Coefficients(2e-3, 1e-4, 0.0, 2e-4, 0.0))
    assert model.predict_s(StepShape(0, 10**6, 0, 10**6)) == pytest.approx(2e-3)
    assert _worst_of_90_percent(_train(model, _law(), 8), _law()) < 0.05


def test_one_hiccup_does_not_move_the_fit():
    model, shape = _train(LatencyModel(), _law(), 9), StepShape(64, 4096, 8, 2000)
    before = model.predict_s(shape)
    for _ in range(16):
        model.observe(shape, _law()(shape))
    model.observe(shape, 10 * _law()(shape))
    for _ in range(15):
        model.observe(shape, _law()(shape))
    assert model.predict_s(shape) == pytest.approx(before, rel=0.05)


def test_steps_that_were_cut_short_do_not_move_the_fit():
    """Weighting by 1 / duration bounds a slow outlier and magnifies a short one, which reweighting has to catch."""
    rng, law, model = random.Random(11), _law(), LatencyModel()
    for _ in range(256):
        shape = _mixed(rng)
        model.observe(shape, law(shape) * rng.gauss(1, 0.05) * (0.3 if rng.random() < 0.05 else 1))
    assert _worst_of_90_percent(model, law) < 0.10


def test_refits_early_and_then_every_16():
    model, shape, changes, last = LatencyModel(), StepShape(0, 0, 4, 400), [], None
    for i in range(1, 49):
        model.observe(shape, 0.02 + i * 1e-3)
        now = model.predict_s(shape)
        if now != last and last is not None:
            changes.append(i)
        last = now
    assert changes == [4, 8, 16, 32, 48]


def test_the_window_bounds_the_samples():
    model = LatencyModel(window=32)
    for _ in range(100):
        model.observe(StepShape(1, 1, 1, 1), 0.01)
    assert model.samples == 32


@pytest.mark.parametrize("duration", [math.nan, math.inf, -math.inf, 0, -1.0, 1e-9, 61.0, 10**400, None, "1", 1j, []])
def test_impossible_durations_teach_nothing(duration):
    model = LatencyModel()
    model.observe(StepShape(1, 1, 1, 1), duration)
    assert model.samples == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 10**400, 10**200, None, "x", []])
@pytest.mark.parametrize("field", range(4))
def test_impossible_shapes_teach_nothing(field, value):
    fields = [1, 1, 1, 1]
    fields[field] = value
    model = LatencyModel()
    model.observe(StepShape(*fields), 0.01)
    assert model.samples == 0


_counts = st.integers(0, 10**15) | st.integers(0, 4000)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_counts, _counts, _counts, _counts, st.floats(1e-5, 60)), min_size=4, max_size=40))
def test_coefficients_stay_finite_and_nonnegative(observations):
    model = LatencyModel(window=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no overflow either
        for *shape, duration in observations:
            model.observe(StepShape(*shape), duration)
    coefficients = model.to_json()["coefficients"]
    assert all(math.isfinite(c) and c >= 0 for c in coefficients)
    assert 1.0 <= model.margin() <= 3.0


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 30),
    st.lists(st.integers(0, 10**6), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(1, 10**6),
)
def test_more_work_never_costs_less(seed, shape, field, more):
    model = _train(LatencyModel(), _law(), seed, 20)
    larger = list(shape)
    larger[field] += more
    assert model.predict_s(StepShape(*larger)) >= model.predict_s(StepShape(*shape))


def test_prefill_work_is_the_prediction_without_what_every_step_costs():
    model = _train(LatencyModel(), _law(), 10)
    whole, empty = model.predict_s(StepShape(300, 60_000, 0, 0)), model.predict_s(StepShape(0, 0, 0, 0))
    assert model.prefill_work_s(300, 60_000) == pytest.approx(whole - empty)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {"format": 2, "coefficients": [1e-3] * 5},
        {"format": 1, "coefficients": [10**400] * 5},
        {"format": 1, "coefficients": [math.nan] * 5},
        {"format": 1, "coefficients": [True] * 5},
        {"format": 1, "coefficients": [0] * 5},
        {"format": 1, "coefficients": ["1e-3"] * 5},
        {"format": 1, "coefficients": [1e-3, 1e-3, 1e-3, 1e-3, 61.0]},
    ],
)
def test_a_corrupt_cache_is_a_value_error_with_a_text(bad):
    with pytest.raises(ValueError, match="latency"):
        LatencyModel.from_json(bad)


@pytest.mark.parametrize("prior", [Coefficients(step_s=-1e-3), Coefficients(prefill_pair_s=math.nan)])
def test_an_impossible_prior_is_refused(prior):
    with pytest.raises(ValueError, match="prior"):
        LatencyModel(prior)


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="window"):
        LatencyModel(window=0)


def test_predicting_is_cheap():
    model, shape = LatencyModel(), StepShape(100, 5000, 8, 2000)
    assert isinstance(model.predict_s(shape), float)
    assert min(timeit.repeat(lambda: model.predict_s(shape), number=1000, repeat=5)) / 1000 < 50e-6
