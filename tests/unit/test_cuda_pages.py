"""The CUDA page driver over a strict fake of CUDA: accounts, fences, zeroes, kept slots and the words of errors."""

import logging
import os

import pytest

from tests.unit.fake_cuda import GARBAGE, GRANULARITY, FakeCuda
from tests.unit.page_kits import BudgetKit, CudaKit, expected
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory import cuda_calls
from vllm_coserve.memory.cuda import CudaDriver, NoEraser
from vllm_coserve.memory.cuda_calls import CudaCallError, Device
from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, make_pool

_PAGES = 8
_PAGE = CudaKit.page


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


def test_a_device_that_cannot_be_opened_says_which_call_failed():
    for fail_at, name in enumerate(("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"), 1):
        api = FakeCuda()
        api.fail_at = fail_at
        with pytest.raises(CudaCallError, match=f"{name}: CUDA_ERROR_UNKNOWN"):
            Device(api=api)


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
