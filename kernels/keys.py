"""Numbers that the digest of a run is made with: the same on every machine and for ever."""

from __future__ import annotations

import functools

import numpy as np

BLOCK_WORDS = 4096


@functools.cache
def keys() -> np.ndarray:
    """A factor for each word of a block, uint64."""
    return _splitmix(np.arange(BLOCK_WORDS, dtype=np.uint64))


def multipliers(words: int) -> np.ndarray:
    """An odd factor for each block of a run of so many words, uint64: its blocks can be neither lost nor exchanged."""
    blocks = -(-words // BLOCK_WORDS)
    return _splitmix(np.arange(BLOCK_WORDS, BLOCK_WORDS + blocks, dtype=np.uint64)) | np.uint64(1)


def _splitmix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
