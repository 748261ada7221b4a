"""Which part of a tensor lies where, against what layers do with a checkpoint; and versions that only pass as parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sharded_world import LAYOUTS, MODEL, follow, shapes_of
from vllm_coserve.weights.publisher import part_of
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


def _region(name: str, rank: Rank, model: ModelShape = MODEL) -> list[Region]:
    return engine_regions(model, name, shapes_of(model)[name], rank)


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
    have = [[n for n in shapes_of(MODEL) if _region(n, r)] for r in stages]
    assert {n.split(".")[2] for n in have[0] if ".layers." in n} == {"0", "1"}
    assert {n.split(".")[2] for n in have[1] if ".layers." in n} == {"2"}
    assert "model.embed_tokens.weight" in have[0] and "lm_head.weight" in have[1]
    assert "model.embed_tokens.weight" not in have[1] and "model.norm.weight" in have[1]
    tied = ModelShape(3, 8, 2, 4, 100, True)
    assert _region("model.embed_tokens.weight", stages[1], tied)


def test_fused_tensors_of_a_checkpoint() -> None:
    qkv = engine_regions(MODEL, "model.layers.0.self_attn.qkv_proj.weight", (48, 32), Rank(2, 1))
    assert qkv == [Region(16, 32, 0, 32), Region(36, 40, 0, 32), Region(44, 48, 0, 32)]
    gate_up = engine_regions(MODEL, "model.layers.0.mlp.gate_up_proj.weight", (96, 32), Rank(2, 0))
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
        engine_regions(MODEL, name, shape, rank)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_versions_pass_between_any_two_layouts(layout: str) -> None:
    """Each trainer rank puts only its cells, each worker reads only what it needs, and has exactly that."""
    trainer, serving = LAYOUTS[layout]
    follow(trainer, serving, steps=30, every=7)
