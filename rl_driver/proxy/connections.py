"""Closes connections whose clients send nothing, or read nothing, for too long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from aiohttp import web

_FIRST_REQUEST_S = 15.0  # a connection must have sent its first request's head by then
_IDLE_S = 90.0
_WRITE_BOUND_S = 60.0  # a client that reads nothing for so long is gone
_SWEEP_S = 2.0

_Connection = web.RequestHandler  # type: ignore[type-arg]


class Connections:
    """What is known of the open connections. `run` closes some of them; one event loop owns it."""

    def __init__(self) -> None:
        self.runner: web.AppRunner | None = None  # of the server, once there is one
        self._idle_since_s: dict[_Connection, float] = {}
        self._served: set[_Connection] = set()
        self._busy: dict[_Connection, int] = {}
        self._writing_since_s: dict[_Connection, float] = {}

    @contextlib.contextmanager
    def busy(self, connection: _Connection) -> Iterator[None]:
        """A request of this connection is answered within the block."""
        self._busy[connection] = self._busy.get(connection, 0) + 1
        try:
            yield
        finally:
            self._served.add(connection)
            self._idle_since_s[connection] = time.monotonic()
            self._busy[connection] -= 1
            if not self._busy[connection]:
                del self._busy[connection]

    async def write(self, connection: _Connection, response: web.StreamResponse, data: bytes) -> None:
        """Send a part of an answer; the connection is closed when the client does not take it in time.

        A timeout around each write would do the same, for a tenth of the proxy's time.
        """
        self._writing_since_s[connection] = time.monotonic()
        try:
            await response.write(data)
        finally:
            del self._writing_since_s[connection]

    async def run(self) -> None:
        """Look at all connections now and then, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if self.runner is not None and self.runner.server is not None:
                self._sweep(set(self.runner.server.connections), time.monotonic())

    def _sweep(self, known: set[_Connection], now_s: float) -> None:
        for old in [c for c in self._idle_since_s if c not in known]:
            del self._idle_since_s[old]
            self._served.discard(old)
        for connection in known:
            if self._busy.get(connection):
                overdue = now_s - self._writing_since_s.get(connection, now_s) > _WRITE_BOUND_S
            else:
                bound_s = _IDLE_S if connection in self._served else _FIRST_REQUEST_S
                overdue = now_s - self._idle_since_s.setdefault(connection, now_s) > bound_s
            if overdue and connection.transport:
                connection.transport.abort()
