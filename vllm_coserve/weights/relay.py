"""The embedded relay: releases in the memory of one process, over HTTP. The default where no other store is there."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vllm_coserve.weights.bearer import Bearer
from vllm_coserve.weights.peer_messages import Broadcast
from vllm_coserve.weights.store import Buffer, Manifest, RelayError, Release
from vllm_coserve.weights.tracker import Tracker

_PATH = re.compile(r"/v1/releases/([a-z0-9-]{1,40})(?:/(manifest|buckets/([A-Za-z0-9._-]{1,64})))?\Z", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})\Z", re.ASCII)
_SOCKET_BOUND_S = 30.0
_TRIES, _RETRY_S = 4, 0.2
_CHUNK_BYTES = 1 << 20
_END_POLL_S = 0.05
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
        self.tracker = Tracker(broadcast, self.bucket) if broadcast else None
        self._buckets: dict[Release, dict[str, bytes]] = {}
        self._manifests: dict[Release, bytes] = {}
        self._lock = threading.Lock()
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
        self._buckets.clear()
        self._manifests.clear()

    # ---- what requests do; each returns (status, body)

    def allows(self, authorization: str) -> bool:
        """Whether a client shows the key."""
        return self._bearer.allows(authorization)

    def room_for(self, nbytes: int) -> bool:
        """Whether so much more may be held."""
        with self._lock:
            held = sum(len(data) for buckets in self._buckets.values() for data in buckets.values())
        return held + nbytes <= self._memory_bytes

    def put_bucket(self, release: Release, name: str, data: bytes) -> tuple[int, bytes]:
        """Buckets are immutable."""
        with self._lock:
            old = self._buckets.setdefault(release, {}).setdefault(name, data)
        if self.tracker is not None:
            self.tracker.prepare(release, name)
        return (201, b"") if old is data or old == data else (409, b"the bucket is there with other content")

    def put_manifest(self, release: Release, data: bytes) -> tuple[int, bytes]:
        """A release is complete only when all its buckets are what the manifest says."""
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as exc:
            return 400, f"this is no manifest: {exc}".encode()
        with self._lock:
            buckets = dict(self._buckets.get(release, {}))
        for bucket in manifest.buckets:
            got = buckets.get(bucket.name)
            if got is None or len(got) != bucket.nbytes:
                return 409, f"bucket {bucket.name} is not there, or is another one".encode()
        if manifest.release != str(release):
            return 409, b"the manifest is of another release"
        with self._lock:
            old = self._manifests.setdefault(release, data)
        return (201, b"") if old == data else (409, b"the release is there with another manifest")

    def get(self, release: Release, what: str, name: str) -> bytes | None:
        """A manifest or bucket of a complete release."""
        with self._lock:
            if release not in self._manifests:
                return None
            return self._manifests[release] if what == "manifest" else self._buckets[release].get(name)

    def bucket(self, release: Release, name: str) -> bytes | None:
        """A bucket, also of a release that is not complete yet."""
        with self._lock:
            return self._buckets.get(release, {}).get(name)

    def releases(self) -> list[str]:
        """Complete ones."""
        with self._lock:
            return [str(r) for r in self._manifests]

    def delete(self, release: Release) -> None:
        """Forget a release."""
        with self._lock:
            self._manifests.pop(release, None)
            self._buckets.pop(release, None)
        if self.tracker is not None:
            self.tracker.forget(release)


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
        found = self._find()
        if found is None:
            return
        if found == "releases":
            self._answer(200, msgspec.json.encode(self.relay.releases()))
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
            self.close_connection = True
            self._answer(507, b"the relay is full: delete old versions")
            return
        data = self.rfile.read(int(length))
        if len(data) != int(length):
            self.close_connection = True
            return
        release, what, name = found
        put = (
            self.relay.put_manifest(release, data) if what == "manifest" else self.relay.put_bucket(release, name, data)
        )
        self._answer(*put)

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
        self.wfile.write(body)


class RelayClient:
    """See `RelayStore`. Interrupted reads go on where they were; one thread uses an instance."""

    def __init__(self, url: str, key: str = "") -> None:
        """Raises RelayError where the address is none."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise RelayError(f"{url!r} is no relay's address such as http://127.0.0.1:8300")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def put_bucket(self, release: Release, name: str, parts: Sequence[Buffer]) -> None:
        """See `RelayStore`."""
        self._call("PUT", f"/v1/releases/{release}/buckets/{name}", parts)

    def put_manifest(self, release: Release, manifest: Manifest) -> None:
        """See `RelayStore`."""
        self._call("PUT", f"/v1/releases/{release}/manifest", [msgspec.json.encode(manifest)])

    def releases(self, version: int) -> list[Release]:
        """See `RelayStore`."""
        return sorted((r for r in self._all() if r.version == version), key=lambda r: r.base is not None)

    def _all(self) -> list[Release]:
        try:
            return [Release.parse(r) for r in msgspec.json.decode(self._call("GET", "/v1/releases"), type=list[str])]
        except (msgspec.DecodeError, ValueError) as exc:
            raise RelayError(f"the relay's list of releases cannot be read: {exc}") from None

    def manifest(self, release: Release) -> Manifest:
        """See `RelayStore`."""
        try:
            return msgspec.json.decode(self._call("GET", f"/v1/releases/{release}/manifest"), type=Manifest)
        except msgspec.DecodeError as exc:
            raise RelayError(f"release {release} has no manifest that can be read: {exc}") from None

    def get_range(self, release: Release, name: str, start: int, end: int) -> Buffer:
        """See `RelayStore`."""
        if start >= end:
            return b""
        return self._call("GET", f"/v1/releases/{release}/buckets/{name}", wanted=(start, end))

    def delete(self, release: Release) -> None:
        """See `RelayStore`."""
        self._call("DELETE", f"/v1/releases/{release}")

    def _call(
        self, method: str, path: str, body: Sequence[Buffer] = (), wanted: tuple[int, int] | None = None
    ) -> bytearray:
        answer = _Answer(bytearray(wanted[1] - wanted[0] if wanted else 0))
        fruitless = 0
        while True:
            before = answer.have
            try:
                self._once(method, path, body, wanted, answer)
                return answer.data
            except (OSError, http.client.HTTPException) as exc:
                self.close()
                fruitless = 0 if answer.have > before else fruitless + 1
                if fruitless >= _TRIES:
                    raise RelayError(f"the relay at {self._host}:{self._port} does not answer: {exc!r}") from None
                time.sleep(_RETRY_S * 2**fruitless)

    def _once(
        self, method: str, path: str, body: Sequence[Buffer], wanted: tuple[int, int] | None, answer: _Answer
    ) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_SOCKET_BOUND_S)
        headers = dict(self._headers)
        if body:
            headers["Content-Length"] = str(sum(len(part) for part in body))
        if wanted is not None:
            headers["Range"] = f"bytes={wanted[0] + answer.have}-{wanted[1] - 1}"
        self._connection.request(method, path, body or None, headers)
        got = self._connection.getresponse()
        if got.status >= 300:
            raise RelayError(f"{method} {path}: HTTP {got.status}: {got.read(300).decode('utf-8', 'replace')}")
        if wanted is None:
            answer.data += got.read()
            return
        room = memoryview(answer.data)
        while answer.have < len(room):
            count = got.readinto(room[answer.have : answer.have + _CHUNK_BYTES])
            if not count:
                raise http.client.IncompleteRead(b"", len(room) - answer.have)
            answer.have += count


@dataclass(slots=True)
class _Answer:
    """What has come of an answer, over all tries."""

    data: bytearray
    have: int = 0
