"""The kernels in Triton. Dense memory is read once; the order of changes does not depend on that of the programs."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_coserve.kernels.keys import BLOCK_WORDS, keys, multipliers

_BLOCK = 4096  # elements of a program


def compact(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """See `vllm_coserve.kernels.compact`."""
    size = old.numel()
    blocks = triton.cdiv(size, _BLOCK)
    counts = torch.zeros(blocks, dtype=torch.int32, device=old.device)
    if not size:
        return counts, torch.empty_like(old)
    # Each program packs its changes to the front of its own slots; how many precede them is known only when all are
    # done. The second kernel touches no more than the changes.
    slots = torch.empty(blocks * _BLOCK, dtype=torch.int16, device=old.device)
    slot_steps = torch.empty(blocks * _BLOCK, dtype=old.dtype, device=old.device)
    _pack[(blocks,)](old, new, counts, slots, slot_steps, size, BLOCK=_BLOCK)
    ends = counts.cumsum(0, dtype=torch.int32)
    total = int(ends[-1])
    positions = torch.empty(total, dtype=torch.int32, device=old.device)
    steps = torch.empty(total, dtype=old.dtype, device=old.device)
    _gather[(blocks,)](counts, ends, slots, slot_steps, positions, steps, BLOCK=_BLOCK)
    return positions, steps


def scatter(bits: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter`."""
    count = positions.numel()
    _scatter[(triton.cdiv(count, _BLOCK),)](bits, positions, steps, count, BLOCK=_BLOCK)


def scatter_masked(bits: Tensor, mask: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter_masked`."""
    size = bits.numel()
    blocks = triton.cdiv(size, _BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=bits.device)
    _count_ones[(blocks,)](mask, counts, size, BLOCK=_BLOCK)
    ends = counts.cumsum(0, dtype=torch.int32)
    if int(ends[-1]) != steps.numel():
        raise ValueError(f"a mask of {int(ends[-1])} elements for {steps.numel()} steps")
    _scatter_masked[(blocks,)](bits, mask, counts, ends, steps, size, BLOCK=_BLOCK)


def digest(bits: Tensor) -> int:
    """See `vllm_coserve.kernels.digest`."""
    data = bits.view(torch.uint8)
    rest = -data.numel() % 4
    if rest or data.data_ptr() % 4:
        data = torch.nn.functional.pad(data, (0, rest))
    words = data.view(torch.int32)
    factors, of_blocks = (
        torch.from_numpy(a.view(np.int64)).to(bits.device) for a in (keys(), multipliers(words.numel()))
    )
    sums = torch.empty_like(of_blocks)
    _digest[(of_blocks.numel(),)](words, factors, of_blocks, sums, words.numel(), BLOCK=BLOCK_WORDS)
    return int(sums.sum()) % 2**64


@triton.jit
def _digest(words, factors, of_blocks, sums, size, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = program.to(tl.int64) * BLOCK + lane
    word = tl.load(words + at, mask=at < size, other=0).to(tl.int64) & 0xFFFFFFFF
    part = tl.sum(word * tl.load(factors + lane), 0)
    tl.store(sums + program, part * tl.load(of_blocks + program))


@triton.jit
def _pack(old, new, counts, slots, slot_steps, size, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = program.to(tl.int64) * BLOCK + lane
    a = tl.load(old + at, mask=at < size, other=0)
    b = tl.load(new + at, mask=at < size, other=0)
    changed = a != b
    ones = changed.to(tl.int32)
    slot = program.to(tl.int64) * BLOCK + tl.cumsum(ones, 0) - 1
    tl.store(slots + slot, lane.to(tl.int16), mask=changed)
    tl.store(slot_steps + slot, b - a, mask=changed)
    tl.store(counts + program, tl.sum(ones, 0))


@triton.jit
def _gather(counts, ends, slots, slot_steps, positions, steps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    count = tl.load(counts + program)
    first = tl.load(ends + program) - count
    lane = tl.arange(0, BLOCK)
    source = program.to(tl.int64) * BLOCK + lane
    inside = lane < count
    tl.store(
        positions + first + lane,
        tl.load(slots + source, mask=inside, other=0).to(tl.int32) + program * BLOCK,
        mask=inside,
    )
    tl.store(steps + first + lane, tl.load(slot_steps + source, mask=inside, other=0), mask=inside)


@triton.jit
def _scatter(bits, positions, steps, count, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    at = tl.load(positions + lane, mask=inside, other=0)
    step = tl.load(steps + lane, mask=inside, other=0)
    tl.store(bits + at, tl.load(bits + at, mask=inside, other=0) + step, mask=inside)


@triton.jit
def _count_ones(mask, counts, size, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    ones = (tl.load(mask + at // 8, mask=at < size, other=0).to(tl.int32) >> (at % 8)) & 1
    tl.store(counts + program, tl.sum(ones, 0))


@triton.jit
def _scatter_masked(bits, mask, counts, ends, steps, size, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    ones = (tl.load(mask + at // 8, mask=at < size, other=0).to(tl.int32) >> (at % 8)) & 1
    first = tl.load(ends + program) - tl.load(counts + program)
    changed = ones != 0
    step = tl.load(steps + first + tl.cumsum(ones, 0) - 1, mask=changed, other=0)
    tl.store(bits + at, tl.load(bits + at, mask=changed, other=0) + step, mask=changed)
