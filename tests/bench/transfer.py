"""Updates from trainers over a relay to workers, real code over real sockets: parts `stages` and `links` of `weights`.

Each connection is paced by the kernel (SO_MAX_PACING_RATE) as a link of its own would be, also on loopback and where
`tc` has no queueing disciplines. Who trains, the relay and who serves share this machine's cores.
"""

from __future__ import annotations

import functools
import http.client
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from vllm_coserve.weights.codec import bits_of, encode, part_of
from vllm_coserve.weights.publisher import Cut, Encoder, Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import ModelShape, Rank, Region, engine_regions, fsdp_region, plan
from vllm_coserve.weights.store import Buffer, PieceEntry

LINKS_GBIT = (10.0, 1.0, 0.2)
DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.4)
STAGES = ("batch", "+ asynchronous", "+ shard-aware", "+ sparse")
_SO_MAX_PACING_RATE = 47  # of Linux; the socket module has no name for it
_SOCKET_BOUND_S = 60.0
_WAIT_S = 120.0
_BUCKET_BYTES = 8 << 20  # of a model that is so much smaller than real ones
_RANKS = 2  # of the trainer, and of the engine
_MODEL = ModelShape(layers=8, heads=16, kv_heads=8, head_dim=64, vocabulary=4096, tied=True)
_HIDDEN, _INNER = 1024, 2048

Weights = Mapping[str, torch.Tensor]


class PacedClient(RelayClient):
    """One end of a link of so many bytes per second: what it sends."""

    def __init__(self, url: str, bytes_per_s: float | None) -> None:
        super().__init__(url)
        self._bytes_per_s = bytes_per_s

    def _once(self, *args: Any) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_SOCKET_BOUND_S)
            self._connection.connect()
            pace(self._connection.sock, self._bytes_per_s)
        super()._once(*args)


def pace(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Have what a socket sends, or those that it accepts from now on, leave at a rate; None: as fast as it can."""
    if bytes_per_s is not None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(int(bytes_per_s), 2**32 - 2))


# ---- links of several rates, changes of several densities


def measure_links(rounds: int) -> dict[str, Any]:
    """Seconds of an update, from the trainer's tensors to the worker's, by link and share of elements that changed."""
    base = _model()
    out: dict[str, Any] = {"nbytes": _nbytes(base), "rows": []}
    for gbit in LINKS_GBIT:
        for density in DENSITIES:
            new, times = _trained(base, density), {"dense": [], "automatic": []}
            for i in range(rounds if gbit >= 1 else 1):
                ways: list[tuple[str, Encoder]] = [("dense", dense), ("automatic", encode)]
                for way, encoder in ways if i % 2 else ways[::-1]:
                    times[way].append(_update_s(base, new, gbit * 1e9 / 8, encoder, True, False))
            row = {"gbit_per_s": gbit, "density": density} | {w: statistics.median(t) for w, t in times.items()}
            out["rows"].append(row | {"of_dense": row["automatic"] / row["dense"]})
            print(out["rows"][-1], flush=True)
    return out


def dense(old: torch.Tensor | None, new: torch.Tensor) -> list[Buffer]:
    """All bits as they are."""
    return encode(None, new, compress=False)


# ---- ROSE's optimisations, one after the other (Figure 10a)


def measure_stages(rounds: int) -> dict[str, Any]:
    """Seconds of an update of which each stage has one more of ROSE's optimisations than the one before, by link.

    batch: one trainer puts all of the model; when it is there, each of the engine's workers reads all of it.
    asynchronous: the workers read buckets as they come. shard-aware: each trainer puts its own part, each worker reads
    what is its own. sparse: what changed, of 1 % of the elements. How a trainer without shard-awareness gets the parts
    of the others is left out.
    """
    base = _model()
    new = _trained(base, 0.01)
    out: dict[str, Any] = {"nbytes": _nbytes(base), "trainers": _RANKS, "workers": _RANKS, "rows": []}
    for gbit in LINKS_GBIT:
        times: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for _ in range(rounds if gbit >= 1 else 1):
            for i, stage in enumerate(STAGES):
                encoder = encode if i == 3 else dense
                times[stage].append(_update_s(base, new, gbit * 1e9 / 8, encoder, i > 0, i > 1, _RANKS))
        seconds = {stage: statistics.median(t) for stage, t in times.items()}
        out["rows"].append({"gbit_per_s": gbit, "seconds": seconds})
        print(out["rows"][-1], flush=True)
    return out


# ---- one update


def _update_s(
    base: Weights,
    new: Weights,
    bytes_per_s: float,
    encoder: Encoder,
    early: bool,
    sharded: bool,
    workers: int = 1,
) -> float:
    """Seconds from the first byte of a version to the last worker that has it."""
    needs = _needs() if sharded else {}
    trainers = _RANKS if sharded else 1
    with ExitStack() as stack:
        relay = stack.enter_context(Relay())
        put, parts = threading.Barrier(trainers), [None] * trainers
        rate: list[float | None] = [None]
        clients: list[PacedClient] = []

        def client() -> PacedClient:
            clients.append(stack.enter_context(closing(PacedClient(relay.url, rate[0]))))
            return clients[-1]

        publishers = [
            Publisher(
                client(),
                1 << 30,
                _BUCKET_BYTES,
                _cut(rank, needs),
                encoder,
                _gather(rank, parts, put),
                lineage="bench",
            )
            for rank in range(trainers)
        ]
        replicas = [Replica(_wants(rank, needs)) for rank in range(workers)]
        _all([functools.partial(p.publish, 1, base.items()) for p in publishers])
        for replica in replicas:
            replica.advance(client(), 1, _any)
        rate[0] = bytes_per_s
        pace(relay._server.socket, bytes_per_s)
        for used in clients[:trainers]:
            used.close()  # the next connection is a paced one
            used._bytes_per_s = bytes_per_s
        pushes = [functools.partial(p.publish, 2, new.items()) for p in publishers]
        pulls = [functools.partial(r.advance, client(), 2, _any, _WAIT_S) for r in replicas]
        begun_s = time.perf_counter()
        for jobs in [pushes + pulls] if early else [pushes, pulls]:
            _all(jobs)
        seconds = time.perf_counter() - begun_s
        for rank, replica in enumerate(replicas):
            _check(replica, new, rank, needs)
    return seconds


def _all(jobs: Sequence[Callable[[], object]]) -> None:
    """Do them at once. Raises what one of them raises."""
    wrong: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


def _gather(rank: int, parts: list[Any], put: threading.Barrier) -> Callable[[Any], Any]:
    def gather(part: Any) -> Any:
        parts[rank] = part
        put.wait(_WAIT_S)
        return list(parts) if rank == 0 else None

    return gather


def _needs() -> dict[str, list[list[Region]]]:
    """What each worker of the engine needs, by tensor."""
    ranks = [Rank(_RANKS, i) for i in range(_RANKS)]
    return {name: [engine_regions(_MODEL, name, shape, r) for r in ranks] for name, shape in _shapes().items()}


def _cut(rank: int, needs: Mapping[str, list[list[Region]]]) -> Cut:
    if not needs:
        return lambda name, shape: [Region(0, shape[0], 0, shape[1] if len(shape) > 1 else 1)]

    def cut(name: str, shape: tuple[int, ...]) -> list[Region]:
        held = [fsdp_region(shape, _RANKS, i) for i in range(_RANKS)]
        return [cell.region for cell in plan(name, shape, held, needs[name]) if cell.pusher == rank]

    return cut


def _wants(rank: int, needs: Mapping[str, list[list[Region]]]) -> Callable[[PieceEntry], bool]:
    if not needs:
        return lambda piece: True
    return lambda piece: any(r.overlaps(piece.region) for r in needs[piece.name][rank])


def _check(replica: Replica, new: Weights, rank: int, needs: Mapping[str, list[list[Region]]]) -> None:
    for name, tensor in new.items():
        everything = [Region(0, tensor.shape[0], 0, tensor.numel() // tensor.shape[0])]
        for region in needs[name][rank] if needs else everything:
            have, want = (bits_of(part_of(t, region).contiguous()) for t in (replica.tensors[name], tensor))
            if not torch.equal(have, want):
                raise RuntimeError(f"what arrived of {name} is not what was sent")


def _any(shapes: Mapping[str, list[int]]) -> None:
    """Accept all."""


# ---- a model


def _shapes() -> dict[str, tuple[int, ...]]:
    queries, keys = _MODEL.heads * _MODEL.head_dim, _MODEL.kv_heads * _MODEL.head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_MODEL.vocabulary, _HIDDEN)}
    for layer in range(_MODEL.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            out[f"{prefix}self_attn.{name}_proj.weight"] = (rows, _HIDDEN)
        out[f"{prefix}self_attn.o_proj.weight"] = (_HIDDEN, queries)
        out[f"{prefix}mlp.gate_proj.weight"] = out[f"{prefix}mlp.up_proj.weight"] = (_INNER, _HIDDEN)
        out[f"{prefix}mlp.down_proj.weight"] = (_HIDDEN, _INNER)
    return out


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in _shapes().items()}


def _trained(base: Weights, density: float) -> dict[str, torch.Tensor]:
    """Another version, of which a share of the elements are one step up or down."""
    generator = torch.Generator().manual_seed(1)
    out = {}
    for name, tensor in base.items():
        out[name] = tensor.clone()
        bits = bits_of(out[name])
        chosen = torch.rand(bits.shape, generator=generator) < density
        bits += chosen * (torch.randint(0, 2, bits.shape, generator=generator, dtype=bits.dtype) * 2 - 1)
    return out


def _nbytes(weights: Weights) -> int:
    return sum(t.nbytes for t in weights.values())


def rows_of(found: dict[str, Any]) -> Iterator[list[str]]:
    """Rows of a table of `measure_stages`."""
    for row in found["rows"]:
        seconds = row["seconds"]
        first = seconds[STAGES[0]]
        yield [f"{row['gbit_per_s']:g}", *(f"{s:.2f} ({first / s:.1f}x)" for s in seconds.values())]
