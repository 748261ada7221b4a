"""Refuses a rollout request that could never get the pages it needs, before its answer has begun."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.memory.geometry import Geometry


def pages_needed(block: ControlBlock, tokens: int) -> int:
    """Most pages that the KV of so many tokens of one rollout request takes; 0 before the engine is up."""
    block_bytes, block_tokens = block.get(Word.KV_BLOCK_BYTES), block.get(Word.KV_BLOCK_TOKENS)
    if not block_bytes or not block_tokens:
        return 0
    geometry = Geometry(block_bytes, block.page_bytes, block.pool_pages)
    return geometry.pages_for(-(-tokens // block_tokens))


def refuse_larger_than_budget(original: Any, block: ControlBlock) -> Any:
    """Wrap vLLM's `get_max_tokens`, the one place that knows a request's length and has not answered yet.

    A request counts with the output it asks for; where it asks for none in particular, with its prompt and one token.
    """

    def get_max_tokens(max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **kwargs: Any) -> int:
        allowed = original(max_model_len, max_tokens, input_length, *args, **kwargs)
        tokens = input_length + (1 if max_tokens is None else min(allowed, max_tokens))
        needed, budget = pages_needed(block, tokens), block.get(Word.BUDGET_PAGES)
        if needed > budget and block.get(Word.ACTIVE_WANTED):  # a deactivated engine answers with its own reason
            from vllm.exceptions import GracefulHTTPError

            raise GracefulHTTPError(
                f"this request needs up to {needed} KV pages for {tokens} tokens, and the rollout budget is {budget} "
                "pages now: send a shorter one (a lower max_tokens), try again when the serving model uses less, or "
                "use another engine",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        return allowed

    return get_max_tokens
