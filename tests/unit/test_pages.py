"""Ledger, page drivers and mapper: one owner a page, nothing of one owner seen by the next, faults injected."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.page_kits import KITS
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory.host import create_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger, runs
from vllm_coserve.memory.mapper import TableMapper, table_difference

_PAGE, _PAGES = 64 << 10, 8


@pytest.fixture(params=KITS)
def kit(request):
    kit = request.param(_PAGES)
    yield kit
    kit.close()


def test_pages_are_zero_for_the_next_owner(kit):
    eraser = kit.eraser()
    owners = np.zeros(_PAGES, dtype=np.uint8)
    ledger, theirs = ServingLedger(owners, eraser.zero), RolloutLedger(owners)
    rollout, serving = kit.driver("rollout"), kit.driver("serving")
    pages = ledger.take(3, Owner.ROLLOUT)
    rollout.map_run(2, pages[0], 3)
    kit.fill(rollout, 2, 3, 0xAB)
    rollout.unmap_run(2, 3)
    theirs.put(pages)
    assert ledger.take(_PAGES, Owner.SERVING) == list(range(_PAGES))
    serving.map_run(0, 0, _PAGES)
    assert not any(kit.read(serving, 0, _PAGES))
    for d in (rollout, serving, eraser):
        d.close()


def test_an_access_to_an_unmapped_slot_ends_the_process():
    code = (
        "import ctypes\n"
        "from vllm_coserve.memory.host import HostDriver, create_pool\n"
        f"fd = create_pool(4, {_PAGE}); d = HostDriver(fd, 4, {_PAGE})\n"
        "d.map_run(1, 0, 1); ctypes.memset(d.address + d.page_bytes, 1, 1); print('mapped ok', flush=True)\n"
        "d.unmap_run(1, 1); ctypes.memset(d.address + d.page_bytes, 1, 1); print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "mapped ok\n"


def test_slots_outside_the_range_are_refused(kit):
    driver = kit.driver("serving", 4)
    for slot, count in ((-1, 1), (4, 1), (3, 2), (0, 0)):
        for call in (
            lambda at=slot, n=count: driver.map_run(at, 0, n),
            lambda at=slot, n=count: driver.unmap_run(at, n),
        ):
            with pytest.raises(ValueError):
                call()
    driver.close()


def test_a_pool_that_cannot_be_had_names_the_flag():
    with pytest.raises(ConfigurationError, match="--coserve-pool-gib"):
        create_pool(1 << 40, 2 << 20)


def test_only_the_owner_gives_a_page_back():
    owners = np.zeros(4, dtype=np.uint8)
    ledger, theirs = ServingLedger(owners, lambda page, count: None), RolloutLedger(owners)
    mine, lent = ledger.take(1, Owner.SERVING), ledger.take(1, Owner.ROLLOUT)
    with pytest.raises(ValueError):
        ledger.put(lent)
    with pytest.raises(ValueError):
        theirs.put(mine)
    with pytest.raises(ValueError):
        theirs.put([*lent, *mine])
    assert theirs.newly_granted() == lent, "nothing was put"
    assert ledger.put_all_of_rollout() == 1
    assert ledger.count(Owner.SERVING) == 1 and ledger.free_pages == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("srlgzx"), st.integers(0, 6)), max_size=50))
def test_every_page_has_one_owner_and_clean_pages_are_clean(moves):
    """s: serving takes, r: the rollout is given, l: it looks, g: both give back, z: zeroing, x: the rollout dies."""
    dirty = [False] * 10
    owners = np.zeros(10, dtype=np.uint8)

    def erase(page, count):
        dirty[page : page + count] = [False] * count

    ledger, theirs = ServingLedger(owners, erase), RolloutLedger(owners)
    held = {Owner.SERVING: set(), Owner.ROLLOUT: set()}
    seen = set()
    for move, n in moves:
        if move in "sr":
            owner = Owner.SERVING if move == "s" else Owner.ROLLOUT
            taken = ledger.take(n, owner)
            assert len(taken) == min(n, 10 - sum(map(len, held.values())))
            assert not any(dirty[p] for p in taken), "the next owner must see zeros"
            held[owner].update(taken)
            for page in taken:
                dirty[page] = True
        elif move == "g":
            for owner, put in ((Owner.SERVING, ledger.put), (Owner.ROLLOUT, theirs.put)):
                pages = sorted(held[owner])[:n]
                put(pages)
                held[owner].difference_update(pages)
            seen &= held[Owner.ROLLOUT]
        elif move == "l":
            assert theirs.newly_granted() == sorted(held[Owner.ROLLOUT] - seen)
            seen = set(held[Owner.ROLLOUT])
        elif move == "z":
            unclean = ledger.count(Owner.FREE_DIRTY)
            assert ledger.clean_some(n) == min(n, unclean) == unclean - ledger.count(Owner.FREE_DIRTY)
        else:
            assert ledger.put_all_of_rollout() == len(held[Owner.ROLLOUT])
            held[Owner.ROLLOUT].clear()
            theirs, seen = RolloutLedger(owners), set()
        for owner, pages in held.items():
            assert set(np.flatnonzero(owners == owner).tolist()) == pages
        assert ledger.free_pages == 10 - sum(map(len, held.values()))


@pytest.mark.parametrize(("page_us", "call_us", "least"), [(1, 20, 500), (40, 0, 20), (5000, 0, 1)])
def test_zeroing_takes_its_time_of_a_tick_and_no_allocation_waits_long_for_it(page_us, call_us, least):
    now_us, runs_us = [0], []

    def erase(page, count):
        runs_us.append(call_us + page_us * count)
        now_us[0] += runs_us[-1]

    owners = np.zeros(2000, dtype=np.uint8)
    owners[10] = Owner.SERVING
    ledger = ServingLedger(owners, erase, lambda: now_us[0] / 1e6)
    done = ledger.clean_some(owners.size, 0.001)
    assert done >= least and done == ledger.count(Owner.FREE_CLEAN)
    assert max(runs_us) <= max(page_us, 220) and sum(runs_us) <= 1000 + max(runs_us)
    while done < 1999:
        done += ledger.clean_some(owners.size, 0.001)
    assert ledger.clean_some(owners.size, 0.001) == 0 and owners[10] == Owner.SERVING


_tables = st.lists(st.integers(-1, 20), min_size=6, max_size=6)


@given(_tables, _tables)
def test_table_difference_leads_from_one_table_to_the_other(have, want):
    unmap, put = table_difference(np.array(have, dtype=np.int32), np.array(want, dtype=np.int32))
    now = list(have)
    for slot, count in unmap:
        now[slot : slot + count] = [-1] * count
    for slot, page, count in put:
        now[slot : slot + count] = range(page, page + count)
    assert now == want
    assert runs([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 2), (9, 1)]


class FailingDriver:
    """Fails at the nth call; keeps what was mapped."""

    page_bytes, num_slots = _PAGE, 6

    def __init__(self, fail_at):
        self.calls, self.fail_at, self.slots = 0, fail_at, [-1] * 6

    def _call(self):
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError("scripted")

    def map_run(self, slot, page, count):
        self._call()
        self.slots[slot : slot + count] = range(page, page + count)

    def unmap_run(self, slot, count):
        self._call()
        self.slots[slot : slot + count] = [-1] * count


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_failed_mapping_is_finished_by_the_next_apply(fail_at):
    driver, table = FailingDriver(fail_at), np.full(6, -1, dtype=np.int32)
    mapper = TableMapper(driver, table)
    steps = ([3, -1, 7, 8, -1, 1], [-1, 4, 7, -1, 2, 1])
    failures = 0
    for step in steps:
        table[:] = step
        for _ in range(2):
            try:
                mapper.apply()
                break
            except OSError:
                failures += 1
        assert driver.slots == step
    assert failures == 1
