"""One measured phase: load on one or both engines of a pair, sampled while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_coserve.demo.arrivals import Arrival
from vllm_coserve.demo.load import RolloutTotals, Served, roll_out, serve_schedule
from vllm_coserve.demo.servers import Pair, get_json

_SAMPLE_S = 0.25
_ROLLOUT_LEAD_S = 3.0  # rollouts are in their stride before serving traffic starts


@dataclass(slots=True)
class PhaseResult:
    """What a phase gave."""

    name: str
    seconds: float = 0.0
    served: list[Served] = field(default_factory=list)
    rollout: RolloutTotals | None = None
    rollout_tokens_per_s: float = 0.0
    busy_fraction: float = 0.0  # share of the time with a serving step on the device
    pages: list[tuple[float, int, int, int]] = field(default_factory=list)  # (s, serving, rollout, free)
    turns: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Fixed numbers of the load."""

    serving_model: str
    rollout_model: str
    vocab: int
    rollouts: int
    seed: int


async def run_phase(
    name: str,
    pair: Pair,
    load: Load,
    arrivals: Sequence[Arrival] | None,
    rollout: bool,
    seconds: float,
    say: Callable[[str], None],
) -> PhaseResult:
    """Run one phase and return its figures; `arrivals` None means no serving traffic."""
    result = PhaseResult(name)
    stop, totals = asyncio.Event(), RolloutTotals()
    tasks = []
    if rollout:
        job = roll_out(pair.rollout_url, load.rollout_model, load.rollouts, load.vocab, load.seed + 1, stop, totals)
        tasks.append(asyncio.create_task(job))
        await asyncio.sleep(_ROLLOUT_LEAD_S)
    busy_s = (await asyncio.to_thread(pair.status))["gate"]["serving_busy_s"]
    start, tokens = time.monotonic(), totals.tokens
    sampler = asyncio.create_task(_sample(pair, result, start, stop))

    def progress(served: list[Served]) -> None:
        done = [s for s in served if s.ok]
        failed = sum(bool(s.error) for s in served)
        worst = 1e3 * percentile([s.ttft_s for s in done], 99) if done else 0.0
        elapsed = max(1e-9, time.monotonic() - start)
        rate = f", rollout {(totals.tokens - tokens) / elapsed:.0f} tok/s" if rollout else ""
        say(
            f"{name}: {elapsed:.0f}/{seconds:.0f} s, {len(done)} served, {failed} failed, TTFT P99 {worst:.0f} ms{rate}"
        )

    if arrivals is not None:
        result.served = await serve_schedule(
            pair.serving_url, load.serving_model, arrivals, load.vocab, load.seed, progress
        )
    while (left := start + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(1.0, left))
        progress(result.served)
    result.seconds = time.monotonic() - start
    status = await asyncio.to_thread(pair.status)
    result.busy_fraction = (status["gate"]["serving_busy_s"] - busy_s) / result.seconds
    result.rollout_tokens_per_s = (totals.tokens - tokens) / result.seconds
    stop.set()
    await asyncio.gather(sampler, *tasks)
    result.rollout = totals if rollout else None
    with contextlib.suppress(urllib.error.URLError, OSError):
        result.status = await asyncio.to_thread(pair.status)
    return result


async def _sample(pair: Pair, result: PhaseResult, start: float, stop: asyncio.Event) -> None:
    cursor = 0
    with contextlib.suppress(urllib.error.URLError, OSError):
        cursor = (await asyncio.to_thread(get_json, f"{pair.rollout_url}/coserve/v1/turns"))["next"]
    ticks = 0
    while not stop.is_set():
        with contextlib.suppress(urllib.error.URLError, OSError, KeyError):
            pages = (await asyncio.to_thread(pair.status))["pages"]
            result.pages.append((time.monotonic() - start, pages["serving"], pages["rollout"], pages["free"]))
            if ticks % 20 == 0:
                more = await asyncio.to_thread(get_json, f"{pair.rollout_url}/coserve/v1/turns?after={cursor}")
                cursor = more["next"]
                for turn in more["turns"]:
                    turn["start_s"], turn["end_s"] = turn["start_s"] - start, turn["end_s"] - start
                result.turns.extend(more["turns"])
        ticks += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SAMPLE_S)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated percentile, q in [0, 100]; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
