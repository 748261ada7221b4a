"""The shard map against the layers of the installed vLLM: what they take of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from vllm_coserve.weights.publisher import part_of
from vllm_coserve.weights.sharding import ModelShape, Rank, engine_regions

pytestmark = pytest.mark.contract

_MODEL = ModelShape(layers=2, heads=8, kv_heads=2, head_dim=4, vocabulary=100, tied=False)
_ATTENTION, _MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
_RANKS = [(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)]


@pytest.fixture(params=_RANKS, ids=lambda pair: f"rank {pair[1]} of {pair[0]}")
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    tp, at = request.param
    for module in (linear, vocab_parallel_embedding, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tp)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: at)
    with set_current_vllm_config(VllmConfig()):
        yield Rank(tp, at)


def _needed(name: str, tensor: torch.Tensor, rank: Rank) -> torch.Tensor:
    regions = engine_regions(_MODEL, name, tuple(tensor.shape), rank)
    columns = tensor.shape[1] if not regions else regions[0].right - regions[0].left
    return torch.cat([part_of(tensor, r) for r in regions] or [tensor.new_zeros(0, columns)])


def _tensor(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_attention(rank: Rank) -> None:
    prefix = f"{_ATTENTION}.qkv_proj"
    layer = linear.QKVParallelLinear(32, 4, 8, 2, bias=False, params_dtype=torch.float32, prefix=prefix)
    expected = []
    for shard, rows in (("q", 32), ("k", 8), ("v", 8)):
        tensor = _tensor(rows, 32)
        layer.weight.weight_loader(layer.weight, tensor, shard)
        expected.append(_needed(f"{_ATTENTION}.{shard}_proj.weight", tensor, rank))
    assert torch.equal(layer.weight.data, torch.cat(expected))
    out = linear.RowParallelLinear(32, 16, bias=False, params_dtype=torch.float32, prefix=f"{_ATTENTION}.o_proj")
    tensor = _tensor(16, 32)
    out.weight.weight_loader(out.weight, tensor)
    assert torch.equal(out.weight.data, _needed(f"{_ATTENTION}.o_proj.weight", tensor, rank))


def test_mlp(rank: Rank) -> None:
    layer = linear.MergedColumnParallelLinear(16, [24, 24], bias=False, params_dtype=torch.float32, prefix=_MLP)
    expected = []
    for number, name in enumerate(("gate", "up")):
        tensor = _tensor(24, 16) + 1000 * number
        layer.weight.weight_loader(layer.weight, tensor, number)
        expected.append(_needed(f"{_MLP}.{name}_proj.weight", tensor, rank))
    assert torch.equal(layer.weight.data, torch.cat(expected))


def test_vocabulary(rank: Rank) -> None:
    layer = vocab_parallel_embedding.VocabParallelEmbedding(100, 16, params_dtype=torch.float32)
    tensor = _tensor(100, 16)
    layer.weight.weight_loader(layer.weight, tensor)
    needed = _needed("model.embed_tokens.weight", tensor, rank)
    assert torch.equal(layer.weight.data[: len(needed)], needed)
    assert not layer.weight.data[len(needed) :].any()  # padding


def test_pipeline_stages() -> None:
    for layers in range(1, 30):
        model = ModelShape(layers, 8, 2, 4, 100, False)
        for stages in range(1, min(layers, 8) + 1):
            for stage in range(stages):
                start, end = get_pp_indices(layers, stage, stages)
                rank = Rank(pp=stages, pp_rank=stage)
                names = [f"model.layers.{i}.input_layernorm.weight" for i in range(layers)]
                assert [bool(engine_regions(model, n, (4,), rank)) for n in names] == [
                    start <= i < end for i in range(layers)
                ]
