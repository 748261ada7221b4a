"""Weights that leave a real device and come back: what CPU tensors cannot show of it."""

import time

import pytest
import torch

from tests.gpu.device import free_bytes
from vllm_coserve.engine.parked_weights import PARK_PAGE_BYTES, ParkedWeights
from vllm_coserve.memory.cuda_calls import Device
from vllm_coserve.memory.devices import make_own_range

_LAYERS, _WIDTH = 32, 8192  # 4 GiB of bfloat16
_BYTES = _LAYERS * _WIDTH * _WIDTH * 2
_SLOWDOWN = 1.5  # of an activation, over bytes / bandwidth


def _make_range(nbytes):
    return make_own_range(-(-nbytes // PARK_PAGE_BYTES), PARK_PAGE_BYTES, torch.cuda.current_device())


@pytest.fixture
def weights():
    made = [torch.empty(_WIDTH, _WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(_LAYERS)]
    for weight in made:
        torch.nn.init.normal_(weight, std=_WIDTH**-0.5)
    return [torch.nn.Parameter(w, requires_grad=False) for w in made]


def _park(weights):
    return ParkedWeights(weights, _make_range, pin_memory=True, trim=torch.cuda.empty_cache)


def test_they_move_without_a_second_copy_and_leave_the_device_whole(weights):
    device = Device()
    torch.cuda.empty_cache()
    free = free_bytes(device)
    parked = _park(weights)
    assert abs(free_bytes(device) - free) < 256 << 20
    assert parked.park() == ""
    assert free_bytes(device) - free > _BYTES - (256 << 20)
    parked.restore()


def test_a_captured_graph_computes_the_same_with_weights_that_have_come_back(weights):
    parked = _park(weights)
    digests = [w.view(torch.int16).sum(dtype=torch.int64) for w in weights]
    x = torch.randn(16, _WIDTH, dtype=torch.bfloat16, device="cuda")

    def forward():
        out = x
        for weight in weights:
            out = torch.tanh(out @ weight)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    graph.replay()
    torch.cuda.synchronize()
    before = out.clone()
    assert parked.park() == ""
    others = torch.full((_BYTES // 2,), 7, dtype=torch.int8, device="cuda")  # who has the memory meanwhile
    torch.cuda.synchronize()
    del others
    torch.cuda.empty_cache()
    parked.restore()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, before)
    assert all(bool(w.view(torch.int16).sum(dtype=torch.int64) == d) for w, d in zip(weights, digests, strict=True))


def test_they_come_back_at_the_speed_of_the_bus(weights):
    """At most 1.5 x what a copy of as many bytes takes, which is measured beside it."""
    parked = _park(weights)
    host = torch.empty(1 << 30, dtype=torch.int8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    best_s = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start)
    bandwidth = device.nbytes / best_s
    took = []
    for _ in range(3):
        assert parked.park() == ""
        parked.restore()
        took.append(parked.took_s)
    print(f"{bandwidth / 1e9:.1f} GB/s; {parked.nbytes / 1e9:.2f} GB came back in {[round(s, 3) for s in took]} s")
    assert sorted(took)[1] <= _SLOWDOWN * parked.nbytes / bandwidth
