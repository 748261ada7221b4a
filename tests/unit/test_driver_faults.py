"""Calls to the page driver that fail: whichever it is, mapping and ledger come through."""

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_driver import PAGE, PAGES, TABLES, Driver, finished
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.memory import host
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper

_WHOLE_RUN = 99


def through_the_tables(driver):
    mapper = TableMapper(driver, table := np.full(PAGES, -1, dtype=np.int32))
    failures = 0
    for wanted in TABLES:
        table[:] = wanted
        failures += finished(mapper)
        assert driver.slots == wanted
        assert len(set(driver.mapped)) == len(driver.mapped)
        before = driver.calls
        assert mapper.apply() == 0 and driver.calls == before
    return failures


def calls_of(script, **kwargs):
    driver = Driver(**kwargs)
    script(driver)
    return driver.calls


@pytest.mark.parametrize("done", [0, 1, 2, _WHOLE_RUN])
def test_a_retry_after_any_failed_call_brings_the_wanted_table(done):
    calls = calls_of(through_the_tables)
    assert calls > 12 and through_the_tables(Driver()) == 0
    for fail_at in range(1, calls + 1):
        assert through_the_tables(Driver(fail_at, done)) == 1


_tables = st.lists(st.integers(-1, 20), min_size=PAGES, max_size=PAGES)


@settings(max_examples=200, deadline=None)
@given(st.lists(_tables, min_size=2, max_size=4), st.integers(1, 10), st.integers(0, 3))
def test_the_table_may_change_between_a_failure_and_the_retry(wanted, fail_at, done):
    driver, table = Driver(fail_at, done), np.full(PAGES, -1, dtype=np.int32)
    mapper = TableMapper(driver, table)
    for step in wanted:
        table[:] = step
        try:
            mapper.apply()
        except OSError:
            continue
        assert driver.slots == step
    finished(mapper)
    assert driver.slots == wanted[-1]


@pytest.mark.parametrize("done", [0, 1, 2, _WHOLE_RUN])
def test_pages_that_a_failed_call_mapped_are_out_before_they_go_to_the_next_owner(done):
    def half_mapped_then_dropped(driver):
        table = np.full(PAGES, -1, dtype=np.int32)
        mapper = TableMapper(driver, table)
        table[:] = [0, 1, 2, -1, 5, 6, -1, 3]
        try:
            mapper.apply()
        except OSError:
            table[:] = -1  # the engine core gives up its pages before the worker's next try
        else:
            table[:] = -1
        finished(mapper)
        assert driver.mapped == []

    for fail_at in range(1, calls_of(half_mapped_then_dropped) + 1):
        half_mapped_then_dropped(Driver(fail_at, done))


def life_of_a_pair(serving_driver, rollout_driver):
    """Both engines take, map, unmap and give back pages; after each apply, also a failed one, the books must agree."""
    block, fd = ControlBlock.create(PAGES, PAGE)
    os.close(fd)
    dirty = set()

    def erase(page, count):
        run = set(range(page, page + count))
        assert not run & {*serving_driver.mapped, *rollout_driver.mapped}
        dirty.difference_update(run)

    ledger, theirs = ServingLedger(block.owners, erase), RolloutLedger(block.owners)
    sides = {
        Owner.SERVING: (serving_driver, TableMapper(serving_driver, block.serving_table), block.serving_table),
        Owner.ROLLOUT: (rollout_driver, TableMapper(rollout_driver, block.rollout_table), block.rollout_table),
    }

    def check():
        for owner, (driver, *_) in sides.items():
            assert set(driver.mapped) <= set(np.flatnonzero(block.owners == owner).tolist())
            assert len(set(driver.mapped)) == len(driver.mapped)
        assert ledger.free_pages + ledger.count(Owner.SERVING) + ledger.count(Owner.ROLLOUT) == PAGES

    def apply(owner):
        failures = 0
        while True:
            try:
                sides[owner][1].apply()
                check()
                return failures
            except OSError:
                failures += 1
                check()

    failures = 0
    for owner, give, take in (
        (Owner.SERVING, 0, 5),
        (Owner.ROLLOUT, 0, 2),
        (Owner.SERVING, 3, 0),
        (Owner.ROLLOUT, 0, 4),
        (Owner.ROLLOUT, 5, 0),
        (Owner.SERVING, 1, 4),
        (Owner.SERVING, PAGES, 0),
        (Owner.ROLLOUT, PAGES, 0),
    ):
        driver, _, table = sides[owner]
        leaving = np.flatnonzero(table >= 0)[:give]
        pages = table[leaving].tolist()
        table[leaving] = -1
        failures += apply(owner)
        (ledger if owner == Owner.SERVING else theirs).put(pages)
        fresh = ledger.take(take, owner)
        assert not dirty & set(fresh)
        dirty.update(fresh)
        table[np.flatnonzero(table < 0)[: len(fresh)]] = fresh
        failures += apply(owner)
        assert driver.slots == table.tolist()
    assert ledger.free_pages == PAGES
    return failures


@pytest.mark.parametrize("done", [0, 1, _WHOLE_RUN])
def test_no_failed_call_of_either_engine_gives_a_page_two_owners(done):
    serving, rollout = Driver(), Driver()
    assert life_of_a_pair(serving, rollout) == 0
    for fail_at in range(1, serving.calls + 1):
        assert life_of_a_pair(Driver(fail_at, done), Driver()) == 1
    for fail_at in range(1, rollout.calls + 1):
        assert life_of_a_pair(Driver(), Driver(fail_at, done)) == 1


# ---- erasing


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_failed_erase_leaves_all_pages_free(fail_at):
    owners = np.array([Owner.FREE_CLEAN, *[Owner.FREE_DIRTY] * 7], dtype=np.uint8)
    owners[[2, 5]] = Owner.ROLLOUT  # so that the free pages are runs: 1, 3-4, 6-7
    calls = []

    def erase(page, count):
        calls.append((page, count))
        if len(calls) == fail_at:
            raise OSError("scripted")

    ledger, before = ServingLedger(owners, erase), owners.copy()
    with pytest.raises(OSError, match="scripted"):
        ledger.take(6, Owner.SERVING)
    assert (owners == before).all()
    assert ledger.take(6, Owner.SERVING) == [0, 1, 3, 4, 6, 7], "the lock is free and nothing was lost"
    assert calls[-3:] == [(1, 1), (3, 2), (6, 2)]


def test_a_failed_sweep_keeps_the_page_dirty():
    owners, failing = np.zeros(4, dtype=np.uint8), [False, True, False, False, False]

    def erase(page, count):
        if failing.pop(0):
            raise OSError("scripted")

    ledger = ServingLedger(owners, erase)
    with pytest.raises(OSError, match="scripted"):
        ledger.clean_some(4)
    assert owners.tolist() == [Owner.FREE_CLEAN, *[Owner.FREE_DIRTY] * 3]
    assert ledger.clean_some(9) == 3 and ledger.count(Owner.FREE_CLEAN) == 4


# ---- the host driver: real mappings


@pytest.fixture
def pool_fd():
    fd = create_pool(PAGES, PAGE)
    yield fd
    os.close(fd)


class FailingMmap:
    """Stands in for `host._mmap`: call `fail_at` fails, with the old mapping kept or already gone."""

    def __init__(self, real, fail_at, old_is_gone=False):
        self.real, self.fail_at, self.old_is_gone, self.calls = real, fail_at, old_is_gone, 0

    def __call__(self, address, size, prot, flags, fd=-1, offset=0):
        self.calls += 1
        if self.calls != self.fail_at:
            return self.real(address, size, prot, flags, fd, offset)
        if self.old_is_gone and address is not None:
            # Linux may fail after it has removed what was there. Not a true hole: another thread could get that memory.
            flags = host._MAP_PRIVATE | host._MAP_FIXED | host._MAP_ANONYMOUS | host._MAP_NORESERVE
            self.real(address, size, host._PROT_NONE, flags)
        raise OSError(errno.ENOMEM, "scripted")


def really_mapped(driver):
    """The page under each slot as the kernel sees it, -1 for none."""
    table = [-1] * driver.num_slots
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, *rest = line.split()
        first, last = (int(x, 16) for x in span.split("-"))
        if "coserve-pool" not in " ".join(rest) or not access.startswith("rw"):
            continue
        for slot in range(driver.num_slots):
            at = driver.address + slot * driver.page_bytes
            if first <= at < last:
                table[slot] = (int(offset, 16) + at - first) // driver.page_bytes
    return table


@pytest.mark.parametrize("old_is_gone", [False, True])
def test_the_host_driver_recovers_from_any_failed_mmap(pool_fd, monkeypatch, old_is_gone):
    real = host._mmap

    def run(fail_at):
        driver = HostDriver(pool_fd, PAGES, PAGE)
        failing = FailingMmap(real, fail_at, old_is_gone)
        monkeypatch.setattr(host, "_mmap", failing)
        table = np.full(PAGES, -1, dtype=np.int32)
        mapper = TableMapper(driver, table)
        failures = 0
        for wanted in TABLES:
            table[:] = wanted
            failures += finished(mapper)
            assert really_mapped(driver) == wanted
            for slot in np.flatnonzero(table >= 0).tolist():
                ctypes.memset(driver.address + slot * PAGE, int(table[slot]) + 1, PAGE)
                assert os.pread(pool_fd, 1, int(table[slot]) * PAGE) == bytes([table[slot] + 1])
        driver.close()
        monkeypatch.setattr(host, "_mmap", real)
        assert failures == (1 if fail_at else 0)
        return failing.calls

    for fail_at in range(1, run(0) + 1):
        run(fail_at)


def test_no_memory_for_the_pool_is_a_configuration_error_and_leaks_nothing(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(host, "_mmap", FailingMmap(host._mmap, 1))
    with pytest.raises(ConfigurationError, match="--coserve-pool-gib"):
        create_pool(PAGES, PAGE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_eraser_without_mapping_lets_nothing_be_taken(pool_fd, monkeypatch):
    owners = np.zeros(PAGES, dtype=np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(host, "_mmap", FailingMmap(host._mmap, 1))
        with pytest.raises(OSError, match="scripted"):
            PoolEraser(pool_fd, PAGES, PAGE)
    eraser = PoolEraser(pool_fd, PAGES, PAGE)
    ledger = ServingLedger(owners, eraser.zero)
    assert ledger.take(2, Owner.ROLLOUT) == [0, 1]
    eraser.close()
    eraser.close()
    with pytest.raises(AssertionError):
        ledger.take(2, Owner.SERVING)
    assert ledger.free_pages == PAGES - 2 and not ledger.count(Owner.SERVING)
