"""Weights that a relay holds, as engines take them: read whole, checked, and only then used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_coserve.engine.checkpoint import other_model
from vllm_coserve.weights.relay import RelayClient
from vllm_coserve.weights.snapshot import pull


@dataclass(frozen=True)
class RelayedWeights:
    """A version at a relay."""

    url: str
    key: str
    version: int

    def read(self, known: dict[str, list[int]]) -> dict[str, Any]:
        """All tensors by name. `known`: names and shapes of the model's checkpoint.

        Raises:
            RelayError: it is not there, or damaged.
            ValueError: it is of another model; nothing of that may be loaded, for a fused parameter of which a part is
                missing would be silently wrong.
        """
        client = RelayClient(self.url, self.key)
        try:
            tensors = dict(pull(client, self.version))
        finally:
            client.close()
        if wrong := other_model(known, {n: list(t.shape) for n, t in tensors.items()}, f"version {self.version}"):
            raise ValueError(wrong)
        return tensors
