"""What a relay does: it holds versions of weights as immutable buckets of bytes, described by a manifest."""

from __future__ import annotations

from typing import Protocol

import msgspec

DIGEST = "sha256"


class RelayError(Exception):
    """The relay cannot be reached, or does not have what was asked for; the text says which."""


class CorruptError(RelayError):
    """What came is not what was published."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies: `nbytes` from `offset` of a bucket, in C order; names and shapes as in the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: str
    offset: int
    nbytes: int


class BucketEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes and its SHA-256 in hex."""

    name: str
    nbytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole version. It is put last: a version with a manifest is complete."""

    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    format: int = 1


class RelayStore(Protocol):
    """A place for versions that a trainer fills and engines read. All methods raise RelayError, and are bounded."""

    def put_bucket(self, version: int, name: str, data: bytes | memoryview) -> None:
        """Put a bucket; again with the same content: nothing happens."""
        ...

    def put_manifest(self, manifest: Manifest) -> None:
        """Complete a version; its buckets must be there."""
        ...

    def versions(self) -> list[int]:
        """Complete versions, the oldest first."""
        ...

    def manifest(self, version: int) -> Manifest:
        """That of a complete version."""
        ...

    def get_range(self, version: int, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a bucket."""
        ...

    def delete(self, version: int) -> None:
        """Forget a version; an unknown one is no error."""
        ...
