"""SIGKILL of the rollout engine under load: what serving's users notice, and when its memory is back.

    python -m tests.gpu.kills --trace FILE [--kills 4] [--graphs] [--out DIR]

The rollout's API server and engine core are killed in turn at random moments, while both engines have the benchmark's
load. A call's kills are a run; runs of the same commit and options are kept together, so that three calls of ten
minutes come to twelve kills. Bars: no request of serving's users fails, no page is leaked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.bench import faults, results
from tests.bench.coserve import slo_flags
from tests.bench.coserve_report import fixed, percent
from tests.gpu import beds, nvml
from tests.gpu.machine import environment, why_not
from vllm_coserve.demo.servers import DemoError

_NAME = "gpu_kills"


class WatchedKiller(faults.Killer):
    """Also sees how much of the device's memory a killed engine gave back before its successor took it."""

    async def kill_once(self, part: str) -> dict[str, Any]:
        """See the base; adds `device_back_bytes`, and after how long that was reached."""
        with nvml.Lowest().watching() as watch:
            before = nvml.used_bytes()
            kill = await super().kill_once(part)
            lowest, _ = watch.lowest
        back = None if before is None or lowest is None else before - lowest
        return kill | {"device_back_bytes": back, "device_used_before_and_after": (before, nvml.used_bytes())}


def missed(run: dict[str, Any]) -> list[str]:
    """The bars that a run of kills did not meet."""
    serving = run["serving"]
    wrong = [f"{serving['failed']} of {serving['requests']} serving requests failed"] if serving["failed"] else []
    if run["pages_leaked"] or run["pages_missing"]:
        wrong.append(f"{run['pages_leaked']} pages leaked, {run['pages_missing']} missing")
    return wrong


def table(result: dict[str, Any]) -> str:
    """A line for each run, and their sum."""
    head = ["run", "kills", "failed", "TTFT P99 ms", "TPOT P99 ms", "SLO attained", "pages usable after ms, P50 / most"]
    head += ["least GB back", "pages leaked", "generates again after s, P50 / most"]
    rows = []
    for number, run in enumerate(result["runs"], 1):
        s, usable, again = run["serving"], run["pages_usable_ms"], run["back_s"]
        back = [k["device_back_bytes"] for k in run["kills"] if k["device_back_bytes"] is not None]
        row = [str(number), str(len(run["kills"])), f"{s['failed']} of {s['requests']}"]
        row += [fixed(s["ttft_ms_p99"], 0), fixed(s["tpot_ms_p99"], 1), percent(s["slo_attainment"], 1)]
        row += [f"{fixed(usable['p50'], 0)} / {fixed(usable['max'], 0)}", fixed(min(back) / 1e9 if back else None, 1)]
        rows.append([*row, str(run["pages_leaked"]), f"{fixed(again['p50'], 1)} / {fixed(again['max'], 1)}"])
    kills = sum(len(run["kills"]) for run in result["runs"])
    failed, asked = (sum(run["serving"][k] for run in result["runs"]) for k in ("failed", "requests"))
    rows.append(["all", str(kills), f"{failed} of {asked}", *["–"] * (len(head) - 3)])
    return results.table(head, rows)


def main() -> int:
    bed = beds.chosen_bed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rate", type=float, default=bed.rate_per_s)
    # Enough to fill the engine. While it is away, all of them try again five times a second where serving is timed.
    parser.add_argument("--rollouts", type=int, default=min(bed.rollouts, 128))
    parser.add_argument("--pool-gib", type=float, default=bed.pool_gib)
    parser.add_argument("--seed", type=int, help="of the moments (default: one for each run)")
    parser.add_argument("--out", type=Path)
    o = beds.parse(beds.common_options(parser))
    if not o.on_cpu and (reason := why_not()):
        print(f"kills: not run: {reason}")
        return 1
    facts = environment()
    options = results.plain(o, "out", "kills", "seed")
    runs = results.earlier(_NAME, o.out, facts["commit"], options).get("runs", [])
    o.seed = len(runs) if o.seed is None else o.seed
    slo = dict(bed.slo_ms or {})
    flags = [*slo_flags(slo), "--coserve-stall-timeout-s=30"]
    try:
        runs.append(faults.part_kills(o, flags, slo, bed, WatchedKiller) | {"command": facts["command"]})
    except (RuntimeError, OSError, DemoError) as exc:
        print(f"kills: failed: {exc}")
        return 1
    result = {"slo": slo, "options": options, "runs": runs}
    results.write(_NAME, result, table(result), o.out, facts)
    for what in missed(runs[-1]):
        print(f"bar not met: {what}")
    return int(bool(missed(runs[-1])))


if __name__ == "__main__":
    sys.exit(main())
