"""Bit-exact deltas of runs of bits: what changed from one version of a tensor to the next, in few bytes.

An encoded run is a header with a checksum, then streams of bytes, each as it is or compressed by zstd:

    same    nothing changed
    sparse  planes of the gaps between changed elements, planes of their steps
    mask    a bit an element, planes of the steps of those that changed
    dense   the new bits, as they are or as planes

A step is the difference of the bits modulo the width, a number of units in the last place, with its sign in the lowest
bit (zigzag). A plane is one byte of each number of a stream: high bytes are mostly zero and cost next to nothing, which
spares an escape code.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import zstandard
from blake3 import blake3

from vllm_coserve.kernels import compact, digest, scatter, scatter_masked
from vllm_coserve.weights import planes
from vllm_coserve.weights.sharding import Region
from vllm_coserve.weights.store import Buffer, CorruptError

ALIGNMENT = 16  # of an encoded run in memory, so that its bits can be used where they are

_MAGIC, _FORMAT = b"CoDe", 1
_LEVEL = 1  # 3 gains nothing on such streams
_SPARSE_BELOW, _MASK_BELOW = 0.15, 0.75  # densities; beyond them gaps cost more time, and steps more bytes
_WORTH = 0.97  # a stream is compressed where that makes it smaller than so much of itself
_CHECKSUM_BYTES = 16
# magic, format, kind, width, streams, those of gaps, elements, changed, digest of the new bits; the checksum follows
_HEADER = struct.Struct("<4sBBBBB7xQQQ8x")
_STREAM = struct.Struct("<QQ")  # bytes, bytes as stored
_local = threading.local()


class Kind(IntEnum):
    """How a run is encoded."""

    SAME = 0
    SPARSE = 1
    MASK = 2
    DENSE = 3


def encode(
    old: torch.Tensor | None, new: torch.Tensor, kind: Kind | None = None, compress: bool = True
) -> list[Buffer]:
    """Encode the change from `old` to `new`.

    Args:
        old: flat bits (see `vllm_coserve.kernels`) that the receiver has; None: it has nothing.
        new: bits of the same dtype and size, on the same device.
        kind: SPARSE, MASK or DENSE; None: chosen by the share of elements that changed.
        compress: False where the link is faster than zstd.

    Returns:
        the parts of what is to be sent. Some may be memory of `new`, which must stay as it is until then.
    """
    width, size = new.element_size(), new.numel()
    changed, gap_planes, streams = size, 0, []
    if old is not None and kind is not Kind.DENSE:
        positions, steps = (t.cpu().numpy() for t in compact(old, new))
        changed = positions.size
        kind = (kind or _choose(changed, size)) if changed else Kind.SAME
    else:
        kind = Kind.DENSE
    if kind is Kind.SPARSE:
        gaps = planes.of_positions(positions)
        gap_planes, streams = len(gaps), gaps + planes.of_steps(steps)
    elif kind is Kind.MASK:
        streams = [planes.to_mask(positions, size), *planes.of_steps(steps)]
    elif kind is Kind.DENSE:
        changed, bits = size, new.cpu().numpy()
        streams = planes.of_bits(bits) if compress else [bits.view(np.uint8)]
    header = _HEADER.pack(_MAGIC, _FORMAT, kind, width, len(streams), gap_planes, size, changed, digest(new))
    payload = [part for stream in streams for part in _store(stream, compress)]
    return [header, _checksum(header, payload[:1] if _is_plain(kind, streams, payload) else payload), *payload]


def apply(bits: torch.Tensor, encoded: Buffer) -> None:
    """Bring a run of bits to the version that `encoded` describes, in place.

    Raises:
        CorruptError: `encoded` is damaged, of another run, or not a change of these bits; they are as they were.
    """
    try:
        run = _parse(bits, memoryview(encoded))
        if run.kind is Kind.DENSE:
            new = run.dense(bits)
            if digest(new) != run.digest:
                raise CorruptError("the bits of a whole run are not those that were published")
            bits.copy_(new)
            return
        undo = run.change(bits)
    except (ValueError, struct.error, zstandard.ZstdError) as exc:
        raise CorruptError(f"an encoded run makes no sense: {exc}") from None
    if digest(bits) != run.digest:
        undo()
        raise CorruptError("the change is one of other bits than those that are here")


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat run of integers, without a copy."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(widths[tensor.element_size()])


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a contiguous tensor, as a view."""
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = tensor.numel() // rows if rows else 0
    return tensor.reshape(rows, columns)[region.top : region.bottom, region.left : region.right]


def _choose(changed: int, size: int) -> Kind:
    density = changed / size
    return Kind.SPARSE if density < _SPARSE_BELOW else Kind.MASK if density < _MASK_BELOW else Kind.DENSE


# ---- streams


def _store(stream: np.ndarray, compress: bool) -> list[Buffer]:
    raw = memoryview(stream)
    stored: Buffer = _zstd().compress(raw) if compress else raw
    stored = stored if len(stored) < _WORTH * len(raw) else raw
    return [_STREAM.pack(len(raw), len(stored)), stored]


def _is_plain(kind: Kind, streams: Sequence[np.ndarray], payload: Sequence[Buffer]) -> bool:
    """Whether it is whole bits as they are. The header's digest is of them: they need not be hashed twice."""
    return kind is Kind.DENSE and len(streams) == 1 and len(payload[1]) == streams[0].nbytes


def _zstd() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return _local.compressor


def _checksum(header: Buffer, parts: Sequence[Buffer]) -> bytes:
    total = blake3(header)
    for part in parts:
        total.update(part)
    return total.digest(length=_CHECKSUM_BYTES)


# ---- reading


@dataclass(frozen=True, slots=True)
class _Run:
    """An encoded run, checked as far as that goes without the bits."""

    kind: Kind
    streams: list[np.ndarray]
    gap_planes: int
    changed: int
    digest: int

    def dense(self, bits: torch.Tensor) -> torch.Tensor:
        width = bits.element_size()
        plain = len(self.streams) == 1
        whole = self.streams[0].view(f"i{width}") if plain else planes.to_bits(self.streams, width)
        if whole.nbytes != bits.nbytes:
            raise CorruptError("the streams of an encoded run do not fit")
        return _tensor(whole, bits)

    def change(self, bits: torch.Tensor) -> Callable[[], None]:
        """Make the change; returns what undoes it. Raises ValueError where it makes no sense; nothing was done then."""
        if self.kind is Kind.SAME:
            return lambda: None
        streams = self.streams
        if self.kind is Kind.MASK:
            where, streams, add = streams[0], streams[1:], scatter_masked
        else:
            (where, last), streams, add = (
                planes.to_positions(streams[: self.gap_planes]),
                streams[self.gap_planes :],
                scatter,
            )
            if last >= bits.numel():
                raise CorruptError("the gaps of an encoded run lead beyond its end")
        steps = planes.to_steps(streams, bits.element_size())
        if steps.size != self.changed:
            raise CorruptError("the streams of an encoded run do not fit")
        places, by = _tensor(where, bits), _tensor(steps, bits)
        add(bits, places, by)
        return lambda: add(bits, places, -by)


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(like.device)


def _parse(bits: torch.Tensor, encoded: memoryview) -> _Run:
    start = _HEADER.size + _CHECKSUM_BYTES
    header, checksum, payload = encoded[: _HEADER.size], encoded[_HEADER.size : start], encoded[start:]
    if len(encoded) < start:
        raise CorruptError(f"{len(encoded)} bytes are no encoded run")
    magic, version, kind, width, count, gap_planes, size, changed, expected = _HEADER.unpack(header)
    plain = kind == Kind.DENSE and count == 1 and payload[:8] == payload[8 : _STREAM.size]
    if _checksum(header, [payload[: _STREAM.size] if plain else payload]) != checksum:
        raise CorruptError("an encoded run is damaged")
    if magic != _MAGIC or version != _FORMAT or kind not in list(Kind):
        raise CorruptError(f"this is no encoded run of format {_FORMAT}")
    if width != bits.element_size() or size != bits.numel() or changed > size:
        here = f"{bits.numel()} of {bits.element_size()}"
        raise CorruptError(f"an encoded run of {size} elements of {width} bytes, where there are {here}")
    return _Run(Kind(kind), _unpack(payload, count, max(size * width, 1)), gap_planes, changed, expected)


def _unpack(payload: memoryview, count: int, nbytes_max: int) -> list[np.ndarray]:
    streams, at = [], 0
    for _ in range(count):
        nbytes, stored = _STREAM.unpack_from(payload, at) if at + _STREAM.size <= len(payload) else (0, len(payload))
        at += _STREAM.size
        if nbytes > nbytes_max or at + stored > len(payload):
            raise CorruptError("the streams of an encoded run do not fit")
        data = payload[at : at + stored]
        if stored != nbytes:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes)
        streams.append(np.frombuffer(data, np.uint8))
        at += stored
    return streams
