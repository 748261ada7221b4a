"""What workers and the relay tell each other about who reads from whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from vllm_coserve.weights.store import Buffer

RELAY = ""  # the relay itself, where a source is named

DIGEST_BYTES = 16
_MEBI = 1 << 20

Name = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]{1,64}$")]
ReleaseName = Annotated[str, Meta(max_length=40, pattern=r"^[0-9]{1,15}(-from-[0-9]{1,15})?$")]
Address = Annotated[str, Meta(max_length=200, pattern=r"^(http://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5})?$")]
Size = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]

Outcome = Literal["ok", "dead", "slow", "lacks", "corrupt"]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """How a relay has its workers forward what they read.

    `memory_bytes`: what a worker keeps for others, the newest chunks. Smaller chunks cost time in Python, larger ones
    a worker that reads parts of tensors has to read more of beside these parts.
    """

    uplink_bytes_per_s: float
    chunk_bytes: int = 256 << 10
    memory_bytes: int = 2048 * _MEBI

    def __post_init__(self) -> None:
        """Raises ValueError where a number makes no sense."""
        if not (0 < self.uplink_bytes_per_s < float("inf") and self.chunk_bytes > 0 and self.memory_bytes > 0):
            raise ValueError(f"want positive numbers: {self}")


class Heard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker saw of a source since its last report; `busy_s`: without the time in which the source waited."""

    source: Address
    outcome: Outcome = "ok"
    nbytes: Size = 0
    busy_s: Seconds = 0.0


class PeerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker reads a release. The first one asks for sources, later ones are heartbeats."""

    worker: Name
    release: ReleaseName
    address: Address = ""  # where it forwards, if it does
    shard: Annotated[str, Meta(max_length=64)] = ""  # workers with the same one read the same parts
    have_bytes: Size = 0
    total_bytes: Size = 0
    done: bool = False  # it reads no more, and forwards on
    heard: Annotated[tuple[Heard, ...], Meta(max_length=64)] = ()


class PeerAdvice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to read, in this order, and from which rate on a peer is worth less than the relay."""

    sources: tuple[Address, ...]
    floor_bytes_per_s: float = 0.0
    report_s: float = 1.0


class DigestQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which buckets a worker wants to check."""

    release: ReleaseName
    buckets: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]


class BucketDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket cut into chunks: a digest of each, one after the other."""

    nbytes: Size
    digests: bytes


class DigestAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those buckets that are there. What is not there is left out."""

    chunk_bytes: Annotated[int, Meta(gt=0, le=1 << 30)]
    memory_bytes: Size
    buckets: dict[str, BucketDigests]


class Grid:
    """A bucket's chunks, and what each must hash to. `tag` stands for all of its content."""

    def __init__(self, release: str, name: str, chunk_bytes: int, bucket: BucketDigests) -> None:
        """Raises ValueError where there are not as many digests as chunks."""
        self.release, self.name, self.chunk_bytes, self.nbytes = release, name, chunk_bytes, bucket.nbytes
        self.count = -(-bucket.nbytes // chunk_bytes)
        if len(bucket.digests) != DIGEST_BYTES * self.count:
            raise ValueError(f"{len(bucket.digests)} bytes are no digests of {self.count} chunks")
        self._digests = bucket.digests
        self.tag = digest(b"%d %d " % (chunk_bytes, bucket.nbytes) + bucket.digests).hex()

    def start(self, index: int) -> int:
        """First byte of a chunk; of the one behind the last: the end."""
        return min(index * self.chunk_bytes, self.nbytes)

    def holds(self, index: int, data: Buffer) -> bool:
        """Whether this is that chunk."""
        right = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return len(data) == self.start(index + 1) - self.start(index) and digest(data) == right


def digest(data: Buffer) -> bytes:
    """Of a chunk."""
    return blake3(data).digest(length=DIGEST_BYTES)


def digests(data: Buffer, chunk_bytes: int) -> BucketDigests:
    """Of all chunks of a bucket."""
    view = memoryview(data)
    parts = [digest(view[at : at + chunk_bytes]) for at in range(0, len(view), chunk_bytes)]
    return BucketDigests(len(view), b"".join(parts))
