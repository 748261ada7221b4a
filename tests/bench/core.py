"""What sharing costs, part by part, as ratios within one run.

    python -m tests.bench.core [--parts pages,pool,gate,reclaim,overhead] [--rounds 3]

- pages: map, unmap and zero of 2 MiB pages against memset and memcpy of as much memory
- pool: bookkeeping of pages and blocks at pools of 256 to 40,000 pages
- gate: one-way hand-over between two processes, with an idle and a busy host core
- reclaim: 1, 16 and 256 pages taken back at once from an engine that generates
- overhead: a decode step with the plugin and an idle rollout against plain vLLM, batch 1, 8 and 32

What the finished parts gave is written also when a later one fails.
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

from tests.bench import machine, overhead, pool, results
from vllm_coserve.control.block import WHO_ROLLOUT, ControlBlock
from vllm_coserve.control.gate import RolloutGate, ServingGate
from vllm_coserve.control.handover import RolloutDevice, ServingDevice
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.models import ROLLOUT_SPEC
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.servers import Pair
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner

_PAGE = 2 << 20
_RUNS = (1, 16, 256)
_RECLAIMS = {1: 30, 16: 15, 256: 5}  # pages -> how often
_RECLAIM_POOL_GIB = 1.2
_LONG_PROMPT_TOKENS = 960


def _us(samples_ns: Sequence[int], per: int = 1) -> dict[str, float | None]:
    values = [s / 1e3 / per for s in samples_ns]
    p50, p99 = (percentile(values, q) if values else None for q in (50, 99))
    return {"p50_us": p50, "p99_us": p99}


def _timed(call: Callable[..., Any], *args: Any) -> int:
    start = time.perf_counter_ns()
    call(*args)
    return time.perf_counter_ns() - start


# ---- pages


def pages(rounds: int) -> dict[str, Any]:
    """Per page, for runs of neighbouring pages; operations alternate within each repetition, over equal volumes.

    `touch` is the first write to all of what was mapped, page faults included: an engine pays for it, and unmapping
    costs more after it.
    """
    count = max(_RUNS)
    fd = create_pool(count, _PAGE)
    driver, eraser = HostDriver(fd, count, _PAGE), PoolEraser(fd, count, _PAGE)
    source, target = (ctypes.create_string_buffer(count * _PAGE) for _ in range(2))
    own = ("map", "touch", "unmap", "zero")
    out: dict[str, Any] = {}
    for run in _RUNS:
        samples: dict[str, list[int]] = {k: [] for k in (*own, "memset", "memcpy")}
        for repetition in range(-1, rounds * max(20, 200 // run)):
            took = {
                "map": _timed(driver.map_run, 0, 0, run),
                "touch": _timed(ctypes.memset, driver.address, 1, run * _PAGE),
                "unmap": _timed(driver.unmap_run, 0, run),
                "zero": _timed(eraser.zero, 0, run),
                "memset": _timed(ctypes.memset, target, 0, run * _PAGE),
                "memcpy": _timed(ctypes.memmove, target, source, run * _PAGE),
            }
            if repetition >= 0:  # the one before faults the buffers and the eraser's mapping in
                for name, ns in took.items():
                    samples[name].append(ns)
        each = {k: _us(v, run) for k, v in samples.items()}
        for name in own:
            for other in ("memset", "memcpy"):
                each[name][f"ratio_to_{other}"] = each[name]["p50_us"] / each[other]["p50_us"]
        out[str(run)] = each
    driver.close()
    eraser.close()
    os.close(fd)
    return out


# ---- gate


def _rollout_side(fd: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    block = ControlBlock.attach(fd)
    gate, device = RolloutGate(block), RolloutDevice(block)
    block.set(Word.ROLLOUT_READY, 1)
    while not block.get(Word.KILL_GENERATION):
        if gate.enter(0.0005, 0.05):
            device.acquire()
            start_ns = time.monotonic_ns()
            while time.monotonic_ns() < start_ns + 500_000:
                pass
            end_ns = time.monotonic_ns()
            device.release()
            block.record_turn(WHO_ROLLOUT, start_ns, end_ns, block.get(Word.ROLLOUT_TURN))


def _end_of_turn_ns(block: ControlBlock, turn: int) -> int:
    """When the rollout side ended a turn. It writes that down after it has left, with the turn in place of tokens."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        last = block.turns(WHO_ROLLOUT, 1 << 60)[0]
        for record in block.turns(WHO_ROLLOUT, max(0, last - 4))[1]:
            if record.tokens == turn:
                return round(record.end_s * 1e9)
        time.sleep(0)
    raise RuntimeError("the rollout side does not answer")


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
        gate, device, there, back, missed = ServingGate(block), ServingDevice(block), [], [], 0
        for _ in range(turns):
            time.sleep(0.001)
            gate.grant(64)
            if not gate.await_taken():
                missed += 1
                continue
            gate.sending()
            device.acquire()
            now_ns = time.monotonic_ns()
            device.release()
            there.append(block.get(Word.ROLLOUT_STEP_SINCE_NS) - block.get(Word.GRANT_SINCE_NS))
            back.append(now_ns - _end_of_turn_ns(block, block.get(Word.ROLLOUT_TURN)))
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


def held(block: ControlBlock) -> int:
    """Pages that the rollout engine has."""
    return int(np.count_nonzero(block.owners == Owner.ROLLOUT))


async def await_held(block: ControlBlock, count: int) -> None:
    """Wait until the rollout engine has so many pages; raises RuntimeError when it does not come to that."""
    deadline = time.monotonic() + 120
    while held(block) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the rollout holds {held(block)} pages after two minutes, not {count}")
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.3)


def reclaim_once(block: ControlBlock, count: int) -> float | None:
    """Ask for pages as the serving engine core does; ms until they are free, None when they do not all come.

    The serving core lends at the same time, so it may overwrite the request, or hand the pages out again.
    """
    before = held(block)
    start = time.perf_counter()
    block.set(Word.ROLLOUT_CAP_PAGES, before - count)
    block.add(Word.RECLAIM_SEQ)
    block.ring(Bell.ROLLOUT_CORE)
    while time.perf_counter() < start + 2:
        if held(block) <= before - count:
            return 1e3 * (time.perf_counter() - start)
        time.sleep(0.00005)
    return None


async def _by_request(block: ControlBlock) -> dict[str, Any]:
    """So many pages at once, whatever prompts would take: mostly prefix cache, which a lease of many turns keeps."""
    out: dict[str, Any] = {}
    for count, times in _RECLAIMS.items():
        ms, missed, aborts = [], 0, block.get(Word.RECLAIM_ABORTS)
        while len(ms) < times and missed <= times:
            await await_held(block, count + 40)
            took_ms = reclaim_once(block, count)
            if took_ms is None:
                missed += 1
            else:
                ms.append(took_ms)
        if len(ms) < times:
            raise RuntimeError(f"{missed} requests for {count} pages were not met")
        aborted = block.get(Word.RECLAIM_ABORTS) - aborts
        out[str(count)] = {"ms_p50": percentile(ms, 50), "ms_max": max(ms), "times": times, "missed": missed}
        out[str(count)]["aborted_requests"] = aborted
        print(f"reclaim of {count} pages: {out[str(count)]}", flush=True)
    return out


async def _reclaims(pair: Pair) -> dict[str, Any]:
    stop, block = asyncio.Event(), machine.control_block(pair)
    load = asyncio.create_task(_keep_generating(pair.rollout_url, stop))
    try:
        return await _by_request(block)
    finally:
        stop.set()
        await load


def reclaim() -> dict[str, Any]:
    """From a pair whose rollout engine generates; a long lease keeps its prefix cache, of which most pages are."""
    flags = ["--coserve-lease-s=600", "--coserve-headroom=0.05"]
    with machine.start(flags, "reclaim.log", _RECLAIM_POOL_GIB) as pair:
        return asyncio.run(_reclaims(pair))


# ---- report


def _cell(part: dict[str, Any], *keys: str, digits: int = 1) -> str:
    return " / ".join("–" if part.get(k) is None else f"{part[k]:.{digits}f}" for k in keys)


def _pages_table(part: dict[str, Any]) -> str:
    names = list(next(iter(part.values())))
    rows = [[run, *(_cell(each[k], "p50_us", "p99_us") for k in names)] for run, each in part.items()]
    text = "Per 2 MiB page, P50 / P99 in us:\n\n" + results.table(["pages in a run", *names], rows)
    own = [k for k in names if not k.startswith("mem")]
    rows = [
        [run, *(_cell(each[k], "ratio_to_memset", "ratio_to_memcpy", digits=3) for k in own)]
        for run, each in part.items()
    ]
    return text + "\nRatio to memset / memcpy of as much:\n\n" + results.table(["pages in a run", *own], rows)


def _pool_table(part: dict[str, Any]) -> str:
    rows = [[what, *(f"{us:.1f}" for us in by_pages.values())] for what, by_pages in part.items()]
    head = ["", *(f"{n:,} pages" for n in pool.SIZES)]
    return "Bookkeeping of an engine core, P50 in us, by size of the pool:\n\n" + results.table(head, rows)


def _gate_table(part: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(_cell(g[k], "p50_us", "p99_us", digits=0) for k in ("grant", "return")),
            f"{g['missed']} of {g['turns']}",
        ]
        for name, g in part.items()
    ]
    return "Hand-over, one way, P50 / P99 in us:\n\n" + results.table(["", "grant", "return", "missed"], rows)


def _reclaim_table(part: dict[str, Any]) -> str:
    rows = [[n, _cell(r, "ms_p50", "ms_max"), str(r["aborted_requests"])] for n, r in part.items()]
    return "Reclaim from a generating engine:\n\n" + results.table(["pages", "P50 / max ms", "requests ended"], rows)


def _overhead_table(part: dict[str, Any]) -> str:
    rows = [
        [b, *(f"{part['step_ms_p50'][server][b]:.2f}" for server in overhead.SERVERS)]
        + ["{:.3f} ({:.3f}-{:.3f})".format(*part[ratio][b]) for ratio in ("ratio_pair_to_vllm", "ratio_vllm_to_vllm")]
        for b in part["ratio_pair_to_vllm"]
    ]
    head = ["batch", "plain vLLM", "pair, idle rollout", "plain vLLM again", "pair / plain", "plain / plain"]
    note = "Ratios are medians of those of neighbouring turns (quartiles).\n"
    return "A decode step, P50 in ms:\n\n" + results.table(head, rows) + "\n" + note


_TABLES = {
    "pages": _pages_table,
    "pool": _pool_table,
    "gate": _gate_table,
    "reclaim": _reclaim_table,
    "overhead": _overhead_table,
}


def markdown(result: dict[str, Any]) -> str:
    """Tables of the parts."""
    return "\n".join(_TABLES[name](result[name]) for name in _TABLES if name in result)


def main() -> None:
    """Run and write core.json and core.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default="pages,pool,gate,reclaim,overhead", help="some of %(default)s; `map` is `pages`")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, help="folder or .json file of the results (default: tests/bench/results)")
    o = p.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "pages": lambda: pages(o.rounds),
        "pool": lambda: pool.measure(o.rounds),
        "gate": lambda: gate(o.rounds),
        "reclaim": reclaim,
        "overhead": lambda: overhead.measure(o.rounds),
    }
    names = ["pages" if name == "map" else name for name in o.parts.split(",")]
    if unknown := set(names) - parts.keys():
        p.error(f"--parts {','.join(sorted(unknown))}: known are {','.join(parts)}")
    if o.rounds < 1:
        p.error("--rounds: give 1 or more")
    to_file = o.out is not None and o.out.suffix == ".json"
    result: dict[str, Any] = {}
    try:
        for name in names:
            result[name] = parts[name]()
            print(f"{name}: {result[name]}", flush=True)
    finally:
        if result:
            name, folder = (o.out.stem, o.out.parent) if to_file else ("core", o.out)
            results.write(name, result, markdown(result), folder)


if __name__ == "__main__":
    main()
