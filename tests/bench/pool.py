"""What the engine cores do for pages and blocks, at pools of different sizes: microseconds an operation.

A pool of an H200 has some hundred times the pages of one on a CPU; what a step or an allocation costs must not follow.
Nothing is mapped or zeroed here: this is the bookkeeping alone, with blocks that straddle pages.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_coserve.demo.phases import percentile
from vllm_coserve.engine.block_pool import ElasticBlockPool
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper

SIZES = 256, 4096, 40_000
_PAGE = 2 << 20
_BLOCKS_OF = {"Qwen2.5-7B": 917_504, "Qwen3-8B": 2_359_296}  # bytes of a block of 16 tokens
_BATCH = 16


class _Pager:
    """Gives what is asked for, and keeps a table."""

    def __init__(self, pages: int) -> None:
        self.table = np.full(pages, -1, dtype=np.int32)
        self.latest: list[int] = []  # slots

    def acquire_pages(self, wanted: int, needed: int) -> list[int]:
        return []

    def set_slots(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        self.latest = list(slots)
        self.table[self.latest] = list(pages)


class _Driver:
    """Maps nothing."""

    def __init__(self, pages: int) -> None:
        self.num_slots = pages

    def map_run(self, slot: int, page: int, count: int) -> None:
        """Nothing."""

    def unmap_run(self, slot: int, count: int) -> None:
        """Nothing."""


def _nothing(_: Any) -> None:
    """For operations that change nothing."""


def _us(call: Callable[[], Any], undo: Callable[[Any], Any], rounds: int) -> float:
    """Median of `call` alone; `undo` is given what it returned."""
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        result = call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        undo(result)
    return percentile(samples, 50)


def _ledgers(pages: int, rounds: int) -> dict[str, float]:
    owners = np.full(pages, Owner.FREE_CLEAN, dtype=np.uint8)
    ledger, theirs = ServingLedger(owners, lambda page, count: None), RolloutLedger(owners)
    ledger.take(pages // 2, Owner.SERVING)
    ledger.take(pages // 4, Owner.ROLLOUT)
    theirs.newly_granted()

    def clean(given: list[int]) -> None:
        theirs.put(given)
        ledger.clean_some(len(given))

    def lend() -> list[int]:
        return ledger.take(_BATCH, Owner.ROLLOUT)

    out = {"ledger: count": _us(lambda: ledger.count(Owner.SERVING), _nothing, rounds)}
    out["ledger: take a page"] = _us(lambda: ledger.take(1, Owner.SERVING), ledger.put, rounds)
    out[f"ledger: take {_BATCH}"] = _us(lend, clean, rounds)
    out[f"ledger: see {_BATCH} granted"] = _us(lambda: (lend(), theirs.newly_granted())[1], clean, rounds)
    out[f"ledger: put {_BATCH}"] = _us(lambda: theirs.put(lend()), lambda _: ledger.clean_some(_BATCH), rounds)

    def dirty(_: Any) -> None:
        owners[owners == Owner.FREE_CLEAN] = Owner.FREE_DIRTY

    dirty(None)
    out[f"ledger: clean {_BATCH}, all dirty"] = _us(lambda: ledger.clean_some(_BATCH), dirty, rounds)
    return out


def _mapper(pages: int, rounds: int) -> dict[str, float]:
    table = np.full(pages, -1, dtype=np.int32)
    mapper = TableMapper(_Driver(pages), table)  # type: ignore[arg-type]
    table[: pages // 2] = np.arange(pages // 2)
    mapper.apply()

    def change() -> int:
        table[pages // 2 : pages // 2 + _BATCH] = range(_BATCH)
        return mapper.apply()

    def undo(_: Any) -> None:
        table[pages // 2 :] = -1
        mapper.apply()

    return {f"mapper: apply {_BATCH}": _us(change, undo, rounds)}


def _blocks(name: str, block_bytes: int, pages: int, rounds: int) -> dict[str, float]:
    """Of a block pool with all pages but a batch: an eighth of its blocks in use, an eighth cached; then none free."""
    geometry, pager = Geometry(block_bytes, _PAGE, pages), _Pager(pages)
    pool = ElasticBlockPool(geometry.num_blocks, True, 16, geometry=geometry, pager=pager, group_by_request=False)
    pool.add_pages(list(range(pages - _BATCH)))
    eighth = pool.get_num_free_blocks() // 8
    _cache(pool, cached := pool.get_new_blocks(eighth))
    pool.get_new_blocks(eighth)
    pool.free_blocks(reversed(cached))
    fresh = list(range(pages - _BATCH, pages))

    def give(_: Any) -> None:
        pool.take_spare_pages()
        pool.drop_slots(pager.latest)

    out = {
        "get a block": _us(lambda: pool.get_new_blocks(1), pool.free_blocks, rounds),
        f"map {_BATCH} pages": _us(lambda: pool.add_pages(fresh), give, rounds),
        f"choose {_BATCH} empty slots": _us(lambda: pool.slots_to_give(_BATCH), _nothing, rounds),
        "look for idle slots, none": _us(lambda: pool.idle_slots(3600.0), _nothing, rounds),
    }
    pool.get_new_blocks(pool.slots.num_free)
    out[f"choose {_BATCH} cached slots"] = _us(lambda: pool.slots_to_give(_BATCH), _nothing, rounds)
    return {f"{name}: {what}": us for what, us in out.items()}


def _cache(pool: ElasticBlockPool, blocks: Sequence[Any]) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    for block in blocks:
        key = make_block_hash_with_group_id(f"hash-{block.block_id}".encode(), 0)
        pool._insert_block_hash(key, block, num_tokens=16)


def measure(rounds: int) -> dict[str, Any]:
    """Median us of each operation, by pages of the pool."""
    out: dict[str, dict[str, float]] = {}
    for pages in SIZES:
        found = _ledgers(pages, 30 * rounds) | _mapper(pages, 30 * rounds)
        for name, block_bytes in _BLOCKS_OF.items():
            found |= _blocks(name, block_bytes, pages, 10 * rounds)
            gc.collect()
        for what, us in found.items():
            out.setdefault(what, {})[str(pages)] = us
    return out
