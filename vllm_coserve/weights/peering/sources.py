"""Where a worker reads a bucket from: the relay, or another worker that forwards it. What comes is not checked here."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from vllm_coserve.weights.peering.forwarder import FRAME, WAIT_FRAME_S, Frame
from vllm_coserve.weights.peering.messages import RELAY, Grid, Outcome

CONNECT_BOUND_S = 2.0
SILENCE_BOUND_S = 6 * WAIT_FRAME_S  # of a peer: it has something to say every half second
RELAY_SILENCE_BOUND_S = 10.0
_JUDGED_S = 2.0  # from so long on a rate is judged
_WAIT_BOUND_S = 30.0  # a source that waits so long does not wait for anything
_READ_BYTES = 1 << 18


class SourceError(Exception):
    """A source does not go on; `outcome`: "dead", "slow", "lacks" or "corrupt"."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class Source:
    """A connection to one source. One thread uses an instance."""

    def __init__(self, name: str, url: str, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: `RELAY` for the relay at `url`, else the same as `url`."""
        self.name, self._clock = name, clock
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection: http.client.HTTPConnection | None = None
        self._nbytes, self._busy_s = 0, 0.0
        self._taken = 0, 0.0

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def take_rate(self) -> tuple[int, float]:
        """(bytes, seconds without those in which the source waited itself) since the last call."""
        before, self._taken = self._taken, (self._nbytes, self._busy_s)
        return self._taken[0] - before[0], self._taken[1] - before[1]

    def read(self, grid: Grid, start: int, room: memoryview, floor_bytes_per_s: float) -> Iterator[int]:
        """Read a bucket's bytes from `start` on into `room`, which is as long as what is wanted.

        Yields how many bytes have come since it yielded last; 0: the source waits itself.

        Raises:
            SourceError: it does not go on. A peer that is slower than the floor for two seconds does not either.
        """
        whole = False
        try:
            self._begin()
            if self.name == RELAY:
                yield from self._plain(grid, start, room)
            else:
                yield from self._frames(grid, start, room, floor_bytes_per_s)
            whole = True
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise SourceError("dead", f"{self._host}:{self._port} does not answer: {exc!r}") from None
        finally:
            if not whole:  # what is left of an answer would be taken for the next one
                self.close()

    def _begin(self) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_BOUND_S)
            self._connection.connect()
            silence_s = RELAY_SILENCE_BOUND_S if self.name == RELAY else SILENCE_BOUND_S
            self._connection.sock.settimeout(silence_s)

    def _ask(self, path: str, headers: dict[str, str], status: int) -> http.client.HTTPResponse:
        begun_s = self._clock()
        try:
            self._connection.request("GET", path, headers=self._headers | headers)
            answer = self._connection.getresponse()
        except (ConnectionError, http.client.HTTPException):  # it may only have closed an idle connection
            self.close()
            self._begin()
            self._connection.request("GET", path, headers=self._headers | headers)
            answer = self._connection.getresponse()
        self._busy_s += self._clock() - begun_s
        if answer.status != status:
            text = answer.read(300).decode("utf-8", "replace")
            raise SourceError("lacks", f"{self._host}:{self._port}: {path}: HTTP {answer.status}: {text}")
        return answer

    def _plain(self, grid: Grid, start: int, room: memoryview) -> Iterator[int]:
        path = f"/v1/releases/{grid.release}/buckets/{grid.name}"
        answer = self._ask(path, {"Range": f"bytes={start}-{start + len(room) - 1}"}, 206)
        have = 0
        while have < len(room):
            # Up to the end of a chunk, so that it is passed on at once.
            chunk_end = grid.start((start + have) // grid.chunk_bytes + 1) - start
            have += (count := self._receive(answer, room[have : min(chunk_end, len(room))]))
            yield count

    def _frames(self, grid: Grid, start: int, room: memoryview, floor_bytes_per_s: float) -> Iterator[int]:
        path = f"/v1/chunks/{grid.release}/{grid.name}/{grid.tag}/{start}-{start + len(room)}"
        answer = self._ask(path, {}, 200)
        have, waits, moved_s = 0, False, self._clock()
        judged = self._nbytes, self._busy_s
        while have < len(room):
            kind, length = self._head(answer, waits)
            waits = kind == Frame.WAIT
            if kind == Frame.GONE:
                answer.read()
                raise SourceError("lacks", f"{self._host}:{self._port} has no more of bucket {grid.name}")
            if length > len(room) - have or waits == bool(length):
                raise ValueError(f"a frame of {length} bytes where {len(room) - have} are missing")
            if waits:
                if self._clock() - moved_s > _WAIT_BOUND_S:
                    raise SourceError("slow", f"{self._host}:{self._port} waits for bucket {grid.name}")
                yield 0
            end = have + length
            while have < end:
                have += (count := self._receive(answer, room[have:end]))
                moved_s = self._clock()
                yield count
                nbytes, busy_s = self._nbytes - judged[0], self._busy_s - judged[1]
                if busy_s > _JUDGED_S:
                    judged = self._nbytes, self._busy_s
                    if nbytes < floor_bytes_per_s * busy_s:
                        raise SourceError("slow", f"{self._host}:{self._port} sends {nbytes / busy_s / 1e6:.2f} MB/s")
        answer.read()

    def _head(self, answer: http.client.HTTPResponse, waits: bool) -> tuple[int, int]:
        begun_s, head = self._clock(), b""
        while len(head) < FRAME.size:
            part = answer.read(FRAME.size - len(head))
            if not part:
                raise http.client.IncompleteRead(head, FRAME.size - len(head))
            head += part
        if not waits:
            self._busy_s += self._clock() - begun_s
        kind, length = FRAME.unpack(head)
        return Frame(kind), length

    def _receive(self, answer: http.client.HTTPResponse, room: memoryview) -> int:
        begun_s = self._clock()
        part = answer.read1(min(len(room), _READ_BYTES))  # what is there: a source that trickles is seen as one
        if not part:
            raise http.client.IncompleteRead(b"", len(room))
        room[: len(part)] = part
        self._busy_s += self._clock() - begun_s
        self._nbytes += len(part)
        return len(part)
