"""A whole version of a model's weights, put to a relay and read from it, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from vllm_coserve.weights.store import DIGEST, BucketEntry, CorruptError, Manifest, RelayStore, TensorEntry

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16


def publish(
    store: RelayStore, version: int, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Manifest:
    """Put tensors (on the CPU, of any dtype) as `version`; buckets go as they fill, the manifest goes last.

    Raises:
        RelayError: the relay did not take it. What was put already is no version.
    """
    entries: list[TensorEntry] = []
    buckets: list[BucketEntry] = []
    bucket = bytearray()

    def end() -> None:
        data = bytes(bucket)
        buckets.append(BucketEntry(f"{len(buckets):05d}", len(data), hashlib.new(DIGEST, data).hexdigest()))
        store.put_bucket(version, buckets[-1].name, data)
        bucket.clear()

    for name, tensor in tensors:
        data = _bytes_of(tensor)
        if bucket and len(bucket) + len(data) > bucket_bytes:
            end()
        bucket += b"\0" * (-len(bucket) % _ALIGNMENT)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), f"{len(buckets):05d}", len(bucket), len(data)))
        bucket += data
    if bucket or not buckets:
        end()
    manifest = Manifest(version, tuple(entries), tuple(buckets))
    store.put_manifest(manifest)
    return manifest


def pull(store: RelayStore, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, a bucket at a time, each only once its whole bucket was checked.

    Raises:
        CorruptError: bytes or manifest are not what was published.
        RelayError: the relay cannot be reached, or has no such version.
    """
    manifest = store.manifest(version)
    of_bucket: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        of_bucket.setdefault(entry.bucket, []).append(entry)
    for bucket in manifest.buckets:
        data = store.get_range(version, bucket.name, 0, bucket.nbytes)
        if len(data) != bucket.nbytes or hashlib.new(DIGEST, data).hexdigest() != bucket.digest:
            raise CorruptError(f"bucket {bucket.name} of version {version} is damaged")
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for entry in of_bucket.pop(bucket.name, ()):
            yield entry.name, _tensor_of(entry, whole)
    if of_bucket:
        raise CorruptError(f"the manifest of version {version} names no bucket {sorted(of_bucket)[0]}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _tensor_of(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    count = 1
    for size in entry.shape:
        count *= size
    fits = isinstance(dtype, torch.dtype) and entry.nbytes == count * dtype.itemsize
    if not fits or entry.offset < 0 or entry.offset + entry.nbytes > bucket.numel() or entry.offset % _ALIGNMENT:
        raise CorruptError(f"the manifest's entry of {entry.name} makes no sense: {entry}")
    return bucket[entry.offset : entry.offset + entry.nbytes].view(dtype).reshape(entry.shape)
