"""Which rollout requests to end when pages must go: most pages freed for least lost work (ROSE 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
        frees is approached by the request that is nearest to freeing it.
    """
    left = {s: used[s] for c in candidates for s in c.blocks_on_slot}
    remaining = list(candidates)
    chosen: list[str] = []
    freed: set[int] = set()
    while remaining and len(freed) < need:

        def score(c: Candidate) -> tuple[float, float]:
            exclusive = sum(1 for s, n in c.blocks_on_slot.items() if s not in freed and n >= left[s])
            share = sum(n / left[s] for s, n in c.blocks_on_slot.items() if s not in freed and left[s] > 0)
            work = c.computed_tokens + 1
            return (min(exclusive, need - len(freed)) / work, share / work)

        best = max(remaining, key=score)
        remaining.remove(best)
        chosen.append(best.request_id)
        for slot, n in best.blocks_on_slot.items():
            left[slot] -= n
            if left[slot] <= 0:
                freed.add(slot)
    return chosen
