"""Kernels of sparse weight deltas: dense to sparse and back, on bits.

A tensor is seen as a flat run of integers of its elements' width (int8, int16, int32 or int64), so that NaNs, signed
zeros and denormals are values like all others. A change is a position and a step, `new - old` modulo the width: for
floats of one sign the number of units in the last place. `compact(old, new)` finds the changes, in ascending order;
`scatter(bits, positions, steps)` makes them, exactly, `scatter_masked(bits, mask, steps)` where many elements change;
`digest(bits)` tells whether the bits are the right ones then.
`reference` says in torch what these do; `cpu` and `gpu` are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import uint8

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS_MAX = 2**31 - 1  # of a run: positions are int32


def compact(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Find what changed between two runs of bits of one dtype, size and device.

    Returns:
        positions, int32 [changed], ascending, and steps, of the runs' dtype, [changed].

    Raises:
        ValueError: the runs do not match, are no integers, or have more than `ELEMENTS_MAX` elements.
    """
    _check(old)
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        raise ValueError(f"runs do not match: {_text(old)} and {_text(new)}")
    return _backend(old).compact(old, new)


def scatter(bits: Tensor, positions: Tensor, steps: Tensor) -> None:
    """Add steps to a run of bits in place.

    Args:
        bits: the run.
        positions: int32 [changed], each at most once; on the device of `bits`.
        steps: [changed], of the dtype of `bits`.

    Raises:
        ValueError: shapes or dtypes are wrong, or a position lies outside; nothing was changed.
    """
    _check(bits)
    if positions.shape != steps.shape or positions.dim() != 1 or steps.dtype != bits.dtype:
        raise ValueError(f"changes do not match: {_text(positions)} and {_text(steps)} for {_text(bits)}")
    if positions.numel():
        low, high = (int(edge) for edge in positions.aminmax())
        if low < 0 or high >= bits.numel():
            raise ValueError(f"positions from {low} to {high} in a run of {bits.numel()}")
        _backend(bits).scatter(bits, positions, steps)


def scatter_masked(bits: Tensor, mask: Tensor, steps: Tensor) -> None:
    """Add steps in their order to the elements of a run that a mask names, in place.

    Args:
        bits: the run.
        mask: uint8 [ceil(elements / 8)], a bit an element, the first in the lowest bit; on the device of `bits`.
        steps: [bits set in the mask], of the dtype of `bits`.

    Raises:
        ValueError: shapes or dtypes are wrong, or the mask has more or fewer ones than steps; nothing was changed.
    """
    _check(bits)
    size = bits.numel()
    if mask.dtype != uint8 or mask.shape != (-(-size // 8),) or steps.dim() != 1 or steps.dtype != bits.dtype:
        raise ValueError(f"changes do not match: {_text(mask)} and {_text(steps)} for {_text(bits)}")
    if size % 8 and int(mask[-1]) >> size % 8:
        raise ValueError(f"a mask for a run of {size} names elements beyond it")
    if size:
        _backend(bits).scatter_masked(bits, mask, steps)


def digest(bits: Tensor) -> int:
    """A checksum of 64 bits, the same on every kind of device; it tells of mistakes, not of forgery.

    The run is read as little-endian words of 32 bits, the last one filled up with zeros. Each is multiplied by the key
    of its place in a block of 4,096 words, the sum of a block by an odd number of the block's own, all modulo 2**64: a
    multilinear hash (Lemire and Kaser, The Computer Journal 57(11), 2014), which any device computes at the speed of
    its memory.
    """
    _check(bits)
    return _backend(bits).digest(bits)


def _backend(bits: Tensor):
    if bits.is_cuda:
        from vllm_coserve.kernels import gpu

        return gpu
    from vllm_coserve.kernels import cpu

    return cpu


def _check(bits: Tensor) -> None:
    if bits.dim() != 1 or bits.is_floating_point() or not bits.is_contiguous() or bits.numel() > ELEMENTS_MAX:
        raise ValueError(f"{_text(bits)} is no flat run of at most {ELEMENTS_MAX} integers")


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
