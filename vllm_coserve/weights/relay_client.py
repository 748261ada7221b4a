"""A client of the embedded relay."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from vllm_coserve.weights.store import (
    Arrived,
    Buffer,
    Contents,
    CorruptError,
    GoneError,
    Manifest,
    RelayError,
    Release,
    pack_manifest,
    unpack_manifest,
)

CONTENTS_HEADER = "Coserve-Contents-Bytes"  # at the end of a bucket's body
_WRONG = {404: GoneError, 416: CorruptError}  # a bucket that ends too early
_SOCKET_BOUND_S = 30.0
_TRIES, _RETRY_S = 4, 0.2
_CHUNK_BYTES = 1 << 20


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

    def put_bucket(
        self, release: Release, name: str, parts: Sequence[Buffer], contents: Contents | None = None
    ) -> None:
        """See `RelayStore`."""
        tail = msgspec.json.encode(contents) if contents is not None else b""
        self._call("PUT", f"/v1/releases/{release}/buckets/{name}", [*parts, tail], {CONTENTS_HEADER: str(len(tail))})

    def put_manifest(self, release: Release, manifest: Manifest) -> None:
        """See `RelayStore`."""
        self._call("PUT", f"/v1/releases/{release}/manifest", [pack_manifest(manifest)])

    def releases(self, version: int, begun: bool = False) -> list[Release]:
        """See `RelayStore`."""
        data = self._call("GET", "/v1/begun" if begun else "/v1/releases")
        try:
            found = [Release.parse(r) for r in msgspec.json.decode(data, type=list[str])]
        except (msgspec.DecodeError, ValueError) as exc:
            raise RelayError(f"the relay's list of releases cannot be read: {exc}") from None
        return sorted((r for r in found if r.version == version), key=lambda r: r.base is not None)

    def arrived(self, release: Release, after: int, wait_s: float) -> Arrived:
        """See `RelayStore`."""
        data = self._call("GET", f"/v1/releases/{release}/arrived/{after}/{int(1000 * wait_s)}")
        try:
            return msgspec.json.decode(data, type=Arrived)
        except (msgspec.DecodeError, ValueError) as exc:
            raise RelayError(f"what has come of release {release} cannot be read: {exc}") from None

    def manifest(self, release: Release) -> Manifest:
        """See `RelayStore`."""
        return unpack_manifest(self._call("GET", f"/v1/releases/{release}/manifest"))

    def get_range(self, release: Release, name: str, start: int, end: int) -> Buffer:
        """See `RelayStore`."""
        if start >= end:
            return b""
        return self._call("GET", f"/v1/releases/{release}/buckets/{name}", wanted=(start, end))

    def delete(self, release: Release) -> None:
        """See `RelayStore`."""
        self._call("DELETE", f"/v1/releases/{release}")

    def holds(self, releases: Sequence[Release]) -> bool:
        """See `RelayStore`."""
        return all(release in self.releases(release.version) for release in releases)

    def _call(
        self,
        method: str,
        path: str,
        body: Sequence[Buffer] = (),
        headers: Mapping[str, str] | None = None,
        wanted: tuple[int, int] | None = None,
    ) -> bytearray:
        answer = _Answer(bytearray(wanted[1] - wanted[0] if wanted else 0))
        fruitless = 0
        while True:
            before = answer.have
            try:
                self._once(method, path, body, dict(headers or {}), wanted, answer)
                return answer.data
            except (OSError, http.client.HTTPException) as exc:
                self.close()
                fruitless = 0 if answer.have > before else fruitless + 1
                if fruitless >= _TRIES:
                    raise RelayError(f"the relay at {self._host}:{self._port} does not answer: {exc!r}") from None
                time.sleep(_RETRY_S * 2**fruitless)

    def _once(
        self,
        method: str,
        path: str,
        body: Sequence[Buffer],
        headers: dict[str, str],
        wanted: tuple[int, int] | None,
        answer: _Answer,
    ) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_SOCKET_BOUND_S)
        headers |= self._headers
        if body:
            headers["Content-Length"] = str(sum(len(part) for part in body))
        if wanted is not None:
            headers["Range"] = f"bytes={wanted[0] + answer.have}-{wanted[1] - 1}"
        self._connection.request(method, path, _chunks(body) if body else None, headers)
        got = self._connection.getresponse()
        if got.status >= 300:
            wrong = _WRONG.get(got.status, RelayError)
            raise wrong(f"{method} {path}: HTTP {got.status}: {got.read(300).decode('utf-8', 'replace')}")
        if wanted is None:
            answer.data += got.read()
            return
        room = memoryview(answer.data)
        while answer.have < len(room):
            count = got.readinto(room[answer.have : answer.have + _CHUNK_BYTES])
            if not count:
                raise http.client.IncompleteRead(b"", len(room) - answer.have)
            answer.have += count


def _chunks(parts: Sequence[Buffer]) -> Iterator[memoryview]:
    """In small pieces: the socket's bound is one of each call."""
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _CHUNK_BYTES):
            yield view[at : at + _CHUNK_BYTES]


@dataclass(slots=True)
class _Answer:
    """What has come of an answer, over all tries."""

    data: bytearray
    have: int = 0
