"""What is found before a start, and what makes the supervisor end a sidecar."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_coserve.api.config import parse_config
from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine import preflight, supervisor
from vllm_coserve.engine.core_runtime import CoreRuntime
from vllm_coserve.engine.supervisor import Supervisor


def _config(**more):
    return parse_config({"rollout": "m", **more})


@pytest.fixture
def watched():
    block = ControlBlock.create(8, 4096)[0]
    fds = dict.fromkeys(("control_fd", "pool_fd", "members_fd"), 0)
    context = Context(side="serving", owner_pid=1, rollout_port=1, serving_port=2, config=_config(), **fds)
    return Supervisor(context, block, []), block


def test_a_restart_is_polite_but_not_for_ever():
    assert [supervisor.restart_niceness(s) for s in (0, 29, 31, 59, 61, 1000)] == [10, 10, 5, 5, 0, 0]


def test_a_part_without_signs_of_life_is_named(watched, monkeypatch):
    supervise, block = watched
    now_ns = 1_000_000_000_000
    monkeypatch.setattr(supervisor.time, "monotonic_ns", lambda: now_ns)
    assert supervise._hung() == "", "parts that were never seen are starting"
    block.set(Word.ROLLOUT_ALIVE_NS, now_ns - int(9e9))
    block.set(Word.ROLLOUT_API_ALIVE_NS, now_ns - int(9e9))
    assert supervise._hung() == ""
    block.set(Word.ROLLOUT_ALIVE_NS, now_ns - int(11e9))
    assert supervise._hung() == "engine core"
    block.set(Word.ROLLOUT_API_ALIVE_NS, now_ns - int(11e9))
    assert supervise._hung() == "API server"


def test_nobody_is_taken_for_hung_after_a_sleep_of_the_whole_machine(watched, monkeypatch):
    supervise, block = watched
    now_ns = [1_000_000_000_000]
    monkeypatch.setattr(supervisor.time, "monotonic_ns", lambda: now_ns[0])
    block.set(Word.ROLLOUT_ALIVE_NS, now_ns[0])
    assert supervise._hung() == ""
    now_ns[0] += int(60e9)  # nobody ran, the supervisor neither
    for _ in range(95):
        assert supervise._hung() == ""
        now_ns[0] += int(0.1e9)
    now_ns[0] += int(0.9e9)
    assert supervise._hung() == "engine core", "it did not come back"


def test_a_long_step_is_no_hang_but_a_stuck_one_is(watched, monkeypatch):
    supervise, block = watched
    now_ns = 1_000_000_000_000
    monkeypatch.setattr(supervisor.time, "monotonic_ns", lambda: now_ns)
    block.set(Word.ROLLOUT_HEARTBEAT_NS, now_ns - int(20e9))
    block.set(Word.ROLLOUT_RUNNING, 3)
    assert supervise._hung() == ""
    block.set(Word.ROLLOUT_HEARTBEAT_NS, now_ns - int(31e9))
    assert supervise._hung() == "worker"
    block.set(Word.ROLLOUT_RUNNING, 0)
    assert supervise._hung() == "", "an idle engine has nothing to show"


def test_priorities_of_a_group_are_lowered_and_raised_again():
    if not supervisor._may_raise_priority():
        pytest.skip("this user may not raise a priority again (CAP_SYS_NICE, RLIMIT_NICE)")
    code = "import os, time; print(flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        child.stdout.readline()
        assert supervisor._renice(child.pid, 10)
        assert supervisor.os.getpriority(supervisor.os.PRIO_PROCESS, child.pid) == 10
        assert supervisor._renice(child.pid, 0)
        assert supervisor.os.getpriority(supervisor.os.PRIO_PROCESS, child.pid) == 0
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"pool_gib": 0.001}, "at least 4 pages"),
        ({"pool_gib": 0.0625, "headroom": 0.97}, "leaves none of the pool's 32 pages to lend"),
        ({"pool_gib": 1e6}, "lower it"),
    ],
)
def test_pools_that_lend_nothing_are_refused(flags, says):
    with pytest.raises(ConfigurationError, match=says):
        preflight.pool_size_pages(argparse.Namespace(), _config(**flags))


def test_models_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path):
    for name, size in (("serving", 10), ("rollout", 1 << 42)):
        folder = tmp_path / name
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as f:
            f.truncate(size)  # sparse
    args = argparse.Namespace(model_tag=str(tmp_path / "serving"), load_format="auto")
    with pytest.raises(ConfigurationError, match=r"4096\.0 GiB \(rollout\).*choose a smaller"):
        preflight.check_fits(args, _config(rollout=str(tmp_path / "rollout")), 50)
    preflight.check_fits(args, _config(rollout=str(tmp_path / "serving")), 50)
    preflight.check_fits(args, _config(rollout="a/name", rollout_args="--load-format dummy"), 50)


def _runtime():
    runtime = CoreRuntime.__new__(CoreRuntime)
    runtime.block = ControlBlock.create(8, 4096)[0]
    runtime._table = runtime.block.serving_table
    return runtime


def _tensors(*strides, host=False):
    return SimpleNamespace(kv_cache_tensors=[SimpleNamespace(block_stride=s, host_resident=host) for s in strides])


def test_models_whose_blocks_cannot_share_pages_are_refused():
    runtime = _runtime()
    runtime.learn_geometry(_tensors(512, 512))
    assert runtime.geometry.block_bytes == 512
    for config in (_tensors(512, 256), _tensors(512, host=True)):
        with pytest.raises(ConfigurationError, match="all layers use the same full attention"):
            _runtime().learn_geometry(config)


@pytest.fixture
def short_folder():
    """Sockets cannot have long paths, so pytest's own folder will not do."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        yield Path(folder)


def test_the_folder_of_sockets_goes_with_its_owner(short_folder):
    code = (
        "import sys, tempfile, time\n"
        f"tempfile.tempdir = {str(short_folder)!r}\n"
        "from vllm_coserve.engine.life import socket_folder\n"
        "with socket_folder() as folder:\n"
        "    (folder / 'x').write_text('')\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(30 if sys.argv[1] == 'killed' else 0)\n"
    )
    for how in ("killed", "ends"):
        child = subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline().startswith(str(short_folder))
        if how == "killed":
            child.kill()
        child.wait(10)
        deadline = time.monotonic() + 5
        while list(short_folder.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not list(short_folder.iterdir()), how


def test_a_dying_process_does_not_wait_for_an_idle_core():
    code = (
        "import os, threading, time\n"
        "def idle():\n"
        "    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "    print(threading.get_native_id(), flush=True)\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=idle).start()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        thread = int(process.stdout.readline())
        assert os.sched_getscheduler(thread) == os.SCHED_IDLE
        supervisor._hasten(process.pid)
        assert os.sched_getscheduler(thread) == os.SCHED_OTHER
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
