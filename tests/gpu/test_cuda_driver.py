"""The CUDA page driver on a real device: what the fake of the unit tests says of CUDA must be so."""

import os
import time

import pytest

from tests.gpu.device import PAGE, Helper, fill, free_bytes, read, until, write
from tests.unit.fake_cuda import GRANULARITY, FakeCuda
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory.cuda import CudaDriver, CudaEraser
from vllm_coserve.memory.cuda_calls import NOT_MAPPED, CudaCallError, Device
from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, WithWeightPages, make_pool
from vllm_coserve.memory.handles import HandleServer, Offer

_PAGES = 64


@pytest.fixture(scope="module")
def device():
    return Device()


@pytest.fixture
def pool(device):
    pool = make_pool(device, _PAGES, PAGE)
    assert isinstance(pool, SharedPages), "this device does not export handles"
    yield pool
    pool.close()


@pytest.fixture
def driver(device, pool):
    driver = CudaDriver(device, pool, _PAGES)
    yield driver
    driver.close()


@pytest.fixture
def rollout(pool, tmp_path):
    """A second process with a driver of its own over the same pool."""
    server = HandleServer(tmp_path / "pages", Offer(True, _PAGES, PAGE), pool.export)
    helper = Helper("rollout", tmp_path / "pages", _PAGES)
    yield helper
    helper.close()
    server.close()


# ---- one process


def test_page_sizes_are_multiples_of_the_granularity(device):
    with pytest.raises(ConfigurationError, match="make pages"):
        SharedPages.create(device, 1, PAGE + 4096)
    for page_bytes in (PAGE, 3 * PAGE, 16 * PAGE):
        pool = SharedPages.create(device, 2, page_bytes)
        driver = CudaDriver(device, pool, 2)
        driver.map_run(0, 0, 2)
        fill(device, driver.address, 2 * page_bytes, 7)
        assert read(device, driver.address + 2 * page_bytes - 1, 1) == b"\x07"
        driver.close()
        pool.close()


def test_a_page_keeps_its_bytes_at_any_slot(device, driver):
    driver.map_run(0, 0, _PAGES)
    for page in range(_PAGES):
        fill(device, driver.address + page * PAGE, PAGE, page + 1)
    driver.unmap_run(0, _PAGES)
    for slot, page in enumerate(reversed(range(_PAGES))):
        driver.map_run(slot, page, 1)
    for slot in range(_PAGES):
        at = driver.address + slot * PAGE
        assert read(device, at, 1) == read(device, at + PAGE - 1, 1) == bytes([_PAGES - slot])


def test_pages_are_replaced_and_unmapped_twice(device, driver):
    driver.map_run(0, 0, 8)
    driver.map_run(4, 8, 8)
    driver.unmap_run(0, _PAGES)
    driver.unmap_run(0, _PAGES)
    driver.map_run(60, 60, 4)
    write(device, driver.address + 60 * PAGE, b"abc")
    assert read(device, driver.address + 60 * PAGE, 3) == b"abc"


def test_the_eraser_zeroes_what_an_engine_wrote(device, pool, driver):
    eraser = CudaEraser(device, pool)
    driver.map_run(0, 0, _PAGES)
    fill(device, driver.address, _PAGES * PAGE, 0xAB)
    driver.unmap_run(3, 5)
    eraser.zero(3, 5)
    driver.map_run(3, 3, 5)
    assert read(device, driver.address + 2 * PAGE, PAGE) == b"\xab" * PAGE
    assert not any(read(device, driver.address + 3 * PAGE, 5 * PAGE))
    assert read(device, driver.address + 8 * PAGE, PAGE) == b"\xab" * PAGE
    eraser.close()


def test_budgets_take_and_give_memory_and_are_zero(device):
    pages = BudgetPages(device, _PAGES, PAGE)
    driver = CudaDriver(device, pages, _PAGES)
    before = free_bytes(device)
    driver.map_run(0, 0, _PAGES)
    assert before - free_bytes(device) >= _PAGES * PAGE
    assert not any(read(device, driver.address, _PAGES * PAGE))
    driver.unmap_run(0, _PAGES)
    assert free_bytes(device) >= before - 16 * PAGE, "unmapping alone gives the memory back"
    driver.close()
    pages.close()


def test_weight_pages_have_memory_from_their_zeroing_to_their_discarding(device, pool):
    pages = WithWeightPages(device, pool, _PAGES)
    eraser, driver = CudaEraser(device, pages), CudaDriver(device, pages, 2 * _PAGES)
    before = free_bytes(device)
    eraser.zero(_PAGES, _PAGES)
    assert before - free_bytes(device) >= _PAGES * PAGE
    driver.map_run(3, _PAGES, _PAGES)
    assert not any(read(device, driver.address + 3 * PAGE, _PAGES * PAGE))
    fill(device, driver.address + 3 * PAGE, _PAGES * PAGE, 0xAB)
    driver.unmap_run(3, _PAGES)
    eraser.zero(_PAGES, 1)
    driver.map_run(0, _PAGES, 2)
    assert not any(read(device, driver.address, PAGE)) and read(device, driver.address + PAGE, 1) == b"\xab"
    driver.unmap_run(0, 2)
    eraser.discard(_PAGES, _PAGES)
    assert free_bytes(device) >= before - 16 * PAGE
    driver.close()
    eraser.close()


def test_a_pool_larger_than_the_device_keeps_nothing(device):
    page_bytes = 512 * PAGE
    before = free_bytes(device)
    with pytest.raises(ConfigurationError, match="--coserve-pool-gib"):
        SharedPages.create(device, before // page_bytes + 2, page_bytes)
    assert free_bytes(device) >= before - 16 * PAGE


# ---- torch


def test_a_tensor_lies_over_a_range_without_a_copy(device, driver):
    import torch

    from vllm_coserve.memory.tensors import int8_over

    tensor = int8_over(driver.address, _PAGES * PAGE, "cuda", 0)  # nothing is mapped yet
    assert tensor.data_ptr() == driver.address and tensor.device == torch.device("cuda", 0)
    driver.map_run(10, 3, 2)
    blocks = tensor.view(torch.bfloat16).view(_PAGES, -1)
    blocks[10:12] = 1.5
    torch.cuda.synchronize()
    assert read(device, driver.address + 11 * PAGE, 2) == b"\xc0\x3f"
    write(device, driver.address + 10 * PAGE, b"\x00\x40")
    assert blocks[10, 0].item() == 2.0


def test_unmapping_waits_for_a_kernel_that_was_launched_before(driver):
    import torch

    from vllm_coserve.memory.tensors import int8_over

    tensor = int8_over(driver.address, _PAGES * PAGE, "cuda", 0)
    driver.map_run(0, 0, 4)
    tensor[: 4 * PAGE].zero_()
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            done = torch.cuda.Event()
            torch.cuda._sleep(400_000_000)  # cycles: some tenths of a second
            tensor[: 4 * PAGE].add_(1)
            done.record()
            assert not done.query(), "the kernel was over too soon to prove anything"
            driver.unmap_run(0, 4)
            assert done.query()
        driver.map_run(0, 0, 4)
    assert tensor[: 4 * PAGE].unique().tolist() == [2]


def test_a_graph_touches_kept_slots_while_pages_come_and_go(device, pool):
    import torch

    from vllm_coserve.memory.tensors import int8_over

    driver = CudaDriver(device, pool, _PAGES, kept_slots=2)
    driver.cover()
    tensor = int8_over(driver.address, _PAGES * PAGE, "cuda", 0)
    tensor.add_(1)  # every slot can be touched, as in a warm-up
    torch.cuda.synchronize()
    driver.uncover()
    graph, kept = torch.cuda.CUDAGraph(), tensor[: 2 * PAGE]
    kept.zero_()
    with torch.cuda.graph(graph):
        kept.add_(1)
    for _ in range(20):
        graph.replay()
        driver.map_run(2, 0, 40)
        graph.replay()
        driver.unmap_run(2, 40)
    torch.cuda.synchronize()
    assert kept.unique().tolist() == [40]
    del graph
    driver.close()


# ---- what the fake says


def _answers(device, granularity):
    """What CUDA says to calls that it may refuse, one after another; by code where the driver looks at it."""
    size, codes = granularity, []
    prop = device.allocation(shareable=True)

    def call(name, *args):
        try:
            value = device.call(name, *args)
            codes.append((name, "CUDA_SUCCESS"))
            return value
        except CudaCallError as exc:
            codes.append((name, exc.code if name == "cuMemRetainAllocationHandle" else "refused"))
            return None

    device.activate()
    base = call("cuMemAddressReserve", 4 * size, 0, 0, 0)
    one, two = (call("cuMemCreate", size, prop, 0) for _ in range(2))
    call("cuMemRetainAllocationHandle", int(base))
    call("cuMemUnmap", base, size)
    call("cuMemMap", base, size, 0, one, 0)
    call("cuMemMap", base, size, 0, two, 0)
    call("cuMemSetAccess", base, 2 * size, device.read_write(), 1)
    call("cuMemMap", int(base) + size, size, 0, two, 0)
    call("cuMemSetAccess", base, 2 * size, device.read_write(), 1)
    call("cuMemMap", int(base) + 2 * size, size, 0, one, 0)  # the same memory at two addresses
    retained = call("cuMemRetainAllocationHandle", int(base))
    assert int(retained) == int(one)
    call("cuMemRelease", retained)
    call("cuMemUnmap", base, 3 * size)
    call("cuMemUnmap", base, 3 * size)
    call("cuMemCreate", size // 2, prop, 0)
    call("cuMemRelease", one)
    call("cuMemRelease", two)
    call("cuMemAddressFree", base, 4 * size)
    return codes


def test_the_fake_refuses_what_the_device_refuses(device):
    assert _answers(device, PAGE) == _answers(Device(api=FakeCuda()), GRANULARITY)


def test_an_empty_slot_is_told_from_a_mapped_one_after_a_failed_call(device, driver):
    with pytest.raises(CudaCallError) as caught:
        device.call("cuMemRetainAllocationHandle", driver.address)
    assert caught.value.code == NOT_MAPPED
    driver.map_run(0, 0, 4)
    device.call("cuMemUnmap", driver.address + PAGE, PAGE)  # behind the driver's back
    driver._slots[:4] = bytes([2]) * 4
    driver.map_run(0, 4, 4)
    fill(device, driver.address, 4 * PAGE, 1)


# ---- two processes


def test_two_processes_write_to_one_page_in_turn(device, driver, rollout):
    rollout.ask("map 5 9 2")
    rollout.ask("fill 5 2 66")
    rollout.ask("unmap 5 2")
    driver.map_run(0, 9, 2)
    assert read(device, driver.address, 2 * PAGE) == b"\x42" * 2 * PAGE
    fill(device, driver.address, PAGE, 0x43)
    driver.unmap_run(0, 2)
    rollout.ask("map 0 9 1")
    assert rollout.ask("first 0") == str(0x43)


def test_an_access_to_a_page_that_was_taken_ends_only_that_engine(device, driver, rollout):
    rollout.ask("map 0 0 1")
    rollout.ask("unmap 0 1")
    assert "CUDA_ERROR" in rollout.ask("touch 0")
    driver.map_run(0, 0, 1)
    fill(device, driver.address, PAGE, 1)
    assert read(device, driver.address, 1) == b"\x01"


def test_memory_of_a_killed_holder_comes_back(device):
    before = free_bytes(device)
    holder = Helper("holder", "-", 1024)
    assert before - free_bytes(device) >= 1024 * PAGE
    holder.close()
    took_s = until(lambda: free_bytes(device) >= before - 64 * PAGE, 10)
    assert took_s is not None
    print(f"memory came back {took_s * 1000:.0f} ms after the process had gone")


def test_a_killed_rollout_writes_no_more_once_its_process_has_ended(device, pool, driver, rollout):
    from vllm_coserve.engine.device import has_ended

    eraser = CudaEraser(device, pool)
    rollout.ask("map 0 0 32")
    rollout.ask("storm 0 32")
    time.sleep(0.2)
    rollout.process.kill()
    took_s = until(lambda: has_ended(rollout.process.pid), 20)
    assert took_s is not None
    eraser.zero(0, 32)
    time.sleep(0.5)
    driver.map_run(0, 0, 32)
    assert not any(read(device, driver.address, 32 * PAGE))
    eraser.close()
    print(f"the process had ended {took_s * 1000:.0f} ms after the kill")


def test_no_descriptor_is_left(device, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    pool = make_pool(device, 300, PAGE)
    server = HandleServer(tmp_path / "pages", Offer(True, 300, PAGE), pool.export)
    helper = Helper("rollout", tmp_path / "pages", 300)
    helper.close()
    server.close()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) < before + 8, "the driver may keep some of its own, but not one a page"
