"""A `vllm serve` pair as a child of the demo: started, pinned to a device core, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE_CORE, HOST_CORE = 0, 1
_START_BOUND_S = 240.0
_STOP_BOUND_S = 30.0
_GUEST_NICENESS = 5


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


def vllm_serve(*argv: str) -> list[str]:
    """The command line of `vllm serve ARGV...`."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *argv]


def engine_env(cores: str) -> dict[str, str]:
    """Environment of an engine whose workers compute on these cores."""
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    urls: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
    bound_s: float = _START_BOUND_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, which begins when /health answers at all addresses.

    Nothing of it is left afterwards, whatever happens: it is a process group of its own. `env` is added to our own
    environment, its output to `log`.

    Raises:
        DemoError: it ended, or did not answer within `bound_s`.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        _await_health(process, list(urls), log, say, bound_s)
        yield process
    finally:
        stop(process)


@contextlib.contextmanager
def running_pair(
    argv: Sequence[str], port: int, rollout_port: int, log: Path, say: Callable[[str], None]
) -> Iterator[Pair]:
    """Run `vllm serve ARGV...` until the block ends, pinned; see `running_server`."""
    if (os.cpu_count() or 1) < 2:
        raise DemoError("the demo needs two CPU cores: one stands for the device, one is the host")
    log.unlink(missing_ok=True)
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{rollout_port}"]
    with running_server(vllm_serve(*argv), urls, log, engine_env(str(DEVICE_CORE)), say) as process:
        pin(process.pid)
        yield Pair(process, *urls, log)


@contextlib.contextmanager
def running_engine(
    argv: Sequence[str], log: Path, say: Callable[[str], None] = lambda text: None, cores: str = str(HOST_CORE)
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a rollout engine of its own, `vllm serve ARGV...`: (address, process).

    `cores`: of its workers, those of several with a bar between them.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = [f"--port={port}", "--host=127.0.0.1", "--enable-scale-out", "--weight-transfer-config"]
    # The first is for vLLM's routes for weights.
    env = engine_env(cores) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_COSERVE_SHARED_CORES": "1"}
    with running_server(vllm_serve(*argv, *flags, '{"backend": "coserve"}'), [url], log, env, say) as process:
        make_guest(process.pid)
        yield url, process


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _await_health(
    process: subprocess.Popen[bytes], waiting: list[str], log: Path, say: Callable[[str], None], bound_s: float
) -> None:
    start = time.monotonic()
    while waiting:
        elapsed = time.monotonic() - start
        say(f"starting the engines ({elapsed:.0f} s)")
        if process.poll() is not None or elapsed > bound_s:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise DemoError(f"{waiting[0]} did not answer within {elapsed:.0f} s; the end of {log}:\n{tail}")
        with contextlib.suppress(urllib.error.URLError, OSError, TimeoutError):
            urllib.request.urlopen(f"{waiting[0]}/health", timeout=2).close()
            waiting.pop(0)
            continue
        time.sleep(0.1)


def pin(root_pid: int) -> None:
    """Workers to the device core, everything else of the pair to the host core, thread by thread."""
    for pid in [root_pid, *descendants(root_pid)]:
        core = DEVICE_CORE if "Worker" in cmdline(pid) else HOST_CORE
        each_thread(pid, lambda thread, core=core: os.sched_setaffinity(thread, {core}))


def make_guest(root_pid: int) -> None:
    """A process and those below it stand for another machine: they get what time the pair leaves on the cores.

    `root_pid` leads a session: where sessions share the cores (autogroups), the session's niceness is what counts.
    """
    for pid in [root_pid, *descendants(root_pid)]:
        each_thread(pid, lambda thread: os.setpriority(os.PRIO_PROCESS, thread, _GUEST_NICENESS))
    with contextlib.suppress(OSError):
        Path(f"/proc/{root_pid}/autogroup").write_text(str(_GUEST_NICENESS))


def each_thread(pid: int, change: Callable[[int], None]) -> None:
    """Change each thread of a process; those that end meanwhile are left out."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                change(int(name))


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a bound, SIGKILL to the whole group; stopped processes go on, to see it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)
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
