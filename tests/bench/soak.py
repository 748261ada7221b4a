"""A pair under load for half an hour: its sidecar killed every minute, its weights replaced every 20 s.

    python -m tests.bench.soak [--minutes 30] [--density 1.5] [--trace FILE]

Reports failed requests, SLO attainment, and what grew in serving's processes: pages without an owner, file descriptors,
resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import machine, results
from tests.bench.faults import Killer, summary
from tests.bench.turns import TurnLoad
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.demo.load import Served, serve_schedule
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.report import serving_summary
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import Pair
from vllm_coserve.memory.ledger import Owner

_SAMPLE_S = 10.0
_BACK_S = 150.0  # a killed sidecar is back by then


def second_checkpoint() -> Path:
    """The rollout model with its weights changed a little, as a training step changes them."""
    from safetensors.torch import load_file, save_file

    source = ensure_model(ROLLOUT_SPEC, Path("out") / "models")
    target = machine.OUT / "updated-weights"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {k: v * 1.01 for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def held_by(pids: dict[str, int]) -> dict[str, dict[str, int]]:
    """Open files and resident KiB of processes; pages of the pool, which come and go, are files and do not count."""
    out = {}
    for name, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        rss = int(status.split("RssAnon:")[1].split()[0])
        out[name] = {"files": len(os.listdir(f"/proc/{pid}/fd")), "rss_kib": rss}
    return out


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._o = options
        self._done = asyncio.Event()
        self._start_s = 0.0
        self.served: list[Served] = []
        self.samples: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.updates = self.updates_refused = 0
        self.wrong: list[str] = []  # what ended a part of the soak early

    async def run(self, pair: Pair) -> TurnLoad:
        """Load, kills and updates until the time is over."""
        o = self._o
        await warm_up(pair.serving_url, pair.rollout_url)
        load = TurnLoad(pair.rollout_url, "rollout", o.rollouts, SERVING_SPEC.vocab, o.seed)
        tasks = [asyncio.create_task(load.run()), asyncio.create_task(self._traffic(pair))]
        tasks += [asyncio.create_task(f(pair)) for f in (self._update, self._sample)]
        tasks.append(asyncio.create_task(self._kill(Killer(pair, machine.control_block(pair), load, o.seed))))
        start = self._start_s = time.monotonic()
        while (left := start + o.minutes * 60 - time.monotonic()) > 0:
            await asyncio.sleep(min(60.0, left))
            failed = sum(bool(s.error) for s in self.served)
            print(
                f"{(time.monotonic() - start) / 60:.0f} min: {len(self.served)} served, {failed} failed, "
                f"{len(self.kills)} kills, {self.updates} updates, {load.totals.tokens} rollout tokens",
                flush=True,
            )
        self._done.set()
        load.stop.set()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self.wrong.append(repr(outcome))
        return load

    async def _traffic(self, pair: Pair) -> None:
        o = self._o
        schedule = machine.arrivals(o.trace, o.minutes * 60, o.rate * o.density, o.seed)
        self.served = []
        self.served += await serve_schedule(
            pair.serving_url, "serving", schedule, SERVING_SPEC.vocab, o.seed, self._keep
        )

    def _keep(self, served: list[Served]) -> None:
        self.served = served  # one list that grows

    async def _every(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except TimeoutError:
            return True
        return False

    async def _kill(self, killer: Killer) -> None:
        rng, last_s = random.Random(self._o.seed), self._start_s + 60 * self._o.minutes - _BACK_S
        while await self._every(self._o.kill_every_s - (time.monotonic() - self._start_s) % self._o.kill_every_s):
            if time.monotonic() > last_s:
                return  # the load would be over before it is back
            self.kills.append(await killer.kill_once(rng.choice(machine.PARTS)))
            print(f"kill {len(self.kills)}: {self.kills[-1]}", flush=True)

    async def _update(self, pair: Pair) -> None:
        checkpoints = [ensure_model(ROLLOUT_SPEC, Path("out") / "models"), second_checkpoint()]
        number = 0
        while await self._every(self._o.update_every_s):
            number += 1
            body = {"path": str(checkpoints[number % 2].resolve()), "version": f"step-{number}"}
            if await asyncio.to_thread(_post, f"{pair.rollout_url}/coserve/v1/weights", body):
                self.updates += 1
            else:
                self.updates_refused += 1  # the sidecar is on its way back

    async def _sample(self, pair: Pair) -> None:
        block = machine.control_block(pair)
        serving = machine.processes(pair, rollout=False)
        start = time.monotonic()
        while await self._every(_SAMPLE_S):
            self.samples.append({"s": time.monotonic() - start, **held_by(serving), **_pages(block)})


def _pages(block: ControlBlock) -> dict[str, int]:
    """Pages that have no owner, or that the slot tables show twice."""
    owned = sum(int(np.count_nonzero(block.owners == s)) for s in Owner)
    tables = np.concatenate([block.serving_table, block.rollout_table])
    mapped = tables[tables >= 0]
    return {
        "pages_missing": block.all_pages - owned,
        "pages_mapped_twice": int(mapped.size - np.unique(mapped).size),
        "serving_pages": int(np.count_nonzero(block.owners == Owner.SERVING)),
        "serving_table_pages": int(np.count_nonzero(block.serving_table >= 0)),
    }


def _post(url: str, body: dict[str, Any]) -> bool:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def growth(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How the last fifth of the run compares with the second fifth (the first warms up), by process, as medians."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    out = {}
    for part in machine.PARTS:
        ratios = {}
        for key in ("files", "rss_kib"):
            medians = [percentile([s[part][key] for s in group], 50) for group in (early, late)]
            ratios[key] = medians[1] / medians[0]
        out[part] = ratios
    return out


def markdown(result: dict[str, Any]) -> str:
    """The result as a table."""
    s, slo = result["serving"], result["slo"]
    grown = {p: f"files x{g['files']:.3f}, RSS x{g['rss_kib']:.3f}" for p, g in result["growth"].items()}
    rows = [
        ["minutes, density", f"{result['minutes']:g}, {result['density']:g}"],
        ["sidecar kills, weight updates", f"{len(result['kills'])}, {result['updates']}"],
        [
            "pages of a killed sidecar usable after ms, P50 / max",
            "{p50:.0f} / {max:.0f}".format(**result["pages_usable_ms"]),
        ],
        ["sidecar generates again after s, P50 / max", "{p50:.1f} / {max:.1f}".format(**result["back_s"])],
        ["serving requests failed", f"{s['failed']} of {s['requests']}"],
        ["SLO", f"TTFT {slo['ttft_ms']:.0f}, TPOT {slo['tpot_ms']:.1f} ms"],
        ["TTFT P50 / P99 ms", f"{s['ttft_ms_p50']:.0f} / {s['ttft_ms_p99']:.0f}"],
        ["TPOT P50 / P99 ms", f"{s['tpot_ms_p50']:.1f} / {s['tpot_ms_p99']:.1f}"],
        ["SLO attained", f"{s['slo_attainment']:.2%}"],
        ["rollout tokens", str(result["rollout_tokens"])],
        ["pages leaked", str(result["pages_leaked"])],
        ["pages missing, mapped twice", f"{result['pages_missing']}, {result['pages_mapped_twice']}"],
        *([f"growth of serving's {p}", g] for p, g in grown.items()),
        ["left behind at the end", str(len(result["left_behind"]))],
    ]
    return results.table(["soak", ""], rows)


def main() -> None:
    """Run and write soak.json and soak.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path)
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--density", type=float, default=1.5)
    p.add_argument("--rate", type=float, default=4.0, help="serving requests per second at density 1 (%(default)s)")
    p.add_argument("--rollouts", type=int, default=40)
    p.add_argument("--pool-gib", type=float, default=0.125)
    p.add_argument("--kill-every-s", type=float, default=60.0)
    p.add_argument("--update-every-s", type=float, default=20.0)
    p.add_argument("--ttft-slo-ms", type=float, default=300.0)
    p.add_argument("--tpot-slo-ms", type=float, default=40.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    slo = {"ttft_ms": o.ttft_slo_ms, "tpot_ms": o.tpot_slo_ms}
    flags = [f"--coserve-ttft-slo-ms={o.ttft_slo_ms}", f"--coserve-tpot-slo-ms={o.tpot_slo_ms}"]
    # What oneDNN compiles for each shape is kept, up to 1,024 shapes by default: that would go on filling all the time.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    before, soak = machine.leftovers(), Soak(o)
    with machine.start([*flags, "--coserve-stall-timeout-s=30"], "soak.log", o.pool_gib) as pair:
        load = asyncio.run(soak.run(pair))
        block = machine.control_block(pair)
        generation, faults = block.get(Word.GENERATION), pair.status()["gate"]["faults"]
    result = {
        "slo": slo,
        "minutes": o.minutes,
        "density": o.density,
        "serving": serving_summary(soak.served, float("nan"), slo),
        "wrong": soak.wrong,
        "errors": sorted({s.error for s in soak.served if s.error})[:5],
        "kills": soak.kills,
        "pages_usable_ms": summary([k["pages_usable_ms"] for k in soak.kills]),
        "back_s": summary([k["back_s"] for k in soak.kills]),
        "pages_leaked": sum(k["pages_leaked"] for k in soak.kills),
        "generation": generation,
        "updates": soak.updates,
        "updates_refused": soak.updates_refused,
        "rollout_tokens": load.totals.tokens,
        "rollout_aborts": load.totals.aborts,
        "hook_faults": faults,
        "pages_missing": max(s["pages_missing"] for s in soak.samples),
        "pages_mapped_twice": max(s["pages_mapped_twice"] for s in soak.samples),
        "growth": growth(soak.samples),
        "left_behind": sorted(machine.leftovers() - before),
        "samples": soak.samples,
    }
    results.write("soak", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
