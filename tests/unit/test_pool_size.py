"""The pool of a GPU: what models take, what they leave, and whether that was true once both have been profiled."""

import argparse
import json
import logging
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_coserve.api.errors import ConfigurationError, ContractError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Note, Word
from vllm_coserve.engine import gpu_pool, preflight
from vllm_coserve.engine.device import MemoryLeft, memory_left
from vllm_coserve.engine.model_size import checkpoint_bytes
from vllm_coserve.engine.refusals import told_to_the_user
from vllm_coserve.policy.pool_size import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    EngineFacts,
    engine_need,
    pool_bytes,
    room_bytes,
)

_GIB = 1 << 30
_SEVEN_B = EngineFacts(15_231_233_024, 3584, 18944, 152064, 2, 8192, 1024, graphs=True)


def test_two_models_of_7b_leave_most_of_a_device_of_140_gib():
    need = engine_need(_SEVEN_B)
    assert need.weight_bytes == _SEVEN_B.weight_bytes and need.fixed_bytes == CONTEXT_BYTES + GRAPHS_BYTES
    assert 1.5 * _GIB < need.activation_bytes < 4 * _GIB
    assert 85 * _GIB < pool_bytes(140 * _GIB, 0.92, (need, need)) < 95 * _GIB


_facts = st.builds(
    EngineFacts,
    weight_bytes=st.integers(0, 1 << 40),
    hidden_size=st.integers(1, 1 << 15),
    intermediate_size=st.integers(1, 1 << 17),
    vocab_size=st.integers(1, 1 << 18),
    dtype_bytes=st.sampled_from([2, 4]),
    max_num_batched_tokens=st.integers(1, 1 << 17),
    max_num_seqs=st.integers(1, 1 << 12),
    graphs=st.booleans(),
)


@given(_facts, _facts, st.integers(1, 1 << 42), st.floats(0.01, 1))
def test_what_is_counted_adds_up(a, b, device_bytes, utilization):
    needs = engine_need(a), engine_need(b)
    left = pool_bytes(device_bytes, utilization, needs)
    assert left + needs[0].total_bytes + needs[1].total_bytes == int(device_bytes * utilization) <= device_bytes
    for facts, need in zip((a, b), needs, strict=True):
        hidden_states = facts.max_num_batched_tokens * facts.hidden_size * facts.dtype_bytes
        logits = 4 * facts.vocab_size * min(facts.max_num_seqs, facts.max_num_batched_tokens)
        assert need.activation_bytes > max(hidden_states, logits)
        assert need.total_bytes > need.weight_bytes + need.activation_bytes


def test_no_room_is_none():
    assert room_bytes(10, (3, 4)) == 3 and room_bytes(10, (7, 4)) == 0


# ---- checkpoints


def _checkpoint(file, **tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)  # the data is not looked at


def test_a_checkpoint_is_counted_as_it_is_loaded(tmp_path):
    _checkpoint(tmp_path / "model.safetensors", a=("BF16", [3, 4], 24), b=("F32", [5], 20), c=("I32", [2], 8))
    assert checkpoint_bytes(tmp_path, 2) == 24 + 10 + 8
    assert checkpoint_bytes(tmp_path, 4) == 48 + 20 + 8
    assert checkpoint_bytes(tmp_path, 0) == 24 + 20 + 8, "a quantized one"
    _checkpoint(tmp_path / "consolidated.safetensors", a=("BF16", [3, 4], 24))
    assert checkpoint_bytes(tmp_path, 2) == 42, "the same weights once more"


def test_an_index_says_which_files_count_and_all_must_be_there(tmp_path):
    for name in "abc":
        _checkpoint(tmp_path / f"{name}.safetensors", **{name: ("BF16", [100], 200)})
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_bytes(tmp_path, 2) == 400
    (tmp_path / "b.safetensors").unlink()
    assert checkpoint_bytes(tmp_path, 2) == 0


def test_other_files_count_by_their_size(tmp_path):
    assert checkpoint_bytes(tmp_path, 2) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(77))
    assert checkpoint_bytes(tmp_path, 2) == 77


# ---- before the start


@pytest.fixture
def device(monkeypatch):
    """A GPU of 140 GiB, and two models of 7 B parameters."""
    monkeypatch.setattr(gpu_pool, "device_memory_bytes", lambda: 140 * _GIB)
    monkeypatch.setattr(preflight, "device_memory_bytes", lambda: 140 * _GIB)
    monkeypatch.setattr(gpu_pool, "engine_facts", lambda model, args: _SEVEN_B)
    monkeypatch.setattr(gpu_pool, "rollout_args", lambda config: None)


def _config(**more):
    return SimpleNamespace(rollout="m", pool_gib=None, headroom=0.2, **more)


def test_the_default_is_what_is_left_in_whole_pages_and_the_log_says_how(device, monkeypatch, caplog):
    args = argparse.Namespace(model_tag="m", gpu_memory_utilization=0.92)
    monkeypatch.setattr(gpu_pool.logger, "propagate", True)
    with caplog.at_level(logging.INFO, gpu_pool.logger.name):
        pages = preflight.pool_size_pages(args, _config(), "cuda")
    left = pool_bytes(140 * _GIB, 0.92, [engine_need(_SEVEN_B)] * 2)
    assert 0 <= left - pages * preflight.PAGE_BYTES < preflight.PAGE_BYTES
    (line,) = caplog.messages
    assert "0.92 of the device's 140.0 GiB" in line and line.count("14.2 GiB of weights") == 2


def test_models_that_leave_nothing_are_refused(device):
    args = argparse.Namespace(model_tag="m", gpu_memory_utilization=0.2)
    with pytest.raises(ConfigurationError, match=r"no room for a page pool.*smaller --coserve-rollout"):
        preflight.pool_size_pages(args, _config(), "cuda")


def test_a_size_that_is_given_counts(device):
    config = _config()
    config.pool_gib = 1.0
    assert preflight.pool_size_pages(argparse.Namespace(), config, "cuda") == 512


# ---- once both are profiled


def test_what_a_process_needs_again_is_its_peak_above_what_it_holds(monkeypatch):
    stats = {"allocated_bytes.all.peak": 10, "reserved_bytes.all.current": 4}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 100))
    assert memory_left() == MemoryLeft(7, 6)
    stats["reserved_bytes.all.current"] = 12
    assert memory_left() == MemoryLeft(7, 0)


@pytest.fixture
def block():
    return ControlBlock.create(1024, 2 << 20)[0]  # 2 GiB


def _measured(monkeypatch, free_gib, transient_gib):
    left = MemoryLeft(int(free_gib * _GIB), int(transient_gib * _GIB))
    monkeypatch.setattr(gpu_pool, "memory_left", lambda: left)


def _side(name):
    return SimpleNamespace(side=name)


def test_the_pool_is_made_only_if_both_engines_can_compute_beside_it(block, monkeypatch):
    _measured(monkeypatch, 99, 0.5)
    gpu_pool.check_pool_fits(_side("rollout"), block, eager=False)
    assert block.get(Word.ROLLOUT_TRANSIENT_BYTES) == _GIB // 2 + GRAPHS_BYTES
    _measured(monkeypatch, 4.5, 1.0)
    gpu_pool.check_pool_fits(_side("serving"), block, eager=True)  # 4.5 - 1.0 - 1.5 is the pool's 2
    _measured(monkeypatch, 4.496, 1.0)
    with pytest.raises(ConfigurationError, match=r"pool of 2\.00 GiB does not fit.*Give --coserve-pool-gib 1\.99$"):
        gpu_pool.check_pool_fits(_side("serving"), block, eager=True)
    _measured(monkeypatch, 2.4, 1.0)
    with pytest.raises(ConfigurationError, match="smaller --coserve-rollout"):
        gpu_pool.check_pool_fits(_side("serving"), block, eager=True)


def test_serving_waits_for_what_the_rollout_measures(block, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            block.set(Word.ROLLOUT_TRANSIENT_BYTES, 1)

    monkeypatch.setattr(gpu_pool.time, "sleep", sleep)
    _measured(monkeypatch, 99, 0)
    gpu_pool.check_pool_fits(_side("serving"), block, eager=True)
    assert len(looks) == 3


def test_serving_does_not_wait_for_a_rollout_that_cannot_start(block, monkeypatch):
    _measured(monkeypatch, 99, 0)
    block.set(Word.START_REFUSED, 1)
    with pytest.raises(ContractError, match="rollout engine"):
        gpu_pool.check_pool_fits(_side("serving"), block, eager=True)


def test_what_serving_finds_impossible_reaches_the_user(block):
    for side, note in (("rollout", ""), ("serving", "the fix")):
        with pytest.raises(ConfigurationError), told_to_the_user(_side(side), block):
            raise ConfigurationError("the fix")
        assert block.note(Note.START_REFUSAL) == note
