"""A TCP proxy between a reader and a source: counts what goes back, and breaks as a script says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_SO_MAX_PACING_RATE = 47  # Linux; paces loopback too
_SEGMENT_BYTES = 1448  # of Ethernet; loopback's 64 KiB would pass as bursts
_BLOCK = 1 << 14


class Bucket:
    """A link that several connections share: `take` returns when so many bytes may go."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._lock, self._free_s = bytes_per_s, threading.Lock(), 0.0

    def take(self, nbytes: int) -> None:
        """First come, first served; small takes share it evenly."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - 0.005) + nbytes / self._rate
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


def pace(listener: socket.socket, bytes_per_s: float) -> None:
    """Have the kernel send at most so much on each connection that is accepted."""
    listener.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(bytes_per_s))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    # A send buffer that is full means that the link is: what lies in it has not been sent.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)


class TcpProxy:
    """Passes connections on to a port of this machine, until `close`."""

    def __init__(self, url: str, link: Bucket | None = None, each_bytes_per_s: float = 0.0) -> None:
        """`link`: what all answers share; `each_bytes_per_s`: what a connection's answers get at most, 0: no bound."""
        self._port, self._link = int(url.rpartition(":")[2]), link
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        if each_bytes_per_s:
            pace(self._listener, each_bytes_per_s)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent_bytes = 0
        self.stalled = False  # answers stop, connections stay
        self.flip_at = -1  # the byte of all answers that is damaged
        self.die_at = -1  # after so many bytes the source is gone
        self._dead = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """As if the source had been killed."""
        self._dead = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._dead:
            try:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, upstream}
            threading.Thread(target=self._pass, args=(client, upstream, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(upstream, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(_BLOCK):
                if answers:
                    part = self._count(part)
                target.sendall(part)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source}
        source.close()

    def _count(self, part: bytes) -> bytes:
        if self._link is not None:
            self._link.take(len(part))
        while self.stalled and not self._dead:
            time.sleep(0.01)
        with self._lock:
            at, self.sent_bytes = self.sent_bytes, self.sent_bytes + len(part)
        if 0 <= self.flip_at - at < len(part):
            place = self.flip_at - at
            part = part[:place] + bytes([part[place] ^ 8]) + part[place + 1 :]
        if 0 <= self.die_at <= self.sent_bytes:
            self.close()
        return part
