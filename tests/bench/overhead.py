"""What the plugin costs serving while the rollout is idle: TPOT of plain vLLM and of a pair, in turn, in one run.

Both engines of a pair are pinned as in the demo: workers on core 0, everything else on core 1; plain vLLM likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench import machine
from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.models import SERVING_SPEC, ensure_model
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.run import free_port
from vllm_coserve.demo.servers import running_pair

BATCHES = (1, 8, 32)
_OUTPUT_TOKENS, _REPEATS = 150, 5
_POOL_GIB = 0.25


@contextlib.contextmanager
def _plain() -> Iterator[str]:
    port = free_port()
    argv = [str(ensure_model(SERVING_SPEC, Path("out") / "models")), *machine.COMMON.split()]
    argv += ["--served-model-name=serving", "--host=127.0.0.1", f"--port={port}", "--max-num-batched-tokens=1024"]
    argv.append(f"--kv-cache-memory-bytes={int(_POOL_GIB * 2**30)}")
    machine.OUT.mkdir(parents=True, exist_ok=True)
    with running_pair(argv, port, port, machine.OUT / "plain.log", lambda text: None) as pair:
        yield pair.serving_url


@contextlib.contextmanager
def _pair() -> Iterator[str]:
    flags = ["--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=50"]
    with machine.start(flags, "overhead.log", _POOL_GIB) as pair:
        yield pair.serving_url


async def _tpots_ms(url: str) -> dict[int, list[float]]:
    """TPOT in ms of every request, by batch size."""
    out: dict[int, list[float]] = {}
    rng = random.Random(7)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for batch in BATCHES:
            values: list[float] = []
            for repeat in range(_REPEATS + 1):
                served = [Served(0.0) for _ in range(batch)]
                prompts = [[rng.randrange(3, SERVING_SPEC.vocab) for _ in range(64)] for _ in range(batch)]
                pairs = zip(prompts, served, strict=True)
                await asyncio.gather(*(stream_one(session, url, "serving", p, _OUTPUT_TOKENS, s) for p, s in pairs))
                if any(not s.ok for s in served):
                    raise RuntimeError(f"a request failed: {[s.error for s in served if s.error]}")
                if repeat:  # the first one warms up
                    values += [1e3 * s.tpot_s for s in served]
            out[batch] = values
    return out


def measure(rounds: int) -> dict[str, Any]:
    """Alternate plain vLLM and a pair, `rounds` times each; medians over all requests, and their ratio."""
    values: dict[str, dict[int, list[float]]] = {n: {b: [] for b in BATCHES} for n in ("vllm", "pair")}
    by_round: list[dict[str, Any]] = []
    for i in range(rounds):
        for name in ("vllm", "pair") if i % 2 == 0 else ("pair", "vllm"):
            with _plain() if name == "vllm" else _pair() as url:
                got = asyncio.run(_tpots_ms(url))
            for batch, tpots in got.items():
                values[name][batch] += tpots
            by_round.append({"name": name} | {str(b): percentile(t, 50) for b, t in got.items()})
            print(f"overhead, round {i}: {by_round[-1]}", flush=True)
    medians = {n: {str(b): percentile(v, 50) for b, v in by.items()} for n, by in values.items()}
    ratios = {b: medians["pair"][b] / medians["vllm"][b] for b in medians["pair"]}
    return {"tpot_ms_p50": medians, "ratio_pair_to_vllm": ratios, "rounds": by_round}
