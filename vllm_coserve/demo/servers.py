"""A `vllm serve` pair as a child of the demo: started, pinned to a device core, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE_CORE, HOST_CORE = 0, 1
_START_BOUND_S = 240.0
_STOP_BOUND_S = 30.0


class DemoError(Exception):
    """The demo cannot go on; the text says why and where to look."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A running pair."""

    process: subprocess.Popen[bytes]
    serving_url: str
    rollout_url: str
    log: Path

    def status(self) -> dict[str, Any]:
        """GET /coserve/v1/status of the sidecar."""
        return get_json(f"{self.rollout_url}/coserve/v1/status")


def get_json(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Fetch a JSON document."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return json.load(response)


@contextlib.contextmanager
def running_pair(argv: Sequence[str], port: int, rollout_port: int, log: Path, say: Any) -> Iterator[Pair]:
    """Run `vllm serve ARGV...` until the block ends; nothing of it is left afterwards, whatever happens."""
    if (os.cpu_count() or 1) < 2:
        raise DemoError("the demo needs two CPU cores: one stands for the device, one is the host")
    env = dict(os.environ)
    env.update(VLLM_CPU_OMP_THREADS_BIND=str(DEVICE_CORE), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    env.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *argv]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    pair = Pair(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{rollout_port}", log)
    try:
        _await_health(pair, say)
        pin(process.pid)
        yield pair
    finally:
        stop(process)


def _await_health(pair: Pair, say: Any) -> None:
    start = time.monotonic()
    waiting = [pair.serving_url, pair.rollout_url]
    while waiting:
        elapsed = time.monotonic() - start
        say(f"starting the engines ({elapsed:.0f} s)")
        if pair.process.poll() is not None or elapsed > _START_BOUND_S:
            tail = "\n".join(pair.log.read_text(errors="replace").splitlines()[-25:])
            raise DemoError(f"the engines did not start within {elapsed:.0f} s; the end of {pair.log}:\n{tail}")
        with contextlib.suppress(urllib.error.URLError, OSError, TimeoutError):
            urllib.request.urlopen(f"{waiting[0]}/health", timeout=2).close()
            waiting.pop(0)
            continue
        time.sleep(0.3)


def pin(root_pid: int) -> None:
    """Workers to the device core, everything else of the pair to the host core, thread by thread."""
    for pid in [root_pid, *descendants(root_pid)]:
        core = DEVICE_CORE if "Worker" in cmdline(pid) else HOST_CORE
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(task), {core})


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a bound, SIGKILL to the whole group."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_BOUND_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below one, by parent."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            out.append(child)
            todo.append(child)
    return out


def cmdline(pid: int) -> str:
    """A process's command line, or the title it gave itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
