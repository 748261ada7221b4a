"""A worker whose page driver fails: it tries again for a bounded time, and ends when that does not help."""

import functools
import logging
import os
from types import SimpleNamespace

import pytest

from tests.unit.fake_driver import PAGE, PAGES, TABLES, Driver
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine import worker_hooks
from vllm_coserve.memory.mapper import TableMapper


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
    block, fd = ControlBlock.create(PAGES, PAGE)
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
    for step, wanted in enumerate((TABLES[0], TABLES[1])):
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
    worker.write(TABLES[0])
    with pytest.raises(Ended):
        getattr(worker.runtime, by)()
    assert worker.driver.calls == worker.runtime.faults == 20 and len(worker.pauses) == 19
    assert worker.behind() == 1 and worker.mapped() == 0, "the engine core must not take the pages for unmapped"
    assert len(worker.lines) == 2 and "20 times" in worker.lines[1]


def test_a_table_that_changes_during_the_retries_is_the_one_that_is_mapped(worker):
    worker.driver.down, worker.driver.done = True, 2
    worker.write(TABLES[0])

    def pause(seconds, real=worker.pauses.append):
        real(seconds)
        if len(worker.pauses) == 3:
            worker.write([-1] * PAGES)
            worker.driver.down = False

    worker_hooks.with_retries.keywords["sleep"] = pause
    worker.runtime.sync()
    assert worker.driver.mapped == [] and worker.behind() == 0
