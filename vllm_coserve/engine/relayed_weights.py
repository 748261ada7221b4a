"""Weights that a relay holds, as engines take them: a copy of the worker's own is brought to a version, then loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_coserve.engine.checkpoint import other_model
from vllm_coserve.weights.peers import open_reader
from vllm_coserve.weights.replica import Replica

# Dedicated engines have no configuration of this project's own. Only used where a job has engines forward weights.
_PEER_HOST_ENV = "VLLM_COSERVE_PEER_HOST"


@dataclass(frozen=True)
class RelayedWeights:
    """A version at a relay."""

    url: str
    key: str
    version: int

    def bring(self, replica: Replica, known: dict[str, list[int]], shard: str = "") -> None:
        """Bring a copy to this version.

        Where the relay offers it, it is read from workers that have it, and handed on to others afterwards: by threads
        with the scheduling of the one that calls this first, on 127.0.0.1 or the address in $VLLM_COSERVE_PEER_HOST.

        Args:
            known: names and shapes of the model's checkpoint.
            shard: the same for all workers that read the same parts of it.

        Raises:
            RelayError: it is not there, or damaged.
            ValueError: it is of another model; nothing of that may be loaded, for a fused parameter of which a part is
                missing would be silently wrong.
        """

        def accept(shapes: Mapping[str, list[int]]) -> None:
            if wrong := other_model(known, dict(shapes), f"version {self.version}"):
                raise ValueError(wrong)

        store = open_reader(self.url, self.key, shard, os.environ.get(_PEER_HOST_ENV, "127.0.0.1"))
        try:
            replica.advance(store, self.version, accept)
        finally:
            store.close()
