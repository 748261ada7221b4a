"""A worker's copy of the published weights, brought from version to version by a relay's releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from vllm_coserve.weights.codec import apply, bits_of
from vllm_coserve.weights.store import CorruptError, Manifest, PieceEntry, RelayError, RelayStore, Release, digest_of

Accept = Callable[[Mapping[str, list[int]]], None]


class Replica:
    """Whole versions only: while it is brought to another, and after a failure in the middle, it is none."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self._lineage = ""

    def advance(self, store: RelayStore, version: int, accept: Accept) -> list[Release]:
        """Bring it to a version, by changes where they lead there, else from a whole one; returns what was taken.

        Args:
            accept: gets names and shapes before anything is changed; raises to refuse them.

        Raises:
            CorruptError: what the relay has is not what was published.
            RelayError: it has no such version, or cannot be reached.
        """
        path = self._path(store, version, self.version)
        if self.version is not None and path and path[0].base is None:
            self.version = None
        try:
            return [self._take(store, release, accept) for release in path]
        except CorruptError:
            if path[0].base is None:
                raise
        # Changes of other weights than these, such as those of another run: start from whole ones.
        self.version = None
        return [self._take(store, release, accept) for release in self._path(store, version, None)]

    def drop(self) -> None:
        """Forget everything."""
        self.tensors, self.version = {}, None

    def _path(self, store: RelayStore, version: int, have: int | None) -> list[Release]:
        releases = store.releases()
        bases = {r.version: r.base for r in releases if r.base is not None}
        whole = {r.version for r in releases if r.base is None}
        path: list[Release] = []
        at = version
        while at != have:  # changes lead to older versions only
            if at in whole and (have is None or at not in bases):
                return [Release(at), *path]
            base = bases.get(at)
            if base is None or base >= at:
                break
            path.insert(0, Release(at, base))
            at = base
        else:
            return path
        if have is not None:
            return self._path(store, version, None)
        raise RelayError(f"the relay has no version {version}, or not what leads to it: 404")

    def _take(self, store: RelayStore, release: Release, accept: Accept) -> Release:
        manifest = store.manifest(release)
        accept({piece.name: list(piece.shape) for piece in manifest.pieces})
        if manifest.release != str(release):
            raise CorruptError(f"the manifest of release {release} is that of {manifest.release}")
        if release.base is None:
            self._lineage = manifest.lineage
            named = {piece.name for piece in manifest.pieces}
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in named}
            buckets: Mapping[str, bytes] = _Buckets(store, release, manifest)
        elif manifest.lineage != self._lineage:
            raise CorruptError(f"release {release} is of other weights")
        else:  # small, and all there before the first bit is changed
            buckets = dict(_Buckets(store, release, manifest))
        self.version = None
        held: tuple[str, bytes] = ("", b"")
        for piece in manifest.pieces:
            if piece.bucket != held[0]:
                held = piece.bucket, buckets[piece.bucket]
            data = memoryview(held[1])[piece.offset : piece.offset + piece.nbytes]
            try:
                apply(bits_of(self._rows(piece, release)), data)
            except CorruptError as exc:
                raise CorruptError(f"{piece.name} of release {release}: {exc}") from None
        _check_whole(manifest)
        self.version = release.version
        return release

    def _rows(self, piece: PieceEntry, release: Release) -> torch.Tensor:
        """The rows of a tensor that a piece is of."""
        dtype = getattr(torch, piece.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(piece.shape, default=1) < 0:
            raise CorruptError(f"the manifest's entry of {piece.name} makes no sense: {piece}")
        have = self.tensors.get(piece.name)
        if have is None or have.dtype != dtype or tuple(have.shape) != piece.shape:
            if release.base is not None:
                raise CorruptError(f"{piece.name} of release {release} was another tensor before")
            have = self.tensors[piece.name] = torch.zeros(piece.shape, dtype=dtype)
        rows = piece.shape[0] if piece.shape else 1
        if not 0 <= piece.start <= piece.stop <= rows:
            raise CorruptError(f"the manifest's entry of {piece.name} makes no sense: {piece}")
        return have.reshape(rows, -1)[piece.start : piece.stop] if have.numel() else have


class _Buckets(Mapping[str, bytes]):
    """A release's buckets, read and checked at each access."""

    def __init__(self, store: RelayStore, release: Release, manifest: Manifest) -> None:
        self._store, self._release = store, release
        self._entries = {bucket.name: bucket for bucket in manifest.buckets}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._entries:
            raise CorruptError(f"the manifest of release {self._release} names no bucket {name}")
        entry = self._entries[name]
        data = self._store.get_range(self._release, name, 0, entry.nbytes)
        if len(data) != entry.nbytes or digest_of(data) != entry.digest:
            raise CorruptError(f"bucket {name} of release {self._release} is damaged")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _check_whole(manifest: Manifest) -> None:
    """Every row of every tensor must have come."""
    rows: dict[str, int] = {}
    for piece in manifest.pieces:
        if piece.start != rows.get(piece.name, 0):
            raise CorruptError(f"rows of {piece.name} are missing in release {manifest.release}")
        rows[piece.name] = piece.stop
    for piece in manifest.pieces:
        if rows[piece.name] != (piece.shape[0] if piece.shape else 1):
            raise CorruptError(f"rows of {piece.name} are missing in release {manifest.release}")
