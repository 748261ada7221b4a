"""Weights that a relay holds, as engines take them: a copy of the worker's own is brought to a version, then loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_coserve.engine.checkpoint import other_model
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.stores import open_store


@dataclass(frozen=True)
class RelayedWeights:
    """A version at a relay."""

    url: str
    key: str
    version: int

    def bring(self, replica: Replica, known: dict[str, list[int]]) -> None:
        """Bring a copy to this version. `known`: names and shapes of the model's checkpoint.

        Raises:
            RelayError: it is not there, or damaged.
            ValueError: it is of another model; nothing of that may be loaded, for a fused parameter of which a part is
                missing would be silently wrong.
        """

        def accept(shapes: Mapping[str, list[int]]) -> None:
            if wrong := other_model(known, dict(shapes), f"version {self.version}"):
                raise ValueError(wrong)

        store = open_store(self.url, self.key)
        try:
            replica.advance(store, self.version, accept)
        finally:
            store.close()
