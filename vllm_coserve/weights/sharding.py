"""Which part of a checkpoint's tensor lies where: from tensor and pipeline parallelism to ranges, pure.

A tensor is seen as rows (its first dimension) by columns (all others). Where engines split it follows from its name in
a Hugging Face checkpoint and the model's configuration, as vLLM's layers do it: outputs of a pair's first linear are
split by rows, inputs of the second by columns, attention by whole heads, with key and value heads repeated where there
are fewer of them than ranks, and the vocabulary by rows after padding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_VOCABULARY_PADDING = 64
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BY_ROWS = {"gate_proj", "up_proj"}
_BY_COLUMNS = {"o_proj", "down_proj"}
_WHOLE = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
_WHOLE |= {"q_norm", "k_norm", "norm", "gate"}


class UnmappedError(ValueError):
    """It is not known how engines split a tensor; the text names it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Rows [top, bottom) by columns [left, right) of a tensor."""

    top: int
    bottom: int
    left: int
    right: int

    def overlaps(self, other: Region) -> bool:
        """Whether they have elements in common."""
        rows = self.top < other.bottom and other.top < self.bottom
        return rows and self.left < other.right and other.left < self.right

    def holds(self, other: Region) -> bool:
        """Whether all of the other lies in it."""
        rows = self.top <= other.top and other.bottom <= self.bottom
        return rows and self.left <= other.left and other.right <= self.right


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's configuration decides how it is split."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the output layer is the embedding

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a config.json. Raises KeyError where it has not what is needed."""
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of an engine with tensor and pipeline parallelism."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """A region of a tensor, who puts it to a relay, and who takes it."""

    region: Region
    pusher: int
    pullers: tuple[int, ...]


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    rows = shape[0] if shape else 1
    return Region(0, rows, 0, math.prod(shape[1:]))


def engine_regions(model: ModelShape, name: str, shape: Sequence[int], rank: Rank) -> list[Region]:
    """What a worker of an engine needs of a tensor.

    Raises:
        UnmappedError: nobody knows, or it cannot be split so.
    """
    if not _on_stage(model, name, rank):
        return []
    everything = whole(shape)
    module, rows = _module(name), everything.bottom
    tp, at = rank.tp, rank.tp_rank
    if module in _WHOLE or (name.endswith(".bias") and module in _BY_COLUMNS):
        return [everything]
    if module in _BY_COLUMNS:
        left, right = _part(name, everything.right, tp, at)
        return [replace(everything, left=left, right=right)]
    if module in ("embed_tokens", "lm_head"):
        padded = -(-model.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        top, bottom = (min(rows, edge) for edge in _part(name, padded, tp, at))
        return [replace(everything, top=top, bottom=bottom)] if top < bottom else []
    spans = _spans(model, name, module, rows)
    if spans is None:
        raise UnmappedError(f"{name}: it is not known how engines split a tensor of this name")
    out = []
    for span in spans:
        top, bottom = _heads(name, span.count, tp, at) if span.repeated else _part(name, span.count, tp, at)
        out.append(replace(everything, top=span.start + top * span.unit, bottom=span.start + bottom * span.unit))
    return out


def fsdp_region(shape: Sequence[int], ranks: int, rank: int) -> list[Region]:
    """What a rank of PyTorch's FSDP2 holds of a tensor: a chunk of its rows, the last ones smaller or empty."""
    everything = whole(shape)
    chunk = -(-everything.bottom // ranks)
    top, bottom = min(everything.bottom, rank * chunk), min(everything.bottom, (rank + 1) * chunk)
    return [replace(everything, top=top, bottom=bottom)] if top < bottom else []


def plan(
    name: str, shape: Sequence[int], held: Sequence[Sequence[Region]], wanted: Sequence[Sequence[Region]]
) -> list[Cell]:
    """Cut a tensor so that each cell lies whole with whoever holds or wants some of it.

    Args:
        held: by trainer rank. Where several hold a cell, they push in turns.
        wanted: by engine worker.

    Raises:
        UnmappedError: somebody wants what nobody holds.
    """
    regions = [whole(shape), *(r for side in (held, wanted) for rank in side for r in rank)]
    rows = sorted({edge for r in regions for edge in (r.top, r.bottom)})
    columns = sorted({edge for r in regions for edge in (r.left, r.right)})
    cells: list[Cell] = []
    for top, bottom in itertools.pairwise(rows):
        for left, right in itertools.pairwise(columns):
            region = Region(top, bottom, left, right)
            pullers = tuple(i for i, rank in enumerate(wanted) if any(r.holds(region) for r in rank))
            if not pullers:
                continue
            holders = [i for i, rank in enumerate(held) if any(r.holds(region) for r in rank)]
            if not holders:
                raise UnmappedError(f"{name}: nobody holds rows {top}-{bottom}, columns {left}-{right}")
            cells.append(Cell(region, holders[len(cells) % len(holders)], pullers))
    return cells


def cut_for(model: ModelShape, tp: int) -> Callable[[str, tuple[int, ...]], list[Region]]:
    """For a trainer that has whole tensors: cuts them along the borders of engines with so many workers.

    One that nobody knows how to split stays whole.
    """

    def cut(name: str, shape: tuple[int, ...]) -> list[Region]:
        everything = [whole(shape)]
        try:
            wanted = [engine_regions(model, name, shape, Rank(tp, i)) for i in range(tp)]
        except UnmappedError:
            return everything
        return [cell.region for cell in plan(name, shape, [everything], wanted)]

    return cut


# ---- details


def _on_stage(model: ModelShape, name: str, rank: Rank) -> bool:
    """Whether a pipeline stage has a tensor, layers divided as vLLM divides them (`get_pp_indices`)."""
    sizes = [model.layers // rank.pp] * rank.pp
    for i in range(2, model.layers % rank.pp + 2):
        sizes[-i] += 1
    if found := _LAYER.search(name):
        first = sum(sizes[: rank.pp_rank])
        return first <= int(found[1]) < first + sizes[rank.pp_rank]
    last = rank.pp_rank == rank.pp - 1
    if _module(name) == "embed_tokens":
        return rank.pp_rank == 0 or (model.tied and last)
    return last


def _module(name: str) -> str:
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-1]


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows from `start` that are split by themselves: `count` units of `unit` rows."""

    start: int
    count: int
    unit: int = 1
    repeated: bool = False  # over ranks, where there are more of them than units


def _spans(model: ModelShape, name: str, module: str, rows: int) -> list[_Span] | None:
    dim, queries, keys = model.head_dim, model.heads * model.head_dim, model.kv_heads * model.head_dim
    query, key = _Span(0, model.heads, dim), _Span(0, model.kv_heads, dim, True)
    spans = {
        "q_proj": [query],
        "k_proj": [key],
        "v_proj": [key],
        "qkv_proj": [query, replace(key, start=queries), replace(key, start=queries + keys)],
        "gate_up_proj": [_Span(0, rows // 2), _Span(rows // 2, rows // 2)],
    } | {module: [_Span(0, rows)] for module in _BY_ROWS}
    found = spans.get(module)
    if found and (end := found[-1].start + found[-1].count * found[-1].unit) != rows:
        raise UnmappedError(f"{name} has {rows} rows, where the configuration makes {end}")
    return found


def _heads(name: str, heads: int, tp: int, rank: int) -> tuple[int, int]:
    """Heads of a rank; fewer heads than ranks are repeated."""
    if heads < tp:
        if tp % heads:
            raise UnmappedError(f"{name}: {heads} heads cannot be repeated over {tp} ranks")
        return rank * heads // tp, rank * heads // tp + 1
    return _part(name, heads, tp, rank)


def _part(name: str, size: int, tp: int, rank: int) -> tuple[int, int]:
    if size % tp:
        raise UnmappedError(f"{name}: {size} cannot be divided among {tp} ranks")
    return size // tp * rank, size // tp * (rank + 1)
