"""What the plugin costs serving while the rollout is idle: TPOT of plain vLLM and of a pair, in turn, in one run.

    python -m tests.bench.idle_overhead [--rounds 2] [--out tests/bench/results/idle_overhead.json]

Both engines of a pair are pinned as in the demo: workers on core 0, everything else on core 1; plain vLLM likewise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.run import free_port, versions
from vllm_coserve.demo.servers import running_pair

_COMMON = "--enforce-eager --max-model-len 1024 --max-num-seqs 48 --block-size 32 --disable-uvicorn-access-log"
_BATCHES = (1, 8)
_OUTPUT_TOKENS, _REPEATS = 150, 5


async def _measure(url: str) -> dict[int, list[float]]:
    """TPOT in ms of every request, by batch size."""
    out: dict[int, list[float]] = {}
    rng = random.Random(7)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for batch in _BATCHES:
            values: list[float] = []
            for repeat in range(_REPEATS + 1):
                served = [Served(0.0) for _ in range(batch)]
                prompts = [[rng.randrange(3, 4096) for _ in range(64)] for _ in range(batch)]
                jobs = [
                    stream_one(session, url, "serving", p, _OUTPUT_TOKENS, s)
                    for p, s in zip(prompts, served, strict=True)
                ]
                await asyncio.gather(*jobs)
                if any(not s.ok for s in served):
                    raise RuntimeError(f"a request failed: {[s.error for s in served if s.error]}")
                if repeat:  # the first one warms up
                    values += [1e3 * s.tpot_s for s in served]
            out[batch] = values
    return out


def run(rounds: int) -> dict[str, Any]:
    """Alternate plain vLLM and a pair, `rounds` times each."""
    models = Path("out") / "models"
    serving, rollout = ensure_model(SERVING_SPEC, models), ensure_model(ROLLOUT_SPEC, models)
    values: dict[str, dict[int, list[float]]] = {"vllm": {b: [] for b in _BATCHES}, "pair": {b: [] for b in _BATCHES}}
    with tempfile.TemporaryDirectory() as logs:
        for i in range(rounds):
            for name in ("vllm", "pair") if i % 2 == 0 else ("pair", "vllm"):
                port, rollout_port = free_port(), free_port()
                argv = [
                    str(serving),
                    *_COMMON.split(),
                    "--served-model-name=serving",
                    "--host=127.0.0.1",
                    f"--port={port}",
                ]
                if name == "pair":
                    argv += [f"--coserve-rollout={rollout}", f"--coserve-rollout-port={rollout_port}"]
                    argv += [f"--coserve-rollout-args={_COMMON}", "--coserve-pool-gib=0.25"]
                    argv += ["--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=50"]
                else:
                    argv += ["--kv-cache-memory-bytes=268435456"]
                    rollout_port = port
                with running_pair(argv, port, rollout_port, Path(logs) / "log", lambda text: None) as pair:
                    got = asyncio.run(_measure(pair.serving_url))
                for batch, tpots in got.items():
                    values[name][batch] += tpots
                    print(f"round {i}: {name}, batch {batch}: TPOT P50 {percentile(tpots, 50):.2f} ms", flush=True)
    medians = {n: {b: percentile(v, 50) for b, v in by.items()} for n, by in values.items()}
    return {
        "tpot_ms_p50": medians,
        "ratio_pair_to_vllm": {b: medians["pair"][b] / medians["vllm"][b] for b in _BATCHES},
        "rounds": rounds,
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "versions": versions(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "command": f"python -m tests.bench.idle_overhead --rounds {rounds}",
    }


def main() -> None:
    """Measure, print, and write the result where asked."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    result = run(a.rounds)
    print(json.dumps(result, indent=2))
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
