"""What vllm-coserve counts on in the installed vLLM."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

from vllm_coserve.engine.seams import SEAMS, VLLM_VERSION, resolve

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("key", SEAMS)
def test_seam_is_there_with_its_parameters(key):
    owner, name = resolve(key)
    seam = SEAMS[key]
    assert seam.reason and seam.until
    if seam.parameters is None:
        return
    got = list(inspect.signature(getattr(owner, name)).parameters)
    wanted = [p for p in seam.parameters if p != "cls"]
    assert [p for p in got if p in wanted] == wanted, f"{seam.attr} takes {got}"


def test_version():
    assert version("vllm").startswith(VLLM_VERSION)


def test_kv_allocation_makes_one_buffer():
    from vllm.v1.worker import utils

    source = inspect.getsource(utils.allocate_kv_cache)
    assert source.count("torch.zeros(") == 1 and "dtype=torch.int8" in source


def test_what_is_compiled_for_logprobs_is_what_we_compute():
    from vllm.v1.sample.ops import logprobs

    source = inspect.getsource(logprobs)
    assert source.count("torch.compile(") == 1 and "return (x >= values).sum(-1)" in source


def test_a_reload_writes_where_the_weights_are():
    """Parked weights and captured graphs count on their addresses."""
    from vllm.model_executor.model_loader.reload import layerwise

    assert "param.data.copy_(" in inspect.getsource(layerwise._copy_and_restore_kernel_tensors)


def test_fields():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequestType
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert "stop_reason" in EngineCoreOutput.__struct_fields__
    assert {"block_stride", "host_resident", "layers"} <= {f.name for f in dataclasses.fields(KVCacheTensor)}
    wanted = {"num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"}
    assert wanted <= {f.name for f in dataclasses.fields(SchedulerOutput)}
    assert KVCacheLayout["BLHNC"].is_block_outermost
    assert hasattr(EngineCoreRequestType, "WAKEUP")


def test_scheduler_attributes_are_set_in_its_constructor():
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.__init__)
    for name in ("running", "waiting", "requests", "max_num_scheduled_tokens", "kv_cache_manager"):
        assert f"self.{name}" in source


def _python(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_without_a_pair_only_the_command_line_is_touched():
    out = _python(
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()\n"
        "from vllm_coserve.engine.seams import patched; print(sorted(patched()))"
    )
    assert out.strip().splitlines()[-1] == "['cli_args', 'serve_cmd']"


def test_an_engine_that_shares_its_cores_naps(monkeypatch):
    monkeypatch.setenv("VLLM_COSERVE_SHARED_CORES", "1")
    out = _python(
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "import timeit\n"
        "from vllm.distributed.device_communicators import shm_broadcast as shm\n"
        "print(shm.sched_yield.__name__, timeit.timeit(shm.sched_yield, number=2000) / 2000)"
    )
    name, seconds = out.strip().splitlines()[-1].split()
    assert name == "nap" and 2e-6 < float(seconds) < 2e-3


_GROUPS = """
import os, sys
from pathlib import Path
from vllm.distributed import parallel_state as groups
from vllm.utils.network_utils import get_open_port
if sys.argv[1] == "shared":
    from vllm_coserve.engine.process_groups import share_groups_of_a_single_rank
    share_groups_of_a_single_rank()
from vllm.config import VllmConfig, set_current_vllm_config
with set_current_vllm_config(VllmConfig()):
    for again in range(2):
        groups.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        groups.initialize_model_parallel(1, 1)
        names = [t.read_text().strip() for t in Path("/proc/self/task").glob("*/comm")]
        print(names.count("gloo_tcp_loop"), groups.get_tp_group().world_size)
        groups.destroy_model_parallel()
        groups.destroy_distributed_environment()
"""


def test_a_single_rank_has_one_group_for_all_purposes():
    plain, shared = (_python(_GROUPS, how).split() for how in ("plain", "shared"))
    assert int(plain[0]) > 6 and shared == ["2", "1"] * 2  # the default group's thread, and one


def test_a_patch_is_applied_once():
    out = _python(
        "from vllm_coserve.engine import seams\n"
        "calls = []\n"
        "make = lambda original: (calls.append(1), original)[1]\n"
        "seams.patch('schedule', make); seams.patch('schedule', make); print(len(calls))"
    )
    assert out.strip().splitlines()[-1] == "1"


def test_help_shows_the_flags_with_units_and_defaults():
    out = _python(
        "import sys; sys.argv = ['vllm', 'serve', '--help=Co-serving']\n"
        "from vllm.entrypoints.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass"
    )
    for flag in ("--coserve-rollout", "--coserve-ttft-slo-ms", "--coserve-pool-gib", "--coserve-policy"):
        assert flag in out
    assert "in ms" in out and "default" in out
