"""The bed of the benchmarks on one H200: models of real size, ROSE's SLO, and a load that suits the device.

Sizes, by arithmetic, for nothing of this was measured on a device yet:

- Serving. A request of the Azure conversation trace (1,155 tokens in, 211 out on average, none cut) takes Qwen2.5-7B
  about 40 ms of prefill and 211 decode steps. A step alone reads 15 GB of weights: 4 ms, and 10 ms where Python
  launches every kernel (`--enforce-eager`). So a request is on the device for 1 to 2.2 s, and 0.5 (eager) or 1
  request/s (CUDA graphs) has serving alone keep it busy for about 1 - exp(-1.1) = two thirds of the time at density 1,
  and nine tenths at density 2. Much more, and serving alone steps without a pause: harvest, which is held against the
  time that it leaves idle, would say nothing. `--rate` is there to try.
- Rollouts. 256 trajectories at a time (ROSE's batch for Qwen3-8B) in groups of 16, six turns, some 3,600 tokens at the
  end. 64 sequences decode at a time: 16 GB of weights and 20 GB of KV memory are 10 to 20 ms a step, a seventh of the
  TPOT SLO. A chunk of 512 tokens takes about as long.
- Pool. A token of the rollout model has 144 KiB: 60 GiB less the headroom hold 350,000, about what the trajectories
  come to with their shared prompts. With 32 GB of weights that is two thirds of the device.
- Client. Engines send the tokens of 16 rollout steps at once: some hundred chunks a second, and as many from serving,
  where one Python process handles ten thousand. Each row says what share of a core the client took.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.machine import CPU, Bed
from tests.bench.rows import COMMON_ROWS, NO_GATE, lease
from tests.bench.turns import TurnShape
from tests.gpu.models import write_model
from vllm_coserve.demo.arrivals import Scale

WORK = Path("out") / "gpu"
LEASE_PHASE_S = 200.0  # twice the longest lease, or it would never end within the phase
ROWS = (*COMMON_ROWS, *(lease(s, LEASE_PHASE_S) for s in (10, 20, 50, 100)), NO_GATE)

_ROSE_SLO_MS = {"ttft_ms": 500.0, "tpot_ms": 150.0}  # section 6, for Qwen2.5-7B
_TOKEN_IDS = "--skip-tokenizer-init"
_EAGER = "--enforce-eager"
# Graphs of decode batches only, and nothing compiled: that needs no compiler and starts soonest.
_GRAPHS = "--compilation-config.mode 0 --compilation-config.cudagraph_mode FULL_DECODE_ONLY"


def h200(graphs: bool) -> Bed:
    """Qwen2.5-7B serving, Qwen3-8B rolling out."""
    engine = f"--load-format dummy {_TOKEN_IDS} {_GRAPHS if graphs else _EAGER} --disable-uvicorn-access-log"
    return Bed(
        name="gpu_coserve",
        serving=lambda: write_model("qwen2.5-7b", WORK / "models"),
        rollout=lambda: write_model("qwen3-8b", WORK / "models"),
        vocab=150_000,
        serving_args=f"{engine} --max-model-len 16384 --max-num-seqs 128 --max-num-batched-tokens 4096",
        rollout_args=f"{engine} --max-model-len 8192 --max-num-seqs 64 --max-num-batched-tokens 2048"
        " --stream-interval 16",
        flags=(),
        pinned=False,
        seconds=90.0,
        rate_per_s=1.0 if graphs else 0.5,
        rollouts=256,
        pool_gib=60.0,
        lead_s=15.0,
        start_bound_s=420.0,
        back_bound_s=240.0,
        turns=TurnShape(group=16, turns=6, prompt=(400, 1200), output=(150, 600), observation=(40, 200)),
        scale=Scale(prompt=1.0, output=1.0, prompt_max=15_000, output_max=1_000, output_min=1),
        warm_up_tokens=(16, 64, 256, 1024, 4096),
        slo_ms=_ROSE_SLO_MS,
    )


def on_cpu() -> Bed:
    """The tiny models on a CPU core, without their tokenizers: to try the stages, not to measure."""
    return replace(
        CPU,
        name="gpu_coserve",
        serving_args=f"{CPU.serving_args} {_TOKEN_IDS}",
        rollout_args=f"{CPU.rollout_args} {_TOKEN_IDS}",
        slo_ms=_ROSE_SLO_MS,
    )


def common_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Which bed: options of every stage that starts a pair."""
    parser.add_argument("--graphs", action="store_true", help="decode with CUDA graphs, in place of --enforce-eager")
    parser.add_argument("--on-cpu", action="store_true", help="try the stage without a GPU; its figures mean nothing")
    return parser


def chosen_bed() -> Bed:
    """The bed that this process's command line asks for, before its other options are known."""
    options, _ = common_options(argparse.ArgumentParser(add_help=False)).parse_known_args()
    return on_cpu() if options.on_cpu else h200(options.graphs)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; without a GPU results go where nobody takes them for a device's."""
    options = parser.parse_args()
    if options.on_cpu and options.out is None:
        options.out = WORK / "on-cpu"
    return options


def config_of(model: Path) -> dict[str, Any]:
    """A model folder's config.json."""
    return json.loads((model / "config.json").read_text())
