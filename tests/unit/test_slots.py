"""Geometry of blocks over pages, and the slot table against a naive model."""

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


class SlotTableMachine(RuleBasedStateMachine):
    """Drives the table as a block pool does, and recounts everything after each step."""

    @initialize(block_bytes=st.integers(3, 40), page_bytes=st.integers(8, 32), keeps=st.booleans())
    def start(self, block_bytes, page_bytes, keeps):
        self.g = Geometry(block_bytes, page_bytes, 8)
        self.t = SlotTable(self.g, len(self.g.slots_of(NULL_BLOCK)) if keeps else 0)
        self.used, self.cached, self.pages = set(), set(), iter(range(10**6))

    def usable(self):
        return {b for b in range(1, self.g.num_blocks) if all(self.t.page_of[s] >= 0 for s in self.g.slots_of(b))}

    @rule(count=st.integers(1, 4))
    def map_more(self, count):
        slots = self.t.unmapped_slots(count)
        assert all(slot >= self.t.kept_slots for slot in slots)
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
        busy = any(slot in self.g.slots_of(b) for b in self.used | self.cached)
        if busy or self.t.page_of[slot] < 0:
            with pytest.raises(ValueError):
                self.t.unmap(slot)
            return
        before = self.usable()
        _, lost = self.t.unmap(slot)
        assert set(lost) == before - self.usable()

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "t"):
            return
        t, g = self.t, self.g
        for s in range(8):
            assert t.used[s] == sum(s in g.slots_of(b) for b in self.used)
            assert t.cached[s] == sum(s in g.slots_of(b) for b in self.cached)
        assert t.num_used_slots == sum(n > 0 for n in t.used)
        assert t.num_used_blocks == len(self.used)
        assert t.num_mapped == sum(p >= 0 for p in t.page_of)
        assert t.num_free == len(self.usable() - self.used - self.cached)
        assert NULL_BLOCK not in self.used


SlotTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotTable = SlotTableMachine.TestCase
