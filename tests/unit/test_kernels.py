"""The kernels of sparse deltas against what they are defined by, on bits of all kinds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve import kernels
from vllm_coserve.kernels import cpu, reference

_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_SIZES = (0, 1, 3, 4, 5, 4095, 4096, 4097, 20_001)
_FLOATS = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 1.0, -1.0])


# Triton reads the variable when it is imported, which others in this process do: `test_triton` has a process for it.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    """A backend whose kernels run on tensors of the CPU: those of GPUs by Triton's interpreter."""
    return importlib.import_module("vllm_coserve.kernels.gpu") if _INTERPRETED else cpu


@pytest.mark.skipif(_INTERPRETED, reason="this is that process")
def test_triton() -> None:
    """The tests of this file again, with the kernels of GPUs."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def _random(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _mask(positions: torch.Tensor, size: int) -> torch.Tensor:
    ones = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8)
    ones[positions.long()] = 1
    return (ones.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _check(backend: ModuleType, old: torch.Tensor, new: torch.Tensor) -> None:
    positions, steps = backend.compact(old, new)
    expected = reference.compact(old, new)
    assert positions.dtype == torch.int32 and steps.dtype == old.dtype
    assert torch.equal(positions, expected[0]) and torch.equal(steps, expected[1])
    bits = old.clone()
    if positions.numel():
        backend.scatter(bits, positions, steps)
    assert torch.equal(bits, new)
    if positions.numel():
        mask = _mask(positions, old.numel())
        for way in (backend, reference):
            bits = old.clone()
            way.scatter_masked(bits, mask, steps)
            assert torch.equal(bits, new)
    assert backend.digest(old) == reference.digest(old)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("size", _SIZES)
def test_dense_to_sparse_and_back(backend: ModuleType, size: int, dtype: torch.dtype) -> None:
    """Nothing, everything, the first, the last, and some elements change."""
    old = _random(size, dtype, 1)
    for seed, density in enumerate((0.0, 0.01, 0.3, 1.0)):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(size, generator=generator) < density
        _check(backend, old, torch.where(chosen, _random(size, dtype, 2 + seed), old))
    for edge in {0, size - 1} if size else ():
        new = old.clone()
        new[edge] ^= 1
        _check(backend, old, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_that_compare_oddly_are_bits_like_others(backend: ModuleType, dtype: torch.dtype) -> None:
    values = _FLOATS.to(dtype).view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    old, new = (t.reshape(-1).contiguous() for t in torch.broadcast_tensors(values[:, None], values[None, :]))
    _check(backend, old, new)
    payloads = values[4] ^ torch.arange(16, dtype=values.dtype)  # NaNs that differ in their payload only
    _check(backend, payloads, payloads.flip(0).contiguous())


def test_runs_that_begin_anywhere(backend: ModuleType) -> None:
    old, new = _random(5000, torch.int16, 1), _random(5000, torch.int16, 2)
    for first in range(5):
        _check(backend, old[first:], torch.where(old > 0, old, new)[first:])
        _check(backend, old[first:-4], old[first + 3 : 4999])


@given(st.binary(max_size=64), st.binary(max_size=64), st.sampled_from(_DTYPES))
@settings(max_examples=200, deadline=None)
def test_any_bytes(one: bytes, other: bytes, dtype: torch.dtype) -> None:
    size = min(len(one), len(other)) // dtype.itemsize * dtype.itemsize
    old, new = (torch.tensor(list(b[:size]), dtype=torch.uint8).view(dtype) for b in (one, other))
    _check(cpu, old, new)


@given(st.integers(1, 9000), st.data())
@settings(max_examples=100, deadline=None)
def test_a_digest_tells_changes_losses_and_exchanges(size: int, data: st.DataObject) -> None:
    bits = _random(size, torch.int16, 3)
    other = bits.clone()
    at = data.draw(st.integers(0, size - 1))
    other[at] ^= 1 << data.draw(st.integers(0, 14))
    assert kernels.digest(other) != kernels.digest(bits)
    swapped = bits.roll(1)
    assert torch.equal(swapped, bits) or kernels.digest(swapped) != kernels.digest(bits)


def test_wrong_runs_are_refused() -> None:
    run = torch.zeros(8, dtype=torch.int16)
    at, steps = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int16)
    for old, new in ((run, run[:7]), (run, run.int()), (run.float(), run.float()), (run.view(2, 4), run.view(2, 4))):
        with pytest.raises(ValueError):
            kernels.compact(old, new)
    for bad_at, bad_steps in ((at + 8, steps), (at - 1, steps), (at, steps.int()), (at, torch.cat([steps, steps]))):
        with pytest.raises(ValueError):
            kernels.scatter(run, bad_at, bad_steps)
    one = torch.ones(1, dtype=torch.uint8)
    for bad_run, mask, bad_steps in (
        (run, one.int(), steps),
        (run, torch.cat([one, one]), steps),
        (run, one * 3, steps),
        (run, one * 0, steps),
        (run[:3], one * 8, steps),
        (run, one, steps.int()),
    ):
        with pytest.raises(ValueError):
            kernels.scatter_masked(bad_run, mask, bad_steps)
    assert not run.any()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for dtype in _DTYPES:
        old, new = _random(100_001, dtype, 1).cuda(), _random(100_001, dtype, 1).cuda()
        new[::97] = _random(100_001, dtype, 2).cuda()[::97]
        positions, steps = kernels.compact(old, new)
        expected = reference.compact(old, new)
        assert torch.equal(positions, expected[0]) and torch.equal(steps, expected[1])
        assert kernels.digest(new) == cpu.digest(new.cpu())
        kernels.scatter(old, positions, steps)
        assert torch.equal(old, new)
        kernels.scatter_masked(old, _mask(positions.cpu(), 100_001).cuda(), steps)
        kernels.scatter(new, positions, steps)
        assert torch.equal(old, new)
