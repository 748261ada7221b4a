"""The trainer's side: a version of the weights goes to a relay as what changed since the last one, now and then whole.

Encoding, sending and the making of the tensors overlap.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from msgspec import structs

from vllm_coserve.weights.codec import ALIGNMENT, bits_of, encode, part_of
from vllm_coserve.weights.sharding import Region, whole
from vllm_coserve.weights.store import (
    BucketEntry,
    Buffer,
    Contents,
    Manifest,
    PieceEntry,
    RelayError,
    RelayStore,
    Release,
)

BUCKET_BYTES = 64 << 20
_PIECE_BYTES = 32 << 20  # of bits: what is encoded at once
_ENCODERS, _ENCODED_AHEAD, _SENT_AHEAD = 2, 4, 2


_Work = tuple[PieceEntry, Callable[[], list[Buffer]]]  # a piece without its place, and what encodes it
Cut = Callable[[str, tuple[int, ...]], Sequence[Region]]
Encoder = Callable[[torch.Tensor | None, torch.Tensor], list[Buffer]]
Parts = list[tuple[list[PieceEntry], list[BucketEntry]]]
Gather = Callable[[tuple[list[PieceEntry], list[BucketEntry]]], "Parts | None"]


class Publisher:
    """Publishes the versions of one model, in ascending order. One thread uses an instance.

    Several trainer ranks publish together when each has an instance with the regions that are its own, the same lineage
    and a `gather` that brings all ranks' parts to one of them, which completes the release.
    """

    def __init__(
        self,
        store: RelayStore,
        whole_every: int = 8,
        bucket_bytes: int = BUCKET_BYTES,
        cut: Cut = lambda name, shape: [whole(shape)],
        encoder: Encoder = encode,
        gather: Gather = lambda part: [part],
        agree: Callable[[bool], bool] = lambda well: well,
        lineage: str = "",
    ) -> None:
        """Every `whole_every`-th version is put whole as well, for engines that have none or have missed some.

        Args:
            encoder: makes a run's change, or a whole run where there is no old one; several threads use it.
            cut: the regions of a tensor that this publisher puts, by the tensor's name and shape.
            gather: gets a rank's part of a release once it is put; returns all ranks' parts on one rank, else None.
            agree: gets whether something is so for a rank; waits for all ranks and returns whether it is for each.
            lineage: a name that no other publisher of any job has, of letters and digits; "": a random one.
        """
        self._store, self._whole_every, self._bucket_bytes = store, whole_every, bucket_bytes
        self._cut, self._encode, self._gather, self._agree = cut, encoder, gather, agree
        self._lineage = lineage or secrets.token_hex(8)
        self._tensors: dict[str, torch.Tensor] = {}  # as they were published last
        self._version: int | None = None  # None: nobody has what `_tensors` are
        self._since_whole = 0
        self._made: list[Release] = []  # that the relay has
        self._left: list[Release] = []  # of versions that failed, perhaps in parts

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Release]:
        """Put tensors of any dtype; returns the releases that this makes. They are on the CPU.

        Raises:
            RelayError: the relay did not take it: that is no version then, and the next one will be put whole.
            ValueError: they are not those of the version before, or not newer.
        """
        base, made = self._version, []
        if base is not None and version <= base:
            raise ValueError(f"version {version} after {base}")
        if not (self._agree(base is not None) and self._agree(self._leads_to_last())):
            base = None
        self._version = None
        self._clear()
        try:
            if base is None:
                self._tensors = {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors}
            else:
                made.append(Release(version, base))
                self._put(made[0], self._changed(tensors))
            self._since_whole += 1
            if base is None or self._since_whole >= self._whole_every:
                made.append(Release(version))
                self._put(made[-1], self._whole())
                self._since_whole = 0
        except BaseException:
            self._left += made
            self._clear()
            raise
        self._version = version
        self._made += made
        self._left = [release for release in self._left if release not in made]
        return made

    def retire(self, keep: int) -> None:
        """Have the relay forget what nobody needs who wants one of the newest `keep` versions."""
        oldest = sorted({r.version for r in self._made})[-keep:][:1]
        start = max((r.version for r in self._made if r.base is None and [r.version] <= oldest), default=0)
        for release in [r for r in self._made if r.version < start]:
            with contextlib.suppress(RelayError):  # the next call tries again
                self._store.delete(release)
                self._made.remove(release)

    def withdraw(self) -> None:
        """Have the relay forget all of them: the job is over. What it does not hear stays there."""
        self._left += self._made
        self._made, self._version = [], None
        self._clear()

    def _clear(self) -> None:
        """Nobody is told of what is left of a version that failed: have it forgotten, now or before the next one."""
        for release in tuple(self._left):
            with contextlib.suppress(RelayError):
                self._store.delete(release)
                self._left.remove(release)

    def _leads_to_last(self) -> bool:
        """Whether the relay still leads from nothing to the version before; one that was started anew does not."""
        start = max(i for i, release in enumerate(self._made) if release.base is None)
        try:
            return self._store.holds(self._made[start:])
        except RelayError:  # the put will tell
            return False

    # ---- pieces

    def _whole(self) -> Iterator[_Work]:
        for name, tensor in self._tensors.items():
            for entry in self._pieces(name, tensor):
                yield entry, partial(self._encode_whole, part_of(tensor, entry.region))

    def _changed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_Work]:
        missing = set(self._tensors)
        for name, tensor in tensors:
            old = self._tensors.get(name)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                raise ValueError(f"{name} was not among the tensors of the version before, or had another shape")
            missing.discard(name)
            now = tensor.detach().contiguous()
            for entry in self._pieces(name, old):
                yield entry, partial(self._advance, part_of(old, entry.region), part_of(now, entry.region))
        if missing:
            raise ValueError(f"{min(missing)} was among the tensors of the version before")

    def _pieces(self, name: str, tensor: torch.Tensor) -> Iterator[PieceEntry]:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        for region in self._cut(name, shape):
            row_bytes = max(1, tensor.element_size() * (region.right - region.left))
            step = max(1, _PIECE_BYTES // row_bytes)
            for top in range(region.top, region.bottom, step) or [region.top]:
                bottom = min(region.bottom, top + step)
                yield PieceEntry(name, dtype, shape, replace(region, top=top, bottom=bottom))

    def _put(self, release: Release, pieces: Iterator[_Work]) -> None:
        entries: list[PieceEntry] = []
        buckets: list[BucketEntry] = []
        bucket: list[Buffer] = []
        filled = described = 0
        # Names of this attempt alone: what an earlier one left, perhaps cut off in the middle, is never met.
        attempt = f"{self._lineage}-{secrets.token_hex(4)}"
        with _sending() as sender, ThreadPoolExecutor(_ENCODERS, "coserve-encode") as pool:
            sent: deque[Future[None]] = deque()

            def send() -> None:
                name = f"{attempt}-{len(buckets):05d}"
                buckets.append(BucketEntry(name, filled))
                contents = Contents(self._lineage, tuple(entries[described:]))
                sent.append(sender.submit(self._store.put_bucket, release, name, tuple(bucket), contents))
                bucket.clear()
                if len(sent) > _SENT_AHEAD:
                    sent.popleft().result()

            for entry, parts in _ahead(pool, pieces, _ENCODED_AHEAD):
                nbytes = sum(len(part) for part in parts)
                if bucket and filled + nbytes > self._bucket_bytes:
                    send()
                    filled, described = 0, len(entries)
                if gap := -filled % ALIGNMENT:
                    bucket.append(bytes(gap))
                place = {"bucket": f"{attempt}-{len(buckets):05d}", "offset": filled + gap, "nbytes": nbytes}
                entries.append(structs.replace(entry, **place))
                bucket += parts
                filled += gap + nbytes
            if filled:
                send()
            for future in sent:
                future.result()
        gathered = self._gather((entries, buckets))
        if gathered is not None:
            all_pieces = tuple(entry for part, _ in gathered for entry in part)
            manifest = Manifest(str(release), self._lineage, all_pieces, tuple(b for _, part in gathered for b in part))
            self._store.put_manifest(release, manifest)

    def _encode_whole(self, now: torch.Tensor) -> list[Buffer]:
        return self._encode(None, bits_of(now.contiguous()))

    def _advance(self, before: torch.Tensor, now: torch.Tensor) -> list[Buffer]:
        encoded = self._encode(bits_of(before.contiguous()), bits_of(now.contiguous()))
        before.copy_(now)
        return encoded


@contextlib.contextmanager
def _sending() -> Iterator[ThreadPoolExecutor]:
    """A thread that sends. What waits for it when something fails is not sent: each try may take its whole bound."""
    sender = ThreadPoolExecutor(1, "coserve-send")
    try:
        yield sender
    except BaseException:
        sender.shutdown(cancel_futures=True)
        raise
    sender.shutdown()


def _ahead(pool: ThreadPoolExecutor, pieces: Iterator[_Work], count: int) -> Iterator[tuple[PieceEntry, list[Buffer]]]:
    """Encoded pieces in their order, `count` of them before their turn."""
    waiting: deque[tuple[PieceEntry, Future[list[Buffer]]]] = deque()
    for entry, work in pieces:
        waiting.append((entry, pool.submit(work)))
        if len(waiting) > count:
            entry, future = waiting.popleft()
            yield entry, future.result()
    for entry, future in waiting:
        yield entry, future.result()
