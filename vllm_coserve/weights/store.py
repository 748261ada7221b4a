"""What a relay does: it holds releases of weights as immutable buckets of bytes, described by a manifest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from vllm_coserve.weights.sharding import Region

Buffer = bytes | bytearray | memoryview

_CHECKSUM_CHARS = 32  # of a manifest
_RELEASE = re.compile(r"(\d{1,15})(?:-from-(\d{1,15}))?\Z", re.ASCII)


class RelayError(Exception):
    """The relay cannot be reached, or does not have what was asked for; the text says which."""


class CorruptError(RelayError):
    """What came is not what was published."""


class GoneError(RelayError):
    """The relay answers, and does not have it, or no longer."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version of the weights as it is handed out: whole, or as what changed since another version."""

    version: int
    base: int | None = None  # None: whole

    def __str__(self) -> str:
        return str(self.version) if self.base is None else f"{self.version}-from-{self.base}"

    @classmethod
    def parse(cls, text: str) -> Release:
        """Raises ValueError where it is none's name."""
        match = _RELEASE.match(text)
        if match is None:
            raise ValueError(f"{text!r} names no release")
        return cls(int(match[1]), None if match[2] is None else int(match[2]))


class PieceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region of a tensor of the checkpoint, encoded (see `weights.codec`) in `nbytes` of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    region: Region
    bucket: str = ""
    offset: int = 0
    nbytes: int = 0


class BucketEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes. What is in it has checksums of its own."""

    name: str
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole release. It is put last: a release with a manifest is complete."""

    release: str
    lineage: str  # of the publisher: versions of another one are not the same weights, whatever their number
    pieces: tuple[PieceEntry, ...]
    buckets: tuple[BucketEntry, ...]
    format: int = 2


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a bucket, for readers that do not wait for the manifest."""

    lineage: str
    pieces: tuple[PieceEntry, ...]


class Arrived(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a release has come."""

    lineage: str
    complete: bool  # the manifest is there
    buckets: int = 0  # that have come, if it is not complete
    pieces: tuple[PieceEntry, ...] = ()  # in those that the reader did not know of, if it is not complete


class RelayStore(Protocol):
    """A place for releases that a trainer fills and engines read. All methods raise RelayError, and are bounded."""

    def close(self) -> None:
        """Leave it."""
        ...

    def put_bucket(
        self, release: Release, name: str, parts: Sequence[Buffer], contents: Contents | None = None
    ) -> None:
        """Put a bucket, parts one after the other; again with the same content: nothing happens.

        `contents` is for those that read it before the release is complete.
        """
        ...

    def put_manifest(self, release: Release, manifest: Manifest) -> None:
        """Complete a release; its buckets must be there."""
        ...

    def releases(self, version: int, begun: bool = False) -> list[Release]:
        """Those that make a version, the whole one first, then changes; `begun`: also those that are not complete."""
        ...

    def arrived(self, release: Release, after: int, wait_s: float) -> Arrived:
        """What has come behind the first `after` buckets; waits that long for more while there is nothing."""
        ...

    def manifest(self, release: Release) -> Manifest:
        """That of a complete release."""
        ...

    def get_range(self, release: Release, name: str, start: int, end: int) -> Buffer:
        """Bytes [start, end) of a bucket."""
        ...

    def delete(self, release: Release) -> None:
        """Forget a release; an unknown one is no error."""
        ...

    def holds(self, releases: Sequence[Release]) -> bool:
        """Whether all of these are still there and complete: a store that was started anew has forgotten everything."""
        ...


def pack_manifest(manifest: Manifest) -> bytes:
    """A manifest as it lies in a store, behind a checksum: a bit of a place or name that flips would mix tensors up."""
    body = msgspec.json.encode(manifest)
    return _checksum(body) + body


def unpack_manifest(data: Buffer) -> Manifest:
    """Raises CorruptError where it is not what was packed."""
    body = bytes(data[_CHECKSUM_CHARS:])
    if _checksum(body) != data[:_CHECKSUM_CHARS]:
        raise CorruptError("a manifest is damaged")
    try:
        return msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, ValueError) as exc:
        raise CorruptError(f"this is no manifest: {exc}") from None


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_CHARS // 2).hexdigest().encode()
