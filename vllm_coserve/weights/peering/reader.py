"""Reading a version from the nearest source that has it: another worker where the relay offers that, else the relay.

What is read is checked chunk by chunk against digests of the relay's and kept for other workers. When a source dies,
stalls, is slow, lacks it or sends something else, it is read on elsewhere at the byte where it was (ECHO-2 4.2;
RobustRL 5.2.1).
"""

from __future__ import annotations

import http.client
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from vllm_coserve.weights.peering.forwarder import Forwarder
from vllm_coserve.weights.peering.messages import (
    RELAY,
    DigestAnswer,
    DigestQuery,
    Grid,
    Heard,
    Outcome,
    PeerAdvice,
    PeerReport,
)
from vllm_coserve.weights.peering.sources import CONNECT_BOUND_S, Source, SourceError
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.store import Buffer, CorruptError, Manifest, RelayError, RelayStore, Release
from vllm_coserve.weights.stores import open_store

_TRIES, _RETRY_S = 5, 0.2  # rounds through all sources without a byte
_DIGESTS_BOUND_S = 30.0
_UNHEARD_S = 5.0  # until a relay that did not take a report gets another one
_FIRST_REPORT_S = 0.2  # places are given while the first workers come


class Peer:
    """This process among the workers of one relay: where it forwards, and whom it never reads from again."""

    def __init__(
        self, url: str, key: str, host: str = "127.0.0.1", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`host`: the address at which other workers can reach this one."""
        self.url, self.key, self.clock = url, key, clock
        self.worker_id = secrets.token_hex(8)
        self.corrupt: set[str] = set()
        self.forwarder: Forwarder | None = None
        self._host, self._tried = host, False

    def serve(self, memory_bytes: int) -> Forwarder | None:
        """What serves others; None where it cannot listen: then it only reads."""
        if not self._tried:
            self._tried = True
            try:
                self.forwarder = Forwarder(self._host, self.key, memory_bytes)
            except OSError:
                self.forwarder = None
        return self.forwarder

    def close(self) -> None:
        """Serve nobody any more."""
        if self.forwarder is not None:
            self.forwarder.close()


_HERE: list[Peer] = []  # at most one: a process follows one job
_HERE_LOCK = threading.Lock()


def open_reader(url: str, key: str = "", shard: str = "", host: str = "127.0.0.1") -> RelayStore:
    """The store that an address names, to read from; what it forwards to others stays in this process.

    Args:
        shard: workers with the same one read the same parts of tensors, and can use what each other has.
        host: the address at which other workers can reach this one.

    Raises:
        RelayError: the address is none.
    """
    if not url.startswith("http:"):
        return open_store(url, key)
    with _HERE_LOCK:
        if _HERE and (_HERE[0].url, _HERE[0].key) != (url, key):
            _HERE.pop().close()
        if not _HERE:
            _HERE.append(Peer(url, key, host))
        return PeerClient(_HERE[0], shard)


def stop_forwarding() -> None:
    """Give back the memory in which versions are kept for others; the next `open_reader` begins anew."""
    with _HERE_LOCK:
        while _HERE:
            _HERE.pop().close()


@dataclass(slots=True)
class _Pull:
    """A release that is read."""

    release: Release
    forwarder: Forwarder | None
    total_bytes: int
    grids: dict[str, Grid]
    advice: PeerAdvice
    have_bytes: int = 0
    avoided: dict[str, SourceError] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    report_due_s: float = 0.0


@dataclass(slots=True)
class _Window:
    """Chunks that are read next. `at`: bytes that are there; those of the chunk that is not whole are unchecked."""

    grid: Grid
    first: int  # the window's first chunk
    index: int  # the chunk that comes next
    room: memoryview
    at: int = 0
    mixed: bool = False  # that chunk is of several sources: nobody is to blame for it

    def chunk(self) -> memoryview:
        """The room of the chunk that comes next."""
        base = self.grid.start(self.first)
        return self.room[self.grid.start(self.index) - base : self.grid.start(self.index + 1) - base]

    def begin_of_chunk(self) -> int:
        """Where it begins in the room."""
        return self.grid.start(self.index) - self.grid.start(self.first)


class PeerClient(RelayClient):
    """See `RelayStore`; a `RelayClient` where the relay offers no forwarding. One thread uses an instance."""

    def __init__(self, peer: Peer, shard: str = "") -> None:
        """Raises RelayError where the relay's address is none."""
        super().__init__(peer.url, peer.key)
        self._peer, self._shard = peer, shard
        self._offered = True
        self._pull: _Pull | None = None
        self._sources: dict[str, Source] = {}
        self._manifests: dict[Release, Manifest] = {}
        self._control: http.client.HTTPConnection | None = None
        self._unheard_until_s = 0.0

    def close(self) -> None:
        """Leave; what was read is still forwarded."""
        self._end_pull()
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._hang_up()
        super().close()

    def manifest(self, release: Release) -> Manifest:
        """See `RelayStore`."""
        manifest = self._manifests[release] = super().manifest(release)
        return manifest

    def get_range(self, release: Release, name: str, start: int, end: int) -> Buffer:
        """See `RelayStore`."""
        grid = self._grid(release, name) if start < end else None
        if grid is None or self._pull is None or end > grid.nbytes:
            return super().get_range(release, name, start, end)
        first, last = start // grid.chunk_bytes, -(-end // grid.chunk_bytes)
        base = grid.start(first)
        data = bytearray(grid.start(last) - base)
        self._fill(self._pull, _Window(grid, first, first, memoryview(data)))
        whole = len(data) == end - start
        return data if whole else memoryview(data)[start - base : end - base]

    # ---- a release

    def _grid(self, release: Release, name: str) -> Grid | None:
        """The bucket's chunks; None where they are not to be had."""
        if not self._offered:
            return None
        if self._pull is None or self._pull.release != release:
            self._end_pull()
            self._begin_pull(release, name)
        if self._pull is not None and name not in self._pull.grids:
            found = self._digests(release, (name,))
            self._pull.grids |= found[0] if found else {}
        return self._pull.grids.get(name) if self._pull is not None else None

    def _begin_pull(self, release: Release, name: str) -> None:
        manifest = self._manifests.get(release)
        buckets = manifest.buckets if manifest else ()
        found = self._digests(release, tuple(bucket.name for bucket in buckets) or (name,))
        if found is None:
            return
        grids, memory_bytes = found
        forwarder = self._peer.serve(memory_bytes)
        total_bytes = sum(bucket.nbytes for bucket in buckets)
        self._pull = _Pull(release, forwarder, total_bytes, grids, PeerAdvice((RELAY,)))
        if forwarder is not None:
            forwarder.begin(str(release))
        self._report(self._pull)
        self._pull.report_due_s = min(self._pull.report_due_s, self._peer.clock() + _FIRST_REPORT_S)

    def _end_pull(self) -> None:
        if self._pull is not None:
            if self._pull.forwarder is not None:
                self._pull.forwarder.end(str(self._pull.release))
            self._report(self._pull, done=True)
            self._pull = None

    # ---- chunks

    def _fill(self, pull: _Pull, window: _Window) -> None:
        """Raises RelayError where no source goes on."""
        fruitless = 0
        while not self._take_own(pull, window):
            name = self._choose(pull)
            if name is None:
                fruitless += 1
                if fruitless >= _TRIES:
                    wrong = list(pull.avoided.values())
                    kind = CorruptError if any(e.outcome == "corrupt" for e in wrong) else RelayError
                    raise kind("no source goes on: " + "; ".join(map(str, wrong)))
                time.sleep(_RETRY_S * 2**fruitless)
                pull.avoided.clear()
                self._report(pull)
                continue
            before = window.at
            self._read_from(name, pull, window)
            fruitless = 0 if window.at > before else fruitless

    def _choose(self, pull: _Pull) -> str | None:
        usable = (s for s in pull.advice.sources if s not in pull.avoided and s not in self._peer.corrupt)
        return next(usable, None)

    def _take_own(self, pull: _Pull, window: _Window) -> bool:
        """Use what an interrupted pull has left; whether the window is full."""
        while window.at < len(window.room):
            own = None
            if pull.forwarder is not None:
                pull.forwarder.aim(window.grid, window.index)
                own = pull.forwarder.have(window.grid, window.index)
            if own is None:
                return False
            window.chunk()[:] = own
            self._next_chunk(pull, window)
        return True

    def _next_chunk(self, pull: _Pull, window: _Window) -> None:
        pull.have_bytes += len(window.chunk())
        window.index += 1
        window.at, window.mixed = window.begin_of_chunk(), False

    def _read_from(self, name: str, pull: _Pull, window: _Window) -> None:
        """Read on at one source as long as it goes well and is the one to read from."""
        window.mixed = window.at > window.begin_of_chunk()
        source = self._source(name)
        start = window.grid.start(window.first) + window.at
        stream = source.read(window.grid, start, window.room[window.at :], pull.advice.floor_bytes_per_s)
        try:
            for count in stream:
                window.at += count
                if window.at - window.begin_of_chunk() >= len(window.chunk()) and not self._accept(pull, window, name):
                    return
                if self._peer.clock() >= pull.report_due_s:
                    self._report(pull)
                    if window.at == window.begin_of_chunk() and self._choose(pull) != name:
                        return
        except SourceError as exc:
            self._fail(pull, name, exc)
        finally:
            stream.close()

    def _accept(self, pull: _Pull, window: _Window, name: str) -> bool:
        """Check the chunk that is complete and hand it on; False: read it again.

        Raises:
            SourceError: it is not what the relay has, and all of it came from this source.
        """
        chunk = window.chunk()
        if window.grid.holds(window.index, chunk):
            if pull.forwarder is not None:
                pull.forwarder.put(window.grid, window.index, bytes(chunk))
            self._next_chunk(pull, window)
            return True
        window.at = window.begin_of_chunk()
        if not window.mixed:
            raise SourceError("corrupt", f"{name or 'the relay'} sends what was not published")
        return False

    def _fail(self, pull: _Pull, name: str, exc: SourceError) -> None:
        pull.avoided[name] = exc
        if exc.outcome == "corrupt" and name != RELAY:
            self._peer.corrupt.add(name)
        self._hear(pull, name, exc.outcome)
        if name != RELAY:  # so that the chain is made anew
            self._report(pull)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            self._sources[name] = Source(name, name or self._peer.url, self._peer.key, self._peer.clock)
        return self._sources[name]

    # ---- what the relay is told, and asked

    def _hear(self, pull: _Pull, name: str, outcome: Outcome) -> None:
        nbytes, busy_s = self._source(name).take_rate()
        if nbytes or outcome != "ok":
            pull.heard = [*pull.heard[-16:], Heard(name, outcome, nbytes, min(busy_s, 3600.0))]

    def _report(self, pull: _Pull, done: bool = False) -> None:
        """Tell how far this worker is, and learn where to read on. A relay that does not answer changes nothing."""
        now_s = self._peer.clock()
        if now_s < self._unheard_until_s:
            return
        for name in self._sources:
            self._hear(pull, name, "ok")
        address = pull.forwarder.url if pull.forwarder is not None else ""
        report = PeerReport(
            self._peer.worker_id,
            str(pull.release),
            address,
            self._shard,
            pull.have_bytes,
            pull.total_bytes,
            done,
            tuple(pull.heard),
        )
        try:
            status, body = self._post("/v1/peers/report", msgspec.json.encode(report), CONNECT_BOUND_S)
            if status == 200:
                pull.advice = msgspec.json.decode(body, type=PeerAdvice)
                pull.heard = []
            pull.report_due_s = now_s + max(0.1, pull.advice.report_s)
        except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError):
            self._hang_up()
            self._unheard_until_s = pull.report_due_s = now_s + _UNHEARD_S

    def _digests(self, release: Release, names: tuple[str, ...]) -> tuple[dict[str, Grid], int] | None:
        """(chunks by bucket, bytes to keep for others); None: this relay offers no forwarding, or does not answer."""
        query = DigestQuery(str(release), names)
        try:
            status, body = self._post("/v1/peers/digests", msgspec.json.encode(query), _DIGESTS_BOUND_S)
            if status != 200:
                self._offered = False
                return None
            answer = msgspec.json.decode(body, type=DigestAnswer)
            text = str(release)
            grids = {name: Grid(text, name, answer.chunk_bytes, entry) for name, entry in answer.buckets.items()}
        except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError):
            self._hang_up()
            return None
        return grids, answer.memory_bytes

    def _post(self, path: str, body: bytes, bound_s: float) -> tuple[int, bytes]:
        if self._control is None:
            self._control = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_BOUND_S)
            self._control.connect()
        self._control.sock.settimeout(bound_s)
        self._control.request("POST", path, body, self._headers)
        answer = self._control.getresponse()
        return answer.status, answer.read()

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
