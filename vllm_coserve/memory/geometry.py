"""Where KV blocks lie in pages: pure arithmetic, shared by the block pool and its tests.

A block is `block_bytes` long (all layers, the stride of the block-outermost layout) and starts at
`block * block_bytes`, so it may straddle pages. A block can be used only while every page under it is mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Geometry:
    """Blocks over slots (virtual pages). All ranges are half open."""

    block_bytes: int
    page_bytes: int
    num_slots: int

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.page_bytes < 1 or self.num_slots < 1:
            raise ValueError(f"sizes must be positive: {self}")

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the range."""
        return self.num_slots * self.page_bytes // self.block_bytes

    def slots_of(self, block: int) -> range:
        """Slots under a block."""
        start = block * self.block_bytes
        return range(start // self.page_bytes, (start + self.block_bytes - 1) // self.page_bytes + 1)

    def blocks_of(self, slot: int) -> range:
        """Blocks that touch a slot."""
        start = slot * self.page_bytes
        last = (start + self.page_bytes - 1) // self.block_bytes
        return range(start // self.block_bytes, min(last + 1, self.num_blocks))

    def count_on_slots(self, blocks: Sequence[int]) -> dict[int, int]:
        """How many of these blocks touch each slot that any of them touches."""
        start = np.asarray(blocks, dtype=np.int64) * self.block_bytes
        first, last = start // self.page_bytes, (start + self.block_bytes - 1) // self.page_bytes
        widest = (self.block_bytes - 2) // self.page_bytes + 2  # slots under a block at most
        touched = np.concatenate([(first + i)[first + i <= last] for i in range(widest)])
        slots, counts = np.unique(touched, return_counts=True)
        return dict(zip(slots.tolist(), counts.tolist(), strict=True))

    def pages_for(self, blocks: int) -> int:
        """Pages that so many neighbouring blocks need at most."""
        return 0 if blocks <= 0 else -(-blocks * self.block_bytes // self.page_bytes) + 1
