"""The hooks of API servers, one or several, of either engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine.core_runtime import KIND_CORE, KIND_WORKER, SIDE_SERVING
from vllm_coserve.engine.metrics import install_metrics
from vllm_coserve.engine.request_size import refuse_larger_than_budget
from vllm_coserve.engine.seams import SEAMS, patch

_PROOF_TIMEOUT_S = 120.0
_POLL_S = 0.02


def install_api(context: Context, block: ControlBlock) -> None:
    """Add the pair's metrics; have serving wait for the pair, and the rollout refuse what is too large and say at each
    chunk which weights made it. Idempotent.
    """
    install_metrics(context, block)
    if context.side == "serving":
        patch("app_state", lambda original: after_proof(original, block))
        return
    patch("completion_output", with_weight_versions)
    for key in SEAMS:
        if key.startswith("max_tokens_"):
            patch(key, lambda original: refuse_larger_than_budget(original, block))


def with_weight_versions(original: Any) -> Any:
    """Wrap vLLM's maker of outputs: spans of weight versions over all tokens so far, as it gives them at the end."""

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    return _new_completion_output


def after_proof(original: Any, block: ControlBlock) -> Any:
    """Wrap vLLM's last step before it listens: both engines must have proved the plugin active in their processes."""

    async def init_app_state(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + _PROOF_TIMEOUT_S
        while not block.get(Word.SERVING_READY) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        # The first rollout engine either comes up or ends the start (see Supervisor); later ones never matter here.
        while block.get(Word.SERVING_READY) and not block.get(Word.ROLLOUT_READY) and not block.get(Word.START_REFUSED):
            await asyncio.sleep(_POLL_S)
        kinds = {"worker": KIND_WORKER, "engine core": KIND_CORE}
        missing = [name for name, kind in kinds.items() if not block.member_pid(SIDE_SERVING, kind)]
        if missing or not block.get(Word.SERVING_READY):
            raise ConfigurationError(
                f"the vllm-coserve plugin is not active in the serving {' and '.join(missing) or 'engine core'}: "
                "see the log above for its error, and check that VLLM_PLUGINS, where it is set, names coserve"
            )
        return await original(*args, **kwargs)

    return init_app_state
