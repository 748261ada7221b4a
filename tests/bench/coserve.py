"""The experiments of ROSE's co-serving executor (Tables 2, 4, 5 and Figure 9) on one device, in one run or several.

    python -m tests.bench.coserve --trace azure-llm-2023-conv.csv [--seconds 50] [--rows dual,static,...] [--merge]

SLO: `--slo-factor` x P99 of serving alone at density 1. Rollouts are agents of several turns (tests/bench/turns.py).
harvest_efficiency = rollout tokens/s beside serving / (tokens/s alone x share of the device that serving alone leaves
idle at that density). Tokens/s alone are measured in the same pair just before and just after serving's phase, since
a machine's speed drifts over half an hour; rows whose rollout engine has less (no prefix cache, half of the memory)
are held against the mean of the others' instead.

Results are written after every row. One that fails is named, and the next is tried. `--merge` goes on with the results
of an earlier run of the same commit and options: its references are used again, its other rows are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import machine, results
from tests.bench.coserve_report import markdown, say
from tests.bench.machine import CPU, Bed
from tests.bench.rows import ROWS, Row, add_harvest, by_pair, chosen
from tests.bench.turns import TurnLoad
from vllm_coserve.demo.load import serve_schedule
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.report import serving_summary
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import DemoError, Pair

REFERENCES = "references"
_ALONE_S = 10.0  # the rollout alone, before and after serving's phase
_ABOUT_A_RUN = ("rows", "out", "merge")  # options that do not change what a row measures


class Bench:
    """One run on a bed: references first, then each row with the SLO that they give or that the bed has.

    `result` has all that was found so far; `save` is called after each part of it.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        bed: Bed,
        rows: Sequence[Row],
        result: dict[str, Any],
        save: Callable[[], None],
    ) -> None:
        self._o, self._bed, self._rows, self._save = options, bed, rows, save
        self._result = result
        self.failed: dict[str, str] = {}

    def run(self, wanted: str) -> None:
        """The references that are missing, then the rows of these names; those that differ in density share a pair."""
        rows = [] if wanted == REFERENCES else chosen(self._rows, wanted)
        try:
            self._references({r.density for r in rows or self._rows} | {1.0})
        except Exception as exc:  # recovery: rows are measured all the same where the SLO is known
            self._fail(REFERENCES, exc)
            if not self._result["slo"]:
                return
        for group in by_pair(rows):
            self._measure_group(group)

    def _measure_group(self, group: list[Row]) -> None:
        waiting = list(group)
        while waiting:
            row = waiting[0]
            try:
                with self._pair(row) as pair:
                    while waiting:
                        row = waiting.pop(0)
                        self._measure(pair, row)
            except DemoError as exc:  # the pair did not start, nor would it for the others
                for row in waiting:
                    self._fail(row.name, exc)
                return
            except Exception as exc:  # recovery: the others are tried, on a pair of their own
                self._fail(row.name, exc)
                waiting = [r for r in waiting if r is not row]

    def _fail(self, name: str, exc: Exception) -> None:
        self.failed[name] = f"{type(exc).__name__}: {exc}"
        print(f"{name}: failed: {self.failed[name]}", flush=True)

    def _references(self, densities: set[float]) -> None:
        alone = self._result["serving_alone"]
        missing = sorted(d for d in densities if str(d) not in alone)
        if not missing and self._result["rollout_alone"]:
            return
        with machine.start([], "references.log", self._o.pool_gib, bed=self._bed) as pair:
            for density in missing:
                phase = self._phase(pair, density, False, self._o.seconds)
                if not self._result["slo"]:
                    self._result["slo"] = self._slo_of(phase)
                alone[str(density)] = _serving(phase, self._result["slo"])
                say(f"serving alone, density {density:g}", {"serving": alone[str(density)]})
                self._save()
            if not self._result["rollout_alone"]:
                phase = self._phase(pair, None, True, self._o.seconds)
                self._result["rollout_alone"] = phase["rollout"]
                say("rollout alone", phase)
                self._save()

    def _slo_of(self, phase: dict[str, Any]) -> dict[str, float]:
        ok, factor = [s for s in phase["served"] if s.ok], self._o.slo_factor * 1e3
        return {
            "ttft_ms": factor * percentile([s.ttft_s for s in ok], 99),
            "tpot_ms": factor * percentile([s.tpot_s for s in ok], 99),
        }

    def _pair(self, row: Row) -> Any:
        flags = list(row.flags)
        if row.slo != "none":
            flags += slo_flags(self._result["slo"])
        stall = "--coserve-stall-timeout-s=30"
        return machine.start([*flags, stall], f"{row.name}.log", self._o.pool_gib, row.rollout_args, bed=self._bed)

    def _measure(self, pair: Pair, row: Row) -> None:
        phase = self._phase(pair, row.density, True, row.seconds or self._o.seconds)
        self._result["rows"][row.name] = asdict(row) | {
            "serving": _serving(phase, self._result["slo"]),
            "rollout": phase["rollout"],
            "rollout_alone_tokens_per_s": phase["alone"],
            "pair": phase["pair"],
            "client_cpu_share": phase["client_cpu_share"],
        }
        measured = self._result["rows"]
        self._result["rows"] = {r.name: measured[r.name] for r in self._rows if r.name in measured}
        add_harvest(self._rows, self._result)
        say(row.name, self._result["rows"][row.name])
        self._save()

    def _phase(self, pair: Pair, density: float | None, rollout: bool, seconds: float) -> dict[str, Any]:
        return asyncio.run(self._phase_async(pair, density, rollout, seconds))

    async def _phase_async(self, pair: Pair, density: float | None, rollout: bool, seconds: float) -> dict[str, Any]:
        o, bed = self._o, self._bed
        await warm_up(pair.serving_url, pair.rollout_url, bed.warm_up_tokens)
        load = TurnLoad(pair.rollout_url, "rollout", o.rollouts, bed.vocab, o.seed + 1, bed.turns)
        task = asyncio.create_task(load.run()) if rollout else None
        await asyncio.sleep(bed.lead_s if rollout else 0)
        alone = [await _rate(load)] if rollout and density is not None else []
        before, start, tokens, turns = pair.status(), time.monotonic(), load.totals.tokens, len(load.totals.turns_s)
        cpu_s = time.process_time()
        served = []
        if density is not None:
            schedule = machine.arrivals(o.trace, seconds, o.rate * density, o.seed, bed.scale)
            served = await serve_schedule(
                pair.serving_url, "serving", schedule, bed.vocab, o.seed, lambda results: None
            )
        await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
        elapsed, after = time.monotonic() - start, pair.status()
        cpu_s = time.process_time() - cpu_s
        tokens, own_turns = load.totals.tokens - tokens, load.totals.turns_s[turns:]
        if alone:
            alone.append(await _rate(load))
        load.stop.set()
        if task:
            await task
        return {
            "served": served,
            "alone": alone,
            "client_cpu_share": cpu_s / elapsed,
            "busy_fraction": (after["gate"]["serving_busy_s"] - before["gate"]["serving_busy_s"]) / elapsed,
            "rollout": {
                "tokens_per_s": tokens / elapsed,
                "busy_fraction": (after["gate"]["rollout_busy_s"] - before["gate"]["rollout_busy_s"]) / elapsed,
                "s_per_10k_tokens": 1e4 * elapsed / tokens if tokens else None,
                "turn_s_mean": sum(own_turns) / len(own_turns) if own_turns else None,
                "turns": len(own_turns),
                "aborts": load.totals.aborts,
                "refused": load.totals.refused,
                "errors": load.totals.errors,
            },
            "pair": _difference(before, after),
        }


async def _rate(load: TurnLoad) -> float:
    """Tokens/s of the rollout alone."""
    start, tokens = time.monotonic(), load.totals.tokens
    await asyncio.sleep(_ALONE_S)
    return (load.totals.tokens - tokens) / (time.monotonic() - start)


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    hits = after["rollout"]["prefix_hit_tokens"] - before["rollout"]["prefix_hit_tokens"]
    queries = after["rollout"]["prefix_query_tokens"] - before["rollout"]["prefix_query_tokens"]
    counts = {k: after["reclaims"][k] - before["reclaims"][k] for k in ("count", "pages", "cuts")}
    gate = {k: after["gate"][k] - before["gate"][k] for k in ("grants", "denials", "overruns", "faults")}
    hit_rate = hits / queries if queries else 0.0
    return {"reclaims": counts, "gate": gate, "prefix_hit_rate": hit_rate, "pages": after["pages"]}


def _serving(phase: dict[str, Any], slo: Mapping[str, float]) -> dict[str, Any]:
    served = phase["served"]
    ok = [s for s in served if s.ok]
    more = {
        "ttft_ms_p95": percentile([1e3 * s.ttft_s for s in ok], 95),
        "tpot_ms_p95": percentile([1e3 * s.tpot_s for s in ok], 95),
        "errors": sorted({s.error for s in served if s.error})[:3],
    }
    return serving_summary(served, phase["busy_fraction"], slo) | more


def slo_flags(slo: Mapping[str, float]) -> list[str]:
    """The promise to serving's users as flags of the pair."""
    return [f"--coserve-ttft-slo-ms={slo['ttft_ms']:.3f}", f"--coserve-tpot-slo-ms={slo['tpot_ms']:.3f}"]


def arguments(bed: Bed, rows: Sequence[Row], doc: str | None = __doc__) -> argparse.ArgumentParser:
    """The options, with the bed's load as defaults."""

    def known(names: str) -> str:
        try:
            chosen(rows, "" if names == REFERENCES else names)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None
        return names

    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path, help="arrivals in the Azure CSV format (default: the bursty generator)")
    p.add_argument("--seconds", type=float, default=bed.seconds, help="length of a phase (%(default)s)")
    p.add_argument("--rate", type=float, default=bed.rate_per_s, help="serving requests/s at density 1 (%(default)s)")
    p.add_argument("--rollouts", type=int, default=bed.rollouts, help="trajectories at a time (%(default)s)")
    p.add_argument("--pool-gib", type=float, default=bed.pool_gib, help="shared page pool (%(default)s)")
    if bed.slo_ms is None:
        p.add_argument("--slo-factor", type=float, default=3.0, help="SLO over P99 of serving alone (%(default)s)")
    p.add_argument(
        "--rows", type=known, default="", help=f"only these: {','.join(r.name for r in rows)}; or `{REFERENCES}`"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    p.add_argument("--merge", action="store_true", help="go on with the results of an earlier run")
    return p


def measure(
    o: argparse.Namespace,
    bed: Bed,
    rows: Sequence[Row],
    table: Callable[[dict[str, Any]], str],
    environment: Callable[[], dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the rows that were asked for and write the bed's result files; returns the result, and why what failed."""
    facts = environment()
    result: dict[str, Any] = {"slo": dict(bed.slo_ms or {}), "serving_alone": {}, "rollout_alone": {}, "rows": {}}
    if o.merge:
        found = results.earlier(bed.name, o.out, facts["commit"], results.plain(o, *_ABOUT_A_RUN))
        result |= {k: found[k] for k in ("slo", "serving_alone", "rollout_alone", "rows") if k in found}
        facts["command"] = "; ".join(filter(None, (found.get("command"), facts["command"])))
    result["options"] = results.plain(o, "merge")

    def save(say_it: bool = False) -> None:
        results.write(bed.name, result, table(result), o.out, facts, say_it)

    bench = Bench(o, bed, rows, result, save)
    bench.run(o.rows)
    if bench.failed:
        result["failed"] = bench.failed
    if result["slo"]:
        save(True)
    return result, bench.failed


def main() -> int:
    """Run and write coserve.json and coserve.md."""
    _, failed = measure(arguments(CPU, ROWS).parse_args(), CPU, ROWS, markdown, results.environment)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
