"""What the co-serving benchmark says of its phases: progress lines, and tables of a result."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

from tests.bench import results


def say(name: str, row: dict[str, Any]) -> None:
    """One line about what was just measured."""
    text = name
    if s := row.get("serving"):
        text += f": {s['requests']} served, {s['failed']} failed, TTFT P99 {s['ttft_ms_p99']:.0f}, "
        text += f"TPOT P99 {s['tpot_ms_p99']:.1f} ms, attained {s['slo_attainment']:.1%}, busy {s['busy_fraction']:.2f}"
    if r := row.get("rollout"):
        text += f"; rollout {r['tokens_per_s']:.0f} tok/s, busy {r['busy_fraction']:.2f}, aborts {r['aborts']}, "
        text += f"refused {r['refused']}"
    if "pair" in row and "rollout_alone_tokens_per_s" in row:
        text += f"; alone {row['rollout_alone_tokens_per_s']}, hits {row['pair']['prefix_hit_rate']:.0%}, "
        text += f"reclaims {row['pair']['reclaims']}, harvest {row['harvest_efficiency']:.2f}"
    print(text, flush=True)


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result, as far as it was measured."""
    slo = result["slo"]
    head = ["", "failed", "TTFT P50 / P95 / P99 ms", "TPOT P50 / P95 / P99 ms", "SLO attained"]
    head += ["rollout tokens/s", "of alone", "s per 10k tokens", "harvest", "prefix hits", "ended early"]
    rows = [_line(f"serving alone, density {d}", s, None) for d, s in sorted(result["serving_alone"].items())]
    if alone := result["rollout_alone"]:
        title = f"rollout alone (device busy {alone['busy_fraction']:.0%})"
        rows.append([title, *["–"] * 4, fixed(alone["tokens_per_s"], 0), "–", fixed(alone["s_per_10k_tokens"], 1)])
        rows[-1] += ["–"] * 3
    rows += [_line(r["title"], r["serving"], r) for r in result["rows"].values()]
    text = f"SLO: TTFT {slo['ttft_ms']:.0f} ms, TPOT {slo['tpot_ms']:.1f} ms (P99).\n\n"
    return text + results.table(head, rows)


def _line(title: str, s: dict[str, Any], row: dict[str, Any] | None) -> list[str]:
    line = [title, f"{s['failed']} of {s['requests']}"]
    line += [
        " / ".join(fixed(s[f"{k}_{q}"], n) for q in ("p50", "p95", "p99")) for k, n in (("ttft_ms", 0), ("tpot_ms", 1))
    ]
    line.append(percent(s["slo_attainment"], 1))
    if row is None:
        return [*line, *["–"] * 6]
    r = row["rollout"]
    line += [fixed(r["tokens_per_s"], 0), fixed(mean(row["rollout_alone_tokens_per_s"]), 0)]
    line += [fixed(r["s_per_10k_tokens"], 1), fixed(row["harvest_efficiency"], 2)]
    return [*line, percent(row["pair"]["prefix_hit_rate"], 0), str(sum(r["aborts"].values()))]


def fixed(value: float | None, digits: int) -> str:
    """A number with so many digits, a dash where it was not measured."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int) -> str:
    """A share as a percentage, a dash where it was not measured."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}%}"
