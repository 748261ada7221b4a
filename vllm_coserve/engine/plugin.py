"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os


def register() -> None:
    """Add the --coserve-* flags; inside a co-serving pair also install the side's hooks.

    Without `--coserve-rollout` nothing of vLLM's behaviour changes.
    """
    from vllm_coserve.api.context import current_context
    from vllm_coserve.engine import cli

    cli.install_flags()
    context = current_context()
    if context is None or os.getpid() == context.owner_pid:
        return  # the owner installs them itself, after it has made the pair
    from vllm_coserve.engine.install import install
    from vllm_coserve.engine.life import die_with_parent

    die_with_parent(context.owner_pid)
    install(context)
