"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import contextlib
import os


def register() -> None:
    """Add the --coserve-* flags; inside a co-serving pair also install the side's hooks.

    Without `--coserve-rollout` nothing of vLLM's behaviour changes; there is one more weight-transfer engine to choose.
    `VLLM_COSERVE_SHARED_CORES=1` is for engines that share their cores with a pair: they wait in a way that lets others
    run (`queues.nap`).
    """
    from vllm_coserve.api.context import current_context
    from vllm_coserve.engine import cli

    cli.install_flags()
    _offer_weight_transfer()
    if os.environ.get("VLLM_COSERVE_SHARED_CORES") == "1":
        from vllm_coserve.engine.queues import nap
        from vllm_coserve.engine.seams import patch

        patch("queue_yield", lambda original: nap)
    context = current_context()
    if context is None or os.getpid() == context.owner_pid:
        return  # the owner installs them itself, after it has made the pair
    from vllm_coserve.api.parent import die_with_parent
    from vllm_coserve.engine.install import install

    die_with_parent(context.owner_pid)
    install(context)


def _offer_weight_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # vLLM calls `register` again in the same process
        WeightTransferEngineFactory.register_engine(
            "coserve", "vllm_coserve.engine.weight_transfer", "RelayTransferEngine"
        )
