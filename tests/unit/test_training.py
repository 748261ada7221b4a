"""The learner's arithmetic: advantages, losses, batches, steps, staleness."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_driver.api.trajectory import Trajectory, Turn, VersionSpan
from rl_driver.policy.staleness import Staleness
from rl_driver.training.advantages import group_advantages, has_signal, overlong_penalty
from rl_driver.training.learner import Learner
from rl_driver.training.losses import Clip, add_up, importance_weights, token_losses
from rl_driver.training.samples import Batch, Sample, micro_batches, samples_of
from tests.unit.learner_world import config, made_up, parameters, tiny_model

ROOT = Path(__file__).resolve().parents[2]

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=32)


@given(rewards)
def test_advantages_are_centred_and_scaled(values):
    got = torch.tensor(group_advantages(values), dtype=torch.float64)
    want = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(got, (want - want.mean()) / (want.std() + 1e-4), atol=1e-6, rtol=1e-6)
    assert has_signal(values) == (max(values) - min(values) > 1e-9)


def test_equal_rewards_teach_nothing():
    assert group_advantages([1.0] * 8) == [0.0] * 8 and not has_signal([1.0] * 8)
    assert group_advantages([3.0]) == [0.0]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (500, -1)])
def test_overlong_answers_are_punished_softly(length, penalty):
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)
    assert overlong_penalty(100, 100, 0) == -1 and overlong_penalty(99, 100, 0) == 0


def test_the_loss_is_the_clipped_surrogate():
    old = torch.zeros(2, 3)
    new = torch.tensor([[0.0, 0.5, -0.5], [0.0, 0.5, -0.5]])
    losses = token_losses(new, old, torch.tensor([1.0, -1.0]), Clip(0.2, 0.28))
    want = [[-1.0, -1.28, -math.exp(-0.5)], [1.0, math.exp(0.5), 0.8]]
    torch.testing.assert_close(losses, torch.tensor(want))


def test_the_loss_has_no_gradient_where_it_is_clipped():
    new = torch.tensor([[0.5, -0.5]], requires_grad=True)
    token_losses(new, torch.zeros(1, 2), torch.tensor([1.0]), Clip(0.2, 0.2)).sum().backward()
    assert new.grad[0, 0] == 0 and new.grad[0, 1] != 0


@pytest.mark.parametrize(("loss_type", "aggregate"), [("grpo", "sequence"), ("dapo", "token")])
def test_losses_are_those_of_trl(loss_type, aggregate):
    """The same tensors through TRL's trainer, whose forward pass is replaced by ours."""
    pytest.importorskip("trl", reason="TRL is not installed; it is the independent reference")
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.manual_seed(0)
    new, old, sampled = (-torch.rand(5, 9) for _ in range(3))
    advantages = torch.randn(5)
    mask = torch.arange(9)[None] < torch.tensor([[9], [1], [4], [7], [3]])
    weights = importance_weights(old, sampled, 1.2)
    trainer = MagicMock()
    trainer.configure_mock(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
    )
    trainer.args.delta, trainer.model.training, trainer.accelerator.num_processes = None, False, 1
    for name in ("gather", "gather_for_metrics", "reduce"):
        getattr(trainer.accelerator, name).side_effect = lambda value, **options: value
    trainer._get_per_token_logps_and_entropies.return_value = (new, torch.zeros(5, 9), None)
    inputs = {
        "prompt_ids": torch.zeros(5, 1, dtype=torch.long),
        "prompt_mask": torch.ones(5, 1, dtype=torch.long),
        "completion_ids": torch.zeros(5, 9, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    want = GRPOTrainer._compute_loss(trainer, None, inputs)
    total, count = add_up(token_losses(new, old, advantages, Clip(0.2, 0.28), weights), mask, aggregate)
    torch.testing.assert_close(total / count, want)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_sums_of_micro_batches_add_up(lengths, seed):
    torch.manual_seed(seed)
    values = torch.randn(len(lengths), 6, dtype=torch.float64)
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    for aggregate in ("token", "sequence"):
        whole = add_up(values, mask, aggregate)
        parts = [add_up(values[i : i + 1], mask[i : i + 1], aggregate) for i in range(len(lengths))]
        torch.testing.assert_close(whole[0], sum(p[0] for p in parts))
        assert whole[1] == sum(p[1] for p in parts)
    assert add_up(values, mask, "token")[1] == sum(lengths)
    assert add_up(values, mask, "sequence")[1] == sum(n > 0 for n in lengths)


def test_weights_of_stale_tokens_are_truncated():
    got = importance_weights(torch.tensor([0.0, 5.0, -1.0]), torch.zeros(3), cap=2.0)
    torch.testing.assert_close(got, torch.tensor([1.0, 2.0, math.exp(-1)]))


def _turn(index, inputs, outputs, version="step-3", kept=None):
    spans = (VersionSpan(version, 0, len(outputs)),)
    return Turn(index, tuple(inputs), tuple(outputs), tuple(-0.1 * t for t in outputs), spans, "stop", kept)


def test_only_the_policys_tokens_are_trained_on():
    turns = (_turn(0, [9, 9], [1, 2]), _turn(1, [9], [3], "step-4"))
    logprobs = [p for turn in turns for p in turn.logprobs]
    assert samples_of(Trajectory("t", "g", turns=turns), 0.5) == [
        Sample([9, 9, 1, 2, 9, 3], [2, 3, 5], logprobs, (3, 4), 0.5)
    ]


def test_an_edited_context_makes_a_sample_of_each_stretch():
    turns = (_turn(0, [9, 9], [1, 2]), _turn(1, [8], [3], kept=1))
    first, second = samples_of(Trajectory("t", "g", turns=turns), 1.0)
    assert (first.token_ids, first.outputs) == ([9, 9, 1, 2], [2, 3])
    assert (second.token_ids, second.outputs) == ([9, 8, 3], [2])


@settings(max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(10, 200))
def test_micro_batches_hold_what_they_may_and_lose_nothing(lengths, most):
    samples = [Sample([1] * n, [n - 1], [0.0], (0, 0), float(i)) for i, n in enumerate(lengths)]
    groups = list(micro_batches(samples, most))
    assert sorted(s.advantage for g in groups for s in g) == [float(i) for i in range(len(lengths))]
    assert all(len(g) == 1 or len(g) * max(len(s.token_ids) for s in g) <= most for g in groups)


# ---- the learner


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_micro_batches_make_the_same_step_as_one_batch(aggregate):
    samples = made_up(12)
    one = Learner(tiny_model(), config(aggregate=aggregate, micro_batch_tokens=10_000))
    many = Learner(tiny_model(), config(aggregate=aggregate, micro_batch_tokens=20))
    one.add(samples)
    for sample in samples:  # groups come one after the other
        many.add([sample])
    a, b = one.step(), many.step()
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["tokens"] == b["tokens"]
    torch.testing.assert_close(parameters(one), parameters(many), atol=1e-4, rtol=1e-3)
    assert one.updates == 1
    assert one.end_step() == 1


def test_samplers_are_compared_with_the_very_weights_that_they_had():
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():  # samplers have bfloat16
            parameter.copy_(parameter.bfloat16())
    learner, samples = Learner(model, config()), made_up(6)
    samples = [replace(s, versions=(0, 0), logprobs=p) for s, p in zip(samples, learner.score(samples), strict=True)]
    assert learner.agreement(samples) is None, "nobody has these weights"
    learner.remember(2)
    assert learner.agreement(samples) < 1e-6
    for _ in range(2):
        learner.add(samples)
        learner.step()
        learner.end_step()
    after = parameters(learner)
    assert learner.agreement(samples) < 1e-6, "whatever the weights of now are"
    assert parameters(learner).equal(after)
    assert learner.agreement([replace(s, versions=(0, 1)) for s in samples]) is None
    moved = [replace(s, versions=(2, 2)) for s in samples]
    learner.remember(2)
    assert learner.agreement(moved) > 1e-4
    learner.end_step()
    learner.remember(2)
    assert learner.agreement(samples) is None, "the oldest are forgotten"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_sharded_ranks_make_the_same_steps_as_one(tmp_path):
    """FSDP2 over gloo, started as users start it."""
    out = tmp_path / "two.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.unit.learner_world", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    two = torch.load(out)
    one, samples = Learner(tiny_model(), config()), made_up(12)
    for _ in range(2):
        one.add(samples)
        figures = one.step()
    torch.testing.assert_close(two["parameters"], parameters(one), atol=1e-4, rtol=1e-3)
    assert two["figures"] == pytest.approx(figures, rel=1e-3, abs=1e-4)
    assert two["names"] == [name for name, _ in one.weights()]


def test_a_step_makes_good_tokens_likelier():
    good = [s for s in made_up(12) if s.advantage > 0]
    learner = Learner(tiny_model(), config())
    before = sum(map(sum, learner.score(good)))
    for _ in range(3):
        learner.add(good)
        learner.step()
    assert sum(map(sum, learner.score(good))) > before + 1


def test_padding_changes_nothing():
    samples = made_up(6)
    learner = Learner(tiny_model(), config())
    batch, _ = learner._logprobs(Batch.of(samples))
    for row, logprobs in enumerate(learner.score(samples)):
        torch.testing.assert_close(batch[row, samples[row].outputs], torch.tensor(logprobs), atol=1e-5, rtol=1e-4)


def test_stale_samples_weigh_less_when_the_policy_has_left_them():
    fresh = made_up(3)
    stale = [Sample(s.token_ids, s.outputs, [p + 3 for p in s.logprobs], (-1, -1), s.advantage) for s in fresh]
    norms = []
    for samples in (fresh, stale):
        learner = Learner(tiny_model(), config(gradient_clip=1e9))
        learner.add(samples)
        norms.append(learner.step()["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0] * math.exp(-3), rel=1e-3)


def test_a_step_without_samples_is_an_error():
    with pytest.raises(ValueError, match="no sample"):
        Learner(tiny_model(), config()).step()


def test_a_checkpoint_goes_on_where_it_was(tmp_path):
    samples = made_up(6)
    learner = Learner(tiny_model(), config())
    learner.add(samples)
    learner.step()
    learner.save(tmp_path / "c", {"step": 7, "names": ["a"]})
    other = Learner(tiny_model(seed=5), config())
    assert other.load(tmp_path / "c") == {"step": 7, "names": ["a"]} and other.updates == 1
    for one in (learner, other):
        one.add(samples)
        one.step()
    torch.testing.assert_close(parameters(learner), parameters(other))


def test_published_weights_are_those_of_the_model():
    learner = Learner(tiny_model(), config())
    names = dict(learner.weights())
    assert "lm_head.weight" not in names and all(t.dtype is torch.bfloat16 for t in names.values())
    assert names["model.embed_tokens.weight"].shape == (32, 32)


# ---- staleness


@given(st.integers(0, 8), st.integers(0, 100))
def test_the_newest_published_weights_are_never_too_old_to_go_on(bound, step):
    staleness = Staleness(bound)
    newest = staleness.published(step)
    assert staleness.publishes(newest) and newest <= step
    assert staleness.may_begin(step, newest), "otherwise sampling and learning would wait for each other"
    assert staleness.admits(step, newest)
    assert not staleness.admits(step, step + 1)


@pytest.mark.parametrize(("bound", "period"), [(0, 1), (1, 1), (2, 1), (3, 2), (5, 4)])
def test_publication_period(bound, period):
    assert Staleness(bound).period == period
    assert [v for v in range(9) if Staleness(bound).publishes(v)] == list(range(0, 9, period))


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="staleness"):
        Staleness(-1)
