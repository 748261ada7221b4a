"""Trainers and engines that are sharded in several ways, and versions that pass between them as parts only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_coserve.weights.codec import bits_of, part_of
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import ModelShape, Rank, Region, engine_regions, fsdp_region, plan
from vllm_coserve.weights.store import PieceEntry

MODEL = ModelShape(layers=3, heads=8, kv_heads=2, head_dim=4, vocabulary=100, tied=False)
HIDDEN, INNER = 32, 48
Trainer = int | Sequence[Rank]  # ranks of FSDP2, or of tensor and pipeline parallelism
_WAIT_BOUND_S = 30


def shapes_of(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Tensors of a Qwen3-like checkpoint, with biases."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, HIDDEN)}
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            out[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            out[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        out[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, queries)
        out[f"{prefix}.self_attn.o_proj.bias"] = (HIDDEN,)
        out[f"{prefix}.self_attn.q_norm.weight"] = (model.head_dim,)
        for name in ("gate", "up"):
            out[f"{prefix}.mlp.{name}_proj.weight"] = (INNER, HIDDEN)
        out[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        out[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
    out["model.norm.weight"] = (HIDDEN,)
    if not model.tied:
        out["lm_head.weight"] = (model.vocabulary, HIDDEN)
    return out


def _engine(tp: int, pp: int = 1) -> list[Rank]:
    return [Rank(tp, t, pp, p) for p in range(pp) for t in range(tp)]


LAYOUTS: dict[str, tuple[Trainer, list[Rank]]] = {
    "TP 1 to 2": (_engine(1), _engine(2)),
    "TP 2 to 1": (_engine(2), _engine(1)),
    "TP 2 to 4": (_engine(2), _engine(4)),
    "PP 2 to 1": (_engine(1, 2), _engine(1)),
    "TP 2 x PP 2 x DP 2 to TP 4": (_engine(2, 2) * 2, _engine(4)),
    "FSDP2 3 to TP 2 x PP 2": (3, _engine(2, 2)),
}


def held_by(trainer: Trainer, name: str, shape: tuple[int, ...]) -> list[list[Region]]:
    """What each trainer rank holds of a tensor."""
    if isinstance(trainer, int):
        return [fsdp_region(shape, trainer, i) for i in range(trainer)]
    return [engine_regions(MODEL, name, shape, rank) for rank in trainer]


def follow(trainer: Trainer, serving: Sequence[Rank], steps: int, every: int) -> None:
    """Publish versions from all trainer ranks; workers follow each `every`-th. Raises where a bit is wrong."""
    shapes = shapes_of(MODEL)
    needs = {n: [engine_regions(MODEL, n, s, rank) for rank in serving] for n, s in shapes.items()}
    plans = {n: plan(n, s, held_by(trainer, n, s), needs[n]) for n, s in shapes.items()}
    ranks = trainer if isinstance(trainer, int) else len(trainer)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}
    with Relay() as relay:
        all_parts: list[Any] = [None] * ranks
        put = threading.Barrier(ranks)

        def publisher_of(rank: int) -> Publisher:
            def gather(part: Any) -> Any:
                all_parts[rank] = part
                put.wait(_WAIT_BOUND_S)
                return list(all_parts) if rank == 0 else None

            def cut(name: str, shape: tuple[int, ...]) -> list[Region]:
                return [cell.region for cell in plans[name] if cell.pusher == rank]

            return Publisher(RelayClient(relay.url), 50, 4000, cut, gather=gather, lineage="sharded")

        def wants(index: int) -> Callable[[PieceEntry], bool]:
            return lambda piece: any(r.overlaps(piece.region) for r in needs[piece.name][index])

        publishers = [publisher_of(rank) for rank in range(ranks)]
        workers = [(RelayClient(relay.url), Replica(wants(i))) for i in range(len(serving))]
        for version in range(1, steps + 1):
            due = version % every == 0 or version == steps
            threads = [threading.Thread(target=p.publish, args=(version, weights.items())) for p in publishers]
            for client, replica in workers if due else ():  # which read what has come while the rest is on its way
                args = (client, version, lambda accepted: None, _WAIT_BOUND_S)
                threads.append(threading.Thread(target=replica.advance, args=args))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_WAIT_BOUND_S)
            publishers[0].retire(1)
            if due:
                for index, (_, replica) in enumerate(workers):
                    if replica.version != version:
                        raise AssertionError(f"worker {index} has version {replica.version} instead of {version}")
                    for name in shapes:
                        for region in needs[name][index]:
                            both = (part_of(t[name], region).contiguous() for t in (replica.tensors, weights))
                            if not torch.equal(*map(bits_of, both)):
                                raise AssertionError(f"{name}, {region} of version {version}")
            for tensor in weights.values():
                bits = bits_of(tensor)
                bits += (torch.rand(bits.shape, generator=generator) < 0.02).to(bits.dtype)
        for client, _ in workers:
            client.close()
