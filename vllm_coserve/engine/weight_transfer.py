"""vLLM weight-transfer engine "coserve": a dedicated rollout engine takes a relay's weights by vLLM's own RL routes.

Start the engine with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "coserve"}'`.

`POST /collective_rpc` with `coserve_pull` begins to read a version while the engine generates, `coserve_pulled` says
whether it is there: an update (`/pause` ... `/update_weights` ... `/resume`) only uses it then.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.worker.gpu_worker import Worker

from vllm_coserve.api.messages import PULLED, UNDER_WAY
from vllm_coserve.engine.checkpoint import known_shapes, repack_embeddings
from vllm_coserve.engine.relayed_weights import NEWER, Puller, RelayedWeights
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import ModelShape, Rank, Region, UnmappedError, engine_regions, whole
from vllm_coserve.weights.store import PieceEntry, RelayError

logger = logging.getLogger("vllm.coserve")

_PULLERS: list[Puller] = []  # at most one: a process has one engine
_PULLS: dict[RelayedWeights, int] = {}  # numbers of pulls; the last one only
_LOCK_BOUND_S = 30.0


@dataclass
class RelayInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):
    """Which version of which relay; see `vllm_coserve.api.messages.RelaySource`."""

    url: str
    version: int
    key: str = ""
    wait_s: float = 0.0


class RelayTransferEngine(WeightTransferEngine[RelayInitInfo, RelayUpdateInfo]):
    """Whole versions: brought together and checked before the first parameter is touched."""

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Worker.coserve_pull, Worker.coserve_pulled = coserve_pull, coserve_pulled

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        """See vLLM."""

    def start_weight_update(self) -> None:
        """See vLLM."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM; its own waits for a device that CPU engines have not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        """Replace all weights. Raises RelayError or ValueError, and the old ones are in use."""
        source = RelayedWeights(**asdict(update_info))
        puller, wrong = _puller(self.vllm_config), None
        try:
            _bring(puller, source, known_shapes(self.model_config.model))
        except Exception as exc:  # recovery: raised when all workers know
            wrong = exc
        if not _all_workers(wrong is None):
            raise wrong or RelayError(f"another worker of this engine could not read version {source.version}")
        try:
            reload_weights(self.vllm_config, self.model, puller.replica.tensors.items(), None, True)
            repack_embeddings(self.model)
        except BaseException:  # recovery: nobody can vouch for these weights; whoever runs the engine starts it again
            logger.exception("coserve: weights could be loaded only in part, ending this engine")
            os._exit(1)

    def finish_weight_update(self) -> None:
        """See vLLM."""

    def shutdown(self) -> None:
        """See vLLM."""


def coserve_pull(worker: Any, source: str) -> str:
    """Begin to read a version; for `collective_rpc`. `source`: JSON of a `RelayUpdateInfo`."""
    wanted = RelayedWeights(**json.loads(source))
    shapes = known_shapes(worker.vllm_config.model_config.model)
    number = _puller(worker.vllm_config).begin(wanted, shapes)
    _PULLS.clear()
    _PULLS[wanted] = number
    return ""


def coserve_pulled(worker: Any, source: str) -> str:
    """PULLED, UNDER_WAY, or why it cannot be had; for `collective_rpc`."""
    wanted = RelayedWeights(**json.loads(source))
    if wanted not in _PULLS:
        return NEWER
    found = _PULLERS[0].result(_PULLS[wanted])
    return UNDER_WAY if found is None else found[1] or PULLED


def _puller(vllm_config: Any) -> Puller:
    if not _PULLERS:
        _PULLERS.append(Puller(Replica(_needed(vllm_config)), shard=_shard(vllm_config)))
    return _PULLERS[0]


def _bring(puller: Puller, source: RelayedWeights, known: dict[str, list[int]]) -> None:
    """Have the copy at a version: usually it was pulled before."""
    if not puller.lock.acquire(timeout=_LOCK_BOUND_S):
        raise RelayError("another version is being read")
    try:
        found = puller.result(_PULLS.get(source, 0))
        if found is None or found[1] or puller.replica.version != source.version:
            source.bring(puller.replica, known, puller.shard)
    finally:
        puller.lock.release()


def _needed(vllm_config: Any) -> Callable[[PieceEntry], bool]:
    """Whether this worker needs some of a piece; all of what nobody knows how to split."""
    rank = _rank(vllm_config)
    if rank == Rank():
        return lambda piece: True
    model = ModelShape.of(vllm_config.model_config.hf_text_config.to_dict())

    @functools.cache
    def regions(name: str, shape: tuple[int, ...]) -> list[Region]:
        try:
            return engine_regions(model, name, shape, rank)
        except UnmappedError as exc:
            logger.warning("coserve: %s; every worker reads all of it", exc)
            return [whole(shape)]

    return lambda piece: any(r.overlaps(piece.region) for r in regions(piece.name, piece.shape))


def _rank(vllm_config: Any) -> Rank:
    parallel = vllm_config.parallel_config
    rank = Rank(parallel.tensor_parallel_size, 0, parallel.pipeline_parallel_size, 0)
    if rank == Rank():
        return rank
    return replace(rank, tp_rank=get_tensor_model_parallel_rank(), pp_rank=get_pp_group().rank_in_group)


def _shard(vllm_config: Any) -> str:
    """The same for workers that need the same parts."""
    rank = _rank(vllm_config)
    return "" if rank == Rank() else f"tp{rank.tp_rank}of{rank.tp}-pp{rank.pp_rank}of{rank.pp}"


def _all_workers(well: bool) -> bool:
    """Whether all workers of the engine are well: either all of them change their weights, or none."""
    group = get_world_group()
    if group.world_size == 1:
        return well
    vote = torch.tensor([int(well)])
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())
