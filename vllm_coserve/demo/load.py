"""Load on real engines over HTTP: serving requests on a schedule (open loop), rollouts in a closed loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from vllm_coserve.demo.arrivals import Arrival

_REQUEST_BOUND_S = 120.0


@dataclass(slots=True)
class Served:
    """What one streamed request came to. Times in seconds."""

    scheduled_s: float
    ok: bool = False
    error: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class RolloutTotals:
    """Counts of a closed-loop phase."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    tokens: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)  # (seconds since start, tokens so far)


def _prompt(rng: random.Random, tokens: int, vocab: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(tokens)]


def _connector() -> aiohttp.TCPConnector:
    """Idle connections are closed before vLLM closes them, after five seconds: a request must not meet that."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)


async def stream_one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    output_tokens: int,
    served: Served,
    on_chunk: Callable[[float], object] = lambda now_s: None,
) -> None:
    """Send one request and time its tokens; errors are recorded, never raised.

    `on_chunk` is told when each part of the answer came, by `time.perf_counter`.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    start = time.perf_counter()
    first = last = 0.0
    chunks = 0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                served.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            done = False
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    break
                if line.startswith(b'data: {"error"'):
                    served.error = line[6:206].decode(errors="replace")
                    return
                last = time.perf_counter()
                on_chunk(last)
                chunks += 1
                if chunks == 1:
                    first = last
                if b'"finish_reason":"abort"' in line:
                    served.error = "aborted"
                    return
        served.tokens = output_tokens
        served.ok = done and chunks > 0
        served.error = "" if served.ok else "the stream ended early"
        served.ttft_s = first - start
        # Chunks may carry several tokens; the time between first and last is over output_tokens - 1 of them.
        served.tpot_s = (last - first) / (output_tokens - 1) if output_tokens > 1 else 0.0
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        served.error = f"{type(exc).__name__}: {exc}"


async def serve_schedule(
    url: str,
    model: str,
    arrivals: Iterable[Arrival],
    vocab: int,
    seed: int,
    progress: Callable[[list[Served]], None],
) -> list[Served]:
    """Send each arrival at its time, whatever became of those before; returns when all have ended."""
    rng = random.Random(seed)
    results: list[Served] = []
    timeout = aiohttp.ClientTimeout(total=_REQUEST_BOUND_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=_connector()) as session:
        start = time.perf_counter()
        tasks = []
        for arrival in arrivals:
            prompt = _prompt(rng, arrival.prompt_tokens, vocab)
            delay = start + arrival.at_s - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            served = Served(arrival.at_s)
            results.append(served)
            tasks.append(asyncio.create_task(stream_one(session, url, model, prompt, arrival.output_tokens, served)))
            progress(results)
        if tasks:
            await asyncio.wait(tasks)
    progress(results)
    return results


async def roll_out(
    url: str, model: str, concurrent: int, vocab: int, seed: int, stop: asyncio.Event, totals: RolloutTotals
) -> None:
    """Keep `concurrent` rollouts going until `stop`; groups of eight share a prompt, as GRPO samples them.

    A request whose pages were taken ends as "abort" with its tokens so far: they count, and another takes its place.
    Tokens are counted as they stream, so a phase's rate does not depend on where requests end.
    """
    start = time.perf_counter()
    rng = random.Random(seed)
    group: list[list[int]] = []

    async def one(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            if not group:
                group.extend([_prompt(rng, rng.randrange(48, 160), vocab)] * 8)
            prompt = group.pop()
            totals.requests += 1
            try:
                await _one_rollout(session, url, model, prompt, rng.randrange(64, 257), stop, totals)
            except (aiohttp.ClientError, TimeoutError, OSError):
                totals.failed += 1
                await asyncio.sleep(0.2)

    async def sample() -> None:
        while not stop.is_set():
            totals.samples.append((time.perf_counter() - start, totals.tokens))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
        totals.samples.append((time.perf_counter() - start, totals.tokens))

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=_connector()) as session:
        tasks = [asyncio.create_task(one(session)) for _ in range(concurrent)]
        sampler = asyncio.create_task(sample())
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await sampler


async def _one_rollout(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: list[int],
    output_tokens: int,
    stop: asyncio.Event,
    totals: RolloutTotals,
) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        # Counts in the stream: one chunk may carry several tokens.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    counted = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            totals.failed += 1
            await asyncio.sleep(0.2)
            return
        async for line in response.content:
            at = line.find(b'"completion_tokens":')
            if at >= 0:
                now = int(line[at + 20 :].split(b",", 1)[0].split(b"}", 1)[0])
                if not stop.is_set():
                    totals.tokens += now - counted
                counted = now
            if b'"finish_reason":"abort"' in line:
                totals.aborted += 1
            elif b'"finish_reason":"length"' in line:
                totals.finished += 1
