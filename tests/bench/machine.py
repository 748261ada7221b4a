"""A pair under load for benchmarks: a bed of models and a device, arrivals of the Azure trace."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.turns import TurnShape
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.demo.arrivals import Arrival, Scale, bursty, from_azure_csv
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.servers import (
    DEVICE_CORE,
    HOST_CORE,
    Pair,
    cmdline,
    descendants,
    each_thread,
    free_port,
    running_pair,
    running_server,
    vllm_serve,
)

OUT = Path("out") / "bench"
PARTS = ("API server", "EngineCore", "Worker")
_ENGINE = "--enforce-eager --max-model-len 1024 --block-size 32 --disable-uvicorn-access-log"
COMMON = f"{_ENGINE} --max-num-seqs 48"
_MODELS = Path("out") / "models"


@dataclass(frozen=True)
class Bed:
    """What a pair runs on and what load suits it: all in which a benchmark on a CPU core differs from one on a GPU."""

    name: str  # of the result files
    serving: Callable[[], Path]  # the folder of the served model, written where it is not there
    rollout: Callable[[], Path]
    vocab: int  # token ids of both models
    serving_args: str
    rollout_args: str
    flags: tuple[str, ...]  # of the pair
    pinned: bool  # workers to the core that stands for the device
    seconds: float  # length of a phase
    rate_per_s: float  # serving requests at density 1
    rollouts: int  # trajectories at a time
    pool_gib: float
    lead_s: float  # rollouts are in their stride before anything is measured
    start_bound_s: float = 240.0  # for both engines to come up
    back_bound_s: float = 300.0  # for a killed rollout engine to generate again; it loads in what users leave over
    turns: TurnShape = field(default_factory=TurnShape)
    scale: Scale = field(default_factory=Scale)  # of the trace's prompts and outputs
    warm_up_tokens: tuple[int, ...] = (16, 64, 256)
    slo_ms: Mapping[str, float] | None = None  # {"ttft_ms", "tpot_ms"}; None: a multiple of serving alone


CPU = Bed(
    name="coserve",
    serving=lambda: ensure_model(SERVING_SPEC, _MODELS),
    rollout=lambda: ensure_model(ROLLOUT_SPEC, _MODELS),
    vocab=SERVING_SPEC.vocab,
    serving_args=f"{COMMON} --max-num-batched-tokens 1024",
    # 16 sequences: beyond that a decode step is longer than the slack between two tokens of serving's users.
    rollout_args=f"{_ENGINE} --max-num-seqs 16 --stream-interval 4 --max-num-batched-tokens 1024",
    flags=("--coserve-chunk-tokens=256",),
    pinned=True,
    seconds=50.0,
    rate_per_s=4.0,
    rollouts=40,
    pool_gib=0.125,
    lead_s=6.0,
)


def arrivals(
    trace: Path | None, seconds: float, rate_per_s: float, seed: int = 0, scale: Scale | None = None
) -> list[Arrival]:
    """Serving requests of a trace in the Azure CSV format, or of the bursty generator where there is none."""
    usual = Scale()
    scale = scale or usual
    if trace is not None:
        return from_azure_csv(trace, seconds, rate_per_s, scale)[0]
    # The generator's sizes are those of the trace at the usual scale.
    prompt, output = scale.prompt / usual.prompt, scale.output / usual.output
    made = bursty(seconds, rate_per_s, seed)
    return [Arrival(a.at_s, round(a.prompt_tokens * prompt), round(a.output_tokens * output)) for a in made]


@contextlib.contextmanager
def start(
    flags: list[str], log: str, pool_gib: float, rollout_args: str = "", rollout: Path | None = None, bed: Bed = CPU
) -> Iterator[Pair]:
    """A pair of the bed's models (or with another rollout model) and further flags.

    It ends with the block. SIGTERM ends a benchmark as Ctrl-C does, so that its pair ends too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serving, rollout = bed.serving(), rollout or bed.rollout()
    OUT.mkdir(parents=True, exist_ok=True)
    port, rollout_port, log_file = free_port(), free_port(), OUT / log
    argv = [
        str(serving),
        *bed.serving_args.split(),
        "--served-model-name=serving",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--coserve-rollout={rollout}",
        f"--coserve-rollout-port={rollout_port}",
        f"--coserve-rollout-args={bed.rollout_args} --served-model-name rollout {rollout_args}",
        f"--coserve-pool-gib={pool_gib}",
        *bed.flags,
        *flags,
    ]
    if bed.pinned:
        with running_pair(argv, port, rollout_port, log_file, lambda text: None) as pair:
            yield pair
        return
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{rollout_port}"]
    log_file.unlink(missing_ok=True)
    with running_server(vllm_serve(*argv), urls, log_file, {}, bound_s=bed.start_bound_s) as process:
        yield Pair(process, *urls, log_file)


def control_block(pair: Pair) -> ControlBlock:
    """The shared memory of a running pair, to see what no API says as fast."""
    folder = Path(f"/proc/{pair.process.pid}/fd")
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if "coserve-control" in os.readlink(entry):
                fd = os.open(entry, os.O_RDWR)
                try:
                    return ControlBlock.attach(fd)
                finally:
                    os.close(fd)
    raise RuntimeError(f"process {pair.process.pid} has no control block open")


def processes(pair: Pair, rollout: bool) -> dict[str, int]:
    """Process ids of one engine of a pair by name, as far as they run: API server, EngineCore and Worker."""
    root = pair.process.pid
    sidecars = [p for p in descendants(root) if "vllm_coserve.engine.sidecar" in cmdline(p)]
    below = {d for s in sidecars for d in descendants(s)}
    if rollout and not sidecars:
        return {}
    found = {PARTS[0]: sidecars[0] if rollout else root}
    for pid in below if rollout else set(descendants(root)) - below:
        for part in PARTS[1:]:
            if part in cmdline(pid):
                found[part] = pid
    return found


def place(root_pid: int, worker_core: int) -> None:
    """An engine's worker on its core; the other processes where there is room, for both cores stand for devices."""
    for pid in [root_pid, *descendants(root_pid)]:
        cores = {worker_core} if "Worker" in cmdline(pid) else {DEVICE_CORE, HOST_CORE}
        each_thread(pid, lambda thread, cores=cores: os.sched_setaffinity(thread, cores))


def leftovers() -> set[str]:
    """Names that vLLM or the pair could leave behind: shared memory and sockets."""
    tmp = (p.name for p in Path("/tmp").iterdir() if p.is_socket() or p.name.startswith("coserve-"))
    return {f"/dev/shm/{n}" for n in os.listdir("/dev/shm")} | {f"/tmp/{n}" for n in tmp}
