"""The memory side as one machine: two engines, one pool, an arbiter, and all that may happen to them in any order.

Real: control block, ledgers, slot tables, mappers, the cores' release protocol, the worker's apply, the policy.
Scripted: vLLM's block pool (block numbers only), the page driver, the eraser and the clock.
"""

import itertools
import os
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_coserve.control.block import WHO_ROLLOUT, WHO_SERVING, ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import SIDE_ROLLOUT, SIDE_SERVING, CoreRuntime
from vllm_coserve.engine.worker_hooks import WorkerRuntime
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper
from vllm_coserve.memory.slots import SlotTable
from vllm_coserve.policy.memory import MemoryConfig, MemoryFacts, MemoryPolicy, headroom_pages, urgent_reclaim_to
from vllm_coserve.policy.victims import Candidate, choose_victims

_PAGES, _PAGE = 24, 4096
_LEASE_S = 3.0
_CONFIG = MemoryConfig(reclaim_batch_pages=2)
_HEADROOM = headroom_pages(_PAGES, _CONFIG)


class KilledError(Exception):
    """SIGKILL: no line of the rollout's code runs after it."""


class Fuse:
    """Lets the rollout make so many single stores, then kills it."""

    left: int | None = None

    def burn(self):
        if self.left == 0:
            raise KilledError
        if self.left is not None:
            self.left -= 1


class Stores(np.ndarray):
    """A shared array on which an assignment is one store an element, each maybe the last."""

    def __setitem__(self, where, values):
        wheres, values = np.broadcast_arrays(np.atleast_1d(where), np.asarray(values))
        for at, value in zip(wheres.tolist(), values.tolist(), strict=True):
            self.fuse.burn()
            super().__setitem__(at, value)


def stores(array, fuse):
    view = array.view(Stores)
    view.fuse = fuse
    return view


class RolloutsView:
    """The control block in the hands of the rollout's processes."""

    def __init__(self, block, fuse):
        self._block, self._fuse = block, fuse
        self.owners, self.rollout_table = stores(block.owners, fuse), stores(block.rollout_table, fuse)

    def set(self, word, value):
        self._fuse.burn()
        self._block.set(word, value)

    def add(self, word, delta=1):
        self._fuse.burn()
        return self._block.add(word, delta)

    def __getattr__(self, name):
        return getattr(self._block, name)


class Driver:
    """One worker's range. A mapped page counts as written to; a call may fail or be killed between two pages."""

    num_slots = _PAGES

    def __init__(self, dirty, fuse):
        self._dirty, self._fuse = dirty, fuse
        self.slots = [-1] * _PAGES
        self.fail_after: int | None = None  # pages until a call fails, once
        self.failures = 0

    def map_run(self, slot, page, count):
        for i in range(count):
            self._step()
            self.slots[slot + i] = page + i
            self._dirty[page + i] = True

    def unmap_run(self, slot, count):
        for i in range(count):
            self._step()
            self.slots[slot + i] = -1

    def _step(self):
        if self.fail_after == 0:
            self.fail_after = None
            self.failures += 1
            raise OSError("scripted")
        if self.fail_after is not None:
            self.fail_after -= 1
        self._fuse.burn()

    @property
    def mapped(self):
        return [p for p in self.slots if p >= 0]


class Engine(CoreRuntime):
    """One side: the core's release protocol, and vLLM's block pool reduced to block numbers."""

    name: str
    prefer_empty = False

    def __init__(self, world, block, driver):
        super().__init__(SimpleNamespace(config=None), block)
        self.world, self.driver = world, driver
        self.slots = SlotTable(world.geometry)
        self.requests: list[list[int]] = []
        self.references: Counter[int] = Counter()  # of blocks in use; prefixes are shared
        self.cached: dict[int, None] = {}  # in the order of eviction
        self.spare: list[int] = []
        self.idle_since: dict[int, float] = {}
        self.worker = WorkerRuntime(SimpleNamespace(side=self.name), block)
        self.worker._mapper = TableMapper(driver, getattr(world.block, f"{self.name}_table"))

    def sync(self):
        """The worker looks at the table; what fails is tried again the next time."""
        try:
            self.worker._apply()
        except OSError:
            self.world.seen["driver call failed"] += 1

    # ---- the block pool

    def ensure_free(self, blocks):
        raise NotImplementedError

    def allocate(self, blocks, grow):
        """Blocks for a new request, or for the latest one, as many as there are."""
        self.ensure_free(blocks)
        request = self.requests[-1] if grow and self.requests else []
        slot = self.slots.geometry.slots_of(request[-1])[-1] if request else None
        for _ in range(blocks):
            block = self.slots.pick_free(slot, self.prefer_empty)
            if block is not None:
                self.slots.use_free(block)
            elif self.cached:
                block = next(iter(self.cached))
                del self.cached[block]
                self.slots.use_cached(block)
            else:
                break
            slot = self.slots.geometry.slots_of(block)[-1]
            self.references[block] = 1
            request.append(block)
        if request and not (grow and self.requests):
            self.requests.append(request)

    def reuse(self, which, blocks):
        """A new request that finds its prefix cached, or in use by another one."""
        prefix = list(self.cached)[-blocks:] if which % 2 and self.cached else []
        for block in prefix:
            del self.cached[block]
            self.slots.use_cached(block)
        if not prefix and self.requests:
            prefix = self.requests[which % len(self.requests)][:blocks]
        if prefix:
            self.world.seen["prefix reused"] += 1
            self.references.update(prefix)
            self.requests.append(prefix)

    def end_request(self, which, keep):
        """Free a request's blocks, the first `keep` stay cached."""
        request = self.requests.pop(which % len(self.requests))
        for i, block in reversed(list(enumerate(request))):
            self.references[block] -= 1
            if self.references[block]:
                continue
            del self.references[block]
            self.slots.release(block, keep_cached=i < keep)
            if i < keep:
                self.cached[block] = None
            for slot in self.slots.geometry.slots_of(block):
                if not self.slots.used[slot]:
                    self.idle_since[slot] = self.world.now_s

    def add_pages(self, pages):
        pages, self.spare = self.spare + pages, []
        if pages:
            slots = self.slots.unmapped_slots(len(pages))
            self.spare = pages[len(slots) :]
            self.slots.map(slots, pages[: len(slots)])
            self.set_slots(slots, pages[: len(slots)])
            self.idle_since.update(dict.fromkeys(slots, self.world.now_s))

    def drop(self, slots):
        pages = []
        for slot in slots:
            for block in [b for b in self.slots.usable_on(slot) if b in self.cached]:
                del self.cached[block]
                self.slots.uncache(block)
            pages.append(self.slots.unmap(slot)[0])
            self.idle_since.pop(slot, None)
        if slots:
            self.set_slots(slots, [-1] * len(slots))
        return pages

    def slots_to_give(self, count):
        out = self.slots.empty_slots()[-count:] if count > 0 else []
        seen = dict.fromkeys(out)
        for block in self.cached if len(out) < count else ():
            seen.update(dict.fromkeys(s for s in self.slots.geometry.slots_of(block) if not self.slots.used[s]))
        return list(seen)[: max(0, count)]

    # ---- what must hold

    def check(self, owned, table):
        """`owned`: pages that are this side's by the ledger and known to it."""
        slots, geometry = self.slots, self.slots.geometry
        pending = [p for _, pages in self._pending for p in pages]
        mapped = [p for p in slots.page_of if p >= 0]
        assert sorted(mapped + self.spare + pending) == sorted(owned), "no page is lost or known twice"
        assert table.tolist() == slots.page_of
        if self.block.get(self._table_version) == self.block.get(self._table_applied):
            assert self.driver.slots == slots.page_of
        used, cached = set(self.references), set(self.cached)
        usable = {b for b in range(1, geometry.num_blocks) if all(slots.page_of[s] >= 0 for s in geometry.slots_of(b))}
        assert not used & cached and used | cached <= usable
        assert self.references == Counter(b for r in self.requests for b in r)
        on_slot = {
            kind: Counter(s for b in blocks for s in geometry.slots_of(b)) for kind, blocks in enumerate((used, cached))
        }
        for slot in range(_PAGES):
            assert (slots.used[slot], slots.cached[slot]) == (on_slot[0][slot], on_slot[1][slot])
        assert slots.num_mapped == len(mapped)
        assert slots.num_used_blocks == len(used)
        assert slots.num_used_slots == len(on_slot[0])
        assert slots.num_free == len(usable - used - cached)


class Serving(Engine):
    """`ServingRuntime`'s main thread, as far as pages go."""

    name, side, who = "serving", SIDE_SERVING, WHO_SERVING
    _table_version, _table_applied = Word.SERVING_TABLE_VERSION, Word.SERVING_TABLE_APPLIED
    _mapper_bell, _mapped_bell = Bell.SERVING_MAPPER, Bell.SERVING_MAPPED
    _faults = Word.SERVING_GATE_FAULTS
    answers = False  # whether the workers and the rollout answer within the bounded waits of an allocation

    def ensure_free(self, blocks):
        short = blocks - self.slots.num_free
        missing = short - len(self.cached)
        if short > 0:
            pages_for = self.slots.geometry.pages_for
            self.add_pages(self._acquire(pages_for(short), pages_for(missing)))

    def _acquire(self, wanted, needed):
        world = self.world
        pages = world.take(max(wanted, needed), Owner.SERVING)
        if len(pages) < needed and world.ledger.count(Owner.ROLLOUT):
            world.seen["serving waits for pages"] += 1
            lacking = needed - len(pages)
            world.ask_back(urgent_reclaim_to(world.facts(), lacking, _CONFIG))
            if self.answers:
                world.rollout_does(lambda rollout: rollout.between_steps(True), world.kill_in_wait)
            pages += world.take(needed - len(pages), Owner.SERVING)
        if len(pages) < needed and self._pending and self.answers:
            self.sync()
            self.finish_releases()
            pages += world.take(needed - len(pages), Owner.SERVING)
        return pages

    def between_steps(self):
        self.finish_releases()
        wanted, self.world.release_wanted = self.world.release_wanted, 0
        if wanted > 0:
            self.world.seen["serving gives cache back"] += 1
            spare, self.spare = self.spare, []
            self.world.ledger.put(spare)
            self._release_later(self.drop(self.slots_to_give(wanted - len(spare))))

    def publish_usage(self):
        self.block.set(Word.SERVING_USED_PAGES, self.slots.num_used_slots)
        self.block.set(Word.SERVING_CACHED_PAGES, self.slots.num_mapped - self.slots.num_used_slots)

    def _give_back(self, pages):
        self.world.ledger.put(pages)


class Rollout(Engine):
    """`RolloutRuntime`, as far as pages go; every store to shared memory may be its last."""

    name, side, who = "rollout", SIDE_ROLLOUT, WHO_ROLLOUT
    _table_version, _table_applied = Word.ROLLOUT_TABLE_VERSION, Word.ROLLOUT_TABLE_APPLIED
    _mapper_bell, _mapped_bell = Bell.ROLLOUT_MAPPER, Bell.ROLLOUT_MAPPED
    _faults = Word.ROLLOUT_GATE_FAULTS
    prefer_empty = True

    def __init__(self, world, block, driver):
        super().__init__(world, block, driver)
        self.ledger = RolloutLedger(block.owners)
        self.held: set[int] = set()
        self.granted_seq = -1
        block.set(Word.ROLLOUT_WANTED_PAGES, 0)
        block.set(Word.ROLLOUT_DEACTIVATED, 0)

    def ensure_free(self, blocks):
        self.look_for_pages()

    def look_for_pages(self):
        seq = self.block.get(Word.GRANTED_SEQ)
        if seq != self.granted_seq:
            self.granted_seq = seq
            leaving = {p for _, pages in self._pending for p in pages}
            fresh = [p for p in self.ledger.granted() if p not in self.held and p not in leaving]
            self.held.update(fresh)
            self.add_pages(fresh)

    def between_steps(self, worker_answers):
        block = self.block
        if not block.get(Word.ACTIVE_WANTED):
            self._deactivate(worker_answers)
        elif block.get(Word.ROLLOUT_DEACTIVATED):
            block.set(Word.ROLLOUT_DEACTIVATED, 0)
        if block.get(Word.RECLAIM_SEQ) != block.get(Word.RECLAIM_DONE_SEQ):
            self._meet_reclaim(worker_answers)
        self.finish_releases()
        self.look_for_pages()
        self._drop(
            [s for s, t in self.idle_since.items() if t + _LEASE_S < self.world.now_s and not self.slots.used[s]]
        )

    def _meet_reclaim(self, worker_answers):
        seq, cap = self.block.get(Word.RECLAIM_SEQ), self.block.get(Word.ROLLOUT_CAP_PAGES)
        self.granted_seq = -1
        self.look_for_pages()
        need = len(self.held) - cap
        if need > 0:
            need -= self._give_spare()
        if need > 0:
            need -= self._drop(self.slots_to_give(need))
        while need > 0 and self.requests:
            for victim in self._victims(need):
                self.end_request(victim, keep=len(self.requests[victim]) - 1)
                self.world.seen["request ended for its pages"] += 1
            need -= self._drop(self.slots_to_give(need))
        assert len(self.held) <= max(0, cap)
        if worker_answers:
            self.sync()
        self.finish_releases()
        self.block.set(Word.RECLAIM_DONE_SEQ, seq)

    def _victims(self, need):
        """Indexes of requests, the highest first, so that they can be taken out one by one."""
        candidates = []
        for i, request in enumerate(self.requests):
            on_slot = Counter(s for b in request for s in self.slots.geometry.slots_of(b))
            candidates.append(Candidate(str(i), on_slot, 16 * len(request)))
        return sorted(map(int, choose_victims(candidates, self.slots.used, need)), reverse=True)

    def _deactivate(self, worker_answers):
        while self.requests:
            self.end_request(0, keep=1)
        if self.block.get(Word.ROLLOUT_DEACTIVATED) and not self.held:
            return
        self.granted_seq = -1
        self.look_for_pages()
        self._give_spare()
        self._drop(self.slots_to_give(self.slots.num_mapped))
        if worker_answers:
            self.sync()
        if not self.finish_releases() and not self.held:
            self.world.seen["deactivated"] += 1
            self.block.set(Word.ROLLOUT_DEACTIVATED, 1)

    def _give_spare(self):
        spare, self.spare = self.spare, []
        self._give_back(spare)
        return len(spare)

    def _drop(self, slots):
        pages = self.drop(slots)
        self.held.difference_update(pages)
        self._release_later(pages)
        return len(pages)

    def _give_back(self, pages):
        self.held.difference_update(pages)
        self.ledger.put(pages)


class World:
    """Both engines, the arbiter of `ServingRuntime` and the supervisor's part in a life of the rollout engine."""

    def __init__(self, block_bytes):
        self.block, self._fd = ControlBlock.create(_PAGES, _PAGE)
        self.geometry = Geometry(block_bytes, _PAGE, _PAGES)
        self.now_s, self.release_wanted, self.seen = 1000.0, 0, Counter()
        self.kill_in_wait: int | None = None  # stores until the rollout is killed while serving waits for pages
        self.dirty = [False] * _PAGES
        self.fuse = Fuse()
        self.ledger = ServingLedger(self.block.owners, self._erase)
        self.policy = MemoryPolicy(_CONFIG, _PAGES)
        self.serving = Serving(self, self.block, Driver(self.dirty, Fuse()))
        self.block.set(Word.ACTIVE_WANTED, 1)
        self.start_rollout()

    def close(self):
        os.close(self._fd)

    def _erase(self, page, count):
        for p in range(page, page + count):
            assert self.block.owners[p] == Owner.FREE_DIRTY
            assert p not in self.serving.driver.slots and p not in self.rollout.driver.slots
            self.dirty[p] = False

    def take(self, count, owner):
        pages = self.ledger.take(count, owner)
        assert not any(self.dirty[p] for p in pages), "the next owner must see zeros"
        return pages

    # ---- a life of the rollout engine

    def start_rollout(self):
        assert self.block.get(Word.GENERATION_CLEARED) == self.block.add(Word.GENERATION) - 1
        self.rollout = Rollout(self, RolloutsView(self.block, self.fuse), Driver(self.dirty, self.fuse))
        self.rollout_lives = self.rollout_maps = True

    def rollout_does(self, what, kill_after=None):
        """The rollout runs `what`; with `kill_after` it is killed after so many stores. True: in the middle of it."""
        if not self.rollout_lives:
            return False
        self.fuse.left, midway = kill_after, False
        try:
            what(self.rollout)
        except KilledError:
            midway = True
            self.seen["killed midway"] += 1
        self.fuse.left = None
        self.rollout_lives = kill_after is None
        return midway

    def last_process_goes(self):
        """The kernel takes the mappings of the last process, and with it its lock on the members file."""
        self.rollout.driver.slots[:] = [-1] * _PAGES
        self.rollout_maps = False

    def death_is_noticed(self):
        self.block.set(Word.GENERATION_DEAD, self.block.get(Word.GENERATION))

    # ---- the arbiter

    def facts(self):
        get = self.block.get
        return MemoryFacts(
            now_s=self.now_s,
            pool_pages=_PAGES,
            free_pages=self.ledger.free_pages,
            serving_used_pages=get(Word.SERVING_USED_PAGES),
            serving_cached_pages=get(Word.SERVING_CACHED_PAGES),
            rollout_pages=self.ledger.count(Owner.ROLLOUT),
            rollout_wanted_pages=get(Word.ROLLOUT_WANTED_PAGES),
            rl_step=get(Word.RL_STEP),
            rollout_alive=get(Word.GENERATION) > get(Word.GENERATION_DEAD),
            rollout_active=bool(get(Word.ACTIVE_WANTED)),
        )

    def tick(self, clean=0):
        self.clear_dead_generation()
        facts = self.facts()
        decision = self.policy.decide(facts)
        self.block.set(Word.BUDGET_PAGES, decision.budget_pages)
        self.seen["cut"] += decision.cut
        if decision.reclaim_to_pages < facts.rollout_pages and facts.rollout_alive:
            self.seen["pages asked back"] += 1
            self.ask_back(decision.reclaim_to_pages)
        elif decision.grant_pages > 0:
            self.lend(decision.grant_pages)
        self.release_wanted = self.release_wanted or decision.serving_release_pages
        self.ledger.clean_some(clean)
        return decision

    def lend(self, count):
        self.seen["pages lent"] += 1
        assert len(self.take(count, Owner.ROLLOUT)) == count
        assert self.ledger.free_pages >= _HEADROOM
        held = self.ledger.count(Owner.ROLLOUT)
        self.block.set(Word.ROLLOUT_CAP_PAGES, max(held, self.block.get(Word.BUDGET_PAGES)))
        self.block.add(Word.GRANTED_SEQ)

    def ask_back(self, to_pages):
        under_way = self.block.get(Word.RECLAIM_SEQ) != self.block.get(Word.RECLAIM_DONE_SEQ)
        if not (under_way and to_pages >= self.block.get(Word.ROLLOUT_CAP_PAGES)):
            self.block.set(Word.ROLLOUT_CAP_PAGES, to_pages)
            self.block.add(Word.RECLAIM_SEQ)

    def clear_dead_generation(self):
        block = self.block
        dead = block.get(Word.GENERATION_DEAD)
        if dead <= block.get(Word.GENERATION_CLEARED) or self.rollout_maps:
            return
        self.ledger.put_all_of_rollout()
        block.rollout_table[:] = -1
        block.set(Word.ROLLOUT_WANTED_PAGES, 0)
        block.set(Word.RECLAIM_DONE_SEQ, block.get(Word.RECLAIM_SEQ))
        block.set(Word.GENERATION_CLEARED, dead)
        self.seen["pages of a dead rollout taken back"] += 1

    # ---- what must hold

    def check(self):
        owners = self.block.owners.tolist()
        assert set(owners) <= set(Owner)
        of = {owner: [p for p, o in enumerate(owners) if o == owner] for owner in Owner}
        for owner, pages in of.items():
            assert self.ledger.count(owner) == len(pages)
        assert self.ledger.free_pages == _PAGES - len(of[Owner.SERVING]) - len(of[Owner.ROLLOUT])
        assert not any(self.dirty[p] for p in of[Owner.FREE_CLEAN])
        for engine, owner in ((self.serving, Owner.SERVING), (self.rollout, Owner.ROLLOUT)):
            mapped = engine.driver.mapped
            assert len(set(mapped)) == len(mapped), "a page is mapped twice"
            assert set(mapped) <= set(of[owner]), "a page is mapped by a side that does not own it"
        self.serving.check(of[Owner.SERVING], self.block.serving_table)
        if self.rollout_lives:
            rollout = self.rollout
            pending = {p for _, pages in rollout._pending for p in pages}
            known = rollout.held | pending
            assert not rollout.held & pending and known <= set(of[Owner.ROLLOUT])
            if rollout.granted_seq == self.block.get(Word.GRANTED_SEQ):
                assert known == set(of[Owner.ROLLOUT]), "a granted page is lost"
            rollout.check(sorted(known), self.block.rollout_table)

    def wind_up(self):
        """Everything can be had back from whatever state this is."""
        if not self.rollout_lives:
            self.last_process_goes()
            self.death_is_noticed()
        self.serving.driver.fail_after = self.rollout.driver.fail_after = None
        self.block.set(Word.ACTIVE_WANTED, 0)
        self.tick()
        self.rollout_does(lambda rollout: rollout.between_steps(True))
        self.check()
        assert self.ledger.count(Owner.ROLLOUT) == 0 and not self.rollout.driver.mapped
        while self.serving.requests:
            self.serving.end_request(0, keep=1)
        for _ in range(2):
            self.release_wanted = _PAGES
            self.serving.between_steps()
            self.serving.sync()
        self.check()
        assert self.ledger.free_pages == _PAGES


# ---- at random


class PoolMachine(RuleBasedStateMachine):
    """Rules are single moves of one process; the invariants are recounted from scratch after each."""

    world: World | None = None

    # Smaller than a page, straddling pages, a page, larger than a page.
    @initialize(
        block_bytes=st.sampled_from([1000, 1024, 1500, 4096, 6000]),
        serving_blocks=st.integers(0, 40),
        lent=st.integers(0, 16),
        rollout_blocks=st.lists(st.integers(1, 20), max_size=4),
    )
    def start(self, block_bytes, serving_blocks, lent, rollout_blocks):
        self.world = World(block_bytes)
        if serving_blocks:
            self.serving_allocates(serving_blocks, False, False, None)
        lend(self.world, lent)
        for blocks in rollout_blocks:
            self.world.rollout.allocate(blocks, grow=False)

    @rule(blocks=st.integers(1, 40), grow=st.booleans(), answers=st.booleans(), kill=st.none() | st.integers(0, 30))
    def serving_allocates(self, blocks, grow, answers, kill):
        self.world.serving.answers, self.world.kill_in_wait = answers, kill
        self.world.serving.allocate(blocks, grow)
        self.world.serving.publish_usage()

    @precondition(lambda self: self.world.serving.requests)
    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    def serving_ends_a_request(self, which, keep):
        self.world.serving.end_request(which, keep)
        self.world.serving.publish_usage()

    @rule(which=st.integers(0, 9), blocks=st.integers(1, 12))
    def serving_reuses_a_prefix(self, which, blocks):
        self.world.serving.reuse(which, blocks)
        self.world.serving.publish_usage()

    @rule()
    def serving_is_between_steps(self):
        self.world.serving.between_steps()
        self.world.serving.publish_usage()

    @rule(clean=st.integers(0, 16))
    def arbiter_ticks(self, clean):
        self.world.tick(clean)

    @precondition(lambda self: self.world.rollout_lives)
    @rule(pages=st.integers(0, _PAGES), clean=st.integers(0, 16), takes_them=st.booleans())
    def rollout_wishes(self, pages, clean, takes_them):
        self.world.block.set(Word.ROLLOUT_WANTED_PAGES, pages)
        self.world.tick(clean)
        if takes_them:
            self.world.rollout.between_steps(True)
            self.world.rollout.sync()

    @precondition(lambda self: self.world.rollout_lives)
    @rule(blocks=st.integers(1, 30), grow=st.booleans(), kill=st.none() | st.integers(0, 30))
    def rollout_allocates(self, blocks, grow, kill):
        # Every other kill is left out, or hardly a rollout would grow old.
        kill = kill if kill is not None and kill % 2 else None
        self.world.rollout_does(lambda rollout: rollout.allocate(blocks, grow), kill)

    @precondition(lambda self: self.world.rollout_lives and self.world.rollout.requests)
    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    def rollout_ends_a_request(self, which, keep):
        self.world.rollout.end_request(which, keep)

    @precondition(lambda self: self.world.rollout_lives)
    @rule(which=st.integers(0, 9), blocks=st.integers(1, 12))
    def rollout_reuses_a_prefix(self, which, blocks):
        self.world.rollout.reuse(which, blocks)

    @precondition(lambda self: self.world.rollout_lives)
    @rule(worker_answers=st.booleans())
    def rollout_is_between_steps(self, worker_answers):
        self.world.rollout_does(lambda rollout: rollout.between_steps(worker_answers))

    @precondition(lambda self: self.world.rollout_lives)
    @rule(after=st.integers(0, 40))
    def rollout_is_killed_between_steps(self, after):
        self.world.rollout_does(lambda rollout: rollout.between_steps(True), after)

    @precondition(lambda self: self.world.rollout_lives)
    @rule(after=st.integers(0, 12))
    def rollout_is_killed_while_it_maps(self, after):
        self.world.rollout_does(lambda rollout: rollout.sync(), after)

    @precondition(lambda self: not self.world.rollout_lives and self.world.rollout_maps)
    @rule()
    def last_process_of_the_rollout_goes(self):
        self.world.last_process_goes()

    @precondition(lambda self: not self.world.rollout_lives)
    @rule()
    def death_of_the_rollout_is_noticed(self):
        self.world.death_is_noticed()

    @precondition(lambda self: not self.world.rollout_lives)
    @rule()
    def rollout_is_started_again(self):
        self.world.last_process_goes()
        self.world.death_is_noticed()
        self.world.tick()
        self.world.start_rollout()

    @rule()
    def serving_worker_maps(self):
        self.world.serving.sync()

    @precondition(lambda self: self.world.rollout_maps)
    @rule()
    def rollout_worker_maps(self):
        self.world.rollout.sync()  # its worker may outlive its core a little

    @rule(serving=st.booleans(), after=st.integers(0, 6))
    def a_driver_call_will_fail(self, serving, after):
        (self.world.serving if serving else self.world.rollout).driver.fail_after = after

    @rule(seconds=st.sampled_from([0.02, 1.0, _LEASE_S + 1, 11.0, 31.0]))
    def time_passes(self, seconds):
        self.world.now_s += seconds

    @rule()
    def rl_step_begins(self):
        self.world.block.add(Word.RL_STEP)

    @rule(wanted=st.booleans())
    def activation_is_wanted(self, wanted):
        self.world.block.set(Word.ACTIVE_WANTED, int(wanted))

    @invariant()
    def all_agrees(self):
        if self.world is not None:
            self.world.check()

    def teardown(self):
        if self.world is None:
            return
        if sys.exc_info()[0] is None:  # else it would hide the failure
            for what in +self.world.seen:
                event(what)
            self.world.wind_up()
        self.world.close()


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


# ---- at every point of a given course


@pytest.fixture
def make_world():
    worlds = []

    def make(block_bytes=1000):
        worlds.append(World(block_bytes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def lend(world, pages):
    """The rollout wishes for pages, is given some and has them mapped."""
    world.block.set(Word.ROLLOUT_WANTED_PAGES, pages)
    world.tick()
    world.rollout.between_steps(True)
    world.block.set(Word.ROLLOUT_WANTED_PAGES, 0)
    world.rollout.sync()
    world.check()


def busy_rollout(world):
    """12 pages: two requests, prefix cache, and pages on which nothing is."""
    lend(world, 12)
    for blocks in (9, 14, 6):
        world.rollout.allocate(blocks, grow=False)
    world.rollout.end_request(1, keep=8)
    world.check()
    assert world.ledger.count(Owner.ROLLOUT) == 12


def burst(world):
    """Serving's next request takes nearly all that is free; returns the arbiter's decision."""
    world.serving.allocate(40, grow=False)
    world.serving.publish_usage()
    world.serving.sync()
    world.now_s += 0.02
    return world.tick()


def test_a_burst_makes_one_cut_and_serving_gets_the_pages(make_world):
    world = make_world()
    busy_rollout(world)
    decision = burst(world)
    assert decision.cut and decision.reclaim_to_pages < 12
    world.rollout.between_steps(True)
    world.check()
    assert world.ledger.count(Owner.ROLLOUT) == decision.reclaim_to_pages
    assert world.ledger.free_pages >= min(_HEADROOM, 12 - decision.reclaim_to_pages)
    world.tick()
    assert world.seen["cut"] == 1
    world.wind_up()


def test_an_allocation_that_waits_gets_the_pages_of_a_rollout_that_answers(make_world):
    world = make_world()
    busy_rollout(world)
    world.serving.answers = True
    world.serving.allocate(70, grow=False)
    world.check()
    assert len(world.serving.requests[0]) == 70
    assert world.seen["request ended for its pages"]
    world.wind_up()


def test_a_rollout_that_does_not_answer_costs_serving_nothing_it_has(make_world):
    world = make_world()
    busy_rollout(world)
    world.serving.allocate(70, grow=False)
    world.check()
    assert 40 < len(world.serving.requests[0]) < 70
    world.rollout.between_steps(True)
    world.serving.allocate(30, grow=True)
    world.check()
    assert len(world.serving.requests[0]) > 70
    world.wind_up()


_COURSES = {
    "reclaim": (lambda world: burst(world), lambda rollout: rollout.between_steps(True)),
    "deactivation": (
        lambda world: (world.block.set(Word.ACTIVE_WANTED, 0), world.tick()),
        lambda rollout: rollout.between_steps(True),
    ),
    "lease": (
        lambda world: setattr(world, "now_s", world.now_s + _LEASE_S + 1),
        lambda rollout: (rollout.between_steps(True), rollout.sync(), rollout.between_steps(True)),
    ),
    "growth": (
        lambda world: (world.block.set(Word.ROLLOUT_WANTED_PAGES, 5), world.tick()),
        lambda rollout: (rollout.allocate(40, grow=True), rollout.sync()),
    ),
}


@pytest.mark.parametrize("course", list(_COURSES))
def test_a_kill_after_any_store_loses_no_page_and_the_next_rollout_works(make_world, course):
    order, reaction = _COURSES[course]
    for after in itertools.count():
        world = make_world()
        busy_rollout(world)
        order(world)
        midway = world.rollout_does(reaction, after)
        world.check()
        assert world.block.owners.tolist().count(Owner.SERVING) == world.serving.slots.num_mapped
        world.death_is_noticed()
        world.tick()
        assert set(world.rollout.driver.mapped) <= set(RolloutLedger(world.block.owners).granted()), "still mapped"
        world.last_process_goes()
        world.tick()
        assert world.ledger.count(Owner.ROLLOUT) == 0
        world.start_rollout()
        world.block.set(Word.ACTIVE_WANTED, 1)
        world.block.add(Word.RL_STEP)
        lend(world, 3)
        assert world.rollout.slots.num_mapped == min(3, max(0, world.ledger.free_pages + 3 - _HEADROOM))
        world.wind_up()
        if not midway:
            break
    assert after > 10


@pytest.mark.parametrize("course", list(_COURSES))
def test_a_driver_call_that_fails_anywhere_is_made_good_by_the_next(make_world, course):
    order, reaction = _COURSES[course]
    for after in itertools.count():
        world = make_world()
        busy_rollout(world)
        order(world)
        world.rollout.driver.fail_after = after
        reaction(world.rollout)
        world.check()
        failed = world.rollout.driver.failures
        world.rollout.sync()
        world.check()
        assert world.rollout.driver.slots == world.rollout.slots.page_of
        world.rollout.between_steps(True)
        assert not world.rollout._pending
        world.wind_up()
        if not failed:
            break
    assert after >= 3
