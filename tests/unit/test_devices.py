"""Which driver and eraser a device has, and what an engine needs of a GPU that can be seen without one."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.unit.fake_cuda import GRANULARITY, Board, FakeCuda
from vllm_coserve.api.errors import ConfigurationError, ContractError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine import cli, preflight, supervisor, worker_hooks
from vllm_coserve.engine.core_runtime import KIND_WORKER, SIDE_ROLLOUT
from vllm_coserve.engine.device import has_ended, wait_for_device
from vllm_coserve.engine.serving_runtime import ServingRuntime
from vllm_coserve.memory import devices
from vllm_coserve.memory.cuda import CudaDriver, CudaEraser, NoEraser
from vllm_coserve.memory.devices import kept_slots, make_driver, make_eraser
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner, ServingLedger
from vllm_coserve.memory.tensors import int8_over

_PAGES, _PAGE = 6, GRANULARITY


def test_a_cpu_has_the_host_driver_and_its_eraser():
    fd = create_pool(_PAGES, _PAGE)
    before = len(os.listdir("/proc/self/fd"))
    context = SimpleNamespace(device="cpu", pool_fd=fd, open=os.dup)
    driver, eraser = make_driver(context, _PAGES, _PAGE), make_eraser(context, _PAGES, _PAGE)
    assert isinstance(driver, HostDriver) and isinstance(eraser, PoolEraser)
    driver.map_run(0, 2, 1)
    ctypes.memset(driver.address, 7, _PAGE)
    eraser.zero(2)
    assert not any(ctypes.string_at(driver.address, _PAGE))
    driver.close()
    eraser.close()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Both sides of a pair on one board, as the processes of the two engines would have them."""
    board, made = Board(), []

    def start(exports=True, pages=(_PAGES, _PAGES)):
        sides = []
        for side, num_pages in zip(("serving", "rollout"), pages, strict=True):
            monkeypatch.setattr(devices, "_pool", None)  # another process
            api = FakeCuda(board, exports=exports)
            context = SimpleNamespace(device="cuda", side=side, pages_socket=str(tmp_path / "pages"))
            parts = [make_driver(context, num_pages, _PAGE, kept_slots=1, api=api)]
            if side == "serving":
                parts.insert(0, make_eraser(context, num_pages, _PAGE, api=api))
            made.append((devices._pool, parts, api))
            sides += parts
        return sides

    yield start
    for pool, parts, api in made:
        for part in parts:
            part.close()
        pool.pages.close()
        if pool.server is not None:
            pool.server.close()
        assert api.nothing_left() and not api.violations
    assert not board.used_bytes


@pytest.mark.parametrize("exports", [True, False])
def test_a_gpu_has_the_cuda_driver_over_one_pool_of_both_engines(pair, exports):
    eraser, serving, rollout = pair(exports)
    assert isinstance(eraser, CudaEraser if exports else NoEraser)
    assert isinstance(serving, CudaDriver) and isinstance(rollout, CudaDriver)
    assert serving.kept_slots == rollout.kept_slots == 1
    theirs, ours = rollout._device.api, serving._device.api
    rollout.map_run(2, 4, 1)
    theirs.write(rollout.address + 2 * _PAGE, b"\xaa" * _PAGE)
    rollout.unmap_run(2, 1)
    if exports:
        serving.map_run(1, 4, 1)
        assert ours.read(serving.address + _PAGE, _PAGE) == b"\xaa" * _PAGE
        serving.unmap_run(1, 1)
    eraser.zero(4)
    serving.map_run(1, 4, 1)
    assert ours.read(serving.address + _PAGE, _PAGE) == bytes(_PAGE)


def test_a_pool_of_another_size_is_refused(pair):
    with pytest.raises(ContractError, match="not 7 pages"):
        pair(pages=(_PAGES, _PAGES + 1))


def test_a_covered_range_can_be_touched_anywhere_until_pages_come(pair):
    _, serving, _ = pair()
    api = serving._device.api
    before = len(set(map(id, api.memories())))
    serving.cover()
    assert len(set(map(id, api.memories()))) == before + 1, "one page for all slots"
    api.launch(serving.address, _PAGES * _PAGE, byte=3)
    serving.uncover()
    assert not api.kernels and not api.violations
    with pytest.raises(AssertionError, match="faults"):
        api.read(serving.address + _PAGE, 1)
    assert api.read(serving.address, _PAGE) == b"\x03" * _PAGE, "the kept slot stays"
    serving.map_run(1, 0, 5)


def test_kept_slots_are_those_of_the_placeholder_block():
    assert [kept_slots(Geometry(n, 4096, 8), "cuda") for n in (100, 4096, 4097, 9000)] == [1, 1, 2, 3]
    assert kept_slots(Geometry(9000, 4096, 8), "cpu") == 0


def test_a_tensor_lies_over_a_range_of_which_nothing_is_mapped():
    fd = create_pool(4, _PAGE)
    driver = HostDriver(fd, 4, _PAGE)
    tensor = int8_over(driver.address, 3 * _PAGE + 5, "cpu")
    assert tensor.dtype == torch.int8 and tensor.shape == (3 * _PAGE + 5,) and tensor.is_contiguous()
    assert tensor.data_ptr() == driver.address and tensor.device.type == "cpu"
    driver.map_run(1, 3, 1)
    view = tensor.view(torch.bfloat16) if tensor.numel() % 2 == 0 else tensor[: 2 * _PAGE].view(torch.bfloat16)
    view[_PAGE // 2 : _PAGE] = 1.5
    assert os.pread(fd, 2, 3 * _PAGE) == bytes(torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8).tolist())
    del tensor, view
    driver.close()
    os.close(fd)


def test_a_process_has_ended_when_its_last_thread_has():
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"  # its first thread ends: a zombie with a thread that lives
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    deadline = time.monotonic() + 20
    while _state(child.pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _state(child.pid) == "Z" and not has_ended(child.pid)
    child.send_signal(signal.SIGKILL)
    while not has_ended(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(child.pid), "not reaped yet, but gone"
    child.wait(20)
    child.stdout.close()
    assert has_ended(child.pid) and has_ended(0) and not has_ended(os.getpid())


def _state(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]


def test_nothing_is_waited_for_on_a_cpu():
    wait_for_device(SimpleNamespace(device="cpu"))


# ---- the engines


@pytest.fixture
def block():
    block, fd = ControlBlock.create(_PAGES, _PAGE)
    os.close(fd)
    return block


@pytest.mark.parametrize("fail_in_uncover", [False, True])
def test_the_worker_covers_its_range_until_the_first_table(block, tmp_path, monkeypatch, fail_in_uncover):
    api = FakeCuda()
    monkeypatch.setattr(devices, "_pool", None)
    monkeypatch.setattr(worker_hooks, "device_index", lambda context: 0)
    monkeypatch.setattr(worker_hooks, "make_driver", lambda *args, **kw: make_driver(*args, **kw, api=api))
    monkeypatch.setattr(worker_hooks, "int8_over", lambda *args: args)
    monkeypatch.setattr(worker_hooks.WorkerRuntime, "_follow", lambda self: None)
    context = SimpleNamespace(side="serving", device="cuda", pages_socket=str(tmp_path / "pages"))
    runtime = worker_hooks.WorkerRuntime(context, block)
    address, nbytes, *where = runtime.kv_tensor(_PAGES * _PAGE, block_bytes=_PAGE + 1)
    assert (nbytes, where) == (_PAGES * _PAGE, ["cuda", 0])
    api.launch(address, nbytes)  # warm-up, before any table
    runtime.sync()
    assert runtime._uncover is not None, "there is no table yet"
    block.serving_table[2:4] = [5, 1]
    block.add(Word.SERVING_TABLE_VERSION)
    if fail_in_uncover:
        api.fail_at = len(api.calls) + 3
    runtime.sync()
    assert runtime.faults == fail_in_uncover and not api.violations
    accessible = [api._accessible(address + slot * _PAGE, _PAGE) for slot in range(_PAGES)]
    assert accessible == [True, True, True, True, False, False], "two kept slots, and two with a page"
    runtime._mapper._driver.close()
    devices._pool.pages.close()
    devices._pool.server.close()
    assert api.nothing_left()


def test_pages_of_a_killed_rollout_come_back_when_its_worker_has_ended(block):
    owners = block.owners
    ledger = ServingLedger(owners, lambda page, count: None)
    assert ledger.take(3, Owner.ROLLOUT)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    block.join(SIDE_ROLLOUT, KIND_WORKER, child.pid)
    block.set(Word.GENERATION, 1)
    block.set(Word.GENERATION_DEAD, 1)
    members = os.memfd_create("members")
    runtime = SimpleNamespace(block=block, context=SimpleNamespace(device="cuda"), _members_fd=members, ledger=ledger)
    ServingRuntime._clear_dead_generation(runtime)
    assert ledger.count(Owner.ROLLOUT) == 3, "nobody holds the lock, but the worker is not gone"
    child.kill()
    child.wait(20)
    ServingRuntime._clear_dead_generation(runtime)
    assert ledger.count(Owner.ROLLOUT) == 0 and block.get(Word.GENERATION_CLEARED) == 1
    os.close(members)


def test_both_engines_of_a_gpu_start_without_a_step_in_flight_and_without_kv_memory_of_their_own(monkeypatch):
    args = SimpleNamespace(async_scheduling=None, gpu_memory_utilization=0.9)
    cli.suit_gpu(args)
    assert args.async_scheduling is False and args.gpu_memory_utilization < 0.1
    config = SimpleNamespace(rollout="m", rollout_port=1, rollout_argv=["--gpu-memory-utilization", "0.2"])
    context = SimpleNamespace(device="cuda", config=config, model_copy=lambda update: context)
    context.model_dump_json = lambda: "{}"
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda argv, **kwargs: argv)
    argv = supervisor.Supervisor._spawn(SimpleNamespace(_context=context, _api_keys=[]))
    assert "--no-async-scheduling" in argv
    assert argv.index("--gpu-memory-utilization") < len(argv) - 2, "what the user gave comes last"


def test_a_worker_in_a_process_of_its_own_is_refused_on_a_gpu():
    with socket.socket() as a, socket.socket() as b:
        for s in (a, b):
            s.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (a, b)]
    args = SimpleNamespace(port=ports[0], host="127.0.0.1", distributed_executor_backend="mp")
    config = SimpleNamespace(rollout_port=ports[1])
    with pytest.raises(ConfigurationError, match="--distributed-executor-backend"):
        preflight.preflight(args, config, "cuda")
