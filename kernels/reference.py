"""What the kernels do, in torch: short, slow, and right on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_coserve.kernels.keys import BLOCK_WORDS, keys, multipliers


def compact(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """See `vllm_coserve.kernels.compact`."""
    positions = torch.nonzero(old != new).squeeze(-1)
    return positions.to(torch.int32), new[positions] - old[positions]


def scatter(bits: Tensor, positions: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter`."""
    bits.index_add_(0, positions.long(), steps)


def scatter_masked(bits: Tensor, mask: Tensor, steps: Tensor) -> None:
    """See `vllm_coserve.kernels.scatter_masked`."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    positions = torch.nonzero(((mask[:, None] >> places) & 1).reshape(-1)).squeeze(-1)
    if positions.numel() != steps.numel():
        raise ValueError(f"a mask of {positions.numel()} elements for {steps.numel()} steps")
    scatter(bits, positions, steps)


def digest(bits: Tensor) -> int:
    """See `vllm_coserve.kernels.digest`."""
    data = bits.view(torch.uint8)
    words = torch.zeros(-(-data.numel() // 4) * 4, dtype=torch.uint8, device=bits.device)
    words[: data.numel()] = data
    words = words.view(torch.int32).long() & 0xFFFFFFFF
    factors = torch.from_numpy(keys().view(np.int64)).to(bits.device)
    of_blocks = torch.from_numpy(multipliers(words.numel()).view(np.int64)).to(bits.device)
    place = torch.arange(words.numel(), device=bits.device)
    products = words * factors[place % BLOCK_WORDS] * of_blocks[place // BLOCK_WORDS]
    return int(products.sum()) % 2**64
