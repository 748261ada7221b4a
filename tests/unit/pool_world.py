"""The world of the memory tests: two engines, their arbiter with the real policy, and a clock of our own."""

import os
from collections import Counter

from tests.unit.pool_engines import (
    CONFIG,
    HEADROOM,
    PAGE,
    PAGES,
    WEIGHT_PAGES,
    Driver,
    Fuse,
    KilledError,
    Rollout,
    RolloutsView,
    Serving,
)
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.ledger import Owner, ServingLedger, has_weight_pages
from vllm_coserve.policy.memory import MemoryFacts, MemoryPolicy, can_spare_weight_pages

ALL_PAGES = PAGES + WEIGHT_PAGES


class World:
    """Both engines, the arbiter of `ServingRuntime` and the supervisor's part in a life of the rollout engine."""

    def __init__(self, block_bytes):
        self.block, self._fd = ControlBlock.create(PAGES, PAGE, WEIGHT_PAGES)
        self._block_bytes = block_bytes
        self.now_s, self.release_wanted, self.seen = 1000.0, 0, Counter()
        self.kill_in_wait: int | None = None  # stores until the rollout is killed while serving waits for pages
        self.dirty = [False] * ALL_PAGES
        self.taken = [page < PAGES for page in range(ALL_PAGES)]  # memory of the device that the pool has
        self.weights_on_device = False
        self.withholding, self.weight_pages_left = True, 0
        self.fuse = Fuse()
        self.ledger = ServingLedger(self.block.owners, self._erase, weight_pages=WEIGHT_PAGES, discard=self._discard)
        self.policy = MemoryPolicy(CONFIG, PAGES)
        self.serving = Serving(self, self.block, Driver(self.dirty, Fuse(), ALL_PAGES))
        self.block.set(Word.ACTIVE_WANTED, 1)
        self.start_rollout()

    def close(self):
        os.close(self._fd)

    def geometry(self, num_slots):
        return Geometry(self._block_bytes, PAGE, num_slots)

    def _erase(self, page, count):
        for p in range(page, page + count):
            assert self.block.owners[p] == Owner.FREE_DIRTY
            assert p not in self.serving.driver.slots and p not in self.rollout.driver.slots
            self.dirty[p], self.taken[p] = False, True

    def _discard(self, page, count):
        for p in range(page, page + count):
            assert p >= PAGES and self.block.owners[p] in (Owner.FREE_DIRTY, Owner.FREE_CLEAN)
            assert p not in self.serving.driver.slots
            self.dirty[p] = self.taken[p] = False

    def take(self, count, owner):
        pages = self.ledger.take(count, owner)
        assert not any(self.dirty[p] for p in pages), "the next owner must see zeros"
        return pages

    # ---- a life of the rollout engine

    def start_rollout(self):
        assert self.block.get(Word.GENERATION_CLEARED) == self.block.add(Word.GENERATION) - 1
        assert has_weight_pages(self.block.owners, PAGES)
        self.rollout = Rollout(self, RolloutsView(self.block, self.fuse), Driver(self.dirty, self.fuse, PAGES))
        self.rollout_lives = self.rollout_maps = self.weights_on_device = True

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
        self.rollout.driver.slots[:] = [-1] * PAGES
        self.rollout_maps = self.weights_on_device = False

    def death_is_noticed(self):
        self.block.set(Word.GENERATION_DEAD, self.block.get(Word.GENERATION))

    # ---- the arbiter

    def facts(self):
        get = self.block.get
        return MemoryFacts(
            now_s=self.now_s,
            pool_pages=PAGES,
            free_pages=self.ledger.free_pages + self.ledger.reserve_pages,
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
        self.share_weight_pages()
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
        self.ledger.make_weight_pages(HEADROOM - self.ledger.free_pages)
        return decision

    def share_weight_pages(self):
        get = self.block.get
        alive = get(Word.GENERATION) > get(Word.GENERATION_DEAD)
        lent = alive and get(Word.ROLLOUT_DEACTIVATED) and not get(Word.ACTIVE_WANTED)
        used = get(Word.SERVING_USED_PAGES)
        self.withholding = not lent and can_spare_weight_pages(used, PAGES, CONFIG, self.withholding)
        self.weight_pages_left = self.ledger.withhold(self.withholding)

    def lend(self, count):
        self.seen["pages lent"] += 1
        assert len(self.take(count, Owner.ROLLOUT)) == count
        assert self.ledger.free_pages >= HEADROOM
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
        dirty = [page for page in of[Owner.FREE_DIRTY] if page < PAGES]
        clean = [page for page in of[Owner.FREE_CLEAN] if page < PAGES or not self.withholding]
        assert self.ledger.free_pages == len(dirty) + len(clean)
        assert all(self.taken[page] for page in clean + of[Owner.SERVING] + of[Owner.ROLLOUT])
        assert all(page < PAGES for page in of[Owner.ROLLOUT]) and all(page >= PAGES for page in of[Owner.WEIGHTS])
        assert not any(self.taken[page] for page in of[Owner.WEIGHTS])
        if self.weights_on_device:
            assert len(of[Owner.WEIGHTS]) == WEIGHT_PAGES and not any(self.taken[PAGES:])
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
            self.release_wanted = ALL_PAGES
            self.serving.between_steps()
            self.serving.sync()
        self.tick(ALL_PAGES)
        self.check()
        lent = ALL_PAGES - self.ledger.count(Owner.WEIGHTS)
        assert self.ledger.free_pages + self.ledger.reserve_pages == lent
        assert lent == ALL_PAGES or not self.rollout_lives
        self.block.set(Word.ACTIVE_WANTED, 1)
        self.serving.publish_usage()
        self.tick()
        assert has_weight_pages(self.block.owners, PAGES)
        self.rollout_does(lambda rollout: rollout.between_steps(True))
        assert self.weights_on_device == self.rollout_lives
        self.check()


# ---- at random
