"""How large the page pool of a GPU can be: what two engines that share the device leave of it.

Before they start, from estimates (`engine_need`, `pool_bytes`); and once vLLM has profiled both, from what the device
really has left (`room_bytes`). Pure arithmetic, all facts are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_BYTES = 1 << 30  # of a process: the CUDA context, libraries' kernels and workspaces
GRAPHS_BYTES = 1 << 30  # of an engine's CUDA graphs, which are captured after the last look at what is free
_SAFETY = 1.25  # on what activations are thought to take
_ROW_TENSORS, _WIDE_TENSORS = 6, 3  # live at once in a layer: of the hidden size; of the intermediate size
_LOGIT_TENSORS = 3  # in float32, while sampling: logits, their copy for the processors, probabilities
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A model, and how its engine is to run it."""

    weight_bytes: int
    hidden_size: int
    intermediate_size: int  # elements that one token takes in the widest layer; of a mixture, in all its experts
    vocab_size: int
    dtype_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    graphs: bool  # whether CUDA graphs are captured


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Device memory of one engine without KV, in bytes."""

    weight_bytes: int
    activation_bytes: int
    fixed_bytes: int  # context and graphs

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.activation_bytes + self.fixed_bytes


def engine_need(facts: EngineFacts) -> EngineNeed:
    """What an engine takes beside its KV memory.

    Activations are those of vLLM's profile run: a step of `max_num_batched_tokens`, then a sample for `max_num_seqs`
    requests. A layer and the sampler are not live at once, so the larger of them counts, and a safety share.
    """
    row = _ROW_TENSORS * facts.hidden_size + _WIDE_TENSORS * facts.intermediate_size
    layer = facts.max_num_batched_tokens * row * facts.dtype_bytes
    requests = min(facts.max_num_seqs, facts.max_num_batched_tokens)
    sampler = requests * facts.vocab_size * (facts.dtype_bytes + _LOGIT_TENSORS * _FLOAT32_BYTES)
    activations = int(_SAFETY * max(layer, sampler))
    return EngineNeed(facts.weight_bytes, activations, CONTEXT_BYTES + (GRAPHS_BYTES if facts.graphs else 0))


def pool_bytes(device_bytes: int, utilization: float, needs: Sequence[EngineNeed]) -> int:
    """What is left for the pool of the share of the device that may be used; not above 0 when nothing is."""
    return int(device_bytes * utilization) - sum(need.total_bytes for need in needs)


def room_bytes(free_bytes: int, transient_bytes: Sequence[int]) -> int:
    """What the pool may take of a device on which both engines have loaded and profiled.

    Args:
        free_bytes: of the device now.
        transient_bytes: for each engine, what it will take again beyond what it holds now.
    """
    return max(0, free_bytes - sum(transient_bytes))
