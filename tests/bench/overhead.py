"""What the plugin costs serving while the rollout is idle: TPOT of plain vLLM and of a pair, in one run.

Both servers are pinned as in the demo: workers on core 0, everything else on core 1. They take turns of some seconds,
with every process of the other one stopped, so that the machine's drift meets both alike. Each round starts both anew:
where their memory lies makes some per cent of difference, also between two plain servers.
"""

from __future__ import annotations

import asyncio
import contextlib
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
_OUTPUT_TOKENS, _TURNS_A_ROUND = 150, 8
_SETTLE_S = 0.3
_POOL_GIB = 0.25


@contextlib.contextmanager
def _plain() -> Iterator[Pair]:
    port = free_port()
    argv = [str(ensure_model(SERVING_SPEC, Path("out") / "models")), *machine.COMMON.split()]
    argv += ["--served-model-name=serving", "--host=127.0.0.1", f"--port={port}", "--max-num-batched-tokens=1024"]
    argv.append(f"--kv-cache-memory-bytes={int(_POOL_GIB * 2**30)}")
    machine.OUT.mkdir(parents=True, exist_ok=True)
    with running_pair(argv, port, port, machine.OUT / "plain.log", lambda text: None) as pair:
        yield pair


async def _tpots_ms(url: str, seed: int) -> dict[int, float]:
    """Median TPOT in ms by batch size."""
    out: dict[int, float] = {}
    rng = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def batch_of(count: int, tokens: int) -> list[float]:
            served = [Served(0.0) for _ in range(count)]
            prompts = [[rng.randrange(3, SERVING_SPEC.vocab) for _ in range(64)] for _ in range(count)]
            pairs = zip(prompts, served, strict=True)
            await asyncio.gather(*(stream_one(session, url, "serving", p, tokens, s) for p, s in pairs))
            if any(not s.ok for s in served):
                raise RuntimeError(f"a request failed: {[s.error for s in served if s.error]}")
            return [1e3 * s.tpot_s for s in served]

        for batch in BATCHES:
            await batch_of(batch, 8)  # warms up
            out[batch] = percentile(await batch_of(batch, _OUTPUT_TOKENS), 50)
    return out


def _signal(pair: Pair, number: int) -> None:
    for pid in [pair.process.pid, *descendants(pair.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def measure(rounds: int) -> dict[str, Any]:
    """Turns of plain vLLM and a pair, `rounds` times some each.

    The ratio is the median of those of neighbouring turns, which begin with each of them equally often.
    """
    turns: dict[str, list[dict[int, float]]] = {"vllm": [], "pair": []}
    for number in range(rounds):
        _round(turns, number)
    medians = {n: {str(b): percentile([t[b] for t in ts], 50) for b in BATCHES} for n, ts in turns.items()}
    ratios = {b: [pair[b] / vllm[b] for pair, vllm in zip(turns["pair"], turns["vllm"], strict=True)] for b in BATCHES}
    return {
        "tpot_ms_p50": medians,
        "ratio_pair_to_vllm": {str(b): percentile(r, 50) for b, r in ratios.items()},
        "ratio_quartiles": {str(b): [percentile(r, 25), percentile(r, 75)] for b, r in ratios.items()},
        "turns": {n: [{str(b): v for b, v in t.items()} for t in ts] for n, ts in turns.items()},
    }


def _round(turns: dict[str, list[dict[int, float]]], number: int) -> None:
    flags = ["--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=50"]
    with _plain() as plain, machine.start(flags, "overhead.log", _POOL_GIB) as pair:
        servers = {"vllm": plain, "pair": pair}
        # Plain vLLM waits in loops of sched_yield(), which keep processes of other sessions off a core for seconds on
        # some kernels (see docs/architecture.md): also this client, whose clock is what counts.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        try:
            for name in servers:
                asyncio.run(_tpots_ms(servers[name].serving_url, -1))
            for i in range(_TURNS_A_ROUND):
                for name in ("vllm", "pair") if i % 2 == 0 else ("pair", "vllm"):
                    for other, server in servers.items():
                        _signal(server, signal.SIGCONT if other == name else signal.SIGSTOP)
                    time.sleep(_SETTLE_S)
                    turns[name].append(asyncio.run(_tpots_ms(servers[name].serving_url, 100 * number + i)))
                both = {b: round(turns["pair"][-1][b] / turns["vllm"][-1][b], 3) for b in BATCHES}
                print(f"overhead, round {number}, turn {i}: {both}", flush=True)
        finally:
            for server in servers.values():
                _signal(server, signal.SIGCONT)
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
