"""`coserve train` on a borrowed and a dedicated engine: it learns, dies, goes on, and serving notices nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_driver.envs.frozen_lake import FrozenLake
from rl_driver.training.warm_start import FRAME, make_policy
from tests.scenario.harness import KEY, RunningPair, start_pair, wait_for
from tests.scenario.proxy_harness import Users, dedicated_engine
from vllm_coserve.demo.training import read_steps

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(750)]

_STEPS = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "policy"
    make_policy(FrozenLake(3, 0.8, 6), folder, skill=0.0, batches=40)
    return folder


def _job(out: Path, policy: Path, pair: RunningPair, dedicated: str) -> dict[str, Any]:
    return {
        "model": str(policy),
        "out": str(out),
        "task": {"name": "frozen_lake", "size": 3, "frozen": 0.8, "turns_max": 6},
        "frame": {"before": FRAME.before, "after": FRAME.after, "between": FRAME.between, "stop": FRAME.stop},
        "algorithm": {"groups": 8, "group_size": 4, "minibatches": 2, "clip_high": 0.28},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5},
        "sampling": {"answer_tokens": 4, "concurrency": 32},
        "workers": {
            "dedicated": [dedicated],
            "borrowed": [pair.pair.rollout_url],
            "turns_per_dedicated": 12,
            "turns_per_borrowed": 12,
        },
        "checkpoint": {"every_steps": 2},
        "staleness": 1,
        "steps": _STEPS,
    }


@contextlib.contextmanager
def _training(job: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "vllm_coserve.console.main", "train", str(job)]
    env = {**os.environ, "COSERVE_WORKER_API_KEY": KEY, "RAY_DEDUP_LOGS": "0"}
    env.pop("RAY_ADDRESS", None)
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()


def test_a_job_learns_dies_and_goes_on(models: tuple[Path, Path], policy: Path, tmp_path: Path) -> None:
    out, job, log = tmp_path / "out", tmp_path / "job.yaml", tmp_path / "train.log"
    flags = ["--coserve-pool-gib=0.0625", "--coserve-ttft-slo-ms=1500", "--coserve-tpot-slo-ms=200", f"--api-key={KEY}"]
    with (
        start_pair((models[0], policy), tmp_path / "pair.log", flags) as pair,
        dedicated_engine(policy, tmp_path / "dedicated.log") as (dedicated, _),
    ):
        job.write_text(yaml.safe_dump(_job(out, policy, pair, dedicated)))
        users = Users(pair)
        try:
            with _training(job, log) as training:
                wait_for("some steps are done", lambda: training.poll() is not None or len(read_steps(out)) >= 3, 240)
                assert training.poll() is None, log.read_text()[-3000:]
                training.kill()
                training.wait()
            # From now on the engines hand weights on to each other.
            job.write_text(
                yaml.safe_dump(_job(out, policy, pair, dedicated) | {"broadcast": {"uplink_mbytes_per_s": 0.5}})
            )
            begun = time.monotonic()
            with _training(job, log) as training:
                assert training.wait(300) == 0, log.read_text()[-3000:]
            assert time.monotonic() - begun < 300
        finally:
            users.stop()
    steps = read_steps(out)
    assert not users.failed and users.count > 10
    assert "going on from the checkpoint of step" in log.read_text()
    assert sorted({s["step"] for s in steps}) == list(range(_STEPS))
    assert all(s["staleness_max"] <= 1 for s in steps)
    assert sum(s["tokens_borrowed"] > 0 for s in steps) >= _STEPS // 2
    assert all(s["turns_lost"] == s["tokens_lost"] == 0 for s in steps)
    agreement = [s["sampler_log_ratio_abs_mean"] for s in steps if "sampler_log_ratio_abs_mean" in s]
    assert agreement and max(agreement) < 0.02, agreement
    assert list((out / "tensorboard").iterdir()) and list((out / "checkpoints").iterdir())
