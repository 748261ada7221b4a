"""The embedded relay: releases in the memory of one process, over HTTP. The default where no other store is there."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_coserve.weights.bearer import Bearer
from vllm_coserve.weights.peering.messages import Broadcast
from vllm_coserve.weights.peering.tracker import Tracker
from vllm_coserve.weights.relay_client import CONTENTS_HEADER
from vllm_coserve.weights.store import (
    Arrived,
    Contents,
    CorruptError,
    PieceEntry,
    Release,
    unpack_manifest,
)

_PATH = re.compile(r"/v1/releases/([a-z0-9-]{1,40})(?:/(manifest|buckets/([A-Za-z0-9._-]{1,64})))?\Z", re.ASCII)
_ARRIVED = re.compile(r"/v1/releases/([a-z0-9-]{1,40})/arrived/(\d{1,9})/(\d{1,9})\Z", re.ASCII)  # after, wait in ms
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})\Z", re.ASCII)
_SOCKET_BOUND_S = 30.0
_CHUNK_BYTES = 1 << 20
_END_POLL_S = 0.05
_LONG_POLL_S = 10.0
_POST_MAX_BYTES = 8 << 20


class Relay:
    """Serves versions until `close`. Use as a context manager."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str = "",
        memory_bytes: int = 64 << 30,
        broadcast: Broadcast | None = None,
    ) -> None:
        """Raises OSError where the port is taken.

        Args:
            key: what clients must show, if not empty.
            broadcast: workers forward what they read, as this says; None: all read from here.
        """
        self.tracker = Tracker(broadcast, self._bucket) if broadcast else None
        self._held: dict[Release, _Held] = {}
        self._changed = threading.Condition()
        self._bearer = Bearer(key)
        self._memory_bytes = memory_bytes
        handler = type("Handler", (_Handler,), {"relay": self})
        self._server = http.server.ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_END_POLL_S,), name="coserve-relay", daemon=True
        )
        self._thread.start()
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no further requests and forget everything."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._held.clear()

    # ---- what requests do; each returns (status, body)

    def allows(self, authorization: str) -> bool:
        """Whether a client shows the key."""
        return self._bearer.allows(authorization)

    def room_for(self, nbytes: int) -> bool:
        """Whether so much more may be held."""
        with self._changed:
            held = sum(len(data) for kept in self._held.values() for data in kept.buckets.values())
        return held + nbytes <= self._memory_bytes

    def put_bucket(self, release: Release, name: str, data: bytes, contents: bytes) -> tuple[int, bytes]:
        """Buckets are immutable."""
        try:
            described = msgspec.json.decode(contents, type=Contents) if contents else None
        except (msgspec.DecodeError, ValueError) as exc:
            return 400, f"these are no contents of a bucket: {exc}".encode()
        with self._changed:
            kept = self._held.setdefault(release, _Held())
            old = kept.buckets.setdefault(name, data)
            if old is data and described is not None:
                kept.lineage = described.lineage
                kept.contents.append(described.pieces)
                self._changed.notify_all()
        if self.tracker is not None:
            self.tracker.prepare(release, name)
        return (201, b"") if old is data or old == data else (409, b"the bucket is there with other content")

    def put_manifest(self, release: Release, data: bytes) -> tuple[int, bytes]:
        """A release is complete only when all its buckets are what the manifest says."""
        try:
            manifest = unpack_manifest(data)
        except CorruptError as exc:
            return 400, str(exc).encode()
        if manifest.release != str(release):
            return 409, b"the manifest is of another release"
        with self._changed:
            kept = self._held.get(release, _Held())
            for bucket in manifest.buckets:
                got = kept.buckets.get(bucket.name)
                if got is None or len(got) != bucket.nbytes:
                    return 409, f"bucket {bucket.name} is not there, or is another one".encode()
            kept = self._held.setdefault(release, kept)
            kept.manifest, kept.lineage = kept.manifest or data, manifest.lineage
            self._changed.notify_all()
            return (201, b"") if kept.manifest == data else (409, b"the release is there with another manifest")

    def get(self, release: Release, what: str, name: str) -> bytes | None:
        """The manifest of a complete release, or a bucket of any."""
        with self._changed:
            kept = self._held.get(release, _Held())
            return kept.manifest if what == "manifest" else kept.buckets.get(name)

    def arrived(self, release: Release, after: int, wait_s: float) -> Arrived | None:
        """See `RelayStore`; None: nothing of it."""

        def news() -> bool:
            kept = self._held.get(release)
            return kept is None or kept.manifest is not None or len(kept.contents) > after

        with self._changed:
            self._changed.wait_for(news, min(wait_s, _LONG_POLL_S))
            kept = self._held.get(release)
            if kept is None:
                return None
            if kept.manifest is not None:
                return Arrived(kept.lineage, True)
            pieces = tuple(piece for pieces in kept.contents[after:] for piece in pieces)
            return Arrived(kept.lineage, False, len(kept.contents), pieces)

    def releases(self, begun: bool) -> list[str]:
        """Complete ones, or all."""
        with self._changed:
            return [str(r) for r, kept in self._held.items() if begun or kept.manifest is not None]

    def delete(self, release: Release) -> None:
        """Forget a release."""
        with self._changed:
            self._held.pop(release, None)
            self._changed.notify_all()
        if self.tracker is not None:
            self.tracker.forget(release)

    def _bucket(self, release: Release, name: str) -> bytes | None:
        return self.get(release, "bucket", name)


@dataclass(slots=True)
class _Held:
    """What there is of a release."""

    buckets: dict[str, bytes] = field(default_factory=dict)
    contents: list[tuple[PieceEntry, ...]] = field(default_factory=list)  # of buckets in the order of their coming
    lineage: str = ""
    manifest: bytes | None = None  # None: not complete


class _Handler(http.server.BaseHTTPRequestHandler):
    relay: Relay
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_BOUND_S
    disable_nagle_algorithm = True  # head and body of an answer are sent one after the other

    def handle(self) -> None:
        """A client that goes away is none of our business."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/begun" or _ARRIVED.match(self.path):
            self._tell()
            return
        found = self._find()
        if found is None:
            return
        if found == "releases":
            self._answer(200, msgspec.json.encode(self.relay.releases(begun=False)))
            return
        release, what, name = found
        data = self.relay.get(release, what, name)
        if data is None:
            self._answer(404, f"release {release} has no such {what}, or is not complete".encode())
            return
        wanted = _RANGE.match(self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, data)
            return
        start, last = int(wanted[1]), int(wanted[2])
        if start > last or last >= len(data):
            self._answer(416, f"bytes {start}-{last} of {len(data)}".encode())
            return
        self._answer(206, memoryview(data)[start : last + 1])

    def _tell(self) -> None:
        """What there is of releases that need not be complete."""
        if not self._is_allowed():
            return
        match = _ARRIVED.match(self.path)
        if match is None:
            self._answer(200, msgspec.json.encode(self.relay.releases(begun=True)))
            return
        try:
            arrived = self.relay.arrived(Release.parse(match[1]), int(match[2]), int(match[3]) / 1000)
        except ValueError:
            arrived = None
        self._answer(*(200, msgspec.json.encode(arrived)) if arrived else (404, b"nothing of that release is here"))

    def do_PUT(self) -> None:
        found = self._find()
        if found is None:
            return
        length = self.headers.get("Content-Length", "")
        if found == "releases" or found[1] == "" or not length.isdigit():
            self.close_connection = True
            self._answer(400, b"put a manifest or a bucket, with its length")
            return
        if not self.relay.room_for(int(length)):
            self._skip(int(length))
            self._answer(507, b"the relay is full: delete old versions")
            return
        tail = self.headers.get(CONTENTS_HEADER, "0")
        size = int(length) - int(tail) if tail.isdigit() else -1
        if size < 0:
            self.close_connection = True
            self._answer(400, b"a bucket is shorter than the description of its contents")
            return
        data, contents = self.rfile.read(size), self.rfile.read(int(tail))
        if len(data) + len(contents) != int(length):
            self.close_connection = True
            return
        release, what, name = found
        if what == "manifest":
            self._answer(*self.relay.put_manifest(release, data + contents))
        else:
            self._answer(*self.relay.put_bucket(release, name, data, contents))

    def do_POST(self) -> None:
        """What workers that forward to each other tell and ask."""
        if not self._is_allowed():
            return
        tracker, length = self.relay.tracker, self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _POST_MAX_BYTES:
            self.close_connection = True
            self._answer(400, b"post a message, with its length")
            return
        body = self.rfile.read(int(length))
        if tracker is None:
            self._answer(404, b"nobody forwards here")
            return
        self._answer(*tracker.answer(self.path, body, self.client_address[0]))

    def do_DELETE(self) -> None:
        found = self._find()
        if found is None:
            return
        if found == "releases" or found[1]:
            self._answer(400, b"delete a release")
            return
        self.relay.delete(found[0])
        self._answer(200, b"")

    def _skip(self, nbytes: int) -> None:
        """Read on: to a client that is still sending, the end of the connection would be all of the answer."""
        while nbytes > 0 and (part := self.rfile.read(min(nbytes, _CHUNK_BYTES))):
            nbytes -= len(part)

    def _find(self) -> tuple[Release, str, str] | str | None:
        """(release, "manifest" or "bucket" or "", bucket); None: the answer has been given."""
        if not self._is_allowed():
            return None
        if self.path == "/v1/releases":
            return "releases"
        match = _PATH.match(self.path)
        if match is None:
            self.close_connection = True
            self._answer(404, b"no such path")
            return None
        try:
            release = Release.parse(match[1])
        except ValueError as exc:
            self.close_connection = True
            self._answer(404, str(exc).encode())
            return None
        return release, (match[2] or "").partition("/")[0].removesuffix("s"), match[3] or ""

    def _is_allowed(self) -> bool:
        """False: the answer has been given."""
        if self.relay.allows(self.headers.get("Authorization", "")):
            return True
        self.close_connection = True
        self._answer(401, b"give the relay's key as `Authorization: Bearer KEY`")
        return False

    def _answer(self, status: int, body: bytes | memoryview) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        view = memoryview(body)
        for at in range(0, len(view), _CHUNK_BYTES):  # the socket's bound is one of each call
            self.wfile.write(view[at : at + _CHUNK_BYTES])
