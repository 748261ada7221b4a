"""What the plugin costs serving while the rollout is idle: a step of plain vLLM and of a pair, in one run.

All servers are pinned as in the demo: workers on core 0, everything else on core 1. They take turns of a second or
two, with every process of the others stopped, so that the machine's drift meets all alike. Two plain servers take part:
where a server's memory lies makes some per cent of difference from start to start, and the one over the other says how
much of a ratio is that, and noise. Each round starts all of them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench import machine
from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.models import SERVING_SPEC, ensure_model
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.servers import Pair, descendants, free_port, running_pair

BATCHES = (1, 8, 32)
SERVERS = ("vllm", "pair", "vllm_again")
_OUTPUT_TOKENS, _FIRST_GAPS, _TURNS_A_ROUND = 70, 10, 12
_SETTLE_S = 0.2
_POOL_GIB = 0.25

Steps = dict[str, dict[int, list[float]]]  # server -> batch -> ms of a step in each turn


@contextlib.contextmanager
def _plain(log: str) -> Iterator[Pair]:
    port = free_port()
    argv = [str(ensure_model(SERVING_SPEC, Path("out") / "models")), *machine.COMMON.split()]
    argv += ["--served-model-name=serving", "--host=127.0.0.1", f"--port={port}", "--max-num-batched-tokens=1024"]
    argv.append(f"--kv-cache-memory-bytes={int(_POOL_GIB * 2**30)}")
    machine.OUT.mkdir(parents=True, exist_ok=True)
    with running_pair(argv, port, port, machine.OUT / log, lambda text: None) as pair:
        yield pair


async def _step_ms(url: str, batch: int, seed: int) -> float:
    """Median time between two tokens of a request, while `batch` of them decode."""
    rng = random.Random(seed)
    times: list[list[float]] = [[] for _ in range(batch)]
    served = [Served(0.0) for _ in range(batch)]
    prompts = [[rng.randrange(3, SERVING_SPEC.vocab) for _ in range(64)] for _ in range(batch)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        requests = zip(prompts, served, times, strict=True)
        await asyncio.gather(
            *(stream_one(session, url, "serving", p, _OUTPUT_TOKENS, s, t.append) for p, s, t in requests)
        )
    if any(not s.ok for s in served):
        raise RuntimeError(f"a request failed: {[s.error for s in served if s.error]}")
    gaps = [1e3 * (b - a) for ts in times for a, b in itertools.pairwise(ts[_FIRST_GAPS:])]
    return percentile(gaps, 50)


def _signal(pair: Pair, number: int) -> None:
    for pid in [pair.process.pid, *descendants(pair.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def measure(rounds: int) -> dict[str, Any]:
    """Turns of two plain servers and a pair, `rounds` times some each.

    A ratio is the median of those of neighbouring turns, of which each server begins equally often.
    `ratio_pair_to_vllm` is over the mean of the two plain servers, `ratio_vllm_to_vllm` is the one over the other.
    """
    steps: Steps = {name: {b: [] for b in BATCHES} for name in SERVERS}
    for number in range(rounds):
        _round(steps, number)

    def summary(of: dict[int, list[float]]) -> dict[str, Any]:
        return {str(b): [percentile(values, q) for q in (50, 25, 75)] for b, values in of.items()}

    plain = {b: list(zip(steps["vllm"][b], steps["vllm_again"][b], strict=True)) for b in BATCHES}
    ratios = {b: [p / (sum(v) / 2) for p, v in zip(steps["pair"][b], plain[b], strict=True)] for b in BATCHES}
    return {
        "step_ms_p50": {n: {str(b): percentile(v, 50) for b, v in of.items()} for n, of in steps.items()},
        "ratio_pair_to_vllm": summary(ratios),
        "ratio_vllm_to_vllm": summary({b: [two / one for one, two in plain[b]] for b in BATCHES}),
        "turns": {n: {str(b): v for b, v in of.items()} for n, of in steps.items()},
    }


def _round(steps: Steps, number: int) -> None:
    flags = ["--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=50"]
    with (
        _plain("plain.log") as plain,
        machine.start(flags, "overhead.log", _POOL_GIB) as pair,
        _plain("plain_again.log") as again,
    ):
        servers = dict(zip(SERVERS, (plain, pair, again), strict=True))
        # Plain vLLM waits in loops of sched_yield(), which keep processes of other sessions off a core for seconds on
        # some kernels (see docs/architecture.md): also this client, whose clock is what counts.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        try:
            for i, batch in itertools.product(range(-1, _TURNS_A_ROUND), BATCHES):  # the first turn warms up
                for name in (*SERVERS[i % 3 :], *SERVERS[: i % 3]):
                    for other, server in servers.items():
                        _signal(server, signal.SIGCONT if other == name else signal.SIGSTOP)
                    time.sleep(_SETTLE_S)
                    took_ms = asyncio.run(_step_ms(servers[name].serving_url, batch, 100 * number + i))
                    if i >= 0:
                        steps[name][batch].append(took_ms)
                if i >= 0:
                    last = ", ".join(f"{name} {steps[name][batch][-1]:.2f}" for name in SERVERS)
                    print(f"overhead, round {number}, turn {i}, batch {batch}: {last} ms", flush=True)
        finally:
            for server in servers.values():
                _signal(server, signal.SIGCONT)
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
