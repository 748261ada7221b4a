"""The store that an address names."""

from __future__ import annotations

from vllm_coserve.weights.mooncake import MooncakeStore
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.store import RelayStore


def open_store(url: str, key: str = "") -> RelayStore:
    """http://HOST:PORT is a relay with a key, mooncake://MASTER:PORT/PREFIX a Mooncake Store. Raises RelayError."""
    return MooncakeStore(url) if url.startswith("mooncake:") else RelayClient(url, key)
