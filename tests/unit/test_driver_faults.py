"""Calls to the page driver that fail: whichever it is, mapping, ledger and worker come through."""

import ctypes
import errno
import functools
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine import worker_hooks
from vllm_coserve.memory import host
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper

_PAGE, _PAGES = 64 << 10, 8
_WHOLE_RUN = 99


class Driver:
    """Keeps what is mapped. The call with number `fail_at` fails after `done` slots of its run, those in `down` too."""

    page_bytes, num_slots = _PAGE, _PAGES

    def __init__(self, fail_at=0, done=0, down=False):
        self.fail_at, self.done, self.down = fail_at, done, down
        self.calls, self.slots = 0, [-1] * _PAGES

    def map_run(self, slot, page, count):
        self._run(slot, range(page, page + count))

    def unmap_run(self, slot, count):
        self._run(slot, [-1] * count)

    def _run(self, slot, pages):
        self.calls += 1
        fails = self.down or self.calls == self.fail_at
        for i, page in enumerate(list(pages)[: self.done] if fails else pages):
            self.slots[slot + i] = page
        if fails:
            raise OSError(errno.ENOMEM, "scripted")

    @property
    def mapped(self):
        return [p for p in self.slots if p >= 0]


def finished(mapper):
    """Apply until nothing fails; returns the failures."""
    failures = 0
    while True:
        try:
            mapper.apply()
            return failures
        except OSError:
            failures += 1


# Pages and slots come and go in runs, a slot changes its page (7: 5, then 0), a page its slot (4: at 4, out, at 2).
_TABLES = (
    [0, 1, 2, 3, 4, -1, 7, 5],
    [0, -1, -1, 3, -1, -1, 7, 5],
    [-1, 1, 4, 3, 2, -1, 7, 0],
    [-1] * 8,
    [6, 7, -1, -1, 0, 1, 2, 3],
)


def through_the_tables(driver):
    mapper = TableMapper(driver, table := np.full(_PAGES, -1, dtype=np.int32))
    failures = 0
    for wanted in _TABLES:
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


_tables = st.lists(st.integers(-1, 20), min_size=_PAGES, max_size=_PAGES)


@settings(max_examples=200, deadline=None)
@given(st.lists(_tables, min_size=2, max_size=4), st.integers(1, 10), st.integers(0, 3))
def test_the_table_may_change_between_a_failure_and_the_retry(wanted, fail_at, done):
    driver, table = Driver(fail_at, done), np.full(_PAGES, -1, dtype=np.int32)
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
        table = np.full(_PAGES, -1, dtype=np.int32)
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
    block, fd = ControlBlock.create(_PAGES, _PAGE)
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
        assert ledger.free_pages + ledger.count(Owner.SERVING) + ledger.count(Owner.ROLLOUT) == _PAGES

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
        (Owner.SERVING, _PAGES, 0),
        (Owner.ROLLOUT, _PAGES, 0),
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
    assert ledger.free_pages == _PAGES
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
    fd = create_pool(_PAGES, _PAGE)
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
        driver = HostDriver(pool_fd, _PAGES, _PAGE)
        failing = FailingMmap(real, fail_at, old_is_gone)
        monkeypatch.setattr(host, "_mmap", failing)
        table = np.full(_PAGES, -1, dtype=np.int32)
        mapper = TableMapper(driver, table)
        failures = 0
        for wanted in _TABLES:
            table[:] = wanted
            failures += finished(mapper)
            assert really_mapped(driver) == wanted
            for slot in np.flatnonzero(table >= 0).tolist():
                ctypes.memset(driver.address + slot * _PAGE, int(table[slot]) + 1, _PAGE)
                assert os.pread(pool_fd, 1, int(table[slot]) * _PAGE) == bytes([table[slot] + 1])
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
        create_pool(_PAGES, _PAGE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_eraser_without_mapping_lets_nothing_be_taken(pool_fd, monkeypatch):
    owners = np.zeros(_PAGES, dtype=np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(host, "_mmap", FailingMmap(host._mmap, 1))
        with pytest.raises(OSError, match="scripted"):
            PoolEraser(pool_fd, _PAGES, _PAGE)
    eraser = PoolEraser(pool_fd, _PAGES, _PAGE)
    ledger = ServingLedger(owners, eraser.zero)
    assert ledger.take(2, Owner.ROLLOUT) == [0, 1]
    eraser.close()
    eraser.close()
    with pytest.raises(AssertionError):
        ledger.take(2, Owner.SERVING)
    assert ledger.free_pages == _PAGES - 2 and not ledger.count(Owner.SERVING)


# ---- the worker


def failing(times, log):
    """A function that raises OSError so often, then succeeds."""

    def fn():
        log.append("call")
        if len(log) <= times:
            raise OSError("scripted")

    return fn


@pytest.mark.parametrize("failures", [0, 1, 2, 19])
def test_retries_go_on_until_a_call_succeeds(failures):
    calls, faults, pauses = [], [], []
    worker_hooks.with_retries(failing(failures, calls), faults.append, pauses.append)
    assert len(calls) == failures + 1 and len(faults) == len(pauses) == failures
    assert pauses == sorted(pauses) and sum(pauses) < 1.0


def test_retries_end_after_a_bounded_time():
    calls, faults, pauses = [], [], []
    with pytest.raises(OSError, match="scripted"):
        worker_hooks.with_retries(failing(10**6, calls), faults.append, pauses.append)
    assert len(calls) == len(faults) == 20
    assert 0.5 < sum(pauses) < 1.0 and len(pauses) == 19, "no pause after the last try"


def test_only_os_errors_are_tried_again():
    calls = []

    def broken():
        calls.append("call")
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        worker_hooks.with_retries(broken, pytest.fail, pytest.fail)
    assert len(calls) == 1


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(params=["serving", "rollout"])
def worker(request, monkeypatch):
    """A worker runtime over a scripted driver; its pauses and log lines are kept, and its end raises `Ended`."""
    block, fd = ControlBlock.create(_PAGES, _PAGE)
    os.close(fd)
    runtime = worker_hooks.WorkerRuntime(SimpleNamespace(side=request.param), block)
    serving = request.param == "serving"
    driver, pauses, lines = Driver(), [], []
    table = block.serving_table if serving else block.rollout_table
    runtime._mapper = TableMapper(driver, table)
    version = Word.SERVING_TABLE_VERSION if serving else Word.ROLLOUT_TABLE_VERSION
    applied = Word.SERVING_TABLE_APPLIED if serving else Word.ROLLOUT_TABLE_APPLIED
    mapped = Bell.SERVING_MAPPED if serving else Bell.ROLLOUT_MAPPED

    def write(pages):
        table[:] = pages
        block.add(version)

    def end(status):
        raise Ended(status)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    worker_hooks.logger.addHandler(handler)
    retries = functools.partial(worker_hooks.with_retries, sleep=pauses.append)
    monkeypatch.setattr(worker_hooks, "with_retries", retries)
    monkeypatch.setattr(worker_hooks.os, "_exit", end)
    yield SimpleNamespace(
        runtime=runtime,
        driver=driver,
        write=write,
        pauses=pauses,
        lines=lines,
        behind=lambda: block.get(version) - block.get(applied),
        mapped=lambda: block.bell(mapped),
    )
    worker_hooks.logger.removeHandler(handler)


def test_a_worker_maps_again_what_failed_and_says_so_once(worker):
    for step, wanted in enumerate((_TABLES[0], _TABLES[1])):
        worker.driver.fail_at, worker.driver.done = worker.driver.calls + 1, 1
        worker.write(wanted)
        worker.runtime.sync()
        assert worker.driver.slots == wanted
        assert worker.behind() == 0 and worker.mapped() == step + 1
    assert worker.runtime.faults == len(worker.pauses) == 2
    assert len(worker.lines) == 1 and "scripted" in worker.lines[0]
    calls = worker.driver.calls
    worker.runtime.sync()
    assert worker.driver.calls == calls, "nothing is new"


@pytest.mark.parametrize("by", ["sync", "_follow"])
def test_a_worker_that_cannot_map_ends_only_after_all_retries(worker, by):
    worker.driver.down = True
    worker.write(_TABLES[0])
    with pytest.raises(Ended):
        getattr(worker.runtime, by)()
    assert worker.driver.calls == worker.runtime.faults == 20 and len(worker.pauses) == 19
    assert worker.behind() == 1 and worker.mapped() == 0, "the engine core must not take the pages for unmapped"
    assert len(worker.lines) == 2 and "20 times" in worker.lines[1]


def test_a_table_that_changes_during_the_retries_is_the_one_that_is_mapped(worker):
    worker.driver.down, worker.driver.done = True, 2
    worker.write(_TABLES[0])

    def pause(seconds, real=worker.pauses.append):
        real(seconds)
        if len(worker.pauses) == 3:
            worker.write([-1] * _PAGES)
            worker.driver.down = False

    worker_hooks.with_retries.keywords["sleep"] = pause
    worker.runtime.sync()
    assert worker.driver.mapped == [] and worker.behind() == 0
