"""The demo's RL job: learns to walk over a frozen lake, on a dedicated engine alone and with the borrowed one.

Serving's users send their requests all the time. The job is `coserve train`, the engines and the traffic are real; only
the cores are few: learner, environments and the dedicated engine share the host core.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_coserve.demo.arrivals import Arrival
from vllm_coserve.demo.load import Served, serve_schedule
from vllm_coserve.demo.servers import DemoError, Pair, make_guest

LAKE = {"size": 3, "frozen": 0.8, "turns_max": 6}
_FRAME = {"before": "", "after": "\n", "between": "", "stop": "<|im_end|>"}
_WARM_UP_BOUND_S, _STOP_BOUND_S, _POLL_S = 240.0, 40.0, 0.2


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job came to: figures of its steps, and what serving's users saw meanwhile."""

    steps: list[dict[str, Any]]
    served: list[Served]


@dataclass(frozen=True, slots=True)
class Learning:
    """The same job twice: without and with the borrowed engine."""

    alone: JobResult
    both: JobResult


def ensure_policy(folder: Path) -> Path:
    """A tiny policy that knows the form of the answers and no more; made once."""
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "rl_driver.training.warm_start", "--out", str(folder)]
        command += [f"--{k.replace('_', '-')}={v}" for k, v in LAKE.items()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_WARM_UP_BOUND_S, check=False)
        if run.returncode:
            raise DemoError(f"the policy could not be made:\n{run.stderr[-1500:]}")
    return folder


def job_of(policy: Path, out: Path, steps: int, dedicated: str, borrowed: str | None) -> dict[str, Any]:
    """The configuration of a job."""
    workers: dict[str, Any] = {"dedicated": [dedicated], "turns_per_dedicated": 16, "turns_per_borrowed": 16}
    return {
        "model": str(policy),
        "out": str(out),
        "task": {"name": "frozen_lake", **LAKE},
        "frame": _FRAME,
        "algorithm": {"groups": 16, "group_size": 8, "minibatches": 4, "clip_high": 0.28},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5},
        "sampling": {"answer_tokens": 4, "concurrency": 64},
        "workers": workers | ({"borrowed": [borrowed]} if borrowed else {}),
        "checkpoint": {"every_steps": 20},
        "staleness": 1,
        "steps": steps,
    }


async def learn(
    job: Mapping[str, Any],
    log: Path,
    pair: Pair,
    arrivals: Sequence[Arrival],
    vocab: int,
    bound_s: float,
    say: Callable[[str], None],
) -> JobResult:
    """Run a job to its end beside serving traffic.

    Raises:
        DemoError: it failed, or took longer than `bound_s`.
    """
    out = Path(job["out"])
    file = out.with_suffix(".yaml")
    out.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job, indent=2))  # JSON is YAML
    done = asyncio.Event()
    schedule = list(itertools.takewhile(lambda a: a.at_s < bound_s, arrivals))
    until_done = (a for a in schedule if not done.is_set())
    traffic = asyncio.create_task(
        serve_schedule(pair.serving_url, "serving", until_done, vocab, 1, lambda served: None)
    )
    try:
        with _training(file, log) as process:
            deadline = time.monotonic() + bound_s
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
                if steps := read_steps(out):
                    last = steps[-1]
                    say(f"step {last['step'] + 1}/{job['steps']}, success {last['success']:.0%}")
            if process.poll() != 0:
                ended = "failed" if process.poll() else f"did not end within {bound_s:.0f} s"
                raise DemoError(f"coserve train {ended}; the end of {log}:\n{log.read_text()[-1500:]}")
    finally:
        done.set()
        served = await traffic
    return JobResult(read_steps(out), served)


@contextlib.contextmanager
def _training(job: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "vllm_coserve.console.main", "train", str(job)]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}  # its local Ray ends with it
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        make_guest(process.pid)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_steps(out: Path) -> list[dict[str, Any]]:
    """Figures of the steps that a job has done so far."""
    file = out / "steps.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if (file.exists())
        else []
    )
