"""A start that the serving engine core finds impossible ends as one that `vllm serve` found so itself: with its fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Note


@contextlib.contextmanager
def told_to_the_user(context: Context, block: ControlBlock) -> Iterator[None]:
    """Note a ConfigurationError for `vllm serve`: of its engine core it sees only that it ended.

    The rollout's errors are not noted: its supervisor refuses the start, and points to the log.
    """
    try:
        yield
    except ConfigurationError as exc:
        if context.side == "serving":
            block.set_note(Note.START_REFUSAL, str(exc))
        raise
