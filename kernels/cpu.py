"""The kernels on CPUs: loops that numba (which vLLM brings) compiles at first use and keeps beside this file."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from vllm_coserve.kernels.keys import BLOCK_WORDS, keys, multipliers

_WORD = 8  # bytes that are compared at once


def compact(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """See `vllm_coserve.kernels.compact`."""
    a, b = old.numpy(), new.numpy()
    words = a.nbytes // _WORD if a.ctypes.data % _WORD == 0 == b.ctypes.data % _WORD else 0
    whole = words * _WORD // a.itemsize
    # Memory that is not written costs nothing: the system maps it at the first write.
    positions, steps = np.empty(a.size, np.int32), np.empty(a.size, a.dtype)
    count = _compact(a, b, a[:whole].view(np.uint64), b[:whole].view(np.uint64), positions, steps)
    return torch.from_numpy(positions[:count].copy()), torch.from_numpy(steps[:count].copy())


def scatter(bits: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter`."""
    _scatter(bits.numpy(), positions.numpy(), steps.numpy())


def scatter_masked(bits: Tensor, mask: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter_masked`."""
    ones = mask.numpy()
    if (count := int(np.bitwise_count(ones).sum(dtype=np.int64))) != steps.numel():
        raise ValueError(f"a mask of {count} elements for {steps.numel()} steps")
    _scatter_masked(bits.numpy(), ones, np.append(steps.numpy(), steps.numpy().dtype.type(0)))


def digest(bits: Tensor) -> int:
    """See `vllm_coserve.kernels.digest`."""
    data = bits.numpy().view(np.uint8)
    words, rest = divmod(data.size, 4)
    factors = multipliers(words + bool(rest))
    aligned = data if data.ctypes.data % 4 == 0 else data.copy()
    total = int(_digest(aligned[: 4 * words].view(np.uint32), keys(), factors))
    last = int.from_bytes(data[4 * words :].tobytes(), "little")
    if rest:
        total += last * int(keys()[words % BLOCK_WORDS]) * int(factors[words // BLOCK_WORDS])
    return total % 2**64


@njit(nogil=True, cache=True)
def _compact(old, new, old_words, new_words, positions, steps):
    lanes = np.uint64(8 // old.itemsize)
    one = np.uint64(1)  # unsigned: no check whether an index counts from the end
    count = np.uint64(0)
    for word in range(np.uint64(old_words.size)):
        if old_words[word] != new_words[word]:
            for i in range(word * lanes, (word + one) * lanes):  # without a branch, which could not be foreseen
                positions[count] = i
                steps[count] = new[i] - old[i]
                count += np.uint64(old[i] != new[i])
    for i in range(np.uint64(old_words.size) * lanes, np.uint64(old.size)):
        if old[i] != new[i]:
            positions[count] = i
            steps[count] = new[i] - old[i]
            count += one
    return count


@njit(nogil=True, cache=True)
def _scatter(bits, positions, steps):
    for k in range(positions.size):
        bits[positions[k]] += steps[k]


@njit(nogil=True, cache=True)
def _scatter_masked(bits, mask, steps):
    """One more step than there are ones: a place that does not change reads the next one's and adds none of it."""
    count = np.uint64(0)
    for byte in range(np.uint64(bits.size >> 3)):
        ones = np.uint64(mask[byte])
        first = byte << np.uint64(3)
        for place in range(np.uint64(8)):  # without a branch, which could not be foreseen
            one = (ones >> place) & np.uint64(1)
            bits[first + place] += steps[count] * bits.dtype.type(one)
            count += one
    for i in range(np.uint64(bits.size & ~7), np.uint64(bits.size)):
        if (mask[i >> np.uint64(3)] >> (i & np.uint64(7))) & 1:
            bits[i] += steps[count]
            count += np.uint64(1)


@njit(nogil=True, cache=True)
def _digest(words, factors, of_blocks):
    total = np.uint64(0)
    for block in range(of_blocks.size):
        part = np.uint64(0)
        inside = words[block * factors.size : (block + 1) * factors.size]
        for i in range(inside.size):  # over a slice from 0 on, which compilers turn into vector instructions
            part += np.uint64(inside[i]) * factors[i]
        total += part * of_blocks[block]
    return total
