"""The rollout proxy of a job: a process of its own that ends with the job, whatever becomes of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_driver.api.train_config import TrainConfig
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.parent import die_with_parent

_START_BOUND_S, _STOP_BOUND_S = 30.0, 15.0
_MOVED = 'coserve_proxy_legs_total{outcome="moved"}'


@dataclass(frozen=True, slots=True)
class ProxyHandle:
    """A running proxy."""

    url: str
    key: str
    store: Path  # of the turns
    process: subprocess.Popen[bytes]

    def call(self, method: str, path: str, body: Any = None, bound_s: float = 10.0) -> Any:
        """A call of its own API. Raises OSError, also for HTTP errors."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=bound_s) as answer:
            return json.load(answer)

    def workers(self) -> list[dict[str, Any]]:
        """What it knows of its workers."""
        return self.call("GET", "/coserve/v1/workers")["workers"]

    def migrations(self) -> int:
        """Turns so far that have left a worker and gone on at another."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            page = answer.read().decode()
        lines = (line.rpartition(" ") for line in page.splitlines() if line.startswith(_MOVED))
        return sum(int(float(value)) for *_, value in lines)


@contextlib.contextmanager
def running_proxy(config: TrainConfig, out: Path) -> Iterator[ProxyHandle]:
    """Run the proxy until the block ends.

    Raises:
        ConfigurationError: it does not start; its log says why.
    """
    workers, log, store = config.workers, out / "proxy.log", out / "trajectories.sqlite"
    port, key = _free_port(), secrets.token_urlsafe(16)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm_coserve.console.main", "proxy", f"--port={port}"]
    command += [f"--dedicated={u}" for u in workers.dedicated] + [f"--borrowed={u}" for u in workers.borrowed]
    command += [f"--turns-per-dedicated={workers.turns_per_dedicated}", f"--policy={workers.policy}"]
    command += [f"--turns-per-borrowed={workers.turns_per_borrowed}", f"--store={store}"]
    command += [f"--borrow={workers.borrow}"] if workers.borrow else []
    env = {**os.environ, "COSERVE_API_KEY": key}
    if workers.api_key:
        env["COSERVE_WORKER_API_KEY"] = workers.api_key
    end_with_me = functools.partial(die_with_parent, os.getpid(), signal.SIGTERM)
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with_me)
    try:
        _await(process, url, log)
        yield ProxyHandle(url, key, store, process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_BOUND_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers; that there is no worker yet is no matter
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigurationError(f"the rollout proxy did not start; the end of {log}:\n{log.read_text()[-1500:]}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
