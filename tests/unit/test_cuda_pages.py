"""The CUDA page driver over a strict fake of CUDA: accounts, fences, zeroes, and any call failing in any way."""

import logging
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_cuda import GARBAGE, GRANULARITY, FakeCuda
from tests.unit.page_kits import BudgetKit, CudaKit
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory import cuda_calls
from vllm_coserve.memory.cuda import CudaDriver, NoEraser
from vllm_coserve.memory.cuda_calls import CudaCallError, Device
from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, make_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger
from vllm_coserve.memory.mapper import TableMapper

_PAGES = 8
_PAGE = CudaKit.page
_HOW = ["before", "after", "half"]

# Pages and slots come and go in runs, a slot changes its page (7: 5, then 0), a page its slot (4: at 4, out, at 2).
_TABLES = (
    [0, 1, 2, 3, 4, -1, 7, 5],
    [0, -1, -1, 3, -1, -1, 7, 5],
    [-1, 1, 4, 3, 2, -1, 7, 0],
    [-1] * 8,
    [6, 7, -1, -1, 0, 1, 2, 3],
)


@pytest.fixture(params=[CudaKit, BudgetKit])
def kit(request):
    kit = request.param(_PAGES)
    yield kit
    kit.close()


@pytest.fixture
def shared():
    kit = CudaKit(_PAGES)
    yield kit
    kit.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def until_done(call, *args):
    """Call until nothing fails; returns what it gives, and the failures."""
    for failures in range(5):
        try:
            return call(*args), failures
        except CudaCallError:
            pass
    raise AssertionError("it fails for ever")


def expected(kit, table):
    return table if isinstance(kit.pool, SharedPages) else [min(page, 0) for page in table]


# ---- what a run costs


def test_access_and_unmapping_take_one_call_a_run(shared):
    driver, api = shared.driver("rollout"), shared.apis["rollout"]
    before = len(api.calls)
    driver.map_run(1, 2, 5)
    assert [c for c in api.calls[before:] if c.startswith("cuMem")] == ["cuMemMap"] * 5 + ["cuMemSetAccess"]
    before = len(api.calls)
    driver.unmap_run(0, _PAGES)
    assert api.calls[before:] == ["cuCtxSetCurrent", "cuCtxSetCurrent", "cuCtxSynchronize", "cuMemUnmap"]
    before = len(api.calls)
    driver.unmap_run(0, _PAGES)
    assert api.calls[before:] == ["cuCtxSetCurrent"], "nothing is mapped, so nothing is waited for"
    driver.close()


def test_new_pages_replace_those_that_are_mapped(kit):
    driver = kit.driver("serving")
    driver.map_run(0, 0, 4)
    driver.map_run(2, 4, 4)
    assert kit.really_mapped(driver) == expected(kit, [0, 1, 4, 5, 6, 7, -1, -1])
    driver.close()


def test_memory_of_a_budget_comes_and_goes_with_the_mapping():
    kit = BudgetKit(4, capacity_pages=4)
    serving, rollout = kit.driver("serving"), kit.driver("rollout")
    serving.map_run(0, 0, 3)
    assert kit.board.used_bytes == 3 * _PAGE
    with pytest.raises(CudaCallError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        rollout.map_run(0, 0, 2)  # a ledger that gave away more than there is
    assert caught.value.call == "cuMemCreate"
    rollout.unmap_run(0, 2)
    serving.unmap_run(1, 1)
    assert kit.board.used_bytes == 2 * _PAGE
    rollout.map_run(0, 1, 2)
    assert kit.read(rollout, 0, 2) == bytes(2 * _PAGE)
    serving.close()
    rollout.close()
    assert not kit.board.used_bytes
    kit.close()


# ---- fence


def test_a_page_leaves_only_after_the_kernels_that_may_touch_it(kit):
    driver, api = kit.driver("rollout"), kit.apis["rollout"]
    driver.map_run(0, 0, 4)
    api.launch(driver.address + _PAGE, 2 * _PAGE, byte=0x11)
    driver.unmap_run(1, 2)
    assert not api.kernels and not api.violations
    api.launch(driver.address, _PAGE)
    driver.map_run(0, 5, 1)
    assert not api.kernels and not api.violations
    api.launch(driver.address + 3 * _PAGE, _PAGE)
    driver.close()
    assert not api.kernels and not api.violations


def test_a_kernel_without_a_fence_is_seen_by_the_fake():
    kit = CudaKit(_PAGES)
    driver, api = kit.driver("rollout", fence=lambda: None), kit.apis["rollout"]
    driver.map_run(0, 0, 4)
    api.launch(driver.address, _PAGE)
    driver.unmap_run(0, 1)
    assert api.violations
    api.kernels.clear()
    api.violations.clear()
    driver.close()
    kit.close()


def test_a_failed_fence_keeps_the_pages(kit):
    driver, api = kit.driver("serving"), kit.apis["serving"]
    driver.map_run(0, 0, 2)
    api.fail_at, api.fail_code = len(api.calls) + 3, api.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaCallError, match="cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.unmap_run(0, 2)
    assert kit.really_mapped(driver)[:2] == expected(kit, [0, 1])
    driver.close()


# ---- kept slots


def test_kept_slots_have_memory_of_their_own(kit):
    driver = kit.driver("serving", kept_slots=2)
    used = kit.board.used_bytes
    assert kit.read(driver, 0, 2) == bytes(2 * _PAGE)
    kit.fill(driver, 0, 2, 0x77)
    driver.map_run(2, 0, 6)
    for call in (lambda: driver.map_run(1, 0, 2), lambda: driver.unmap_run(0, 1)):
        with pytest.raises(ValueError, match="first 2 are kept"):
            call()
    driver.unmap_run(2, 6)
    assert kit.read(driver, 0, 2) == b"\x77" * 2 * _PAGE and kit.board.used_bytes == used
    driver.close()
    assert kit.board.used_bytes == used - 2 * _PAGE


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


# ---- page size, device, words of errors


def test_pages_outside_the_pool_are_refused(kit):
    driver = kit.driver("serving")
    for page, count in ((-1, 1), (_PAGES, 1), (_PAGES - 1, 2)):
        with pytest.raises(ValueError, match="outside the pool"):
            driver.map_run(0, page, count)
    assert not kit.apis["serving"].mappings
    driver.close()


@pytest.mark.parametrize("page_bytes", [0, 1, GRANULARITY - 1, GRANULARITY + 1, 3 * GRANULARITY // 2])
def test_a_page_size_that_does_not_fit_the_device_names_one_that_does(page_bytes):
    device, fits = Device(api=FakeCuda()), max(1, -(-page_bytes // GRANULARITY)) * GRANULARITY
    for make in (SharedPages.create, BudgetPages):
        with pytest.raises(ConfigurationError, match=f"make pages {fits} bytes large"):
            make(device, 4, page_bytes)


@pytest.mark.parametrize("multiple", [1, 2, 3, 7])
def test_any_multiple_of_the_granularity_is_a_page_size(multiple):
    api = FakeCuda()
    device = Device(api=api)
    pool = make_pool(device, 3, multiple * GRANULARITY)
    driver = CudaDriver(device, pool, 3)
    driver.map_run(0, 0, 3)
    driver.close()
    pool.close()
    assert api.nothing_left()


def test_a_pool_that_is_larger_than_the_device_names_the_flag_and_keeps_nothing():
    api = FakeCuda()
    api.board.capacity_bytes = 5 * _PAGE
    with pytest.raises(ConfigurationError, match="--coserve-pool-gib"):
        make_pool(Device(api=api), 6, _PAGE)
    assert api.nothing_left() and not api.board.used_bytes


def test_without_cuda_python_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_calls.importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"vllm-coserve\[cuda\]"):
        Device()


def test_without_a_driver_the_error_says_so():
    api = FakeCuda()

    def no_library(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    api.cuInit = no_library
    with pytest.raises(ConfigurationError, match=r"libcuda\.so\.1"):
        Device(api=api)


def test_an_error_names_call_code_and_meaning():
    device = Device(api=FakeCuda())
    with pytest.raises(CudaCallError, match=r"cuMemRelease: CUDA_ERROR_INVALID_VALUE \(as in the fake\)") as caught:
        device.release(12345)
    assert (caught.value.call, caught.value.code) == ("cuMemRelease", "CUDA_ERROR_INVALID_VALUE")


# ---- sharing


@pytest.mark.parametrize("why", ["attribute", "export"])
def test_without_exports_a_page_is_a_budget_and_the_log_says_so_once(why, caplog):
    api = FakeCuda(exports=why != "export", handle_attribute=int(why != "attribute"))
    with caplog.at_level(logging.WARNING, "vllm.coserve"):
        pool = make_pool(Device(api=api), 4, _PAGE)
    assert isinstance(pool, BudgetPages) and isinstance(NoEraser().zero(0), type(None))
    assert [r.message for r in caplog.records if "cannot be shared" in r.message] == [caplog.records[0].message]
    pool.close()
    assert api.nothing_left()


def test_a_page_keeps_its_bytes_whoever_maps_it(shared):
    serving, rollout = shared.driver("serving"), shared.driver("rollout")
    rollout.map_run(3, 5, 1)
    shared.fill(rollout, 3, 1, 0x42)
    rollout.unmap_run(3, 1)
    serving.map_run(0, 5, 1)
    assert shared.read(serving, 0, 1) == b"\x42" * _PAGE
    serving.close()
    rollout.close()


def test_the_eraser_clears_new_memory_and_no_page_beside(shared):
    serving, eraser = shared.driver("serving"), shared.eraser()
    serving.map_run(0, 0, _PAGES)
    assert shared.read(serving, 0, _PAGES) == bytes([GARBAGE]) * _PAGES * _PAGE
    eraser.zero(2, 3)
    dirty = bytes([GARBAGE]) * _PAGE
    assert shared.read(serving, 0, _PAGES) == 2 * dirty + bytes(3 * _PAGE) + 3 * dirty
    eraser.close()
    eraser.close()
    with pytest.raises(AssertionError, match="closed"):
        eraser.zero(0)
    serving.close()


# ---- any call fails, in any way


def tables_with_a_failure(make_kit, fail_at, how):
    """All tables, with one call of the rollout's process failing; returns how many calls it made."""
    kit = make_kit(_PAGES)
    api = kit.apis["rollout"]
    begin = len(api.calls)
    api.fail_at, api.how = begin + fail_at if fail_at else None, how
    driver, failures = until_done(kit.driver, "rollout")
    assert len(api.mappings) == 0
    mapper = TableMapper(driver, table := np.full(_PAGES, -1, dtype=np.int32))
    for wanted in _TABLES:
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


def test_a_device_that_cannot_be_opened_says_which_call_failed():
    for fail_at, name in enumerate(("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"), 1):
        api = FakeCuda()
        api.fail_at = fail_at
        with pytest.raises(CudaCallError, match=f"{name}: CUDA_ERROR_UNKNOWN"):
            Device(api=api)


def test_a_look_up_that_fails_is_not_taken_for_an_empty_slot(shared):
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
