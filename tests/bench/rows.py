"""The rows of the co-serving benchmark's tables, and the arithmetic of harvest over what they gave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from vllm_coserve.demo.report import harvest_efficiency


@dataclass(frozen=True)
class Row:
    """One line of the tables: a configuration of the pair and a density of serving traffic."""

    name: str
    title: str
    flags: tuple[str, ...] = ()
    rollout_args: str = ""
    slo: str = "both"  # which SLOs are given as flags: both or none
    density: float = 1.0
    seconds: float | None = None  # length of its phase, where it has one of its own

    @property
    def whole(self) -> bool:
        """Its rollout engine has all that the pair offers, so alone it is what harvest is held against."""
        return not self.rollout_args and not any("memory" in f for f in self.flags)

    @property
    def pair(self) -> tuple[Any, ...]:
        """Rows for which this is equal can be measured on one pair, one after the other."""
        return self.flags, self.rollout_args, self.slo


def lease(seconds: int, phase_s: float | None = None) -> Row:
    """A row with another lease of idle prefix cache (ROSE, Table 4)."""
    return Row(f"lease{seconds}", f"lease {seconds} s", (f"--coserve-lease-s={seconds}",), seconds=phase_s)


# ROSE's Tables 2 and 5 and Figure 9.
COMMON_ROWS = (
    Row("dual", "all of it: dual SLO, preemption, prefix cache, lease 10 s, density 1"),
    Row("density15", "density 1.5", density=1.5),
    Row("density2", "density 2", density=2.0),
    Row("static", "static half-and-half partition", ("--coserve-memory=static",), "--no-enable-prefix-caching"),
    Row("grow", "sharing without preemption", ("--coserve-memory=grow_only",), "--no-enable-prefix-caching"),
    Row("preempt", "+ preemption (no prefix cache)", (), "--no-enable-prefix-caching"),
    Row("idle", "idle windows only", slo="none"),
    Row("ttft", "TTFT-only", ("--coserve-policy=ttft",)),
    Row("tpot", "TPOT-only", ("--coserve-policy=tpot",)),
)
NO_GATE = Row("nogate", "no gate", ("--coserve-policy=none",))
ROWS = (*COMMON_ROWS, lease(1), lease(50), NO_GATE)


def chosen(rows: Sequence[Row], names: str) -> list[Row]:
    """Rows by their names with commas between them, all where there is none.

    Raises:
        ValueError: there is no row of such a name.
    """
    wanted = [n for n in names.split(",") if n]
    if unknown := set(wanted) - {r.name for r in rows}:
        raise ValueError(f"no row {','.join(sorted(unknown))}: there are {','.join(r.name for r in rows)}")
    return [r for r in rows if not wanted or r.name in wanted]


def by_pair(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows, those that can share a pair together."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.pair, []).append(row)
    return list(groups.values())


def add_harvest(rows: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Write `harvest_efficiency` into each row of a result; NaN where serving alone was not measured.

    A row whose rollout engine has less than the pair offers (no prefix cache, half of the memory) is held against the
    mean of the others' rates alone, for its own would hide what it lacks.
    """
    measured = result["rows"]
    own = {name: mean(m["rollout_alone_tokens_per_s"]) for name, m in measured.items()}
    alone = result["rollout_alone"].get("tokens_per_s", math.nan)
    whole = [own[r.name] for r in rows if r.name in own and r.whole] or [alone]
    for row in rows:
        if row.name not in measured:
            continue
        rate = measured[row.name]["rollout"]["tokens_per_s"]
        busy = result["serving_alone"].get(str(row.density), {}).get("busy_fraction", math.nan)
        bound = own[row.name] if row.whole else mean(whole)
        measured[row.name]["harvest_efficiency"] = harvest_efficiency(rate, bound, busy)
