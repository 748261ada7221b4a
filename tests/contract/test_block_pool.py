"""The elastic block pool inside vLLM's own block pool interface, with a scripted pager."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.memory.geometry import Geometry

pytestmark = pytest.mark.contract


class Pager:
    """Has `free` pages to give; remembers the table."""

    def __init__(self, free: int) -> None:
        self.free, self.next_page, self.table = free, 0, {}
        self.asked: list[tuple[int, int]] = []

    def acquire_pages(self, wanted, needed):
        self.asked.append((wanted, needed))
        give = min(self.free, max(wanted, needed))
        self.free -= give
        self.next_page += give
        return list(range(self.next_page - give, self.next_page))

    def set_slots(self, slots, pages):
        for slot, page in zip(slots, pages, strict=True):
            self.table[slot] = page


def make_pool(free_pages: int, block_bytes: int = 300, page_bytes: int = 1000, slots: int = 8, group: bool = False):
    from vllm_coserve.engine.block_pool import ElasticBlockPool

    geometry, pager = Geometry(block_bytes, page_bytes, slots), Pager(free_pages)
    pool = ElasticBlockPool(geometry.num_blocks, True, 16, geometry=geometry, pager=pager, group_by_request=group)
    return pool, pager


def cache(pool, blocks):
    """Give blocks a prefix-cache hash, as cache_full_blocks does."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    for block in blocks:
        key = make_block_hash_with_group_id(f"hash-{block.block_id}".encode(), 0)
        pool._insert_block_hash(key, block, num_tokens=16)


def find(pool, block_id):
    return pool.get_cached_block(f"hash-{block_id}".encode(), [0])


def check(pool, pager):
    slots = pool.slots
    queue = pool.free_block_queue.get_all_free_blocks()
    ids = [b.block_id for b in queue]
    assert len(ids) == len(set(ids)) == pool.get_num_free_blocks()
    assert pool.null_block.block_id not in ids
    for block in queue:
        assert block.ref_cnt == 0
        assert all(slots.page_of[s] >= 0 for s in slots.geometry.slots_of(block.block_id))
    usable = {b for s in range(8) for b in slots.usable_on(s)}
    in_use = {b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null} | pool._kept
    assert set(ids) == usable - in_use
    assert slots.num_used_blocks == len(in_use)
    assert {s: p for s, p in pager.table.items() if p >= 0} == {s: p for s, p in enumerate(slots.page_of) if p >= 0}


def test_pages_are_asked_for_before_cache_is_evicted():
    pool, pager = make_pool(8)
    pool.ensure_free(3, "a")
    blocks = pool.get_new_blocks(3)
    cache(pool, blocks)
    pool.free_blocks(reversed(blocks))
    pool.ensure_free(6, "b")
    taken = pool.get_new_blocks(6)
    assert not {b.block_id for b in taken} & {b.block_id for b in blocks}
    assert all(find(pool, b.block_id) for b in blocks)
    check(pool, pager)


def test_cache_survives_until_its_slot_goes():
    pool, pager = make_pool(4)
    pool.ensure_free(4, "a")
    blocks = pool.get_new_blocks(4)
    cache(pool, blocks)
    pool.free_blocks(reversed(blocks))
    hit = find(pool, blocks[0].block_id)
    pool.touch(hit)
    check(pool, pager)
    pool.free_blocks(hit)
    pages = pool.drop_slots(pool.slots_to_give(8))
    assert pages and not any(find(pool, b.block_id) for b in blocks)
    assert pool.slots.num_mapped == 0
    check(pool, pager)


def test_a_dry_pool_makes_the_scheduler_wait_and_never_raises():
    pool, pager = make_pool(1)
    pool.ensure_free(20, "a")
    assert 0 < pool.get_num_free_blocks() < 20
    pool.get_new_blocks(pool.get_num_free_blocks())
    pool.ensure_free(1, "a")
    assert pool.get_num_free_blocks() == 0
    assert pager.asked[-1][1] > 0
    check(pool, pager)


def test_requests_are_grouped_on_slots():
    pool, _ = make_pool(8, block_bytes=100, group=True)
    on = {"a": set(), "b": set()}
    for _ in range(6):
        for name, slots in on.items():
            pool.ensure_free(1, name)
            (block,) = pool.get_new_blocks(1)
            slots.update(pool.slots.geometry.slots_of(block.block_id))
    assert not on["a"] & on["b"]


_ops = st.lists(st.tuples(st.sampled_from("agtfdr"), st.integers(1, 9), st.integers(0, 5)), max_size=60)


@settings(max_examples=120, deadline=None)
@given(_ops, st.integers(0, 8), st.sampled_from([100, 300, 333, 1500]), st.booleans())
def test_random_use_keeps_the_invariants(ops, free_pages, block_bytes, group):
    """a: allocate, g: free with cache, t: touch a cached one, f: free without, d: drop slots, r: pages return."""
    pool, pager = make_pool(free_pages, block_bytes=block_bytes, group=group)
    held: list[list] = []
    for op, n, which in ops:
        if op == "a":
            pool.ensure_free(n, f"r{which}")
            got = pool.get_new_blocks(min(n, pool.get_num_free_blocks()))
            assert all(b.ref_cnt == 1 and not b.is_null for b in got)
            if got:
                held.append(got)
        elif op in "gf" and held:
            blocks = held.pop(which % len(held))
            if op == "g":
                cache(pool, [b for b in blocks if b.block_hash is None and b.ref_cnt == 1])
            pool.free_blocks(reversed(blocks))
        elif op == "t":
            for b in range(1, len(pool.blocks)):
                if hit := find(pool, b):
                    pool.touch(hit)
                    held.append(list(hit))
                    break
        elif op == "d":
            used = {s for s, u in enumerate(pool.slots.used) if u}
            slots = pool.slots_to_give(n)
            assert not used & set(slots)
            pager.free += len(pool.drop_slots(slots))
        elif op == "r":
            pager.free += len(pool.take_spare_pages())
        check(pool, pager)
    mapped, spare = pool.slots.num_mapped, len(pool._spare_pages)
    assert pager.free + mapped + spare == free_pages, "no page is lost"


def test_slots_that_are_to_come_free_do_when_the_requests_on_them_end_whoever_comes_meanwhile():
    pool, pager = make_pool(free_pages=8)
    pool.ensure_free(20, "before")
    old = pool.get_new_blocks(20)
    cache(pool, old[:12])
    closing = sorted({s for b in old[6:] for s in pool.slots.geometry.slots_of(b.block_id)})
    pages = pool.vacate(closing, 1.0)
    check(pool, pager)
    assert not any(find(pool, b.block_id) for b in old[7:12]), "nobody finds what lies there"
    newer = []
    while any(pool.slots.page_of[s] >= 0 for s in closing):
        if old:
            pool.free_blocks([old.pop()])
        fresh = pool.get_new_blocks(min(2, pool.get_num_free_blocks()))
        newer += fresh
        assert not any(set(pool.slots.geometry.slots_of(b.block_id)) & set(closing) for b in fresh)
        if len(newer) > 3:
            pool.free_blocks([newer.pop(0)])
        pages += pool.vacate([s for s in closing if pool.slots.page_of[s] >= 0], 1.0)
        check(pool, pager)
    assert len(pages) == len(set(pages)) == len(closing)
    pool.free_blocks(old + newer)
    check(pool, pager)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([300, 1000, 1700]),
    st.lists(st.tuples(st.sampled_from("agcvvrf"), st.integers(0, 9)), max_size=40),
)
def test_closing_and_reopening_slots_loses_no_block(block_bytes, moves):
    """a: allocate, g: give (free), c: cache in use, v: vacate some slots, r: reopen, f: find and touch."""
    pool, pager = make_pool(free_pages=8, block_bytes=block_bytes)
    held = []
    for move, n in moves:
        if move == "a":
            pool.ensure_free(n, "r")
            held += pool.get_new_blocks(min(n, pool.get_num_free_blocks()))
        elif move == "g" and held:
            pool.free_blocks([held.pop(n % len(held))])
        elif move == "c" and held and held[n % len(held)].block_hash is None:
            cache(pool, [held[n % len(held)]])
        elif move == "v":
            mapped = [s for s in range(n % 8, 8) if pool.slots.page_of[s] >= 0]
            before = pager.free
            pager.free += len(pool.vacate(mapped, 1.0))
            assert pager.free >= before
        elif move == "r":
            pool.reopen()
        elif move == "f" and (found := find(pool, n)):
            pool.touch(found)
            held += found
        check(pool, pager)
    pool.reopen()
    pool.free_blocks(held)
    check(pool, pager)
    assert pool.slots.num_used_blocks == 0
