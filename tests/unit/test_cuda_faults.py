"""Any call of the CUDA driver API fails, in any way: accounts and mappings agree after a retry, and nothing leaks."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_cuda import FakeCuda
from tests.unit.fake_driver import TABLES
from tests.unit.page_kits import BudgetKit, CudaKit, expected, until_done
from vllm_coserve.memory.cuda_calls import CudaCallError, Device
from vllm_coserve.memory.cuda_pages import make_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper

_PAGES = 8
_PAGE = CudaKit.page
_HOW = ["before", "after", "half"]


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def tables_with_a_failure(make_kit, fail_at, how):
    """All tables, with one call of the rollout's process failing; returns how many calls it made."""
    kit = make_kit(_PAGES)
    api = kit.apis["rollout"]
    begin = len(api.calls)
    api.fail_at, api.how = begin + fail_at if fail_at else None, how
    driver, failures = until_done(kit.driver, "rollout")
    assert len(api.mappings) == 0
    mapper = TableMapper(driver, table := np.full(_PAGES, -1, dtype=np.int32))
    for wanted in TABLES:
        table[:] = wanted
        failures += until_done(mapper.apply)[1]
        assert kit.really_mapped(driver) == expected(kit, wanted)
        for slot in np.flatnonzero(table >= 0).tolist():
            kit.fill(driver, slot, 1, int(table[slot]) + 1)
        for slot in np.flatnonzero(table >= 0).tolist():
            assert kit.read(driver, slot, 1) == bytes([table[slot] + 1]) * _PAGE
            api.launch(driver.address + slot * _PAGE, _PAGE)
        if not kit.exports:
            assert kit.board.used_bytes - _PAGE * len(kit.devices["rollout"]._unreleased) == _PAGE * (table >= 0).sum()
    failures += until_done(driver.close)[1]
    failures += until_done(kit.pages["rollout"].close)[1]
    assert failures == (1 if fail_at else 0)
    calls = len(api.calls) - begin
    api.fail_at = None
    kit.close()
    return calls


@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("make_kit", [CudaKit, BudgetKit])
def test_the_driver_recovers_from_any_failed_call(make_kit, how):
    calls = tables_with_a_failure(make_kit, 0, how)
    assert calls > 60
    for fail_at in range(1, calls + 1):
        tables_with_a_failure(make_kit, fail_at, how)


def life_with_a_failure(make_kit, side, fail_at, how):
    """Both engines take, write, give back; returns the calls of `side`, one of which fails."""
    kit = make_kit(_PAGES, capacity_pages=_PAGES + 2)
    api = kit.apis[side]
    begin = len(api.calls)
    api.fail_at, api.how = begin + fail_at if fail_at else None, how
    eraser, failures = until_done(kit.eraser)
    owners, sides = np.zeros(_PAGES, dtype=np.uint8), {}
    ledger, theirs = ServingLedger(owners, eraser.zero), RolloutLedger(owners)
    for owner, name in ((Owner.SERVING, "serving"), (Owner.ROLLOUT, "rollout")):
        driver, failed = until_done(kit.driver, name)
        table = np.full(_PAGES, -1, dtype=np.int32)
        sides[owner] = driver, TableMapper(driver, table), table
        failures += failed
    for owner, give, take in (
        (Owner.SERVING, 0, 5),
        (Owner.ROLLOUT, 0, 2),
        (Owner.SERVING, 3, 0),
        (Owner.ROLLOUT, 1, 4),
        (Owner.SERVING, _PAGES, 0),
        (Owner.ROLLOUT, _PAGES, 1),
        (Owner.SERVING, 0, 6),
        (Owner.ROLLOUT, _PAGES, 0),
        (Owner.SERVING, _PAGES, 0),
    ):
        driver, mapper, table = sides[owner]
        leaving = np.flatnonzero(table >= 0)[:give]
        pages = table[leaving].tolist()
        table[leaving] = -1
        failures += until_done(mapper.apply)[1]
        (ledger if owner == Owner.SERVING else theirs).put(pages)
        fresh, failed = until_done(ledger.take, take, owner)
        failures += failed
        slots = np.flatnonzero(table < 0)[: len(fresh)]
        table[slots] = fresh
        failures += until_done(mapper.apply)[1]
        for slot in slots.tolist():
            assert not any(kit.read(driver, slot, 1)), "the next owner must see zeros"
            kit.fill(driver, slot, 1, 0xEE)
            kit.api_of(driver).launch(driver.address + slot * _PAGE, _PAGE, byte=0xEF)
        for driver, _, table in sides.values():
            assert kit.really_mapped(driver) == expected(kit, table.tolist())
    for driver, *_ in sides.values():
        failures += until_done(driver.close)[1]
    failures += until_done(eraser.close)[1]
    for pages in kit.pages.values():
        failures += until_done(pages.close)[1]
    assert failures == (1 if fail_at else 0)
    calls = len(api.calls) - begin
    api.fail_at = None
    kit.close()
    return calls


@pytest.mark.parametrize("side", ["serving", "rollout"])
@pytest.mark.parametrize("make_kit", [CudaKit, BudgetKit])
def test_no_failed_call_of_either_engine_shows_a_page_to_two_owners(make_kit, side):
    calls = life_with_a_failure(make_kit, side, 0, "before")
    for how in _HOW:
        for fail_at in range(1, calls + 1):
            life_with_a_failure(make_kit, side, fail_at, how)


def kept_and_covered_with_a_failure(make_kit, fail_at, how):
    kit = make_kit(_PAGES)
    api = kit.apis["serving"]
    begin = len(api.calls)
    api.fail_at, api.how = begin + fail_at if fail_at else None, how
    driver, failures = until_done(lambda: kit.driver("serving", kept_slots=2))
    assert list(api.mappings) == [driver.address, driver.address + _PAGE]
    failures += until_done(driver.cover)[1]
    api.launch(driver.address, _PAGES * _PAGE, byte=9)
    failures += until_done(driver.uncover)[1]
    assert not api.violations and kit.read(driver, 0, 2) == b"\x09" * 2 * _PAGE
    failures += until_done(driver.close)[1]
    assert failures == (1 if fail_at else 0)
    calls, api.fail_at = len(api.calls) - begin, None
    kit.close()
    return calls


@pytest.mark.parametrize("how", _HOW)
def test_kept_and_covered_slots_recover_from_any_failed_call(how):
    calls = kept_and_covered_with_a_failure(CudaKit, 0, how)
    for fail_at in range(1, calls + 1):
        kept_and_covered_with_a_failure(CudaKit, fail_at, how)


def pool_with_a_failure(fail_at, how_many=4):
    """A pool is made and closed, with a call that fails; returns the calls."""
    api = FakeCuda()
    device = Device(api=api)
    begin = len(api.calls)
    api.fail_at = begin + fail_at if fail_at else None
    pool, failures = until_done(make_pool, device, how_many, _PAGE)
    assert len(api._handles) == how_many and not api.mappings
    failures += until_done(pool.close)[1]
    assert failures == (1 if fail_at else 0)
    assert api.nothing_left() and not api.board.used_bytes
    return len(api.calls) - begin


def test_a_failure_while_the_pool_is_made_keeps_no_memory():
    calls = pool_with_a_failure(0)
    assert calls > 12
    for fail_at in range(1, calls + 1):
        pool_with_a_failure(fail_at)


def test_a_look_up_that_fails_is_not_taken_for_an_empty_slot():
    shared = CudaKit(_PAGES)
    driver, api = shared.driver("rollout"), shared.apis["rollout"]
    driver.map_run(0, 0, 2)
    now = len(api.calls)
    api.fail_at = {now + 4, now + 6}  # the unmapping; then the first look-up of the next try
    for call in ("cuMemUnmap", "cuMemRetainAllocationHandle"):
        with pytest.raises(CudaCallError, match=call):
            driver.unmap_run(0, 2)
        assert len(api.mappings) == 2
    driver.unmap_run(0, 2)
    assert not api.mappings
    driver.close()
    shared.close()


_tables = st.lists(st.integers(-1, _PAGES - 1), min_size=_PAGES, max_size=_PAGES)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([CudaKit, BudgetKit]),
    st.lists(_tables, min_size=2, max_size=4),
    st.sets(st.integers(1, 60), max_size=4),
    st.sampled_from(_HOW),
)
def test_the_table_may_change_between_a_failure_and_the_retry(make_kit, wanted, fail_at, how):
    kit = make_kit(_PAGES)
    driver, api = kit.driver("rollout"), kit.apis["rollout"]
    mapper = TableMapper(driver, table := np.full(_PAGES, -1, dtype=np.int32))
    api.fail_at, api.how = {len(api.calls) + n for n in fail_at}, how
    for step in wanted:
        table[:] = step
        try:
            mapper.apply()
        except CudaCallError:
            continue
        assert kit.really_mapped(driver) == expected(kit, step)
    until_done(mapper.apply)
    assert kit.really_mapped(driver) == expected(kit, wanted[-1])
    api.fail_at = None
    driver.close()
    kit.close()
