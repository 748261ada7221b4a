"""What placing a turn costs, by the number of workers: `python -m tests.bench.routing`.

Each worker has 16 trajectories in flight. A turn ends, its trajectory's next one is submitted, and who waits is placed:
that is one decision.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from rl_driver.policy.routing import Placement, Router, Turn, Worker
from tests.bench import results
from vllm_coserve.demo.phases import percentile

_WORKERS = (100, 1000, 10_000)
_PER_WORKER = 16


def measure(workers: int, decisions: int, seed: int = 0) -> dict[str, Any]:
    """Costs in us of `decisions` decisions with every worker full and a tenth of the trajectories waiting."""
    rng, router = random.Random(seed), Router()
    for i in range(workers):
        kind = "dedicated" if i % 4 else "borrowed"
        router.put_worker(Worker(f"w{i:05d}", kind, _PER_WORKER, weight_version=i % 3))
    running: list[Turn] = []
    number = 0

    def submit(trajectory: str) -> None:
        nonlocal number
        number += 1
        turn = Turn(f"turn-{number}", trajectory, min_version=rng.randrange(2))
        if isinstance(router.submit(turn), Placement):
            running.append(turn)

    for i in range(int(workers * _PER_WORKER * 1.1)):
        submit(f"t{i}")
    cost_ns = []
    for _ in range(decisions):
        at = rng.randrange(len(running))
        running[at], running[-1] = running[-1], running[at]
        ended = running.pop()
        start = time.perf_counter_ns()
        router.finish(ended.turn_id)
        submit(ended.trajectory_id)
        placed = router.place_queued()
        cost_ns.append(time.perf_counter_ns() - start)
        running.extend(p.turn for p in placed)
    us = [c / 1e3 for c in cost_ns]
    return {
        "workers": workers,
        "trajectories": int(workers * _PER_WORKER * 1.1),
        "waiting": router.queued,
        "p50_us": percentile(us, 50),
        "p99_us": percentile(us, 99),
        "max_us": max(us),
    }


def main() -> None:
    """Run and write routing.json and routing.md."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--decisions", type=int, default=20_000)
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    rows = [measure(n, o.decisions) for n in _WORKERS]
    head = ["workers", "trajectories", "waiting", "P50 us", "P99 us", "max us"]
    lines = [
        [f"{r[k]:.0f}" for k in ("workers", "trajectories", "waiting", "p50_us", "p99_us", "max_us")] for r in rows
    ]
    results.write("routing", {"routing": rows}, results.table(head, lines), o.out)


if __name__ == "__main__":
    main()
