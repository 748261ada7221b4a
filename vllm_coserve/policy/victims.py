"""Which rollout requests to end when pages must go: most pages freed for least lost work (ROSE 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request: its blocks per slot, and the tokens whose computation would be lost."""

    request_id: str
    blocks_on_slot: Mapping[int, int]
    computed_tokens: int


def choose_victims(candidates: Sequence[Candidate], used: Sequence[int], need: int) -> list[str]:
    """Greedy choice of requests until at least `need` slots have no block in use.

    Args:
        candidates: running requests. Blocks that two of them share are counted once in `used`.
        used: blocks in use on each slot.
        need: slots to free.

    Returns:
        Request ids in the order of choice; all of them when even that frees too little. A slot that no single request
        frees is approached by the request that is nearest to freeing it. Serving may be waiting: each choice is a few
        operations over whole arrays.
    """
    chosen: list[str] = []
    request, slot, blocks = _entries(candidates)
    left = np.asarray(used, dtype=np.float64)
    work = np.array([c.computed_tokens + 1 for c in candidates], dtype=np.float64)
    remaining, freed = np.ones(len(candidates), dtype=bool), 0
    while remaining.any() and freed < need:
        left_there = left[slot]
        in_use = left_there > 0
        exclusive = np.bincount(request, in_use & (blocks >= left_there), len(candidates))
        share = np.bincount(request, blocks / np.where(in_use, left_there, np.inf), len(candidates))
        gain = np.where(remaining, np.minimum(exclusive, need - freed) / work, -1.0)
        best = int(np.where(gain == gain.max(), share / work, -1.0).argmax())
        remaining[best] = False
        chosen.append(candidates[best].request_id)
        its = request == best
        left[slot[its]] -= blocks[its]
        freed += int(np.count_nonzero(in_use[its] & (left[slot[its]] <= 0)))
        request, slot, blocks = request[~its], slot[~its], blocks[~its]
    return chosen


def _entries(candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number of the request, slot, its blocks there) for each slot of each request, as three arrays."""
    slots = np.array([len(c.blocks_on_slot) for c in candidates], dtype=np.int64)
    request = np.repeat(np.arange(len(candidates)), slots)
    slot = [s for c in candidates for s in c.blocks_on_slot]
    blocks = [n for c in candidates for n in c.blocks_on_slot.values()]
    return request, np.array(slot, dtype=np.int64), np.array(blocks, dtype=np.float64)
