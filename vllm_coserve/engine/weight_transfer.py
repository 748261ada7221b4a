"""vLLM weight-transfer engine "coserve": a dedicated rollout engine takes a relay's weights by vLLM's own RL routes.

Start the engine with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "coserve"}'`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from vllm_coserve.engine.checkpoint import known_shapes, repack_embeddings
from vllm_coserve.engine.relayed_weights import RelayedWeights
from vllm_coserve.weights.replica import Replica

logger = logging.getLogger("vllm.coserve")

_REPLICA = Replica()  # one engine a process


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
        source.bring(_REPLICA, known_shapes(self.model_config.model))
        try:
            reload_weights(self.vllm_config, self.model, _REPLICA.tensors.items(), None, True)
            repack_embeddings(self.model)
        except BaseException:  # recovery: nobody can vouch for these weights; whoever runs the engine starts it again
            logger.exception("coserve: weights could be loaded only in part, ending this engine")
            os._exit(1)

    def finish_weight_update(self) -> None:
        """See vLLM."""

    def shutdown(self) -> None:
        """See vLLM."""
