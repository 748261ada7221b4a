"""Weights that go to host memory and come back: the same bits at the same addresses, or an error that ends it all."""

import contextlib
import gc
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.fake_cuda import GRANULARITY, FakeCuda
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine import install, parked_weights, rollout_weights, worker_weights
from vllm_coserve.engine.parked_weights import ParkedWeights
from vllm_coserve.engine.rollout_weights import WeightsKeeper
from vllm_coserve.memory.devices import make_own_range
from vllm_coserve.memory.host import HostDriver, create_pool

_PAGE = 64 << 10
_PLENTY = 1 << 40
_GARBAGE = -51
_DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool)


_ranges = []


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Other tests count descriptors."""
    yield
    while _ranges:
        _ranges.pop().close()
    gc.collect()


class _Range(HostDriver):
    """Memory that holds garbage whenever it comes anew, as a device's may."""

    def __init__(self, nbytes):
        num_pages = -(-nbytes // _PAGE)
        pool = create_pool(num_pages, _PAGE)
        super().__init__(pool, num_pages, _PAGE)
        os.close(pool)
        self.mapped, self.calls, self.fails = set(), 0, False
        _ranges.append(self)

    def map_run(self, slot, page, count):
        self.calls += 1
        if self.fails:
            raise OSError("no memory")
        super().map_run(slot, page, count)
        self.mapped |= set(range(slot, slot + count))
        _bytes_at(self.address + slot * _PAGE, count * _PAGE).fill_(_GARBAGE)

    def unmap_run(self, slot, count):
        super().unmap_run(slot, count)
        self.mapped -= set(range(slot, slot + count))


def _bytes_at(address, nbytes):
    return parked_weights.int8_over(address, nbytes, "cpu")


def _bits(tensor):
    return torch.empty(0, dtype=torch.int8).set_(tensor.untyped_storage())


def _random(nbytes, seed=0):
    return torch.randint(-128, 128, (nbytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def _view(storage, dtype, skip, transposed):
    """A tensor over most of a storage, that begins after `skip` elements."""
    count = storage.nbytes() // dtype.itemsize - skip
    shape, stride = ((2, count // 2), (1, 2)) if transposed else ((count,), (1,))
    data = torch.empty(0, dtype=dtype).set_(storage, skip, shape, stride)
    return torch.nn.Parameter(data, requires_grad=False)


def _park(tensors, **options):
    options = {"spare_bytes": lambda: _PLENTY} | options
    return ParkedWeights(tensors, _Range, pin_memory=False, **options)


def _weights(*sizes):
    return [_view(_random(n, i).untyped_storage(), torch.int8, 0, False) for i, n in enumerate(sizes)]


_views = st.tuples(st.sampled_from(_DTYPES), st.integers(0, 3), st.booleans())
_storages = st.tuples(st.integers(64, 3 * _PAGE), st.lists(_views, min_size=1, max_size=3))


@settings(max_examples=60, deadline=None)
@given(st.lists(_storages, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_mix_of_tensors_comes_back_bit_by_bit(storages, random):
    groups, before, gone = [], [], []
    for seed, (nbytes, views) in enumerate(storages):
        storage = _random(nbytes, seed).untyped_storage()
        before.append(_bits(_view(storage, torch.int8, 0, False)).clone())
        gone.append(StorageWeakRef(storage))
        groups.append([_view(storage, *view) for view in views])
        del storage
    tensors = [t for group in groups for t in group]
    faces = [(t.dtype, t.shape, t.stride(), t.storage_offset(), type(t)) for t in tensors]
    random.shuffle(shuffled := tensors + tensors[:1])
    parked = _park(iter(shuffled))
    assert all(ref.expired() for ref in gone), "their memory was given back"
    assert parked.nbytes < sum(nbytes + 512 for nbytes, _ in storages) + _PAGE
    addresses = [t.data_ptr() for t in tensors]

    for cycle in range(3):
        assert [(t.dtype, t.shape, t.stride(), t.storage_offset(), type(t)) for t in tensors] == faces
        assert [t.data_ptr() for t in tensors] == addresses
        for group, bits in zip(groups, before, strict=True):
            assert len({t.untyped_storage()._cdata for t in group}) == 1, "what shared a storage does"
            assert torch.equal(_bits(group[0]), bits)
        index = cycle % len(groups)
        before[index] = _random(len(before[index]), 99 + cycle)  # other weights, between two times
        _bits(groups[index][0]).copy_(before[index])
        assert parked.park() == "" and parked.parked
        assert not parked._range.mapped, "nothing is left on the device"
        parked.restore()
        assert not parked.parked
    assert parked.took_s > 0
    parked._range.close()


def test_host_memory_is_had_once(monkeypatch):
    spare = [_PLENTY]
    weights = _weights(3 * _PAGE)
    parked = _park(weights, spare_bytes=lambda: spare[0])
    assert parked.park() == ""
    parked.restore()
    host, spare[0] = [t.data_ptr() for t in parked._host], 0
    assert parked.park() == ""
    assert [t.data_ptr() for t in parked._host] == host


def test_a_host_without_room_refuses_and_nothing_happens(monkeypatch):
    weights = _weights(3 * _PAGE)
    bits = _bits(weights[0]).clone()
    parked = _park(weights, spare_bytes=lambda: (2 << 30) + _PAGE)
    assert "do not fit the host's memory" in parked.park()
    assert not parked.parked and torch.equal(_bits(weights[0]), bits)

    def empty(*size, pin_memory=False, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    parked = _park(weights)
    with monkeypatch.context() as patched:
        patched.setattr(parked_weights.torch, "empty", empty)
        assert "could not be had: CUDA error: out of memory" in parked.park()
    assert not parked.parked and torch.equal(_bits(weights[0]), bits)
    assert parked.park() == "", "there may be more of it the next time"


@pytest.mark.parametrize("way", ["park", "restore"])
@pytest.mark.parametrize("at", range(4))
def test_a_copy_that_fails_anywhere_is_an_error(monkeypatch, way, at):
    parked, calls = _park(_weights(4 * _PAGE)), []
    if way == "restore":
        assert parked.park() == ""
    genuine = torch.Tensor.copy_

    def copy(*args, **kwargs):
        calls.append(1)
        if len(calls) == at + 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return genuine(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        getattr(parked, way)()
    assert parked.parked == (way == "restore"), "it does not say that it is done"
    assert len(parked._range.mapped) == (4 if way == "park" else at + 1), "no memory goes before it is copied"


def test_device_memory_that_does_not_come_back_is_an_error():
    parked = _park(_weights(_PAGE))
    assert parked.park() == ""
    parked._range.fails = True
    with pytest.raises(OSError, match="no memory"):
        parked.restore()
    assert parked.parked


def test_what_others_have_views_of_stays_where_it_is():
    weights = _weights(_PAGE, _PAGE, 100)
    bits, hidden, address = _bits(weights[1]).clone(), weights[1].data[5:], weights[1].data_ptr()
    parked = _park(weights)
    assert weights[1].data_ptr() == address and parked.nbytes == 2 * _PAGE
    weights[1].fill_(3)
    assert bool((hidden == 3).all()), "and is one memory with the view"
    weights[1].copy_(bits)
    assert parked.park() == ""
    assert torch.equal(_bits(weights[1]), bits)
    parked.restore()
    assert torch.equal(_bits(weights[1]), bits)


def test_they_move_without_a_second_copy_of_all(monkeypatch):
    """What has moved is given back before more than a bound of it has come together."""
    monkeypatch.setattr(parked_weights, "_TRIM_BYTES", 2 * _PAGE)
    weights, left = _weights(*[_PAGE] * 7), []
    refs = [StorageWeakRef(w.untyped_storage()) for w in weights]
    parked = _park(weights, trim=lambda: left.append(sum(not ref.expired() for ref in refs)))
    assert left == [5, 3, 1, 0]
    assert parked._range.calls == 7, "and memory comes as it is needed"


def test_a_model_without_weights():
    parked = ParkedWeights([], lambda nbytes: _Range(1), pin_memory=False)
    assert parked.park() == "" and parked.nbytes == 0
    parked.restore()


def test_memory_of_a_gpus_own_range_goes_when_it_is_unmapped():
    api = FakeCuda()
    range_ = make_own_range(4, 4 * GRANULARITY, api=api)
    assert not api.board.used_bytes
    range_.map_run(0, 0, 4)
    assert api.board.used_bytes == 16 * GRANULARITY
    api.write(range_.address, b"w" * 16 * GRANULARITY)
    range_.unmap_run(0, 4)
    assert not api.board.used_bytes
    range_.map_run(0, 0, 4)
    assert api.read(range_.address, 16 * GRANULARITY)
    assert "cuMemsetD8Async" not in api.calls, "the device has nothing to compute for it"
    range_.close()
    assert api.nothing_left() and not api.violations


# ---- the worker's jobs


@pytest.fixture
def block(monkeypatch):
    made = ControlBlock.create(4, 2 << 20)[0]
    monkeypatch.setattr(install, "installed_block", lambda: made)
    monkeypatch.setattr(worker_weights, "_when_idle", lambda: None)
    monkeypatch.setattr(worker_weights, "_PARKED", [])
    return made


def _worker(**weights):
    model = torch.nn.Module()
    for name, data in weights.items():
        model.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    runner = SimpleNamespace(get_model=lambda: model)
    return SimpleNamespace(model_runner=runner, vllm_config=config, device=torch.device("cpu"))


def _gpu(worker, spare_bytes=_PLENTY):
    """What `make_parkable` does on a GPU."""
    weights = [p for _, p in worker_weights._weights(worker)]
    worker_weights._PARKED[:] = [_park(weights, spare_bytes=lambda: spare_bytes)]
    return worker_weights._PARKED[0]


def _do(worker, number, kind, path):
    worker_weights.begin_job(worker, number, kind, path)
    return _result(worker, number)


def _result(worker, number):
    block = install.installed_block()
    deadline = time.monotonic() + 20
    while block.get(Word.WEIGHTS_JOB_DONE) != number and time.monotonic() < deadline:
        time.sleep(0.001)
    return worker_weights.job_result(worker, number)


def test_who_begins_a_job_does_not_wait_for_it(block, monkeypatch):
    """On a GPU that is the engine core itself."""
    begun, may_end = threading.Event(), threading.Event()

    def load(worker, path):
        begun.set()
        return path if may_end.wait(5) else "nobody let it end"

    monkeypatch.setattr(worker_weights, "_load", load)
    worker_weights.begin_job(worker := _worker(), 7, "load", "its result")
    assert begun.wait(5) and block.get(Word.WEIGHTS_JOB_DONE) != 7
    may_end.set()
    assert _result(worker, 7) == "its result"


def test_a_gpus_weights_are_parked_whatever_their_loader(block, monkeypatch):
    monkeypatch.setattr(worker_weights, "_can_reload", lambda worker: False)
    worker = _worker(large=torch.randn(40_000), small=torch.randn(8))
    model = worker.model_runner.get_model()
    bits = {n: _bits(p).clone() for n, p in model.named_parameters()}
    parked = _gpu(worker)
    assert _do(worker, 1, "free", "") == ""
    assert block.get(Word.WEIGHTS_JOB_DONE) == 1 and not parked._range.mapped
    assert block.get(Word.PARKED_BYTES) == parked.nbytes == 3 * _PAGE and block.get(Word.PARK_NS) > 0
    assert torch.equal(_bits(model.small), bits["small"]), "it has never gone"
    assert _do(worker, 2, "restore", "") == ""
    assert all(torch.equal(_bits(p), bits[n]) for n, p in model.named_parameters())


def test_without_room_on_the_host_they_are_loaded_again_where_that_can_be(block, monkeypatch):
    worker = _worker(large=torch.randn(40_000))
    weight = worker.model_runner.get_model().large
    loaded, new, parked = [], torch.randn(40_000), _gpu(worker, spare_bytes=0)
    address = weight.data_ptr()

    def reload(worker):
        loaded.append(1)
        weight.copy_(new)

    monkeypatch.setattr(worker_weights, "_reload", reload)
    monkeypatch.setattr(worker_weights, "_can_reload", lambda worker: False)
    kept = _do(worker, 1, "free", "")
    assert "do not fit the host's memory" in kept and "--load-format dummy cannot be loaded again: kept" in kept
    assert parked._range.mapped
    monkeypatch.setattr(worker_weights, "_can_reload", lambda worker: True)
    assert _do(worker, 2, "free", "") == ""
    assert not parked._range.mapped
    assert _do(worker, 3, "restore", "") == ""
    assert loaded and torch.equal(weight, new) and weight.data_ptr() == address


def test_a_cpus_weights_are_loaded_again(block, monkeypatch):
    worker = _worker(large=torch.randn(40_000), small=torch.randn(8))
    model = worker.model_runner.get_model()
    new = torch.randn(40_000)
    monkeypatch.setattr(worker_weights, "_reload", lambda worker: model.large.copy_(new))
    monkeypatch.setattr(worker_weights, "_can_reload", lambda worker: False)
    assert "dummy cannot be loaded again: kept" in _do(worker, 1, "free", "")
    monkeypatch.setattr(worker_weights, "_can_reload", lambda worker: True)
    assert _do(worker, 2, "free", "") == ""
    assert not model.large.untyped_storage().nbytes() and model.small.untyped_storage().nbytes()
    assert _do(worker, 3, "restore", "") == ""
    assert torch.equal(model.large, new) and not block.get(Word.PARKED_BYTES)


def _until_ended(keeper):
    deadline = time.monotonic() + 20
    while keeper.busy and time.monotonic() < deadline:
        keeper.poll()
        time.sleep(0.001)


def test_a_copy_that_fails_ends_the_engine(block, monkeypatch):
    """The core hears of it from the job's answer."""
    worker, ended = _worker(large=torch.randn(40_000)), []
    parked = _gpu(worker)

    def collective_rpc(function, args, non_block=False):
        return [function(worker, *args)]

    def end_engine(why):
        ended.append(why)
        raise SystemExit

    monkeypatch.setattr(rollout_weights, "_end_engine", end_engine)
    core = SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=collective_rpc), get_weight_version=lambda: "default"
    )
    keeper = WeightsKeeper(block, lambda: None)
    keeper.attach(core)
    keeper.free()
    _until_ended(keeper)
    assert not keeper.loaded and not keeper.busy and not ended
    parked._range.fails = True
    keeper.restore()
    with contextlib.suppress(SystemExit):
        _until_ended(keeper)
    assert ended == ["weights job 'restore' failed and left weights that cannot be trusted: no memory"]
