"""What the proxy needs of a worker, and how a worker can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

# Reasons with which a borrowed engine ends a request early (stop_reason); another engine may go on with it.
MOVED_REASONS = frozenset({"coserve:reclaimed", "coserve:stalled", "coserve:deactivated", "coserve:too_large"})


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Tokens in, tokens out. `sampling` are the further parameters of vLLM's sampling, passed through."""

    token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def after(self, tokens: list[int]) -> GenerateRequest:
        """The same request when some of its answer is there already."""
        return replace(
            self,
            token_ids=(*self.token_ids, *tokens),
            max_tokens=self.max_tokens - len(tokens),
            min_tokens=max(0, self.min_tokens - len(tokens)),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of an answer, with a logprob each; the last chunk has a finish reason.

    `version` names the weights that made the tokens of this chunk.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class WorkerFailedError(Exception):
    """The worker's doing: refused or lost connection, 5xx, an answer that is none. Another may do it."""


class NoRoomError(Exception):
    """The request is larger than what this worker may hold now (HTTP 413). Another may do it; it is no failure."""


class RefusedError(Exception):
    """The client's doing (HTTP 4xx): no worker would take it. `status` and `message` go to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Upstream(Protocol):
    """Streams from workers; `http` is the real one."""

    def generate(self, worker_id: str, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Tokens as they come. Ends after a chunk with a finish reason, or raises one of the errors above.

        Closing the iterator aborts the request on the worker.
        """
        ...
