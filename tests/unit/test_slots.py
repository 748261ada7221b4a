"""Geometry of blocks over pages, and the slot table against a naive model."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.slots import NULL_BLOCK, SlotTable


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 12))
def test_blocks_and_slots_agree_with_brute_force(block_bytes, page_bytes, slots):
    g = Geometry(block_bytes, page_bytes, slots)
    for block in range(g.num_blocks):
        touched = {byte // page_bytes for byte in range(block * block_bytes, (block + 1) * block_bytes)}
        assert set(g.slots_of(block)) == touched
    for slot in range(slots):
        assert set(g.blocks_of(slot)) == {b for b in range(g.num_blocks) if slot in g.slots_of(b)}
    assert g.num_blocks * block_bytes <= slots * page_bytes


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError):
        Geometry(0, 1, 1)


@given(st.integers(1, 40), st.integers(1, 32), st.lists(st.integers(0, 30), unique=True))
def test_blocks_are_counted_on_every_slot_they_touch(block_bytes, page_bytes, blocks):
    geometry = Geometry(block_bytes, page_bytes, 2000)
    assert geometry.count_on_slots(blocks) == Counter(s for b in blocks for s in geometry.slots_of(b))


def slots_looked_for_one_by_one(table, count):
    """What `unmapped_slots` is to choose."""
    geometry, chosen = table.geometry, []
    if geometry.block_bytes <= geometry.page_bytes:
        return [s for s, page in enumerate(table.page_of) if page < 0 and s >= table.kept_slots][:count]
    for block in range(1, geometry.num_blocks):
        lacking = [s for s in geometry.slots_of(block) if table.page_of[s] < 0 and s not in chosen]
        if not (lacking and lacking[0] < table.kept_slots) and len(chosen) + len(lacking) <= count:
            chosen += lacking
    return sorted(chosen)


class SlotTableMachine(RuleBasedStateMachine):
    """Drives the table as a block pool does, and recounts everything after each step."""

    @initialize(block_bytes=st.integers(3, 40), page_bytes=st.integers(8, 32), keeps=st.booleans())
    def start(self, block_bytes, page_bytes, keeps):
        self.g = Geometry(block_bytes, page_bytes, 8)
        self.now_s = 0.0
        self.t = SlotTable(self.g, len(self.g.slots_of(NULL_BLOCK)) if keeps else 0, lambda: self.now_s)
        self.used, self.cached, self.pages = set(), set(), iter(range(10**6))
        self.idle: dict[int, float] = {}  # mapped slots with nothing in use, the one that was in use longest ago first

    def usable(self):
        return {b for b in range(1, self.g.num_blocks) if all(self.t.page_of[s] >= 0 for s in self.g.slots_of(b))}

    def on(self, slot, blocks):
        return sum(slot in self.g.slots_of(b) for b in blocks)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(count=st.integers(1, 6))
    def map_more(self, count):
        slots = self.t.unmapped_slots(count)
        assert slots == slots_looked_for_one_by_one(self.t, count)
        before = self.usable()
        gained = self.t.map(slots, [next(self.pages) for _ in slots])
        assert set(gained) == self.usable() - before

    @rule(prefer_empty=st.booleans(), slot=st.none() | st.integers(0, 7))
    def take(self, prefer_empty, slot):
        block = self.t.pick_free(slot, prefer_empty)
        free = self.usable() - self.used - self.cached
        assert (block is None) == (not free)
        if block is not None:
            assert block in free
            self.t.use_free(block)
            self.used.add(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), keep=st.booleans())
    def give(self, data, keep):
        block = data.draw(st.sampled_from(sorted(self.used)))
        self.used.remove(block)
        self.t.release(block, keep)
        if keep:
            self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), touch=st.booleans())
    def cached_block(self, data, touch):
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.cached.remove(block)
        if touch:
            self.t.use_cached(block)
            self.used.add(block)
        else:
            self.t.uncache(block)

    @rule(data=st.data())
    def unmap_one(self, data):
        slot = data.draw(st.integers(0, 7))
        busy = self.on(slot, self.used | self.cached)
        if busy or self.t.page_of[slot] < 0:
            with pytest.raises(ValueError):
                self.t.unmap(slot)
            return
        before = self.usable()
        _, lost = self.t.unmap(slot)
        assert set(lost) == before - self.usable()

    def follow_idle_slots(self):
        mapped = [s for s in range(8) if self.t.page_of[s] >= 0]
        idle = [s for s in mapped if not self.on(s, self.used)]
        self.idle = {s: t for s, t in self.idle.items() if s in idle}
        for slot in idle:
            self.idle.setdefault(slot, self.now_s)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "t"):
            return
        t = self.t
        for s in range(8):
            assert t.used[s] == self.on(s, self.used)
            assert t.cached[s] == self.on(s, self.cached)
        assert t.num_used_slots == sum(n > 0 for n in t.used)
        assert t.num_used_blocks == len(self.used)
        assert t.num_mapped == sum(p >= 0 for p in t.page_of)
        assert t.num_free == len(self.usable() - self.used - self.cached)
        assert NULL_BLOCK not in self.used
        assert {b for s in range(8) for b in t.usable_on(s)} == self.usable()

    @invariant()
    def slots_to_give_are_the_cheapest(self):
        if not hasattr(self, "t"):
            return
        self.follow_idle_slots()
        vacant = [s for s in reversed(range(8)) if s in self.idle and not self.on(s, self.cached)]
        for count in range(-1, 10):
            given = self.t.slots_to_give(count)
            assert len(given) == min(max(0, count), len(self.idle))
            assert given[: len(vacant)] == vacant[: max(0, count)]
            since = [self.idle[s] for s in given[len(vacant) :]]
            assert since == sorted(self.idle[s] for s in self.idle if s not in vacant)[: len(since)]
        for older_than_s in (0.0, 2.0, 5.0):
            idle = self.t.idle_slots(older_than_s)
            assert sorted(idle) == sorted(s for s, t in self.idle.items() if t < self.now_s - older_than_s)
            assert [self.idle[s] for s in idle] == sorted(self.idle[s] for s in idle)


SlotTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotTable = SlotTableMachine.TestCase
