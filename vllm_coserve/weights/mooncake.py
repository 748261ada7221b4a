"""Relay in a Mooncake Store: buckets lie in the memory of segment owners, wherever those are.

Keys are immutable. A release's buckets go first, its manifest next, and last a note that names it among those that make
its version. A publisher's buckets have names of its own: what a killed one left in the middle of a put, which takes no
other value any more, is never met. Readers trust what they read as little as that of any relay: runs have checksums.

Tested with mooncake-transfer-engine-non-cuda 0.3.13.post1 over TCP.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from vllm_coserve.weights.store import Arrived, Buffer, Contents, Manifest, RelayError, Release

_STATUS_BOUND_S = 5  # of a transfer with an owner that does not answer; Mooncake's own is 30
_NOTE_BYTES = 4096
_ERRORS = {
    -200: "the owners' segments are full: retire old versions or start more owners",
    -600: "bad parameters",
    -703: "the object is not complete",
    -704: "no such object: 404",
    -800: "its owner does not answer",
    -900: "the master does not answer",
}


class MooncakeStore:
    """See `RelayStore`. One thread uses an instance; close it before its process ends."""

    def __init__(self, url: str, staging_bytes: int = 80 << 20) -> None:
        """`url`: mooncake://MASTER:PORT/PREFIX, where the prefix is one job's.

        Args:
            staging_bytes: of registered memory, through which everything goes; no bucket may be larger.

        Raises:
            RelayError: the address is none, Mooncake is not installed, or the master does not answer.
        """
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        if parts.scheme != "mooncake" or not parts.hostname or not parts.port or not prefix or "/" in prefix:
            raise RelayError(f"{url!r} is no store's address such as mooncake://127.0.0.1:41000/job-1")
        self._prefix = prefix
        os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", str(_STATUS_BOUND_S))  # read when a transfer engine is made
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as exc:
            hint = "pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda where there is no CUDA"
            raise RelayError(f"Mooncake cannot be used ({exc}): {hint}") from None
        self._config = ReplicateConfig()
        self._config.with_hard_pin = True  # others vanish when memory is short
        self._store = MooncakeDistributedStore()
        # A segment of 0: a pure client, which holds nothing for others.
        master = f"{parts.hostname}:{parts.port}"
        self._check(self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, staging_bytes, "tcp", "", master), "setup")
        self._staging = bytearray(staging_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
        self._check(self._store.register_buffer(self._address, staging_bytes), "register_buffer")

    def close(self) -> None:
        """Leave the store."""
        self._store.unregister_buffer(self._address)
        self._store.close()

    def put_bucket(
        self, release: Release, name: str, parts: Sequence[Buffer], contents: Contents | None = None
    ) -> None:
        """See `RelayStore`; nothing is read before the release is complete."""
        self._put(self._key(release, name), parts)

    def put_manifest(self, release: Release, manifest: Manifest) -> None:
        """See `RelayStore`."""
        for bucket in manifest.buckets:
            size = self._store.get_size(self._key(release, bucket.name))
            if size != bucket.nbytes:
                raise RelayError(f"bucket {bucket.name} of release {release} is not there, or is another one")
        self._put(self._key(release, "manifest"), [msgspec.json.encode(manifest)])
        if self.manifest(release) != manifest:  # a put on a key that exists does nothing, and says that all is well
            raise RelayError(f"release {release} is there with another manifest")
        self._put(self._note(release), [str(release).encode()])

    def releases(self, version: int, begun: bool = False) -> list[Release]:
        """See `RelayStore`; complete ones only."""
        found = []
        for kind in ("whole", "changes"):
            key = f"{self._prefix}/{version}/{kind}"
            if self._exists(key):
                found.append(self._parse(bytes(self._get(key, _NOTE_BYTES)), version))
        return found

    def arrived(self, release: Release, after: int, wait_s: float) -> Arrived:
        """See `RelayStore`; a release is complete, or nothing of it has come."""
        return Arrived(self.manifest(release).lineage, True)

    def manifest(self, release: Release) -> Manifest:
        """See `RelayStore`."""
        key = self._key(release, "manifest")
        if not self._exists(key):
            raise RelayError(f"there is no release {release}: 404")
        try:
            return msgspec.json.decode(self._get(key, len(self._staging)), type=Manifest)
        except msgspec.DecodeError as exc:
            raise RelayError(f"release {release} has no manifest that can be read: {exc}") from None

    def get_range(self, release: Release, name: str, start: int, end: int) -> Buffer:
        """See `RelayStore`."""
        out = bytearray(end - start)
        key = self._key(release, name)
        for at in range(start, end, len(self._staging)):
            count = min(end - at, len(self._staging))
            got = self._store.get_into_ranges([self._address], [[key]], [[[0]]], [[[at]]], [[[count]]])
            while isinstance(got, list | tuple):
                (got,) = got
            if got != count:
                self._check(got if got < 0 else -704, f"reading {key}")
            out[at - start : at - start + count] = memoryview(self._staging)[:count]
        return out

    def delete(self, release: Release) -> None:
        """See `RelayStore`."""
        self._store.remove(self._note(release), True)
        self._store.remove_by_regex(f"^{self._prefix}/{release}/", True)

    # ---- details

    def _key(self, release: Release, name: str) -> str:
        return f"{self._prefix}/{release}/{name}"

    def _note(self, release: Release) -> str:
        return f"{self._prefix}/{release.version}/{'whole' if release.base is None else 'changes'}"

    def _exists(self, key: str) -> bool:
        found = self._store.is_exist(key)
        if found < 0:
            self._check(found, f"looking for {key}")
        return found == 1

    def _put(self, key: str, parts: Sequence[Buffer]) -> None:
        size = 0
        room = memoryview(self._staging)
        for part in parts:
            if size + len(part) > len(room):
                raise RelayError(f"{key} has more than the {len(room)} bytes of registered memory")
            room[size : size + len(part)] = part
            size += len(part)
        self._check(self._store.put_from(key, self._address, size, self._config), f"putting {key}")
        if self._store.get_size(key) != size:
            raise RelayError(f"{key} is there already, with other content")

    def _get(self, key: str, nbytes_max: int) -> memoryview:
        got = self._store.get_into(key, self._address, nbytes_max)
        if got < 0:
            self._check(got, f"reading {key}")
        return memoryview(self._staging)[:got]

    def _parse(self, text: bytes, version: int) -> Release:
        try:
            release = Release.parse(text.decode())
        except (ValueError, UnicodeDecodeError):
            release = None
        if release is None or release.version != version:
            raise RelayError(f"what the store says of version {version} cannot be read")
        return release

    def _check(self, code: int, what: str) -> None:
        if code:
            raise RelayError(f"{what}: {_ERRORS.get(code, 'Mooncake says')} ({code})")
