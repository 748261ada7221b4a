"""The memory side as one machine: two engines, one pool, an arbiter, and all that may happen to them in any order.

Real: control block, ledgers, slot tables, mappers, the cores' release protocol, the worker's apply, the policy.
Scripted: vLLM's block pool (block numbers only), the page driver, the eraser and the clock.
"""

import itertools
import sys

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.pool_engines import HEADROOM, LEASE_S, PAGES
from tests.unit.pool_world import ALL_PAGES, World
from vllm_coserve.control.words import Word
from vllm_coserve.memory.ledger import Owner, RolloutLedger, has_weight_pages


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
    @rule(pages=st.integers(0, PAGES), clean=st.integers(0, 16), takes_them=st.booleans())
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
        if has_weight_pages(self.world.block.owners, PAGES):
            self.world.start_rollout()
        else:
            self.world.seen["a start waits for memory"] += 1

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

    @rule(seconds=st.sampled_from([0.02, 1.0, LEASE_S + 1, 11.0, 31.0]))
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
    assert world.ledger.free_pages >= min(HEADROOM, 12 - decision.reclaim_to_pages)
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


def serving_on_weight_pages(world):
    """The rollout is deactivated, and serving uses more than the pool has without the memory of its weights."""
    world.block.set(Word.ACTIVE_WANTED, 0)
    world.tick()
    world.rollout.between_steps(True)
    world.tick(ALL_PAGES)
    world.serving.allocate(60, grow=False)
    world.serving.allocate(50, grow=False)
    world.serving.publish_usage()
    world.serving.sync()
    world.check()
    assert world.ledger.count(Owner.SERVING) > PAGES
    assert not world.weights_on_device


def serving_is_asked(world):
    """What the arbiter and serving's main thread do to have the weights' memory back."""
    for _ in range(2):
        world.tick()
        world.serving.between_steps()
        world.serving.sync()
        world.serving.publish_usage()
        world.check()
    world.serving.between_steps()
    world.tick()


def test_weights_come_back_when_serving_can_do_without_their_memory(make_world):
    world = make_world()
    serving_on_weight_pages(world)
    world.block.set(Word.ACTIVE_WANTED, 1)
    serving_is_asked(world)
    world.rollout.between_steps(True)
    assert world.ledger.count(Owner.SERVING) > PAGES, "serving keeps what it uses"
    assert not world.weights_on_device and world.seen["activation waits for memory"]
    world.serving.end_request(1, keep=3)  # the one that came last has the last pages
    world.serving.publish_usage()
    serving_is_asked(world)
    world.rollout.between_steps(True)
    world.check()
    assert world.weights_on_device and len(world.serving.requests) == 1
    world.wind_up()


def test_a_rollout_that_dies_while_its_weights_memory_is_lent_starts_when_it_is_back(make_world):
    world = make_world()
    serving_on_weight_pages(world)
    world.rollout_does(lambda rollout: rollout.between_steps(True), 0)
    world.death_is_noticed()
    world.last_process_goes()
    serving_is_asked(world)
    assert not has_weight_pages(world.block.owners, PAGES)
    while world.serving.requests:
        world.serving.end_request(0, keep=3)
    world.serving.publish_usage()
    serving_is_asked(world)
    world.start_rollout()
    world.check()
    world.wind_up()


def test_a_revoked_activation_lends_the_memory_again(make_world):
    world = make_world()
    serving_on_weight_pages(world)
    world.serving.end_request(1, keep=3)
    world.serving.publish_usage()
    world.block.set(Word.ACTIVE_WANTED, 1)
    serving_is_asked(world)
    assert has_weight_pages(world.block.owners, PAGES)
    world.block.set(Word.ACTIVE_WANTED, 0)
    world.tick()
    world.rollout.between_steps(True)
    world.check()
    assert world.ledger.count(Owner.WEIGHTS) == 0
    world.wind_up()


_COURSES = {
    "reclaim": (lambda world: burst(world), lambda rollout: rollout.between_steps(True)),
    "deactivation": (
        lambda world: (world.block.set(Word.ACTIVE_WANTED, 0), world.tick()),
        lambda rollout: rollout.between_steps(True),
    ),
    "lease": (
        lambda world: setattr(world, "now_s", world.now_s + LEASE_S + 1),
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
        assert set(world.rollout.driver.mapped) <= set(RolloutLedger(world.block.owners).newly_granted()), (
            "still mapped"
        )
        world.last_process_goes()
        world.tick()
        assert world.ledger.count(Owner.ROLLOUT) == 0
        world.start_rollout()
        world.block.set(Word.ACTIVE_WANTED, 1)
        world.block.add(Word.RL_STEP)
        lend(world, 3)
        assert world.rollout.slots.num_mapped == min(3, max(0, world.ledger.free_pages + 3 - HEADROOM))
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
