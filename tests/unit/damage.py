"""What comes from a store is damaged on the way: a replica must notice, keep what it has, and catch up later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import TypeVar

import torch

from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.store import RelayError, RelayStore

Weights = dict[str, torch.Tensor]
Kept = Mapping[int | None, tuple[Replica, Weights]]  # replicas at, and the weights of, some versions
Data = TypeVar("Data", bytearray, memoryview)


class Damage:
    """Flips a bit of one byte of all that comes, or ends the answer there; bytes are numbered as they come."""

    def __init__(self) -> None:
        self.at, self.bit, self.cut, self.seen = -1, 0, False, 0

    def of(self, data: Data) -> Data:
        """An answer as it arrives."""
        at, self.seen = self.at - self.seen, self.seen + len(data)
        if not 0 <= at < len(data):
            return data
        if self.cut:
            return data[:at]
        data[at] ^= 1 << self.bit
        return data


def same(replica: Replica, weights: Weights) -> bool:
    """Whether a replica has exactly these bits."""
    return replica.tensors.keys() == weights.keys() and all(
        torch.equal(bits_of(replica.tensors[name]), bits_of(weights[name])) for name in weights
    )


def any_shapes(shapes: Mapping[str, list[int]]) -> None:
    """Accept all."""


def check_damaged_read(
    store: RelayStore,
    damage: Damage,
    kept: Kept,
    have: int | None,
    wanted: int,
    place: float,
    bit: int,
    cut: bool = False,
) -> None:
    """Damage a read of `wanted` at `place` (0 to 1) of its bytes: no wrong version comes of it, and the next is right.

    `damage` is what `store` passes its answers through.
    """
    damage.at, damage.seen = -1, 0
    copy.deepcopy(kept[have][0]).advance(store, wanted, any_shapes)
    damage.at, damage.bit, damage.cut, damage.seen = int(place * damage.seen), bit, cut, 0
    replica = copy.deepcopy(kept[have][0])
    with contextlib.suppress(RelayError):
        replica.advance(store, wanted, any_shapes)
        assert replica.version == wanted
    assert replica.version is None or same(replica, kept[replica.version][1])
    damage.at = -1
    replica.advance(store, wanted, any_shapes)
    assert replica.version == wanted and same(replica, kept[wanted][1])
