"""The experiments of ROSE's co-serving executor (Tables 2, 4, 5 and Figure 9) on one device core, in one run.

    python -m tests.bench.coserve --trace azure-llm-2023-conv.csv [--seconds 50] [--rows dual,static,...]

SLO: `--slo-factor` x P99 of serving alone at density 1. Rollouts are agents of several turns (tests/bench/turns.py).
harvest_efficiency = rollout tokens/s beside serving / (tokens/s alone x share of the device that serving alone leaves
idle at that density). Tokens/s alone are measured in the same pair just before and just after serving's phase, since
a machine's speed drifts over half an hour; rows whose rollout engine has less (no prefix cache, half of the memory)
are held against the mean of the others' instead.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tests.bench import machine, results
from tests.bench.turns import TurnLoad
from vllm_coserve.demo.load import serve_schedule
from vllm_coserve.demo.models import SERVING_SPEC
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.report import harvest_efficiency, serving_summary
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import Pair

_LEAD_S = 6.0  # rollouts are in their stride before anything is measured
_ALONE_S = 10.0  # the rollout alone, before and after serving's phase
_DENSITIES = (1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Row:
    """One line of the tables: a configuration of the pair and a density of serving traffic."""

    name: str
    title: str
    flags: tuple[str, ...] = ()
    rollout_args: str = ""
    slo: str = "both"  # which SLOs are given as flags: both, ttft, tpot or none
    density: float = 1.0

    @property
    def whole(self) -> bool:
        """Its rollout engine has all that the pair offers, so alone it is what harvest is held against."""
        return not self.rollout_args and not any("memory" in f for f in self.flags)


ROWS = (
    Row("dual", "all of it: dual SLO, preemption, prefix cache, lease 10 s, density 1"),
    Row("density15", "density 1.5", density=1.5),
    Row("density2", "density 2", density=2.0),
    Row("static", "static half-and-half partition", ("--coserve-memory=static",), "--no-enable-prefix-caching"),
    Row("grow", "sharing without preemption", ("--coserve-memory=grow_only",), "--no-enable-prefix-caching"),
    Row("preempt", "+ preemption (no prefix cache)", (), "--no-enable-prefix-caching"),
    Row("idle", "idle windows only", slo="none"),
    Row("ttft", "TTFT-only", ("--coserve-policy=ttft",)),
    Row("tpot", "TPOT-only", ("--coserve-policy=tpot",)),
    Row("lease1", "lease 1 s", ("--coserve-lease-s=1",)),
    Row("lease50", "lease 50 s", ("--coserve-lease-s=50",)),
    Row("nogate", "no gate", ("--coserve-policy=none",)),
)


class Bench:
    """One run: references first, then each row with the SLO that they give."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._o = options
        self._slo: dict[str, float] = {}
        self._alone: dict[float, dict[str, Any]] = {}
        self._rollout_alone: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All rows; those that differ in density only share a pair."""
        o = self._o
        rows = [r for r in ROWS if not o.rows or r.name in o.rows.split(",")]
        self._references({r.density for r in rows} | {1.0})
        measured: dict[str, dict[str, Any]] = {}
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.flags, row.rollout_args, row.slo), []).append(row)
        for group in groups.values():
            with self._pair(group[0]) as pair:
                for row in group:
                    measured[row.name] = asdict(row) | self._measure(pair, row)
                    _say(row.name, measured[row.name])
        self._add_harvest(rows, measured)
        return {
            "slo": self._slo,
            "serving_alone": {str(d): s for d, s in self._alone.items()},
            "rollout_alone": self._rollout_alone,
            "rows": measured,
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(o).items()},
        }

    def _references(self, densities: set[float]) -> None:
        served: dict[float, Any] = {}
        with machine.start([], "references.log", self._o.pool_gib) as pair:
            for density in sorted(densities):
                served[density] = self._phase(pair, density, rollout=False)
            alone = self._phase(pair, None, rollout=True)
        self._rollout_alone = alone["rollout"]
        first = [s for s in served[1.0]["served"] if s.ok]
        factor = self._o.slo_factor * 1e3
        self._slo = {
            "ttft_ms": factor * percentile([s.ttft_s for s in first], 99),
            "tpot_ms": factor * percentile([s.tpot_s for s in first], 99),
        }
        for density, phase in served.items():
            self._alone[density] = _serving(phase, self._slo)
            _say(f"serving alone, density {density:g}", {"serving": self._alone[density]})
        _say("rollout alone", alone)

    def _pair(self, row: Row) -> Any:
        flags = list(row.flags)
        if row.slo != "none":
            flags += [f"--coserve-ttft-slo-ms={self._slo['ttft_ms']:.3f}"]
            flags += [f"--coserve-tpot-slo-ms={self._slo['tpot_ms']:.3f}"]
        stall = "--coserve-stall-timeout-s=30"
        return machine.start([*flags, stall], f"{row.name}.log", self._o.pool_gib, row.rollout_args)

    def _measure(self, pair: Pair, row: Row) -> dict[str, Any]:
        phase = self._phase(pair, row.density, rollout=True)
        return {
            "serving": _serving(phase, self._slo),
            "rollout": phase["rollout"],
            "rollout_alone_tokens_per_s": phase["alone"],
            "pair": phase["pair"],
        }

    def _add_harvest(self, rows: list[Row], measured: dict[str, dict[str, Any]]) -> None:
        own = {r.name: mean(measured[r.name]["rollout_alone_tokens_per_s"]) for r in rows}
        whole = [own[r.name] for r in rows if r.whole] or [self._rollout_alone["tokens_per_s"]]
        for row in rows:
            alone = own[row.name] if row.whole else mean(whole)
            rate = measured[row.name]["rollout"]["tokens_per_s"]
            busy = self._alone[row.density]["busy_fraction"]
            measured[row.name]["harvest_efficiency"] = harvest_efficiency(rate, alone, busy)
            print(f"{row.name}: harvest {measured[row.name]['harvest_efficiency']:.2f}", flush=True)

    def _phase(self, pair: Pair, density: float | None, rollout: bool) -> dict[str, Any]:
        return asyncio.run(self._phase_async(pair, density, rollout))

    async def _phase_async(self, pair: Pair, density: float | None, rollout: bool) -> dict[str, Any]:
        o = self._o
        await warm_up(pair.serving_url, pair.rollout_url)
        load = TurnLoad(pair.rollout_url, "rollout", o.rollouts, SERVING_SPEC.vocab, o.seed + 1)
        task = asyncio.create_task(load.run()) if rollout else None
        await asyncio.sleep(_LEAD_S if rollout else 0)
        alone = [await _rate(load)] if rollout and density is not None else []
        before, start, tokens, turns = pair.status(), time.monotonic(), load.totals.tokens, len(load.totals.turns_s)
        served = []
        if density is not None:
            schedule = machine.arrivals(o.trace, o.seconds, o.rate * density, o.seed)
            served = await serve_schedule(
                pair.serving_url, "serving", schedule, SERVING_SPEC.vocab, o.seed, lambda results: None
            )
        await asyncio.sleep(max(0.0, start + o.seconds - time.monotonic()))
        elapsed, after = time.monotonic() - start, pair.status()
        tokens, own_turns = load.totals.tokens - tokens, load.totals.turns_s[turns:]
        if alone:
            alone.append(await _rate(load))
        load.stop.set()
        if task:
            await task
        return {
            "served": served,
            "alone": alone,
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


def _serving(phase: dict[str, Any], slo: dict[str, float]) -> dict[str, Any]:
    served = phase["served"]
    ok = [s for s in served if s.ok]
    more = {
        "ttft_ms_p95": percentile([1e3 * s.ttft_s for s in ok], 95),
        "tpot_ms_p95": percentile([1e3 * s.tpot_s for s in ok], 95),
        "errors": sorted({s.error for s in served if s.error})[:3],
    }
    return serving_summary(served, phase["busy_fraction"], slo) | more


def _say(name: str, row: dict[str, Any]) -> None:
    text = name
    if s := row.get("serving"):
        text += f": {s['requests']} served, {s['failed']} failed, TTFT P99 {s['ttft_ms_p99']:.0f}, "
        text += f"TPOT P99 {s['tpot_ms_p99']:.1f} ms, attained {s['slo_attainment']:.1%}, busy {s['busy_fraction']:.2f}"
    if r := row.get("rollout"):
        text += f"; rollout {r['tokens_per_s']:.0f} tok/s, busy {r['busy_fraction']:.2f}, aborts {r['aborts']}, "
        text += f"refused {r['refused']}"
    if "pair" in row and "rollout_alone_tokens_per_s" in row:
        text += f"; alone {row['rollout_alone_tokens_per_s']}, hits {row['pair']['prefix_hit_rate']:.0%}, "
        text += f"reclaims {row['pair']['reclaims']}"
    print(text, flush=True)


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    slo = result["slo"]
    head = ["", "failed", "TTFT P50 / P95 / P99 ms", "TPOT P50 / P95 / P99 ms", "SLO attained"]
    head += ["rollout tokens/s", "of alone", "s per 10k tokens", "harvest", "prefix hits", "ended early"]
    rows = [_line(f"serving alone, density {d}", s, None) for d, s in result["serving_alone"].items()]
    alone = result["rollout_alone"]
    title = f"rollout alone (device busy {alone['busy_fraction']:.0%})"
    rate = f"{alone['tokens_per_s']:.0f}"
    rows.append([title, *["–"] * 4, rate, "–", f"{alone['s_per_10k_tokens']:.1f}", *["–"] * 3])
    rows += [_line(r["title"], r["serving"], r) for r in result["rows"].values()]
    text = f"SLO: TTFT {slo['ttft_ms']:.0f} ms, TPOT {slo['tpot_ms']:.1f} ms (P99).\n\n"
    return text + results.table(head, rows)


def _line(title: str, s: dict[str, Any], row: dict[str, Any] | None) -> list[str]:
    line = [title, f"{s['failed']} of {s['requests']}"]
    line += [
        " / ".join(f"{s[f'{k}_{q}']:.{n}f}" for q in ("p50", "p95", "p99")) for k, n in (("ttft_ms", 0), ("tpot_ms", 1))
    ]
    line.append(f"{s['slo_attainment']:.1%}")
    if row is None:
        return [*line, *["–"] * 6]
    r = row["rollout"]
    seconds = "–" if r["s_per_10k_tokens"] is None else f"{r['s_per_10k_tokens']:.1f}"
    own = mean(row["rollout_alone_tokens_per_s"])
    line += [f"{r['tokens_per_s']:.0f}", f"{own:.0f}", seconds, f"{row['harvest_efficiency']:.2f}"]
    return [*line, f"{row['pair']['prefix_hit_rate']:.0%}", str(sum(r["aborts"].values()))]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path, help="arrivals in the Azure CSV format (default: the bursty generator)")
    p.add_argument("--seconds", type=float, default=50.0, help="length of a phase (%(default)s)")
    p.add_argument("--rate", type=float, default=4.0, help="serving requests per second at density 1 (%(default)s)")
    p.add_argument("--rollouts", type=int, default=40, help="trajectories at a time (%(default)s)")
    p.add_argument("--pool-gib", type=float, default=0.125, help="shared page pool (%(default)s)")
    p.add_argument("--slo-factor", type=float, default=3.0, help="SLO over P99 of serving alone (%(default)s)")
    p.add_argument("--rows", default="", help=f"only these: {','.join(r.name for r in ROWS)}")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    return p.parse_args(argv)


def main() -> None:
    """Run and write coserve.json and coserve.md."""
    options = parse()
    result = Bench(options).run()
    results.write("coserve", result, markdown(result), options.out)


if __name__ == "__main__":
    main()
