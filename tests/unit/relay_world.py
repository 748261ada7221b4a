"""A relay in a process of its own, and a wire to it on which things happen at a given byte."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from vllm_coserve.demo.servers import free_port

_PROGRAM = """
import sys
from vllm_coserve.weights.relay import Relay
relay = Relay(port=int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


class RelayProcess:
    """A relay in a process of its own, on one port all the time."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)


class Wire:
    """Passes bytes on to a relay and back, and does something once so many of one direction have gone by."""

    def __init__(self, port: int) -> None:
        self._to, self._armed, self._lock = port, {}, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, direction: str, nbytes: int, do: Callable[[], None]) -> None:
        with self._lock:
            self._armed[direction] = nbytes, do

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    relay = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    client.close()
                    continue
                for args in ((client, relay, "up"), (relay, client, "down")):
                    threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                self._count(direction, len(part))
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _count(self, direction: str, nbytes: int) -> None:
        with self._lock:
            left, do = self._armed.get(direction, (0, None))
            if do is None:
                return
            self._armed[direction] = left - nbytes, do
            if left <= nbytes:
                del self._armed[direction]
                do()
