"""Rollout requests: which are refused, which end early and why, and whose prefix cache they may use."""

import json
import struct
from collections import deque
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine import endings as endings_module
from vllm_coserve.engine.checkpoint import difference, read_shapes
from vllm_coserve.engine.endings import Endings
from vllm_coserve.engine.request_size import pages_needed, refuse_larger_than_budget
from vllm_coserve.engine.rollout_weights import salted
from vllm_coserve.memory.geometry import Geometry


@pytest.fixture
def block():
    return ControlBlock.create(64, 2 << 20)[0]


@pytest.fixture
def clock(monkeypatch):
    fake = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(endings_module.time, "monotonic", lambda: fake.now_s)
    monkeypatch.setattr(endings_module.time, "time", lambda: fake.now_s)
    return fake


def _request(name, computed=0, tokens=10, arrival=0.0):
    return SimpleNamespace(request_id=name, num_computed_tokens=computed, num_tokens=tokens, arrival_time=arrival)


def _scheduler(running=(), waiting=()):
    return SimpleNamespace(running=list(running), waiting=deque(waiting))


def test_a_running_request_without_progress_is_stalled(block, clock):
    endings, a, b = Endings(block, 2.0), _request("a"), _request("b")
    scheduler = _scheduler([a, b])
    assert endings.stalled(scheduler) == []
    for step in range(4):
        clock.now_s += 1.0
        a.num_computed_tokens += 1
        block.set(Word.ROLLOUT_STEPS, step)
        stalled = endings.stalled(scheduler)
        assert stalled == (["b"] if step >= 2 else [])


def test_a_waiting_request_is_stalled_only_when_nothing_is_computed(block, clock):
    endings, late = Endings(block, 2.0), _request("late", arrival=101.5)
    scheduler = _scheduler([], [_request("w", arrival=90.0), late])
    assert endings.stalled(scheduler) == []
    for step in range(5):  # others are served: it queues
        clock.now_s += 1.0
        block.set(Word.ROLLOUT_STEPS, step)
        assert endings.stalled(scheduler) == []
    late.arrival_time = clock.now_s + 1.5
    clock.now_s += 2.5
    assert endings.stalled(scheduler) == ["w"]
    endings.restart_clocks()
    assert endings.stalled(scheduler) == []


def test_a_request_that_outgrew_the_budget_ends_instead_of_waiting(block, clock):
    endings, geometry = Endings(block, 2.0), Geometry(1 << 20, 2 << 20, 64)
    small, large, fresh = (
        _request("s", tokens=64),
        _request("l", tokens=32 * 20),
        _request("f", tokens=9999, arrival=99.0),
    )
    block.set(Word.BUDGET_PAGES, 5)
    assert endings.too_large(_scheduler([], [small, large, fresh]), geometry, 32) == ["l"]
    assert endings.too_large(_scheduler([small], [large]), geometry, 32) == []
    block.set(Word.BUDGET_PAGES, 50)
    assert endings.too_large(_scheduler([], [large]), geometry, 32) == []


def test_requests_larger_than_the_budget_are_refused_with_413(block):
    exceptions = pytest.importorskip("vllm.exceptions")
    block.set(Word.KV_BLOCK_BYTES, 128 << 10)
    block.set(Word.KV_BLOCK_TOKENS, 32)
    block.set(Word.BUDGET_PAGES, 3)
    block.set(Word.ACTIVE_WANTED, 1)
    guarded = refuse_larger_than_budget(lambda longest, asked, n, *a, **k: min(longest - n, asked or 10**9), block)
    assert pages_needed(block, 32) == 2
    assert guarded(1024, 100, 200) == 100
    assert guarded(1024, None, 400) == 624, "a request that names no length counts with its prompt"
    for asked, prompt in ((900, 200), (None, 1100), (1, 1100)):
        with pytest.raises(exceptions.GracefulHTTPError, match="rollout budget is 3 pages") as refused:
            guarded(2048, asked, prompt)
        assert refused.value.http_status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    block.set(Word.ACTIVE_WANTED, 0)
    assert guarded(2048, 900, 200) == 900, "a deactivated engine answers with its own reason"


def test_cache_salts_change_with_the_weights_and_keep_the_users():
    assert salted(None, 1) != salted(None, 2)
    assert salted("mine", 1) != salted(None, 1)
    assert salted(salted("a:b", 1), 2) == salted("a:b", 2)
    assert salted("a", 1) != salted("b", 1)


def _checkpoint(folder, shapes, cut=0):
    folder.mkdir(exist_ok=True)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(at)
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut])
    return folder


def test_only_checkpoints_of_the_same_model_are_taken(tmp_path):
    shapes = {"a": [2, 3], "b": [4]}
    known = read_shapes(_checkpoint(tmp_path / "base", shapes))
    assert known == shapes
    assert difference(known, _checkpoint(tmp_path / "same", shapes)) == ""
    assert "truncated" in difference(known, _checkpoint(tmp_path / "cut", shapes, cut=3))
    assert "lacks 1 tensors" in difference(known, _checkpoint(tmp_path / "less", {"a": [2, 3]}))
    assert "has 1 tensors" in difference(known, _checkpoint(tmp_path / "more", shapes | {"c": [1]}))
    assert "has shape [3, 2]" in difference(known, _checkpoint(tmp_path / "turned", {"a": [3, 2], "b": [4]}))
    assert "no safetensors files" in difference(known, tmp_path / "nowhere")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "x.safetensors").write_bytes(b"\xff" * 64)
    assert "safetensors" in difference(known, tmp_path / "junk")
