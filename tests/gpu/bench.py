"""The co-serving benchmark on a device: tests/bench/coserve.py on a bed for an H200, with ROSE's SLO and leases.

    python -m tests.gpu.bench --trace FILE [--rows references,...] [--graphs] [--out DIR]

Qwen2.5-7B (TTFT 500 ms, TPOT 150 ms) serves arrivals of the trace at density 1, 1.5 and 2 beside Qwen3-8B rollouts.
Every row is written as it ends and merged with those of earlier calls of the same commit and options, so that a
machine that is there for minutes does it in pieces: `--rows references`, then `dual,density15,density2`, then one or
two at a time. A pair takes some two minutes to start, a row `--seconds` and 45 s; the rows of leases have phases of
their own, of 200 s.

Bars: no failed request, P99 within the SLO at every density, harvest >= 0.85. Where serving alone keeps the device
busy nearly all the time, harvest is large and says little: the column "of the time left" is held against the time that
serving left in the same phase.
"""

from __future__ import annotations

import sys
from statistics import mean
from typing import Any

from tests.bench import coserve, results
from tests.bench.coserve_report import fixed, markdown
from tests.gpu import beds
from tests.gpu.machine import environment, why_not

_BARRED = ("dual", "density15", "density2")
_HARVEST_LEAST = 0.85


def bars(result: dict[str, Any]) -> dict[str, list[str]]:
    """What the measured rows at each density miss of what they should show; [] where a row meets all."""
    missed: dict[str, list[str]] = {}
    for name in _BARRED:
        if (row := result["rows"].get(name)) is None:
            continue
        serving, slo = row["serving"], result["slo"]
        met = {
            f"{serving['failed']} of {serving['requests']} failed": serving["requests"] > 0 and not serving["failed"],
            f"TTFT P99 {fixed(serving['ttft_ms_p99'], 0)} ms": _at_most(serving["ttft_ms_p99"], slo["ttft_ms"]),
            f"TPOT P99 {fixed(serving['tpot_ms_p99'], 1)} ms": _at_most(serving["tpot_ms_p99"], slo["tpot_ms"]),
            f"harvest {fixed(row['harvest_efficiency'], 2)}": _at_most(_HARVEST_LEAST, row["harvest_efficiency"]),
        }
        missed[name] = [what for what, ok in met.items() if not ok]
    return missed


def _at_most(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value <= bound  # also False for NaN


def tables(result: dict[str, Any]) -> str:
    """The benchmark's tables, and what only matters here."""
    missed = bars(result)
    rows = []
    for name, row in result["rows"].items():
        busy = row["serving"]["busy_fraction"]
        left = mean(row["rollout_alone_tokens_per_s"]) * (1 - busy)
        alone = result["serving_alone"].get(str(row["density"]), {}).get("busy_fraction")
        shares = (alone, busy, row["rollout"]["tokens_per_s"] / left if left > 0 else None, row["client_cpu_share"])
        verdict = "–" if name not in missed else "; ".join(missed[name]) or "met"
        rows.append([row["title"], *(fixed(share, 2) for share in shares), verdict])
    head = ["", "busy with serving alone", "busy with serving here", "of the time left", "client's CPU share", "bars"]
    return markdown(result) + "\n" + results.table(head, rows)


def main() -> int:
    bed = beds.chosen_bed()
    parser = beds.common_options(coserve.arguments(bed, beds.ROWS, __doc__))
    parser.set_defaults(merge=True)
    options = beds.parse(parser)
    if not options.on_cpu and (reason := why_not()):
        print(f"bench: not run: {reason}")
        return 1
    result, failed = coserve.measure(options, bed, beds.ROWS, tables, environment)
    for name, missed in bars(result).items():
        for what in missed:
            print(f"bar not met, {name}: {what}")
    return int(bool(failed) or any(bars(result).values()))


if __name__ == "__main__":
    sys.exit(main())
