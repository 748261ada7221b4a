"""What sharing costs, part by part, as ratios within one run.

    python -m tests.bench.core [--parts pages,gate,reclaim,overhead] [--rounds 3]

- pages: map, unmap and zero of 2 MiB pages against memset and memcpy of as much memory
- gate: one-way hand-over between two processes, with an idle and a busy host core
- reclaim: 1, 16 and 256 pages taken back from an engine that generates
- overhead: TPOT with the plugin and an idle rollout against plain vLLM, batch 1, 8 and 32
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.bench import machine, overhead, results
from vllm_coserve.control.block import WHO_ROLLOUT, ControlBlock
from vllm_coserve.control.gate import RolloutGate, ServingGate
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.models import ROLLOUT_SPEC
from vllm_coserve.demo.phases import percentile
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner

_PAGE = 2 << 20
_RUNS = (1, 16, 256)
_RECLAIMS = {1: 30, 16: 15, 256: 5}  # pages -> how often
_RECLAIM_POOL_GIB = 1.0
_LONG_PROMPT_TOKENS = 960


def _us(samples_ns: Sequence[int], per: int = 1) -> dict[str, float]:
    values = [s / 1e3 / per for s in samples_ns]
    return {"p50_us": percentile(values, 50), "p99_us": percentile(values, 99)}


def _timed(call: Callable[[], Any]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


# ---- pages


def pages(rounds: int) -> dict[str, Any]:
    """Per page, for runs of neighbouring pages; operations alternate within each repetition."""
    count = max(_RUNS)
    fd = create_pool(count, _PAGE)
    driver, eraser = HostDriver(fd, count, _PAGE), PoolEraser(fd, count, _PAGE)
    source, target = (ctypes.create_string_buffer(_PAGE) for _ in range(2))
    out: dict[str, Any] = {}
    for run in _RUNS:
        samples: dict[str, list[int]] = {k: [] for k in ("map", "unmap", "zero", "memset", "memcpy")}
        for _ in range(rounds * max(20, 200 // run)):
            samples["map"].append(_timed(lambda run=run: driver.map_run(0, 0, run)))
            for page in range(run):  # an engine touches what it maps
                ctypes.memset(driver.address + page * _PAGE, 1, 64)
            samples["unmap"].append(_timed(lambda run=run: driver.unmap_run(0, run)))
            samples["zero"].append(_timed(lambda run=run: eraser.zero(0, run)))
            samples["memset"].append(_timed(lambda: ctypes.memset(target, 0, _PAGE)))
            samples["memcpy"].append(_timed(lambda: ctypes.memmove(target, source, _PAGE)))
        each = {k: _us(v, run if k in ("map", "unmap", "zero") else 1) for k, v in samples.items()}
        for name in ("map", "unmap", "zero"):
            each[name]["ratio_to_memset"] = each[name]["p50_us"] / each["memset"]["p50_us"]
        out[str(run)] = each
    driver.close()
    eraser.close()
    os.close(fd)
    return out


# ---- gate


def _rollout_side(fd: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    block = ControlBlock.attach(fd)
    gate = RolloutGate(block)
    block.set(Word.ROLLOUT_READY, 1)
    while not block.get(Word.KILL_GENERATION):
        if gate.enter(0.001, 0.05):
            start_ns = time.monotonic_ns()
            while time.monotonic_ns() < start_ns + 500_000:
                pass
            end_ns = time.monotonic_ns()
            gate.leave()
            block.record_turn(WHO_ROLLOUT, start_ns, end_ns, 1)


def _spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def _hand_overs(turns: int, rollout_core: int, serving_core: int, busy_core: int | None) -> dict[str, Any]:
    block, fd = ControlBlock.create(4, _PAGE)
    context = multiprocessing.get_context("fork")
    helpers = [context.Process(target=_rollout_side, args=(fd, rollout_core), daemon=True)]
    if busy_core is not None:
        helpers.append(context.Process(target=_spin, args=(busy_core,), daemon=True))
    for process in helpers:
        process.start()
    affinity = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {serving_core})
        while not block.get(Word.ROLLOUT_READY):
            time.sleep(0.01)
        gate, there, back, missed = ServingGate(block), [], [], 0
        for _ in range(turns):
            time.sleep(0.001)
            last = block.turns(WHO_ROLLOUT, 1 << 60)[0]
            used = gate.grant(64)
            now_ns = time.monotonic_ns()
            if not used:
                missed += 1
                continue
            there.append(block.get(Word.ROLLOUT_STEP_SINCE_NS) - block.get(Word.GRANT_SINCE_NS))
            while block.turns(WHO_ROLLOUT, last)[0] == last:
                time.sleep(0)
            back.append(now_ns - int(block.turns(WHO_ROLLOUT, last)[1][-1].end_s * 1e9))
    finally:
        os.sched_setaffinity(0, affinity)
        block.set(Word.KILL_GENERATION, 1)
        block.ring(Bell.ROLLOUT_CORE)
        helpers[0].join(5)
        for process in helpers:
            process.kill()
            process.join()
        os.close(fd)
    return {"grant": _us(there), "return": _us([max(0, b) for b in back]), "missed": missed, "turns": turns}


def gate(rounds: int) -> dict[str, Any]:
    """Grant (serving to rollout) and return (rollout to serving), one way each."""
    turns = 400 * rounds
    return {
        "two cores": _hand_overs(turns, 0, 1, None),
        "two cores, serving's one busy": _hand_overs(turns, 0, 1, 1),
        "one core": _hand_overs(turns, 1, 1, None),
        "one core, busy": _hand_overs(turns, 1, 1, 1),
    }


# ---- reclaim


async def _keep_generating(url: str, stop: asyncio.Event) -> None:
    rng = np.random.default_rng(3)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(tokens: int) -> None:
            while not stop.is_set():
                prompt = rng.integers(3, ROLLOUT_SPEC.vocab, tokens).tolist()
                await stream_one(session, url, "rollout", prompt, 60, Served(0.0))

        tasks = [asyncio.create_task(one(64 if i % 2 else _LONG_PROMPT_TOKENS)) for i in range(16)]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _reclaim_once(block: ControlBlock, count: int) -> tuple[float, int]:
    """Ask for pages as the serving engine core does; returns (ms until they are free, how many were)."""

    def held() -> int:
        return int(np.count_nonzero(block.owners == Owner.ROLLOUT))

    before = held()
    start = time.perf_counter()
    block.set(Word.ROLLOUT_CAP_PAGES, before - count)
    block.add(Word.RECLAIM_SEQ)
    block.ring(Bell.ROLLOUT_CORE)
    while held() > before - count and time.perf_counter() < start + 5:
        time.sleep(0.00005)
    return 1e3 * (time.perf_counter() - start), before - held()


async def _reclaims(url: str, block: ControlBlock) -> dict[str, Any]:
    stop = asyncio.Event()
    load = asyncio.create_task(_keep_generating(url, stop))
    out: dict[str, Any] = {}
    for count, times in _RECLAIMS.items():
        ms, aborts = [], block.get(Word.RECLAIM_ABORTS)
        for _ in range(times):
            deadline = time.monotonic() + 90
            while np.count_nonzero(block.owners == Owner.ROLLOUT) < count + 40 and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.3)
            took_ms, freed = await _reclaim_once(block, count)
            if freed < count:
                raise RuntimeError(f"only {freed} of {count} pages came back")
            ms.append(took_ms)
        aborted = block.get(Word.RECLAIM_ABORTS) - aborts
        out[str(count)] = {"ms_p50": percentile(ms, 50), "ms_max": max(ms), "times": times, "aborted_requests": aborted}
        print(f"reclaim of {count} pages: {out[str(count)]}", flush=True)
    stop.set()
    await load
    return out


def reclaim() -> dict[str, Any]:
    """From a pair whose rollout engine generates; its prefix cache is kept, as a lease of many turns would."""
    with machine.start(["--coserve-lease-s=600", "--coserve-headroom=0.05"], "reclaim.log", _RECLAIM_POOL_GIB) as pair:
        return asyncio.run(_reclaims(pair.rollout_url, machine.control_block(pair)))


def markdown(result: dict[str, Any]) -> str:
    """Tables of the parts."""
    text = ""
    if part := result.get("pages"):
        rows = []
        for run, each in part.items():
            cells = [f"{each[k]['p50_us']:.1f} / {each[k]['p99_us']:.1f}" for k in each]
            rows.append(
                [run, *cells, " / ".join(f"{each[k]['ratio_to_memset']:.2f}" for k in ("map", "unmap", "zero"))]
            )
        head = [
            "pages in a run",
            "map",
            "unmap",
            "zero",
            "memset 2 MiB",
            "memcpy 2 MiB",
            "map / unmap / zero to memset",
        ]
        text += "Per 2 MiB page, P50 / P99 in us:\n\n" + results.table(head, rows) + "\n"
    if part := result.get("gate"):
        rows = [
            [name, *(f"{g[k]['p50_us']:.0f} / {g[k]['p99_us']:.0f}" for k in ("grant", "return")), str(g["missed"])]
            for name, g in part.items()
        ]
        text += (
            "Hand-over, one way, P50 / P99 in us:\n\n"
            + results.table(["", "grant", "return", "not taken"], rows)
            + "\n"
        )
    if part := result.get("reclaim"):
        rows = [[n, f"{r['ms_p50']:.1f} / {r['ms_max']:.1f}", str(r["aborted_requests"])] for n, r in part.items()]
        head = ["pages", "P50 / max ms", "requests ended"]
        text += "Reclaim from a generating engine:\n\n" + results.table(head, rows) + "\n"
    if part := result.get("overhead"):
        tpot = part["tpot_ms_p50"]
        rows = [
            [b, f"{tpot['vllm'][b]:.2f}", f"{tpot['pair'][b]:.2f}", f"{r:.3f}"]
            for b, r in part["ratio_pair_to_vllm"].items()
        ]
        text += "TPOT P50 in ms:\n\n" + results.table(["batch", "plain vLLM", "pair, idle rollout", "ratio"], rows)
    return text


def main() -> None:
    """Run and write core.json and core.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default="pages,gate,reclaim,overhead")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "pages": lambda: pages(o.rounds),
        "gate": lambda: gate(o.rounds),
        "reclaim": reclaim,
        "overhead": lambda: overhead.measure(o.rounds),
    }
    if unknown := set(o.parts.split(",")) - parts.keys():
        p.error(f"--parts {','.join(sorted(unknown))}: known are {','.join(parts)}")
    result: dict[str, Any] = {}
    for name in o.parts.split(","):
        result[name] = parts[name]()
        print(f"{name}: {result[name]}", flush=True)
    results.write("core", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
