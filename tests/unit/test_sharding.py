"""Which part of a tensor lies where, against what layers do with a checkpoint; and versions that only pass as parts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.publisher import Publisher, part_of
from vllm_coserve.weights.relay import Relay, RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import (
    ModelShape,
    Rank,
    Region,
    UnmappedError,
    engine_regions,
    fsdp_region,
    plan,
    whole,
)
from vllm_coserve.weights.store import PieceEntry

_MODEL = ModelShape(layers=3, heads=8, kv_heads=2, head_dim=4, vocabulary=100, tied=False)
_HIDDEN, _INNER = 32, 48


def _shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Tensors of a Qwen3-like checkpoint, with biases."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, _HIDDEN)}
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            out[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, _HIDDEN)
            out[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        out[f"{prefix}.self_attn.o_proj.weight"] = (_HIDDEN, queries)
        out[f"{prefix}.self_attn.o_proj.bias"] = (_HIDDEN,)
        out[f"{prefix}.self_attn.q_norm.weight"] = (model.head_dim,)
        for name in ("gate", "up"):
            out[f"{prefix}.mlp.{name}_proj.weight"] = (_INNER, _HIDDEN)
        out[f"{prefix}.mlp.down_proj.weight"] = (_HIDDEN, _INNER)
        out[f"{prefix}.input_layernorm.weight"] = (_HIDDEN,)
    out["model.norm.weight"] = (_HIDDEN,)
    if not model.tied:
        out["lm_head.weight"] = (model.vocabulary, _HIDDEN)
    return out


def _region(name: str, rank: Rank, model: ModelShape = _MODEL) -> list[Region]:
    return engine_regions(model, name, _shapes(model)[name], rank)


def test_what_a_worker_needs() -> None:
    layer, two = "model.layers.0", [Rank(2, 0), Rank(2, 1)]
    assert [_region(f"{layer}.self_attn.q_proj.weight", r) for r in two] == [
        [Region(0, 16, 0, 32)],
        [Region(16, 32, 0, 32)],
    ]
    assert [_region(f"{layer}.self_attn.k_proj.weight", Rank(4, i)) for i in range(4)] == [
        [Region(4 * (i // 2), 4 * (i // 2) + 4, 0, 32)] for i in range(4)
    ]
    assert _region(f"{layer}.self_attn.k_proj.bias", two[1]) == [Region(4, 8, 0, 1)]
    assert _region(f"{layer}.self_attn.o_proj.weight", two[1]) == [Region(0, 32, 16, 32)]
    assert _region(f"{layer}.self_attn.o_proj.bias", two[1]) == [Region(0, 32, 0, 1)]
    assert _region(f"{layer}.mlp.down_proj.weight", two[0]) == [Region(0, 32, 0, 24)]
    assert _region(f"{layer}.input_layernorm.weight", two[0]) == [Region(0, 32, 0, 1)]
    # 100 rows are padded to 128
    assert [_region("lm_head.weight", r) for r in two] == [[Region(0, 64, 0, 32)], [Region(64, 100, 0, 32)]]
    assert _region("lm_head.weight", Rank(4, 3)) == [Region(96, 100, 0, 32)]
    assert _region("lm_head.weight", Rank(8, 7)) == []


def test_pipeline_stages() -> None:
    stages = [Rank(pp=2, pp_rank=i) for i in range(2)]
    have = [[n for n in _shapes(_MODEL) if _region(n, r)] for r in stages]
    assert {n.split(".")[2] for n in have[0] if ".layers." in n} == {"0", "1"}
    assert {n.split(".")[2] for n in have[1] if ".layers." in n} == {"2"}
    assert "model.embed_tokens.weight" in have[0] and "lm_head.weight" in have[1]
    assert "model.embed_tokens.weight" not in have[1] and "model.norm.weight" in have[1]
    tied = ModelShape(3, 8, 2, 4, 100, True)
    assert _region("model.embed_tokens.weight", stages[1], tied)


def test_fused_tensors_of_a_checkpoint() -> None:
    qkv = engine_regions(_MODEL, "model.layers.0.self_attn.qkv_proj.weight", (48, 32), Rank(2, 1))
    assert qkv == [Region(16, 32, 0, 32), Region(36, 40, 0, 32), Region(44, 48, 0, 32)]
    gate_up = engine_regions(_MODEL, "model.layers.0.mlp.gate_up_proj.weight", (96, 32), Rank(2, 0))
    assert gate_up == [Region(0, 24, 0, 32), Region(48, 72, 0, 32)]


@pytest.mark.parametrize(
    ("name", "shape", "rank"),
    [
        ("model.layers.0.mlp.strange.weight", (4, 4), Rank()),
        ("model.layers.0.self_attn.q_proj.weight", (33, 32), Rank()),
        ("model.layers.0.self_attn.q_proj.weight", (32, 32), Rank(16, 0)),
        ("model.layers.0.self_attn.k_proj.weight", (8, 32), Rank(3, 0)),
        ("model.layers.0.mlp.up_proj.weight", (47, 32), Rank(2, 0)),
        ("model.layers.0.mlp.down_proj.weight", (32, 47), Rank(2, 0)),
    ],
)
def test_what_cannot_be_mapped_is_named(name: str, shape: tuple[int, ...], rank: Rank) -> None:
    with pytest.raises(UnmappedError, match=name):
        engine_regions(_MODEL, name, shape, rank)


@given(st.integers(1, 40), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_a_plan_covers_what_is_wanted_once(rows: int, columns: int, data: st.DataObject) -> None:
    shape, ranks = (rows, columns), data.draw(st.integers(1, 4))
    held = [fsdp_region(shape, ranks, i) for i in range(ranks)] * data.draw(st.integers(1, 2))
    wanted = []
    for _ in range(data.draw(st.integers(1, 4))):
        top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
        wanted.append([Region(top, bottom, left, right)])
    cells = plan("x", shape, held, wanted)
    for index, (region,) in enumerate(wanted):
        times = torch.zeros(shape, dtype=torch.int32)
        for cell in cells:
            if index in cell.pullers:
                part_of(times, cell.region).add_(1)
        assert part_of(times, region).eq(1).all() and int(times.sum()) == part_of(times, region).numel()
    for cell in cells:
        assert any(r.holds(cell.region) for r in held[cell.pusher])


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(UnmappedError, match="x: nobody holds rows 2-4"):
        plan("x", (4, 2), [[Region(0, 2, 0, 2)]], [[whole((4, 2))]])


# ---- versions that only pass as parts


def _engine(tp: int, pp: int = 1) -> list[Rank]:
    return [Rank(tp, t, pp, p) for p in range(pp) for t in range(tp)]


def _held(trainer: Any, name: str, shape: tuple[int, ...]) -> list[list[Region]]:
    if isinstance(trainer, int):
        return [fsdp_region(shape, trainer, i) for i in range(trainer)]
    return [engine_regions(_MODEL, name, shape, rank) for rank in trainer]


@pytest.mark.parametrize(
    ("trainer", "serving"),
    [
        (_engine(1), _engine(2)),
        (_engine(2), _engine(1)),
        (_engine(2), _engine(4)),
        (_engine(1, 2), _engine(1)),
        (_engine(2, 2) * 2, _engine(4)),  # data parallelism: two copies of everything
        (3, _engine(2, 2)),  # FSDP2
    ],
    ids=["TP 1 to 2", "TP 2 to 1", "TP 2 to 4", "PP 2 to 1", "TP 2 x PP 2 x DP 2 to TP 4", "FSDP2 3 to TP 2 x PP 2"],
)
def test_forty_steps_between_any_two_layouts(trainer: Any, serving: list[Rank]) -> None:
    """Each trainer rank puts only its cells, each worker reads only what it needs, and has exactly that."""
    shapes = _shapes(_MODEL)
    needs = {n: [engine_regions(_MODEL, n, s, rank) for rank in serving] for n, s in shapes.items()}
    plans = {n: plan(n, s, _held(trainer, n, s), needs[n]) for n, s in shapes.items()}
    ranks = trainer if isinstance(trainer, int) else len(trainer)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}
    with Relay() as relay:
        parts: list[Any] = [None] * ranks
        put = threading.Barrier(ranks)

        def trainer_rank(rank: int) -> tuple[RelayClient, Publisher]:
            client = RelayClient(relay.url)

            def gather(part: Any) -> Any:
                parts[rank] = part
                put.wait(30)
                return list(parts) if rank == 0 else None

            def cut(name: str, shape: tuple[int, ...]) -> list[Region]:
                return [cell.region for cell in plans[name] if cell.pusher == rank]

            return client, Publisher(client, 50, 4000, cut, rank, gather)

        def wants(index: int):
            def wanted(piece: PieceEntry) -> bool:
                return any(r.overlaps(piece.region) for r in needs[piece.name][index])

            return wanted

        publishers = [trainer_rank(rank) for rank in range(ranks)]
        replicas = [(RelayClient(relay.url), Replica(wants(i))) for i in range(len(serving))]
        for version in range(1, 41):
            threads = [
                threading.Thread(target=publisher.publish, args=(version, weights.items()))
                for _, publisher in publishers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            publishers[0][1].retire(1)
            if version % 7 == 0 or version == 40:
                for index, (client, replica) in enumerate(replicas):
                    replica.advance(client, version, lambda shapes: None)
                    for name, regions in ((n, needs[n][index]) for n in shapes):
                        for region in regions:
                            both = (part_of(t[name], region).contiguous() for t in (replica.tensors, weights))
                            assert torch.equal(*map(bits_of, both)), (name, region)
            for tensor in weights.values():
                bits = bits_of(tensor)
                bits += (torch.rand(bits.shape, generator=generator) < 0.02).to(bits.dtype)
        for client, _ in (*publishers, *replicas):
            client.close()
