"""A pair under load for benchmarks: the demo's models, one device core, arrivals of the Azure trace."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

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
)

OUT = Path("out") / "bench"
PARTS = ("API server", "EngineCore", "Worker")
_ENGINE = "--enforce-eager --max-model-len 1024 --block-size 32 --disable-uvicorn-access-log"
COMMON = f"{_ENGINE} --max-num-seqs 48"
# 16 sequences at a time: beyond that a decode step is longer than the slack between two tokens of serving's users.
_ROLLOUT = f"{_ENGINE} --max-num-seqs 16 --served-model-name rollout --stream-interval 4 --max-num-batched-tokens 1024"


def arrivals(trace: Path | None, seconds: float, rate_per_s: float, seed: int = 0) -> list[Arrival]:
    """Serving requests of a trace in the Azure CSV format, or of the bursty generator where there is none."""
    if trace is None:
        return bursty(seconds, rate_per_s, seed)
    return from_azure_csv(trace, seconds, rate_per_s, Scale())[0]


@contextlib.contextmanager
def start(
    flags: list[str], log: str, pool_gib: float, rollout_args: str = "", rollout: Path | None = None
) -> Iterator[Pair]:
    """A pair of the demo's models (or with another rollout model) and further flags, pinned as in the demo.

    It ends with the block. SIGTERM ends a benchmark as Ctrl-C does, so that its pair ends too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    models = Path("out") / "models"
    serving, rollout = ensure_model(SERVING_SPEC, models), rollout or ensure_model(ROLLOUT_SPEC, models)
    OUT.mkdir(parents=True, exist_ok=True)
    port, rollout_port = free_port(), free_port()
    argv = [
        str(serving),
        *COMMON.split(),
        "--served-model-name=serving",
        "--max-num-batched-tokens=1024",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--coserve-rollout={rollout}",
        f"--coserve-rollout-port={rollout_port}",
        f"--coserve-rollout-args={_ROLLOUT} {rollout_args}",
        f"--coserve-pool-gib={pool_gib}",
        "--coserve-chunk-tokens=256",
        *flags,
    ]
    with running_pair(argv, port, rollout_port, OUT / log, lambda text: None) as pair:
        yield pair


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
