"""vLLM weight-transfer engine "coserve": a dedicated rollout engine takes a relay's weights by vLLM's own RL routes.

Start the engine with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "coserve"}'`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from vllm_coserve.engine.checkpoint import known_shapes, repack_embeddings
from vllm_coserve.engine.relayed_weights import RelayedWeights
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import ModelShape, Rank, Region, UnmappedError, engine_regions, whole
from vllm_coserve.weights.store import PieceEntry, RelayError

logger = logging.getLogger("vllm.coserve")

_REPLICAS: list[Replica] = []  # at most one: a process has one engine


@dataclass
class RelayInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):
    """Which version of which relay; see `vllm_coserve.api.messages.RelaySource`."""

    url: str
    version: int
    key: str = ""


class RelayTransferEngine(WeightTransferEngine[RelayInitInfo, RelayUpdateInfo]):
    """Whole versions: brought together and checked before the first parameter is touched."""

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        """See vLLM."""

    def start_weight_update(self) -> None:
        """See vLLM."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM; its own waits for a device that CPU engines have not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        """Replace all weights. Raises RelayError or ValueError, and the old ones are in use."""
        source = RelayedWeights(update_info.url, update_info.key, update_info.version)
        if not _REPLICAS:
            _REPLICAS.append(Replica(_needed(self.vllm_config)))
        replica, wrong = _REPLICAS[0], None
        try:
            source.bring(replica, known_shapes(self.model_config.model), _shard(self.vllm_config))
        except Exception as exc:  # recovery: raised when all workers know
            wrong = exc
        if not _all_workers(wrong is None):
            raise wrong or RelayError(f"another worker of this engine could not read version {source.version}")
        try:
            reload_weights(self.vllm_config, self.model, replica.tensors.items(), None, True)
            repack_embeddings(self.model)
        except BaseException:  # recovery: nobody can vouch for these weights; whoever runs the engine starts it again
            logger.exception("coserve: weights could be loaded only in part, ending this engine")
            os._exit(1)

    def finish_weight_update(self) -> None:
        """See vLLM."""

    def shutdown(self) -> None:
        """See vLLM."""


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
