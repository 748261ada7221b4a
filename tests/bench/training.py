"""`coserve train` on a dedicated and a borrowed engine: staleness 0, 1 and 3, and GRPO against DAPO, side by side.

    python -m tests.bench.training [--steps 40] [--rate 2]

Every row is the same job from the same warm-started policy, beside serving traffic: the success of its walks, the time
of its steps, how old its samples are, and what DAPO's dynamic sampling costs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.bench import machine, results
from vllm_coserve.demo.arrivals import bursty
from vllm_coserve.demo.models import SERVING_SPEC
from vllm_coserve.demo.report import serving_summary
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import running_engine
from vllm_coserve.demo.training import ensure_policy, job_of, learn

_JOB_BOUND_S = 900.0
_DEDICATED = "--served-model-name=rollout --kv-cache-memory-bytes=67108864"

Row = tuple[str, dict[str, Any]]
ROWS: list[Row] = [
    ("GRPO, S = 0", {"staleness": 0}),
    ("GRPO, S = 1", {"staleness": 1}),
    ("GRPO, S = 3", {"staleness": 3}),
    ("DAPO, S = 1", {"staleness": 1, "algorithm": {"name": "dapo", "dynamic_sampling": {"enabled": True, "cap": 3}}}),
]


def merged(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A job with some of its keys changed, those of sections one by one."""
    out = dict(job)
    for key, value in changes.items():
        out[key] = {**out.get(key, {}), **value} if isinstance(value, dict) else value
    return out


def row_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a job; step times without the first, in which everything starts."""
    ratios = [s["sampler_log_ratio_abs_mean"] for s in steps if "sampler_log_ratio_abs_mean" in s]
    last = steps[-10:]
    return {
        "steps": len(steps),
        "success": [s["success"] for s in steps],
        "success_start": steps[0]["success"],
        "success_last10": sum(s["success"] for s in last) / len(last),
        "step_s_mean": sum(s["step_s"] for s in steps[1:]) / max(1, len(steps) - 1),
        "staleness_mean": sum(s["staleness_mean"] for s in steps) / len(steps),
        "staleness_max": max(s["staleness_max"] for s in steps),
        "sampled_per_useful_group": [s["sampled_per_useful_group"] for s in steps],
        "log_ratio_mean": sum(ratios) / len(ratios) if ratios else math.nan,
        "log_ratio_max": max(ratios, default=math.nan),
        "borrowed_token_share": sum(s["tokens_borrowed"] for s in steps)
        / max(1, sum(s["tokens_borrowed"] + s["tokens_dedicated"] for s in steps)),
        "turns_lost": sum(s["turns_lost"] for s in steps),
    }


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """All rows, one after the other on the same engines."""
    policy = ensure_policy(Path("out") / "models" / "demo-policy")
    slo = {"ttft_ms": o.ttft_slo_ms, "tpot_ms": o.tpot_slo_ms}
    flags = [f"--coserve-ttft-slo-ms={o.ttft_slo_ms}", f"--coserve-tpot-slo-ms={o.tpot_slo_ms}"]
    arrivals = bursty(_JOB_BOUND_S, o.rate, o.seed)
    rows: dict[str, Any] = {}
    engine_argv = [str(policy), *machine.COMMON.split(), *_DEDICATED.split()]
    with (
        machine.start(flags, "training.log", o.pool_gib, rollout=policy) as pair,
        running_engine(engine_argv, machine.OUT / "training-dedicated.log") as (url, _),
    ):
        asyncio.run(warm_up(pair.serving_url, pair.rollout_url))
        for number, (title, changes) in enumerate(ROWS):
            out = machine.OUT / f"training-{number}"
            shutil.rmtree(out, ignore_errors=True)
            job = merged(job_of(policy, out, o.steps, url, pair.rollout_url), changes)
            run = learn(
                job, out.with_suffix(".log"), pair, arrivals, SERVING_SPEC.vocab, _JOB_BOUND_S, lambda text: None
            )
            result = asyncio.run(run)
            rows[title] = row_of(result.steps) | {"serving": serving_summary(result.served, math.nan, slo)}
            rows[title]["serving"]["errors"] = [s.error for s in result.served if not s.ok]
            print(title, {k: v for k, v in rows[title].items() if not isinstance(v, list)}, flush=True)
    return {"slo": slo, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    head = ["", "success at the start, of the last 10 steps", "step s", "staleness mean, max", "|log ratio|"]
    head += ["sampled per useful group, first and last 5 steps", "borrowed", "serving failed, TTFT / TPOT P99 ms"]
    rows = []
    for title, r in result["rows"].items():
        s, sampled = r["serving"], r["sampled_per_useful_group"]
        rows.append(
            [
                title,
                f"{r['success_start']:.2f}, {r['success_last10']:.2f}",
                f"{r['step_s_mean']:.2f}",
                f"{r['staleness_mean']:.2f}, {r['staleness_max']}",
                f"{r['log_ratio_mean']:.4f}",
                f"{sum(sampled[:5]) / len(sampled[:5]):.2f}, {sum(sampled[-5:]) / len(sampled[-5:]):.2f}",
                f"{r['borrowed_token_share']:.0%}",
                f"{s['failed']} of {s['requests']}, {s['ttft_ms_p99']:.0f} / {s['tpot_ms_p99']:.1f}",
            ]
        )
    return results.table(head, rows) + "\n" + _curves(result["rows"])


def _curves(rows: dict[str, Any]) -> str:
    """Success, means of five steps."""
    longest = max(len(r["success"]) for r in rows.values())
    starts = range(0, longest, 5)
    lines = []
    for title, r in rows.items():
        blocks = [r["success"][i : i + 5] for i in starts]
        lines.append([title, *(f"{sum(b) / len(b):.2f}" if b else "–" for b in blocks)])
    return results.table(["success in steps", *(f"{i + 1}-{i + 5}" for i in starts)], lines)


def main() -> None:
    """Run and write training.json and training.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--rate", type=float, default=2.0, help="serving requests per second (%(default)s)")
    p.add_argument("--pool-gib", type=float, default=0.0625)
    p.add_argument("--ttft-slo-ms", type=float, default=600.0)
    p.add_argument("--tpot-slo-ms", type=float, default=80.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = measure(o)
    results.write("training", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
