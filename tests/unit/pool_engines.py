"""Two engines over one pool for the memory tests: real ledgers, tables and release protocol over scripted drivers.

A fuse may kill the rollout between any two of its stores; a driver may fail at any call.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np

from vllm_coserve.control.block import WHO_ROLLOUT, WHO_SERVING
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import SIDE_ROLLOUT, SIDE_SERVING, CoreRuntime
from vllm_coserve.engine.worker_hooks import WorkerRuntime
from vllm_coserve.memory.ledger import Owner, RolloutLedger, has_weight_pages
from vllm_coserve.memory.mapper import TableMapper
from vllm_coserve.memory.slots import SlotTable
from vllm_coserve.policy.memory import MemoryConfig, headroom_pages, urgent_reclaim_to
from vllm_coserve.policy.victims import Candidate, choose_victims

PAGES, WEIGHT_PAGES, PAGE = 24, 5, 4096
LEASE_S = 3.0
CONFIG = MemoryConfig(reclaim_batch_pages=2)
HEADROOM = headroom_pages(PAGES, CONFIG)


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

    def __init__(self, dirty, fuse, num_slots):
        self._dirty, self._fuse, self.num_slots = dirty, fuse, num_slots
        self.slots = [-1] * num_slots
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
        self.slots = SlotTable(world.geometry(driver.num_slots), clock=lambda: world.now_s)
        self.requests: list[list[int]] = []
        self.references: Counter[int] = Counter()  # of blocks in use; prefixes are shared
        self.cached: dict[int, None] = {}  # in the order of eviction
        self.spare: list[int] = []
        self.idle_since: dict[int, float] = {}  # what the slot table must know as well
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
        for slot in range(geometry.num_slots):
            assert (slots.used[slot], slots.cached[slot]) == (on_slot[0][slot], on_slot[1][slot])
        idle = {s: t for s, t in self.idle_since.items() if not on_slot[0][s]}
        assert set(slots.slots_to_give(geometry.num_slots)) == set(slots.idle_slots(-1.0)) == set(idle)
        now_s = self.world.now_s
        assert set(slots.idle_slots(LEASE_S)) == {s for s, t in idle.items() if t < now_s - LEASE_S}
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
            world.ask_back(urgent_reclaim_to(world.facts(), lacking, CONFIG))
            if self.answers:
                world.rollout_does(lambda rollout: rollout.between_steps(True), world.kill_in_wait)
            pages += world.take(needed - len(pages), Owner.SERVING)
        if len(pages) < needed:
            world.seen["weight pages made"] += world.ledger.make_weight_pages(needed - len(pages))
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
            self._release_later(self.drop(self.slots.slots_to_give(wanted - len(spare))))
        if self.world.weight_pages_left:
            self.world.seen["serving leaves weight pages"] += 1
            spare, self.spare = self.spare, []
            self.world.ledger.put(spare)
            idle = [s for s, page in enumerate(self.slots.page_of) if page >= PAGES and not self.slots.used[s]]
            self._release_later(self.drop(idle))

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
            unknown = [
                p
                for p in RolloutLedger(self.world.block.owners).newly_granted()
                if p not in self.held and p not in leaving
            ]
            fresh = self.ledger.newly_granted()
            assert fresh == unknown
            self.held.update(fresh)
            self.add_pages(fresh)

    def between_steps(self, worker_answers):
        block = self.block
        if not block.get(Word.ACTIVE_WANTED):
            self._deactivate(worker_answers)
        elif block.get(Word.ROLLOUT_DEACTIVATED):
            self._activate()
        if block.get(Word.RECLAIM_SEQ) != block.get(Word.RECLAIM_DONE_SEQ):
            self._meet_reclaim(worker_answers)
        self.finish_releases()
        self.look_for_pages()
        self._drop(self.slots.idle_slots(LEASE_S))

    def _meet_reclaim(self, worker_answers):
        seq, cap = self.block.get(Word.RECLAIM_SEQ), self.block.get(Word.ROLLOUT_CAP_PAGES)
        self.granted_seq = -1
        self.look_for_pages()
        need = len(self.held) - cap
        if need > 0:
            need -= self._give_spare()
        if need > 0:
            need -= self._drop(self.slots.slots_to_give(need))
        while need > 0 and self.requests:
            for victim in self._victims(need):
                self.end_request(victim, keep=len(self.requests[victim]) - 1)
                self.world.seen["request ended for its pages"] += 1
            need -= self._drop(self.slots.slots_to_give(need))
        assert len(self.held) <= max(0, cap)
        if worker_answers:
            self.sync()
        self.finish_releases()
        self.block.set(Word.RECLAIM_DONE_SEQ, seq)

    def _victims(self, need):
        """Indexes of requests, the highest first, so that they can be taken out one by one."""
        candidates = []
        for i, request in enumerate(self.requests):
            candidates.append(Candidate(str(i), self.slots.geometry.count_on_slots(request), 16 * len(request)))
        return sorted(map(int, choose_victims(candidates, self.slots.used, need)), reverse=True)

    def _deactivate(self, worker_answers):
        while self.requests:
            self.end_request(0, keep=1)
        if self.block.get(Word.ROLLOUT_DEACTIVATED) and not self.held:
            self._lend_weight_pages()
            return
        self.granted_seq = -1
        self.look_for_pages()
        self._give_spare()
        self._drop(self.slots.slots_to_give(self.slots.num_mapped))
        if worker_answers:
            self.sync()
        if not self.finish_releases() and not self.held:
            self.world.seen["deactivated"] += 1
            self.world.weights_on_device = False
            self.block.set(Word.ROLLOUT_DEACTIVATED, 1)
            self._lend_weight_pages()

    def _lend_weight_pages(self):
        self.world.seen["weight pages lent"] += bool(self.ledger.lend_weight_pages(PAGES, WEIGHT_PAGES))

    def _activate(self):
        if has_weight_pages(self.block.owners, PAGES):
            self.world.weights_on_device = True
            self.block.set(Word.ROLLOUT_DEACTIVATED, 0)
        else:
            self.world.seen["activation waits for memory"] += 1

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
