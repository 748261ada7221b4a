"""How long an update of weights keeps engines from generating: part `pause` of `weights`.

Rollout models of several sizes. A borrowed engine generates while a relay's changes come to it, and so does serving
beside it; the longest time between two tokens is compared with that of a stretch without updates. A dedicated engine
reads them while it generates and is paused only to use them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from rl_driver.api.openai import Publication
from rl_driver.proxy.publication import pull, switch
from tests.bench import machine
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ModelSpec, ensure_model
from vllm_coserve.demo.servers import HOST_CORE, running_engine
from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient

_SPECS = (
    ROLLOUT_SPEC,
    ModelSpec("bench-100m", "qwen2", layers=12, hidden=768, intermediate=2304, heads=12, kv_heads=2),
    ModelSpec("bench-200m", "qwen2", layers=16, hidden=1024, intermediate=2816, heads=16, kv_heads=2),
)
_DENSITY = 0.01
_STREAMS, _SERVED = 4, 2  # requests at a time
_QUIET_S = 8.0
_KEY = "relay-key"
_BOUND = aiohttp.ClientTimeout(total=300)


def measure_pauses(updates: int) -> dict[str, Any]:
    """Milliseconds by model size."""
    rows = []
    for spec in _SPECS:
        folder = ensure_model(spec, Path("out") / "models")
        weights = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
        with Relay(key=_KEY) as relay:
            publisher = Publisher(RelayClient(relay.url, _KEY), whole_every=1 << 30)
            publisher.publish(1, weights.items())
            row = {"nbytes": sum(t.nbytes for t in weights.values())}
            row |= asyncio.run(_borrowed(folder, relay, publisher, weights, updates))
            row |= asyncio.run(_dedicated(folder, relay, publisher, weights, updates))
        rows.append(row)
        print(row, flush=True)
    return {"density": _DENSITY, "updates": updates, "rows": rows}


# ---- the borrowed engine and serving beside it


async def _borrowed(
    folder: Path, relay: Relay, publisher: Publisher, weights: dict[str, torch.Tensor], updates: int
) -> dict[str, Any]:
    flags = ["--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=50"]
    with machine.start(flags, "pause.log", 0.25, "--stream-interval 1", rollout=folder) as pair:
        async with aiohttp.ClientSession(timeout=_BOUND) as session:
            first = {"relay": {"url": relay.url, "key": _KEY, "version": 1}, "version": "v1"}
            await _post(session, f"{pair.rollout_url}/coserve/v1/weights", first)
            async with (
                _streams(session, pair.serving_url, "serving", SERVING_SPEC.vocab, _SERVED) as served,
                _streams(session, pair.rollout_url, "rollout", ROLLOUT_SPEC.vocab, _STREAMS) as rolled,
            ):
                await asyncio.sleep(2)
                quiet = await _watch(served, rolled, asyncio.sleep(_QUIET_S))
                busy, seconds = [], []
                for version in range(2, updates + 2):
                    _train(weights, version)
                    await asyncio.to_thread(publisher.publish, version, weights.items())
                    source = {"url": relay.url, "key": _KEY, "version": version}
                    body = {"relay": source, "version": f"v{version}"}
                    begun_s = time.perf_counter()
                    url = f"{pair.rollout_url}/coserve/v1/weights"
                    busy.append(await _watch(served, rolled, _post(session, url, body)))
                    seconds.append(time.perf_counter() - begun_s)
                    await asyncio.sleep(1)
    return {
        "borrowed": {
            "update_s": statistics.median(seconds),
            "rollout_gap_ms": statistics.median(max(b["rollout"]) for b in busy),
            "rollout_gap_quiet_ms": max(quiet["rollout"]),
            "serving_tpot_p99_ms": _p99([g for b in busy for g in b["serving"]]),
            "serving_tpot_p99_quiet_ms": _p99(quiet["serving"]),
            "serving_gap_ms": max(g for b in busy for g in b["serving"]),
            "serving_gap_quiet_ms": max(quiet["serving"]),
        }
    }


async def _watch(served: list[Any], rolled: list[Any], work: Any) -> dict[str, list[float]]:
    """Milliseconds between tokens of a stream that came while some work was done."""
    begun_s = time.perf_counter()
    await work
    await asyncio.sleep(0.3)  # the first tokens after it
    return {
        name: [1e3 * gap for at, gap in gaps if at > begun_s]
        for name, gaps in (("serving", served), ("rollout", rolled))
    }


@asynccontextmanager
async def _streams(
    session: aiohttp.ClientSession, url: str, model: str, vocab: int, count: int
) -> AsyncIterator[list[tuple[float, float]]]:
    """Requests one after the other, `count` at a time; gives (when, seconds since the token before) of each token."""
    gaps: list[tuple[float, float]] = []
    over = asyncio.Event()

    async def loop(index: int) -> None:
        n = 0
        while not over.is_set():
            n += 1
            prompt = [(7919 * (index + 1) * n + 31 * i) % (vocab - 3) + 3 for i in range(32)]
            body = {"model": model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
            last_s = None
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b'data: {"error"'):
                        raise RuntimeError(line.decode())
                    if line.startswith(b"data: {"):
                        now_s = time.perf_counter()
                        if last_s is not None:
                            gaps.append((now_s, now_s - last_s))
                        last_s = now_s

    tasks = [asyncio.create_task(loop(i)) for i in range(count)]
    try:
        yield gaps
    finally:
        over.set()
        await asyncio.gather(*tasks)


# ---- the dedicated engine


async def _dedicated(
    folder: Path, relay: Relay, publisher: Publisher, weights: dict[str, torch.Tensor], updates: int
) -> dict[str, Any]:
    argv = [str(folder), *machine.COMMON.split(), "--served-model-name=rollout", f"--kv-cache-memory-bytes={256 << 20}"]
    pulls, pauses = [], []
    with running_engine(argv, machine.OUT / "pause-dedicated.log", cores=str(HOST_CORE)) as (url, _):
        async with aiohttp.ClientSession(timeout=_BOUND) as session:

            async def call(method: str, path: str, body: Any, bound_s: float, **query: str) -> bytes:
                return await _post(session, url + path, body, query)

            first = Publication(relay.url, publisher._version or 1, _KEY)
            await pull(call, first)
            await switch(call, first)
            for version in range(first.version + 1, first.version + 1 + updates):
                _train(weights, version)
                await asyncio.to_thread(publisher.publish, version, weights.items())
                published = Publication(relay.url, version, _KEY)
                begun_s = time.perf_counter()
                await pull(call, published)
                pulled_s = time.perf_counter()
                await switch(call, published)
                pulls.append(pulled_s - begun_s)
                pauses.append(time.perf_counter() - pulled_s)
    return {"dedicated": {"pull_s": statistics.median(pulls), "pause_ms": 1e3 * statistics.median(pauses)}}


async def _post(session: aiohttp.ClientSession, url: str, body: Any, query: dict[str, str] | None = None) -> bytes:
    async with session.post(url, json=body, params=query) as answer:
        data = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status} for {url}: {data[:300].decode(errors='replace')}")
        return data


def _train(weights: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        new = tensor.clone()
        bits = bits_of(new)
        bits += (torch.rand(bits.shape, generator=generator) < _DENSITY).to(bits.dtype)
        weights[name] = new


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """Rows of a table."""
    rows = []
    for row in found["rows"]:
        b, d = row["borrowed"], row["dedicated"]
        rows.append(
            [
                f"{row['nbytes'] / 1e6:.0f}",
                f"{b['update_s']:.2f}",
                f"{b['rollout_gap_ms']:.0f} ({b['rollout_gap_quiet_ms']:.0f})",
                f"{b['serving_tpot_p99_ms']:.1f} ({b['serving_tpot_p99_quiet_ms']:.1f})",
                f"{b['serving_gap_ms']:.0f} ({b['serving_gap_quiet_ms']:.0f})",
                f"{d['pull_s']:.2f}",
                f"{d['pause_ms']:.0f}",
            ]
        )
    return rows


HEADER = (
    "weights, MB",
    "borrowed: update, s",
    "its longest gap, ms (without)",
    "serving's P99 TPOT, ms (without)",
    "its longest gap, ms (without)",
    "dedicated: read while it generates, s",
    "its pause, ms",
)
