"""Start-ups that cannot work: a message with the fix, a non-zero exit, nothing left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.bench.machine import leftovers
from tests.scenario.harness import COMMON, run_serve
from vllm_coserve.demo.servers import free_port

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]


def _argv(models: tuple[Path, Path], *more: str) -> list[str]:
    args = [str(models[0]), *COMMON.split(), "--host=127.0.0.1", f"--port={free_port()}"]
    if not any(m.startswith("--coserve-rollout=") for m in more):
        args.append(f"--coserve-rollout={models[1]}")
    if not any(m.startswith("--coserve-rollout-port=") for m in more):
        args.append(f"--coserve-rollout-port={free_port()}")
    return [*args, *more]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--coserve-rollout=/no/such/model"], "no such folder"),
        (["--coserve-ttft-slo-ms=0"], "--coserve-ttft-slo-ms"),
        (["--coserve-tpot-slo-ms=-3"], "--coserve-tpot-slo-ms"),
        (["--coserve-pool-gib=100000"], "lower it"),
        (["--coserve-rollout-args=--max-model-len 'oops"], "quotes"),
    ],
    ids=["missing-model", "slo-zero", "slo-negative", "pool-too-large", "quotes"],
)
def test_refused(models: tuple[Path, Path], flags: list[str], says: str) -> None:
    before = leftovers()
    done = run_serve(_argv(models, *flags))
    assert done.returncode == 2, done.stderr[-2000:]
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert leftovers() <= before


def test_port_in_use(models: tuple[Path, Path]) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        done = run_serve(_argv(models, f"--coserve-rollout-port={s.getsockname()[1]}"))
    assert done.returncode == 2
    assert "give another with --coserve-rollout-port" in done.stderr


def test_rollout_engine_that_cannot_start(models: tuple[Path, Path]) -> None:
    before = leftovers()
    done = run_serve(_argv(models, "--coserve-pool-gib=0.0625", "--coserve-rollout-args=--no-such-flag"))
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Check --coserve-rollout and --coserve-rollout-args" in done.stderr
    assert leftovers() <= before
