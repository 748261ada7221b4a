"""Starting, asking and inspecting a pair of real engines."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.bench.machine import processes
from vllm_coserve.demo.servers import Pair, free_port, running_pair

COMMON = "--enforce-eager --max-model-len 1024 --max-num-seqs 32 --block-size 32 --disable-uvicorn-access-log"
KEY = "sesame"


@dataclass
class RunningPair:
    """A pair that serves."""

    pair: Pair

    def complete(self, rollout: bool, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """One completion with token ids in and out; raises for anything but HTTP 200."""
        url = self.pair.rollout_url if rollout else self.pair.serving_url
        body = {
            "model": "rollout" if rollout else "serving",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        answer = requests.post(f"{url}/v1/completions", json=body, headers=bearer(), timeout=120)
        answer.raise_for_status()
        return answer.json()["choices"][0]

    def coserve(self, method: str, path: str) -> dict[str, Any]:
        """A call of the sidecar's own API."""
        url = f"{self.pair.rollout_url}/coserve/v1/{path}"
        answer = requests.request(method, url, headers=bearer(), timeout=20)
        answer.raise_for_status()
        return answer.json()

    def pid(self, rollout: bool, title: str) -> int:
        """The process of one engine: "API server", "EngineCore" or "Worker"."""
        return processes(self.pair, rollout)[title]


def bearer() -> dict[str, str]:
    """Header of the test pair's API key."""
    return {"Authorization": f"Bearer {KEY}"}


@contextlib.contextmanager
def start_pair(
    models: tuple[Path, Path], log: Path, flags: Sequence[str], rollout_args: str = ""
) -> Iterator[RunningPair]:
    """A pair of the demo's models on free ports."""
    port, rollout_port = free_port(), free_port()
    argv = [
        str(models[0]),
        *COMMON.split(),
        "--served-model-name=serving",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--coserve-rollout={models[1]}",
        f"--coserve-rollout-port={rollout_port}",
        f"--coserve-rollout-args={COMMON} --served-model-name rollout {rollout_args}",
        *flags,
    ]
    with running_pair(argv, port, rollout_port, log, lambda text: None) as pair:
        yield RunningPair(pair)


def prompt(seed: int, tokens: int) -> list[int]:
    """A seeded prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 4096) for _ in range(tokens)]


class RolloutLoad:
    """Rollouts in a closed loop on threads; their choices are kept. Errors are expected while the sidecar is down."""

    def __init__(self, running: RunningPair, concurrent: int, prompt_tokens: int, output_tokens: int) -> None:
        self._running, self._sizes, self._stop = running, (prompt_tokens, output_tokens), False
        self.done: list[tuple[list[int], dict[str, Any]]] = []
        self.errors = 0
        self._pool = ThreadPoolExecutor(concurrent)
        self._jobs = [self._pool.submit(self._loop, i) for i in range(concurrent)]

    def _loop(self, index: int) -> None:
        n = 0
        while not self._stop:
            p = prompt(1000 * index + n, self._sizes[0])
            n += 1
            try:
                self.done.append((p, self._running.complete(True, p, self._sizes[1])))
            except requests.RequestException:
                self.errors += 1
                time.sleep(0.2)

    def stop(self) -> None:
        """End the loop; requests in flight are waited for."""
        self._stop = True
        self._pool.shutdown(wait=True)
        for job in self._jobs:
            job.result()


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float) -> float:
    """Wait until a condition holds; returns after how many seconds."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        with contextlib.suppress(requests.RequestException, KeyError):
            if condition():
                return time.monotonic() - start
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def greedy_gap(running: RunningPair, rollout: bool, tokens: Sequence[int], choice: dict[str, Any]) -> float:
    """Largest gap in nats between a generated token and the best one, when the whole text is scored anew."""
    generated = choice["token_ids"]
    text = [*tokens, *generated]
    scored = running.complete(rollout, text[:1023], 1, prompt_logprobs=1)["prompt_logprobs"]
    worst = 0.0
    for at in range(len(tokens), min(len(text), 1023)):
        entry = scored[at]
        own = entry[str(text[at])]["logprob"]
        worst = max(worst, max(e["logprob"] for e in entry.values()) - own)
    return worst


def run_serve(argv: Sequence[str], timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """`vllm serve ARGV...` to its end, for start-ups that must fail."""
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
