"""Main module of the rollout engine's process: `python -m vllm_coserve.engine.sidecar serve MODEL ...`.

It is vLLM's own command line, after it has been tied to the life of the `vllm serve` process that started it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Tie this process to its parent, then run vLLM's command line."""
    from vllm_coserve.api.context import current_context
    from vllm_coserve.api.parent import die_with_parent

    context = current_context()
    if context is None or context.side != "rollout":
        sys.exit("vllm_coserve.engine.sidecar is started by `vllm serve MODEL --coserve-rollout ROLLOUT_MODEL`")
    die_with_parent(context.owner_pid)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
