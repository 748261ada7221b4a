"""Numbers as planes of bytes and back: positions by the gaps between them, steps with their sign in the lowest bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit


def of_positions(positions: np.ndarray) -> list[np.ndarray]:
    """Planes of the gaps between ascending positions (int32): as many as the longest gap needs, the lowest first."""
    return _split((np.diff(positions, prepend=np.int32(-1)) - 1).view(np.uint32))


def of_steps(steps: np.ndarray) -> list[np.ndarray]:
    """Planes of signed steps, as many as the longest step needs."""
    return _split(((steps << 1) ^ (steps >> (8 * steps.itemsize - 1))).view(f"u{steps.itemsize}"))


def of_bits(bits: np.ndarray) -> list[np.ndarray]:
    """All planes of the bits of elements."""
    return _split(bits.view(f"u{bits.itemsize}"), bits.itemsize)


def to_positions(planes: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """(positions, int32; the last one, which is wrong where it is too large for that); -1: there is none."""
    gaps = _join(planes, 4)
    positions = np.empty(gaps.size, np.int32)
    return positions, int(_positions(gaps, positions))


def to_steps(planes: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Signed steps of `width` bytes."""
    numbers = _join(planes, width)
    steps = numbers.view(f"i{width}")
    _unzigzag(steps)
    return steps


def to_bits(planes: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Signed integers of `width` bytes."""
    return _join(planes, width).view(f"i{width}")


def to_mask(positions: np.ndarray, size: int) -> np.ndarray:
    """A bit an element, the first in the lowest bit of the first byte."""
    mask = np.zeros(-(-size // 8), np.uint8)
    _set_bits(positions, mask)
    return mask


def _split(numbers: np.ndarray, count: int = 0) -> list[np.ndarray]:
    count = count or max(1, (int(numbers.max(initial=0)).bit_length() + 7) // 8)
    return [(numbers >> numbers.dtype.type(8 * i)).astype(np.uint8) for i in range(count)]


def _join(planes: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Raises ValueError where there are too many planes, or they differ in length."""
    if len({plane.size for plane in planes}) > 1 or len(planes) > width:
        raise ValueError(f"{len(planes)} planes are not those of numbers of {width} bytes")
    numbers = planes[0].astype(f"u{width}") if planes else np.empty(0, f"u{width}")
    for i, plane in enumerate(planes[1:], 1):
        _add_plane(numbers, plane, numbers.dtype.type(8 * i))
    return numbers


@njit(nogil=True, cache=True)
def _add_plane(numbers, plane, shift):
    for i in range(numbers.size):
        numbers[i] |= numbers.dtype.type(plane[i]) << shift


@njit(nogil=True, cache=True)
def _positions(gaps, positions):
    at = np.int64(-1)
    for i in range(gaps.size):
        at += np.int64(gaps[i]) + 1
        positions[i] = at
    return at


@njit(nogil=True, cache=True)
def _set_bits(positions, mask):
    for i in range(positions.size):
        at = np.uint32(positions[i])
        mask[at >> 3] |= np.uint8(1) << np.uint8(at & 7)


@njit(nogil=True, cache=True)
def _unzigzag(numbers):
    for i in range(numbers.size):
        z = numbers[i]
        # The shift is one of unsigned numbers.
        numbers[i] = ((z >> 1) & ~(numbers.dtype.type(1) << (8 * numbers.itemsize - 1))) ^ -(z & 1)
