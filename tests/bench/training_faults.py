"""Faults while `coserve train` learns: what is lost, and what serving's users see.

    python -m tests.bench.training_faults [--faults 20]

In turn the borrowed engine is killed, stopped, taken back by its owner, and cut off; after each the job must do a step,
and later one with tokens of the borrowed engine again.
Then the disk of the checkpoints is full for a while (a small tmpfs, so this needs root), the job is killed and started
again, where it goes on from its newest checkpoint, and the dedicated engine is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import machine, results
from tests.bench.driver_faults import Faults, run
from tests.scenario.harness import KEY, start_pair
from tests.scenario.proxy_harness import Relay, Users, dedicated_engine
from vllm_coserve.demo.models import SERVING_SPEC, ensure_model
from vllm_coserve.demo.servers import DEVICE_CORE
from vllm_coserve.demo.training import ensure_policy, job_of, read_steps

_STEP_BOUND_S = 180.0
_DISK_KIB = 6000  # room for two checkpoints of the tiny policy
_LAST_STEPS = 8  # after the driver was started again


class Job:
    """The job's process, its checkpoints on a disk of their own."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.out, self._file, self._log = Path(job["out"]), folder / "job.yaml", folder / "train.log"
        self._file.write_text(json.dumps(job))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or go on."""
        command = [sys.executable, "-m", "vllm_coserve.console.main", "train", str(self._file)]
        env = {**os.environ, "COSERVE_WORKER_API_KEY": KEY}
        env.pop("RAY_ADDRESS", None)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def steps(self) -> int:
        """That it has done so far."""
        if self.process is not None and self.process.poll() not in (None, 0):
            raise RuntimeError(f"the job ended with {self.process.returncode}:\n{self._log.read_text()[-2000:]}")
        return len(read_steps(self.out))

    def await_steps(self, count: int) -> float:
        """Until so many are done; returns the seconds that it took."""
        begun, deadline = time.monotonic(), time.monotonic() + _STEP_BOUND_S
        while self.steps() < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no step within {_STEP_BOUND_S:.0f} s:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def await_borrowed(self, count: int) -> float:
        """Until a step after the first `count` has tokens of the borrowed engine; returns the seconds that it took."""
        begun, deadline = time.monotonic(), time.monotonic() + _STEP_BOUND_S
        while not any(s["tokens_borrowed"] for s in read_steps(self.out)[count:]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing borrowed within {_STEP_BOUND_S:.0f} s:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def stop(self, number: int) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def said(self, text: str) -> int:
        """How often its log has this text."""
        return self._log.read_text(errors="replace").count(text)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs that is full after some megabytes."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_KIB}k", "coserve-bench", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """Run all faults."""
    folder = machine.OUT / "training-faults"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    serving = ensure_model(SERVING_SPEC, Path("out") / "models")
    policy = ensure_policy(Path("out") / "models" / "demo-policy")
    flags = ["--coserve-pool-gib=0.0625", "--coserve-ttft-slo-ms=1500", "--coserve-tpot-slo-ms=200", f"--api-key={KEY}"]
    done: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(start_pair((serving, policy), folder / "pair.log", flags))
        machine.place(pair.pair.process.pid, DEVICE_CORE)
        url, engine = stack.enter_context(dedicated_engine(policy, folder / "dedicated.log"))
        relay = Relay(int(pair.pair.rollout_url.rpartition(":")[2]))
        stack.callback(relay.close)
        out = folder / "out"
        stack.enter_context(small_disk(out / "checkpoints"))
        config = job_of(policy, out, 10_000, url, relay.url)
        config["algorithm"] |= {"groups": 8}
        config["checkpoint"] = {"every_steps": 2}
        job = Job(config, folder)
        job.start()
        stack.callback(lambda: job.process and (job.process.kill(), job.process.wait()))
        users = Users(pair)
        stack.callback(users.stop)
        job.await_steps(4)
        faults = Faults(pair, relay, random.Random(o.seed))

        def after(what: str) -> None:
            steps = job.steps()
            done.append({"fault": what, "next_step_after_s": job.await_steps(steps + 1)})
            done[-1]["borrowed_again_after_s"] = round(job.await_borrowed(steps + 1), 1)
            print(done[-1], flush=True)

        for number in range(o.faults):
            after(faults.kinds[number % len(faults.kinds)]())
        ballast = out / "checkpoints" / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            for _ in range(_DISK_KIB):
                file.write(b"\0" * 1024)
        job.await_steps(job.steps() + 4)
        refused = job.said("could not be written")
        ballast.unlink()
        done.append({"fault": "disk full", "checkpoints_refused": refused})
        before = job.steps()
        job.await_steps(before + 3)
        job.stop(signal.SIGKILL)
        steps = [s["step"] for s in read_steps(out)]
        job.start()
        after("driver killed and started again")
        first = [s["step"] for s in read_steps(out)][len(steps)]
        done[-1] |= {"last_step_before": steps[-1], "first_step_after": first}
        os.killpg(engine.pid, signal.SIGKILL)
        after("dedicated killed")  # and gone for good
        job.await_steps(job.steps() + _LAST_STEPS)
        code = job.stop(signal.SIGTERM)
        users.stop()
    steps_done = read_steps(out)
    return {
        "faults": done,
        "success_start": steps_done[0]["success"],
        "success_last10": sum(s["success"] for s in steps_done[-10:]) / 10,
        "steps": len(steps_done),
        "staleness_max": max(s["staleness_max"] for s in steps_done),
        "turns_lost": sum(s["turns_lost"] for s in steps_done),
        "tokens_lost": sum(s["tokens_lost"] for s in steps_done),
        "migrations": sum(s["migrations"] for s in steps_done),
        "exit_code_of_sigterm": code,
        "serving_requests": users.count,
        "serving_failed": users.failed,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    r = result
    text = (
        f"{r['steps']} steps, success {r['success_start']:.2f} at the start and {r['success_last10']:.2f} at the end; "
    )
    text += f"{r['turns_lost']} turns and {r['tokens_lost']} tokens lost in {r['migrations']} migrations; staleness at "
    text += (
        f"most {r['staleness_max']}. {r['serving_requests']} serving requests, {len(r['serving_failed'])} failed.\n\n"
    )
    rows = []
    for fault in r["faults"]:
        more = {k: v for k, v in fault.items() if k not in ("fault", "next_step_after_s")}
        said = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in more.items())
        seconds = fault.get("next_step_after_s")
        rows.append([fault["fault"], "–" if seconds is None else f"{seconds:.1f}", said])
    return text + results.table(["fault", "next step done after s", ""], rows)


if __name__ == "__main__":
    run("training_faults", __doc__, measure, markdown)
