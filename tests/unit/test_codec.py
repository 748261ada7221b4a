"""Encoded changes come out bit for bit, and damage is seen before it does any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.weights.codec import Kind, apply, bits_of
from vllm_coserve.weights.codec import encode as encode_parts
from vllm_coserve.weights.store import CorruptError

_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def encode(*args: Any, **options: Any) -> bytes:
    """In one piece."""
    return b"".join(encode_parts(*args, **options))


def _random(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _changed(old: torch.Tensor, density: float, seed: int, far: bool) -> torch.Tensor:
    """Other bits at a share of the places: by one step up or down, or by any number of them."""
    generator = torch.Generator().manual_seed(seed)
    steps = _random(old.numel(), old.dtype, seed + 1) if far else torch.ones_like(old)
    steps = torch.where(torch.rand(old.shape, generator=generator) < 0.5, steps, -steps)
    return torch.where(torch.rand(old.shape, generator=generator) < density, old + steps, old)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("kind", [None, Kind.SPARSE, Kind.MASK, Kind.DENSE])
@pytest.mark.parametrize("compress", [True, False])
def test_every_kind_is_exact_at_every_density(dtype: torch.dtype, kind: Kind | None, compress: bool) -> None:
    for size in (1, 7, 4096, 30_001):
        old = _random(size, dtype, 1)
        for density in (0.0, 0.002, 0.05, 0.4, 1.0):
            for far in (False, True):
                new = _changed(old, density, size, far)
                bits = old.clone()
                apply(bits, encode(old, new, kind, compress))
                assert torch.equal(bits, new)


def test_gaps_of_any_length() -> None:
    old = torch.zeros(20_000_000, dtype=torch.int8)
    new = old.clone()
    new[[0, 1, 256, 257, 70_000, 17_000_000, 19_999_999]] = 1
    encoded = encode(old, new)
    assert len(encoded) < 300
    apply(old, encoded)
    assert torch.equal(old, new)


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from(_DTYPES), st.sampled_from([None, *Kind]))
@settings(max_examples=200, deadline=None)
def test_any_bytes(one: bytes, other: bytes, dtype: torch.dtype, kind: Kind | None) -> None:
    size = min(len(one), len(other)) // dtype.itemsize * dtype.itemsize
    old, new = (torch.tensor(list(b[:size]), dtype=torch.uint8).view(dtype) for b in (one, other))
    bits = old.clone()
    apply(bits, encode(old, new, kind if kind is not Kind.SAME else None))
    assert torch.equal(bits, new)


@pytest.mark.parametrize("kind", [Kind.SPARSE, Kind.MASK, Kind.DENSE])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_damage_is_seen_and_nothing_changed(kind: Kind, data: st.DataObject) -> None:
    old = _random(500, torch.int16, 1)
    encoded = bytearray(encode(old, _changed(old, 0.1, 2, True), kind))
    if data.draw(st.booleans()):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    bits = old.clone()
    with pytest.raises(CorruptError):
        apply(bits, bytes(encoded))
    assert torch.equal(bits, old)


@pytest.mark.parametrize("kind", [Kind.SPARSE, Kind.MASK])
def test_a_change_of_other_bits_is_refused(kind: Kind) -> None:
    old = _random(5000, torch.int16, 1)
    encoded = encode(old, _changed(old, 0.1, 2, False), kind)
    for at in (0, 4999):
        other = old.clone()
        other[at] ^= 1
        bits = other.clone()
        with pytest.raises(CorruptError, match="other bits"):
            apply(bits, encoded)
        assert torch.equal(bits, other)
    for wrong in (old[:-1].clone(), old.int()):
        with pytest.raises(CorruptError):
            apply(wrong, encoded)


def test_floats_that_compare_oddly() -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, 3.0], dtype=torch.bfloat16)
    old, new = bits_of(odd.repeat(6)), bits_of(odd.repeat_interleave(6))
    bits = old.clone()
    apply(bits, encode(old, new))
    assert torch.equal(bits, new)


def test_small_changes_cost_little() -> None:
    """One element in a hundred, one step up or down: close to the entropy of that, 8.08 + 1 bits a change."""
    old = _random(4_000_000, torch.int16, 1)
    new = _changed(old, 0.01, 2, False)
    bits_each = 8 * len(encode(old, new)) / int((old != new).sum())
    assert bits_each < 1.15 * 9.08
