"""Engines, proxies and their users for tests and benchmarks of the rollout proxy."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

from tests.scenario.harness import COMMON, KEY, RunningPair, prompt, wait_for
from vllm_coserve.demo.servers import HOST_CORE, free_port, running_engine, running_server


@contextlib.contextmanager
def dedicated_engine(
    model: Path, log: Path, *flags: str, cores: str = str(HOST_CORE)
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A plain vLLM server with the rollout model, its worker on the second core: (address, process)."""
    argv = [str(model), *COMMON.split(), "--served-model-name=rollout", f"--api-key={KEY}"]
    with running_engine([*argv, f"--kv-cache-memory-bytes={128 << 20}", *flags], log, cores=cores) as engine:
        yield engine


@contextlib.contextmanager
def running_proxy(
    log: Path, *flags: str, port: int | None = None, host: str = "127.0.0.1", enter: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`coserve proxy`, in the namespace that the command `enter` enters: (address, process)."""
    port = port or free_port()
    url = f"http://{host}:{port}"
    command = [*enter, sys.executable, "-m", "vllm_coserve.console.main", "proxy", f"--port={port}", f"--host={host}"]
    command += ["--poll-s=0.2", *flags]
    env = {"COSERVE_WORKER_API_KEY": KEY, "COSERVE_API_KEY": "proxy-key"}
    with running_server(command, [url], log, env, bound_s=60) as process:
        yield url, process


AUTH = {"Authorization": "Bearer proxy-key"}


def workers_of(url: str) -> dict[str, Any]:
    """What a proxy knows of its workers."""
    answer = requests.get(f"{url}/coserve/v1/workers", headers=AUTH, timeout=5)
    answer.raise_for_status()
    return answer.json()


def wait_usable(url: str, count: int, bound_s: float = 60) -> float:
    """Wait until a proxy has so many usable workers; returns the seconds that it took."""
    return wait_for(
        f"{count} usable workers", lambda: sum(w["usable"] for w in workers_of(url)["workers"]) == count, bound_s
    )


class Relay:
    """A way to a worker that can be cut without anybody being told: bytes go nowhere, as in a partition."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self._target, self.cut, self._listener = target_port, False, socket.create_server((host, 0))
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # nobody listens now
                    client.close()
                    continue
                for a, b in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                while self.cut:
                    time.sleep(0.05)
                b.sendall(data)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no further connections."""
        self._listener.close()


class Framework:
    """Trajectories of three turns as an RL framework makes them: a turn is asked for again until it is answered."""

    def __init__(self, url: str, concurrent: int) -> None:
        self._url, self._over = url, threading.Event()
        self.turns: dict[tuple[str, int], list[int]] = {}
        self.wrong: list[str] = []
        self.seconds: list[float] = []  # that each turn took
        self._threads = [threading.Thread(target=self._loop, args=(i,)) for i in range(concurrent)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Whatever is under way must end within its bound."""
        self._over.set()
        for thread in self._threads:
            thread.join(70)
            assert not thread.is_alive(), "something hangs"

    def _loop(self, index: int) -> None:
        rng, n = random.Random(index), 0
        while not self._over.is_set():
            text = prompt(1000 * index + n, 30)
            for turn in range(3):
                out = self._turn(f"t{index}-{n}", turn, text)
                if out is None or self._over.is_set():
                    return
                text = text + out + [rng.randrange(3, 4096) for _ in range(5)]
            n += 1

    def _turn(self, name: str, turn: int, text: list[int]) -> list[int] | None:
        headers = {**AUTH, "X-Trajectory-Id": name, "X-Turn-Index": str(turn)}
        body = {"prompt": text, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        start = time.monotonic()
        while time.monotonic() < start + 60:
            with contextlib.suppress(requests.RequestException):
                answer = requests.post(f"{self._url}/v1/completions", json=body, headers=headers, timeout=50)
                if answer.status_code == 200:
                    out = answer.json()["choices"][0]["token_ids"]
                    self.turns[name, turn] = out
                    self.seconds.append(time.monotonic() - start)
                    if len(out) != 24:
                        self.wrong.append(f"{name} {turn} has {len(out)} tokens")
                    return out
                if answer.status_code not in (429, 502, 503):
                    self.wrong.append(f"{name} {turn}: {answer.status_code} {answer.text}")
            time.sleep(0.1)
        self.wrong.append(f"{name} {turn} was not answered within 60 s")
        return None


class Users:
    """Serving's own traffic; every request must succeed."""

    def __init__(self, pair: RunningPair) -> None:
        self._pair, self._over, self.count = pair, threading.Event(), 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def stop(self) -> None:
        """No further requests; the one under way ends."""
        self._over.set()
        self._thread.join(60)

    def _loop(self) -> None:
        while not self._over.is_set():
            try:
                self._pair.complete(False, prompt(self.count, 60), 12)
            except Exception as exc:  # recovery: told at the end
                self.failed.append(repr(exc))
            self.count += 1
