"""A worker's copy of the published weights, brought from version to version by a relay's releases."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from vllm_coserve.weights.codec import ALIGNMENT, apply, bits_of, part_of
from vllm_coserve.weights.sharding import whole
from vllm_coserve.weights.store import CorruptError, GoneError, Manifest, PieceEntry, RelayError, RelayStore, Release

_POLL_S = 0.05
_EARLY_BYTES = 4 << 30  # read before a release is complete, and kept until it is

Accept = Callable[[Mapping[str, list[int]]], None]


class Replica:
    """Whole versions only: while it is brought to another, and after a failure in the middle, it is none.

    A worker that needs parts of tensors has whole ones all the same, of which only those parts are read and written:
    memory that nobody writes to is none.
    """

    def __init__(
        self, wants: Callable[[PieceEntry], bool] = lambda piece: True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wants`: whether some of a piece is needed."""
        self._wants, self._clock = wants, clock
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self._lineage = ""

    def advance(self, store: RelayStore, version: int, accept: Accept, wait_s: float = 0.0) -> list[Release]:
        """Bring it to a version, by changes where they lead there, else from a whole one; returns what was taken.

        Args:
            accept: gets names and shapes before anything is changed; raises to refuse them.
            wait_s: for a version that is not complete. Changes are read as they come to the relay meanwhile.

        Raises:
            CorruptError: what the relay has is not what was published.
            RelayError: it has no such version, or cannot be reached.
        """
        until_s = self._clock() + wait_s
        while not (ways := store.releases(version, begun=wait_s > 0)) and self._clock() < until_s:
            time.sleep(_POLL_S)
        # Versions of another publisher are other weights, whatever their numbers.
        ours = bool(ways) and store.arrived(ways[-1], 0, 0).lineage == self._lineage
        path = self._path(store, version, self.version if ours else None, ways)
        try:
            return [self._take(store, release, accept, until_s) for release in path]
        except (CorruptError, GoneError):
            if path[0].base is None:
                raise
        # The copy is damaged, or what leads to the version, or that is gone: start from a whole one.
        ways = store.releases(version)
        return [self._take(store, release, accept, until_s) for release in self._path(store, version, None, ways)]

    def drop(self) -> None:
        """Forget everything."""
        self.tensors, self.version = {}, None

    def _path(self, store: RelayStore, version: int, have: int | None, ways: Sequence[Release]) -> list[Release]:
        """Changes from the version that is there, else a whole one and changes from that.

        `ways` lead to the version, and may be incomplete; what leads to earlier ones may not.
        """
        path: list[Release] = []
        at, to_there = version, ways
        while at != have:
            to_there = [r for r in to_there if r.base is None or r.base < at]
            if have is not None:
                to_there.reverse()  # changes before whole ones
            if not to_there:
                break
            path.insert(0, to_there[0])
            if to_there[0].base is None:
                return path
            at = to_there[0].base
            to_there = store.releases(at)
        else:
            return path
        if have is not None:
            return self._path(store, version, None, ways)
        raise GoneError(f"the relay has no version {version}, or not what leads to it: 404")

    def _take(self, store: RelayStore, release: Release, accept: Accept, until_s: float) -> Release:
        early = self._await(store, release, until_s)
        manifest = store.manifest(release)
        accept({piece.name: list(piece.shape) for piece in manifest.pieces})
        _check(manifest, release)
        wanted = [piece for piece in manifest.pieces if piece not in early and self._wants(piece)]
        encoded: Iterable[tuple[PieceEntry, memoryview]] = _read(store, release, wanted)
        if release.base is None:
            self._lineage = manifest.lineage
            named = {piece.name for piece in wanted}
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in named}
        elif manifest.lineage != self._lineage:
            raise CorruptError(f"release {release} is of other weights")
        else:
            known = set(manifest.pieces)
            # Small, and all there before the first bit is changed.
            encoded = [*((piece, data) for piece, data in early.items() if piece in known), *encoded]
        self.version = None
        for piece, data in encoded:
            part = self._part(piece, release)
            run = part.contiguous()
            try:
                apply(bits_of(run), data)
            except CorruptError as exc:
                raise CorruptError(f"{piece.name} of release {release}: {exc}") from None
            if run.data_ptr() != part.data_ptr():
                part.copy_(run)
        self.version = release.version
        return release

    def _await(self, store: RelayStore, release: Release, until_s: float) -> dict[PieceEntry, memoryview]:
        """Until a release is complete; returns what has been read of its changes meanwhile."""
        early: dict[PieceEntry, memoryview] = {}
        count = nbytes = 0
        while not (arrived := store.arrived(release, count, max(0.0, until_s - self._clock()))).complete:
            if self._clock() > until_s:
                raise RelayError(f"release {release} was not completed in time")
            count = arrived.buckets
            if release.base is None or arrived.lineage != self._lineage or nbytes > _EARLY_BYTES:
                continue
            for piece, data in _read(store, release, filter(self._wants, arrived.pieces)):
                early[piece] = data
                nbytes += len(data)
        return early

    def _part(self, piece: PieceEntry, release: Release) -> torch.Tensor:
        """The region of a tensor that a piece is of."""
        dtype = getattr(torch, piece.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(piece.shape, default=1) < 0:
            raise CorruptError(f"the manifest's entry of {piece.name} makes no sense: {piece}")
        have = self.tensors.get(piece.name)
        if have is None or have.dtype != dtype or tuple(have.shape) != piece.shape:
            if release.base is not None:
                raise CorruptError(f"{piece.name} of release {release} was another tensor before")
            have = self.tensors[piece.name] = torch.zeros(piece.shape, dtype=dtype)
        return part_of(have, piece.region)


def _read(store: RelayStore, release: Release, pieces: Iterable[PieceEntry]) -> Iterator[tuple[PieceEntry, memoryview]]:
    """Encoded pieces, those that lie side by side in one read. Each has a checksum of its own."""
    in_order = sorted(pieces, key=lambda piece: (piece.bucket, piece.offset))
    for _, group in itertools.groupby(_runs(in_order), key=lambda item: item[0]):
        run = [piece for _, piece in group]
        start, end = run[0].offset, run[-1].offset + run[-1].nbytes
        data = memoryview(store.get_range(release, run[0].bucket, start, end))
        for piece in run:
            yield piece, data[piece.offset - start : piece.offset - start + piece.nbytes]


def _runs(pieces: Sequence[PieceEntry]) -> Iterator[tuple[int, PieceEntry]]:
    """(number of its run, piece): a run is what lies in one bucket with nothing else between."""
    number, bucket, end = 0, "", 0
    for piece in pieces:
        if piece.bucket != bucket or not 0 <= piece.offset - end < ALIGNMENT:
            number += 1
        bucket, end = piece.bucket, piece.offset + piece.nbytes
        yield number, piece


def _check(manifest: Manifest, release: Release) -> None:
    """It must be the release's, and have every element of every tensor: a part of a fused parameter is useless."""
    if manifest.release != str(release):
        raise CorruptError(f"the manifest of release {release} is that of {manifest.release}")
    nbytes = {bucket.name: bucket.nbytes for bucket in manifest.buckets}
    missing: dict[str, int] = {}
    for piece in manifest.pieces:
        r, everything = piece.region, whole(piece.shape)
        inside = 0 <= r.top <= r.bottom and 0 <= r.left <= r.right and everything.holds(r)
        if not inside or piece.offset < 0 or piece.offset + piece.nbytes > nbytes.get(piece.bucket, -1):
            raise CorruptError(f"the manifest's entry of {piece.name} makes no sense: {piece}")
        missing.setdefault(piece.name, everything.bottom * everything.right)
        missing[piece.name] -= (r.bottom - r.top) * (r.right - r.left)
    for name, count in missing.items():
        if count:
            raise CorruptError(f"{count} elements of {name} are missing in release {release}")
