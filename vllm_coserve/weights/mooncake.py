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

from vllm_coserve.weights.store import (
    Arrived,
    Buffer,
    Contents,
    GoneError,
    Manifest,
    RelayError,
    Release,
    pack_manifest,
    unpack_manifest,
)

# Mooncake's own bounds are 30 s for each wait and 90 s until it says that there is no master. It reads them when its
# library is loaded.
_ENVIRONMENT = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # of a put to an owner that does not answer
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # of a get
    "MC_RPC_TIMEOUT_MS": "5000",  # of a master that does not
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_NOTE_BYTES = 4096
_GONE = -704
_ERRORS = {
    -200: "the owners' segments are full: retire old versions or start more owners",
    -600: "bad parameters",
    -703: "the object is not complete",
    _GONE: "no such object: 404",
    -800: "its owner does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
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
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
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
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, staging_bytes, "tcp", "", master):
            raise RelayError(f"the master at {master} does not answer")
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
        if missing := self._missing(release, manifest):
            raise RelayError(f"bucket {missing} of release {release} is not there, or is another one")
        self._put(self._key(release, "manifest"), [pack_manifest(manifest)])
        if self.manifest(release) != manifest:  # a put on a key that exists does nothing, and says that all is well
            raise RelayError(f"release {release} is there with another manifest")
        self._put(self._note(release), [str(release).encode()])

    def releases(self, version: int, begun: bool = False) -> list[Release]:
        """See `RelayStore`; complete ones only."""
        found = []
        for kind in ("whole", "changes"):
            key = self._note_key(version, kind)
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
            raise GoneError(f"there is no release {release}: 404")
        return unpack_manifest(self._get(key, len(self._staging)))

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
                self._check(got if got < 0 else _GONE, f"reading {key}")
            out[at - start : at - start + count] = memoryview(self._staging)[:count]
        return out

    def delete(self, release: Release) -> None:
        """See `RelayStore`."""
        removed = self._store.remove(self._note(release), True)
        if removed != _GONE:
            self._check(removed, f"removing {release}")
        removed = self._store.remove_by_regex(f"^{self._prefix.replace('.', '[.]')}/{release}/", True)
        if removed < 0:  # else so many
            self._check(removed, f"removing {release}")

    def holds(self, releases: Sequence[Release]) -> bool:
        """See `RelayStore`. An owner that ends takes some buckets with it and leaves others."""
        for release in releases:
            if not self._exists(self._note(release)) or not self._exists(self._key(release, "manifest")):
                return False
            if self._missing(release, self.manifest(release)):
                return False
        return True

    # ---- details

    def _key(self, release: Release, name: str) -> str:
        return f"{self._prefix}/{release}/{name}"

    def _note(self, release: Release) -> str:
        return self._note_key(release.version, "whole" if release.base is None else "changes")

    def _note_key(self, version: int, kind: str) -> str:
        return f"{self._prefix}/notes/{version}/{kind}"  # not among the keys of a release, which are deleted together

    def _missing(self, release: Release, manifest: Manifest) -> str | None:
        """A bucket that is not there as the manifest says."""
        sizes = ((b.name, b.nbytes, self._store.get_size(self._key(release, b.name))) for b in manifest.buckets)
        return next((name for name, nbytes, size in sizes if size != nbytes), None)

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
            wrong = GoneError if code == _GONE else RelayError
            raise wrong(f"{what}: {_ERRORS.get(code, 'Mooncake says')} ({code})")
