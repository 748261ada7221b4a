"""A worker's side of forwarding: serves the chunks that it has read, as soon as it has them, the newest ones only.

    GET /v1/chunks/RELEASE/BUCKET/TAG/START-END    bytes of a bucket, as frames

A frame is its kind and its length, then so many bytes: DATA, or WAIT while the next chunk is on its way, so that a
reader can tell a source that waits from one that has died, or GONE, after which nothing more comes.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from vllm_coserve.weights.bearer import Bearer
from vllm_coserve.weights.peering.messages import Grid

FRAME = struct.Struct(">BI")
CONNECTIONS_MAX = 64
WAIT_FRAME_S = 0.5
_WAIT_BOUND_S = 20.0  # a chunk that is on its way so long will not come soon
_SOCKET_BOUND_S = 30.0
_RELEASES_MAX = 4  # a version's way may lead over a whole release and changes
_END_POLL_S = 0.05
_PATH = re.compile(
    r"/v1/chunks/([0-9a-z-]{1,40})/([A-Za-z0-9._-]{1,64})/([0-9a-f]{32})/(\d{1,15})-(\d{1,15})\Z", re.ASCII
)


class Frame(IntEnum):
    """Kinds of frames."""

    DATA = 0
    WAIT = 1
    GONE = 2


@dataclass(slots=True)
class _Held:
    grid: Grid
    chunks: dict[int, bytes] = field(default_factory=dict)


class Forwarder:
    """Serves until `close`. Its reader puts chunks in; any thread may call its methods."""

    def __init__(self, host: str = "127.0.0.1", key: str = "", memory_bytes: int = 2 << 30, port: int = 0) -> None:
        """`key`: what readers must show, if not empty. Raises OSError where it cannot listen."""
        self._bearer, self._memory_bytes = Bearer(key), memory_bytes
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        self._order: deque[tuple[tuple[str, str], int]] = deque()  # chunks as they came
        self._releases: deque[str] = deque()
        self._reading: Counter[str] = Counter()
        self._frontier: dict[str, tuple[str, int]] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.held_bytes = 0
        handler = type("Handler", (_Handler,), {"forwarder": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (http.server.ThreadingHTTPServer,), {"address_family": family})
        self._server = server((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_END_POLL_S,), name="coserve-forward", daemon=True
        )
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Serve no more, also those who are in the middle, and forget everything."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._held.clear()
            self._order.clear()

    # ---- the reader

    def begin(self, release: str) -> None:
        """Chunks of a release are on their way, until `end`."""
        with self._changed:
            self._reading[release] += 1
            self._frontier[release] = ("", 0)
            if release in self._releases:
                self._releases.remove(release)
            self._releases.append(release)
            while len(self._releases) > _RELEASES_MAX:
                self._forget(self._releases.popleft())

    def end(self, release: str) -> None:
        """What has not come of it does not come any more."""
        with self._changed:
            self._reading[release] -= 1
            self._changed.notify_all()

    def aim(self, grid: Grid, index: int) -> None:
        """The reader reads on from this chunk: what lies before it and is not here is not going to be."""
        with self._changed:
            self._frontier[grid.release] = (grid.name, index)
            self._changed.notify_all()

    def put(self, grid: Grid, index: int, data: bytes) -> None:
        """A chunk that has been checked."""
        key = (grid.release, grid.name)
        with self._changed:
            held = self._held.get(key)
            if self._closed or len(data) > self._memory_bytes or grid.release not in self._releases:
                return
            if held is None or held.grid.tag != grid.tag:
                self._drop(key)
                held = self._held[key] = _Held(grid)
            if index not in held.chunks:
                held.chunks[index] = data
                self._order.append((key, index))
                self.held_bytes += len(data)
            self._frontier[grid.release] = max(self._frontier.get(grid.release, ("", 0)), (grid.name, index + 1))
            while self.held_bytes > self._memory_bytes:
                self._drop_chunk(*self._order.popleft())
            self._changed.notify_all()

    def have(self, grid: Grid, index: int) -> bytes | None:
        """A chunk that was read before, in a pull that was interrupted."""
        with self._changed:
            held = self._held.get((grid.release, grid.name))
            return held.chunks.get(index) if held is not None and held.grid.tag == grid.tag else None

    # ---- requests

    def allows(self, authorization: str) -> bool:
        """Whether a reader shows the key."""
        return self._bearer.allows(authorization)

    def find(self, release: str, name: str, tag: str, at: int, wait_s: float) -> bytes | Frame:
        """A bucket's bytes from `at` on to the end of their chunk; WAIT: not yet, GONE: never."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                found = self._look(release, name, tag, at)
                left_s = deadline - time.monotonic()
                if found is not Frame.WAIT or left_s <= 0:
                    return found
                self._changed.wait(left_s)

    def _look(self, release: str, name: str, tag: str, at: int) -> bytes | Frame:
        if self._closed:
            return Frame.GONE
        reading, frontier = self._reading[release] > 0, self._frontier.get(release, ("", 0))
        held = self._held.get((release, name))
        if held is None:
            return Frame.WAIT if reading and (name, 0) >= frontier else Frame.GONE
        if held.grid.tag != tag or at >= held.grid.nbytes:
            return Frame.GONE
        index = at // held.grid.chunk_bytes
        data = held.chunks.get(index)
        if data is not None:
            return data[at - held.grid.start(index) :] if at > held.grid.start(index) else data
        return Frame.WAIT if reading and (name, index) >= frontier else Frame.GONE

    # ---- connections

    def admit(self, connection: socket.socket) -> bool:
        """Whether one more is served."""
        with self._changed:
            if self._closed or len(self._connections) >= CONNECTIONS_MAX:
                return False
            self._connections.add(connection)
            return True

    def leave(self, connection: socket.socket) -> None:
        """It has ended."""
        with self._changed:
            self._connections.discard(connection)

    # ---- with the lock held

    def _forget(self, release: str) -> None:
        for key in [key for key in self._held if key[0] == release]:
            self._drop(key)
        self._frontier.pop(release, None)

    def _drop(self, key: tuple[str, str]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.held_bytes -= sum(map(len, held.chunks.values()))
            self._order = deque(entry for entry in self._order if entry[0] != key)

    def _drop_chunk(self, key: tuple[str, str], index: int) -> None:
        self.held_bytes -= len(self._held[key].chunks.pop(index))


class _Handler(http.server.BaseHTTPRequestHandler):
    forwarder: Forwarder
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_BOUND_S
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """A reader that goes away is none of our business."""
        if not self.forwarder.admit(self.connection):
            return
        try:
            with contextlib.suppress(OSError):
                super().handle()
        finally:
            self.forwarder.leave(self.connection)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if not self.forwarder.allows(self.headers.get("Authorization", "")):
            self._refuse(401)
            return
        match = _PATH.match(self.path)
        start, end = (int(match[4]), int(match[5])) if match else (0, 0)
        if match is None or start >= end:
            self._refuse(404)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        at = start
        while at < end:
            data = self._next(match[1], match[2], match[3], at)
            if data is None:
                self._frame(Frame.GONE)
                break
            self._frame(Frame.DATA, data[: end - at])
            at += len(data)
        self.wfile.write(b"0\r\n\r\n")

    def _next(self, release: str, name: str, tag: str, at: int) -> bytes | None:
        """The bytes that follow, told of every half a second while they are on their way."""
        deadline, wait_s = time.monotonic() + _WAIT_BOUND_S, 0.0
        while True:
            found = self.forwarder.find(release, name, tag, at, wait_s)
            if not isinstance(found, Frame):
                return found
            if found is Frame.GONE or time.monotonic() > deadline:
                return None
            self._frame(Frame.WAIT)
            wait_s = WAIT_FRAME_S

    def _frame(self, kind: Frame, data: bytes = b"") -> None:
        length = FRAME.size + len(data)
        self.wfile.write(b"".join((b"%x\r\n" % length, FRAME.pack(kind, len(data)), data, b"\r\n")))

    def _refuse(self, status: int) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
