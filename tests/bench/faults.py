"""Kills and stops processes of a pair under load: what serving's users notice, and what is left behind.

    python -m tests.bench.faults [--kills 30] [--trace FILE]

1. SIGKILL of the sidecar's API server, engine core or worker at random moments, again and again.
2. SIGSTOP of each for `--stop-seconds`, compared with the same traffic undisturbed.
3. SIGKILL of serving's API server, engine core and worker: nothing of either engine may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import machine, results
from tests.bench.machine import CPU, Bed
from tests.bench.turns import TurnLoad
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.demo.load import Served, serve_schedule
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.report import serving_summary
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import Pair, cmdline, descendants
from vllm_coserve.memory.ledger import Owner

_CLEAR_BOUND_S = 10.0


def summary(values: list[float]) -> dict[str, float]:
    """Median and maximum."""
    return {"p50": percentile(values, 50), "max": max(values, default=float("nan"))}


class Killer:
    """Part 1, on a running pair under load."""

    def __init__(
        self, pair: Pair, block: ControlBlock, load: TurnLoad, seed: int, back_bound_s: float = CPU.back_bound_s
    ) -> None:
        self._pair, self._block, self._load, self._back_bound_s = pair, block, load, back_bound_s
        self._rng = random.Random(seed)

    async def kill_once(self, part: str) -> dict[str, Any]:
        """Kill one process of the sidecar at a random moment; returns when it is back."""
        await self.until_generating()
        await asyncio.sleep(self._rng.uniform(0.0, 4.0))
        pid, block = machine.processes(self._pair, rollout=True)[part], self._block
        generation = block.get(Word.GENERATION)
        held = int(np.count_nonzero(block.owners == Owner.ROLLOUT))
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        while block.get(Word.GENERATION_CLEARED) < generation and time.monotonic() - killed_s < _CLEAR_BOUND_S:
            await asyncio.sleep(0.001)
        usable_s = time.monotonic() - killed_s
        leaked = int(np.count_nonzero(block.owners == Owner.ROLLOUT)) if block.get(Word.GENERATION) == generation else 0
        await self.until_generating()
        return {
            "part": part,
            "pages_held": held,
            "pages_usable_ms": 1e3 * usable_s,
            "pages_leaked": leaked,
            "back_s": time.monotonic() - killed_s,
        }

    async def until_generating(self) -> None:
        """Wait, with a bound, until the rollout engine makes tokens."""
        tokens, deadline = self._load.totals.tokens, time.monotonic() + self._back_bound_s
        while self._load.totals.tokens < tokens + 50:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the rollout engine was not back within {self._back_bound_s:.0f} s")
            await asyncio.sleep(0.02)


async def _under_load(pair: Pair, o: argparse.Namespace, work: Any, bed: Bed = CPU) -> tuple[list[Served], Any]:
    """Serving traffic and rollouts while `work(load)` runs, then until the traffic sent by then has ended."""
    await warm_up(pair.serving_url, pair.rollout_url, bed.warm_up_tokens)
    load = TurnLoad(pair.rollout_url, "rollout", o.rollouts, bed.vocab, o.seed, bed.turns)
    rollouts = asyncio.create_task(load.run())
    served: list[Served] = []
    done = asyncio.Event()

    async def traffic() -> None:
        seed = o.seed
        while not done.is_set():
            schedule = machine.arrivals(o.trace, 10.0, o.rate, seed, bed.scale)
            served.extend(await serve_schedule(pair.serving_url, "serving", schedule, bed.vocab, seed, lambda r: None))
            seed += 1

    serving = asyncio.create_task(traffic())
    try:
        result = await work(load)
    finally:
        done.set()
        await serving
        load.stop.set()
        await rollouts
    return served, result


def part_kills(
    o: argparse.Namespace,
    slo_flags: list[str],
    slo: Mapping[str, float],
    bed: Bed = CPU,
    kind: type[Killer] = Killer,
) -> dict[str, Any]:
    """SIGKILL of the sidecar's processes, in turn."""
    with machine.start(slo_flags, "faults-kill.log", o.pool_gib, bed=bed) as pair:
        block = machine.control_block(pair)
        running = machine.processes(pair, rollout=True)  # on a GPU there is no worker: the engine core computes
        parts = [p for p in machine.PARTS if p in running]

        async def work(load: TurnLoad) -> list[dict[str, Any]]:
            killer, out = kind(pair, block, load, o.seed, bed.back_bound_s), []
            for i in range(o.kills):
                out.append(await killer.kill_once(parts[i % len(parts)]))
                print(f"kill {i + 1}: {out[-1]}", flush=True)
            return out

        served, kills = asyncio.run(_under_load(pair, o, work, bed))
        status = pair.status()
        states = [int(np.count_nonzero(block.owners == s)) for s in Owner]
    return {
        "kills": kills,
        "serving": serving_summary(served, float("nan"), slo),
        "errors": sorted({s.error for s in served if s.error}),
        "pages_usable_ms": summary([k["pages_usable_ms"] for k in kills]),
        "pages_leaked": sum(k["pages_leaked"] for k in kills),
        "pages_missing": block.all_pages - sum(states),
        "back_s": summary([k["back_s"] for k in kills]),
        "generation": status["generation"],
        "hook_faults": status["gate"]["faults"],
    }


def part_stops(o: argparse.Namespace, slo_flags: list[str], slo: dict[str, float]) -> dict[str, Any]:
    """SIGSTOP of the sidecar's processes."""
    out: dict[str, Any] = {}
    with machine.start(slo_flags, "faults-stop.log", o.pool_gib) as pair:
        for part in ("none", *machine.PARTS):

            async def work(load: TurnLoad, part: str = part) -> int:
                killer = Killer(pair, machine.control_block(pair), load, o.seed)
                await killer.until_generating()
                await asyncio.sleep(1.0)
                pid = None if part == "none" else machine.processes(pair, rollout=True)[part]
                if pid:
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(o.stop_seconds)
                if pid:
                    with contextlib.suppress(ProcessLookupError):  # the supervisor may have ended it meanwhile
                        os.kill(pid, signal.SIGCONT)
                await killer.until_generating()
                return pair.status()["generation"]

            served, generation = asyncio.run(_under_load(pair, o, work))
            errors = sorted({s.error for s in served if s.error})
            out[part] = serving_summary(served, float("nan"), slo) | {"generation": generation, "errors": errors}
            print(f"SIGSTOP of {part}: {out[part]}", flush=True)
    return out


def part_serving(o: argparse.Namespace, slo_flags: list[str]) -> dict[str, Any]:
    """SIGKILL of serving's own processes."""
    out: dict[str, Any] = {}
    for part in machine.PARTS:
        before = machine.leftovers()
        with machine.start(slo_flags, f"faults-serving-{part.replace(' ', '-')}.log", o.pool_gib) as pair:
            asyncio.run(warm_up(pair.serving_url, pair.rollout_url))
            members = {pair.process.pid, *descendants(pair.process.pid)}
            os.kill(machine.processes(pair, rollout=False)[part], signal.SIGKILL)
            killed_s = time.monotonic()
            alive, left = members, set()
            while time.monotonic() - killed_s < 30 and (alive or left):
                pair.process.poll()
                alive = {p for p in members if Path(f"/proc/{p}").exists() and not _is_zombie(p)}
                left = machine.leftovers() - before
                time.sleep(0.02)
            out[part] = {
                "all_gone_s": time.monotonic() - killed_s,
                "processes_left": [cmdline(p) for p in alive],
                "names_left": sorted(left),
            }
        print(f"SIGKILL of serving's {part}: {out[part]}", flush=True)
    return out


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def markdown(result: dict[str, Any]) -> str:
    """Tables of a result."""
    text = ""
    if k := result.get("kills"):
        s = k["serving"]
        rows = [
            ["kills of the sidecar under load", str(len(k["kills"]))],
            ["serving requests failed", f"{s['failed']} of {s['requests']}"],
            [
                "TTFT P99, TPOT P99 ms, attained",
                f"{s['ttft_ms_p99']:.0f}, {s['tpot_ms_p99']:.1f}, {s['slo_attainment']:.1%}",
            ],
            [
                "its pages usable again after ms, P50 and max",
                f"{k['pages_usable_ms']['p50']:.0f}, {k['pages_usable_ms']['max']:.0f}",
            ],
            ["pages leaked", str(k["pages_leaked"])],
            ["sidecar generates again after s, P50 and max", f"{k['back_s']['p50']:.1f}, {k['back_s']['max']:.1f}"],
        ]
        text += results.table(["SIGKILL", ""], rows) + "\n"
    if stops := result.get("stops"):
        rows = [
            [
                part,
                f"{s['failed']} of {s['requests']}",
                f"{s['ttft_ms_p99']:.0f}",
                f"{s['tpot_ms_p99']:.1f}",
                f"{s['slo_attainment']:.1%}",
            ]
            for part, s in stops.items()
        ]
        text += results.table(["SIGSTOP of", "failed", "TTFT P99 ms", "TPOT P99 ms", "SLO attained"], rows) + "\n"
    if serving := result.get("serving"):
        rows = [
            [part, f"{s['all_gone_s']:.1f}", str(len(s["processes_left"])), str(len(s["names_left"]))]
            for part, s in serving.items()
        ]
        text += results.table(
            ["SIGKILL of serving's", "all gone after s", "processes left", "shared memory, sockets left"], rows
        )
    return text


def main() -> None:
    """Run and write faults.json and faults.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path)
    p.add_argument("--kills", type=int, default=30)
    p.add_argument("--stop-seconds", type=float, default=15.0)
    p.add_argument("--rate", type=float, default=2.5)
    p.add_argument("--rollouts", type=int, default=16)
    p.add_argument("--pool-gib", type=float, default=0.09)
    p.add_argument("--ttft-slo-ms", type=float, default=300.0)
    p.add_argument("--tpot-slo-ms", type=float, default=40.0)
    p.add_argument("--parts", default="kills,stops,serving")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    slo = {"ttft_ms": o.ttft_slo_ms, "tpot_ms": o.tpot_slo_ms}
    flags = [f"--coserve-ttft-slo-ms={o.ttft_slo_ms}", f"--coserve-tpot-slo-ms={o.tpot_slo_ms}"]
    flags.append("--coserve-stall-timeout-s=30")
    parts = o.parts.split(",")
    result: dict[str, Any] = {"slo": slo}
    if "kills" in parts:
        result["kills"] = part_kills(o, flags, slo)
    if "stops" in parts:
        result["stops"] = part_stops(o, flags, slo)
    if "serving" in parts:
        result["serving"] = part_serving(o, flags)
    results.write("faults", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
