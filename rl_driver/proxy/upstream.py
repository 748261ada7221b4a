"""What the proxy needs of a worker, and how a worker can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rl_driver.api.trajectory import VersionSpan

TOO_LARGE = "coserve:too_large"  # stop_reason of a borrowed engine whose budget a request has outgrown


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Tokens in, tokens out.

    Args:
        logprobs: that of each token and so many of the likeliest others; None: none at all.
        sampling: the further parameters of vLLM's sampling, passed through.
        priority: vLLM's; lower goes first.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    logprobs: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    priority: int = 0

    def after(self, tokens: list[int]) -> GenerateRequest:
        """The same request when some of its answer is there already."""
        if not tokens:
            return self
        return replace(
            self,
            token_ids=(*self.token_ids, *tokens),
            max_tokens=self.max_tokens - len(tokens),
            min_tokens=max(0, self.min_tokens - len(tokens)),
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of an answer; the last chunk has a finish reason.

    Args:
        logprobs: one a token where they were asked for, else none.
        top: for each token the likeliest ones as (token id, logprob), where they were asked for.
        spans: which weights made the tokens of this worker's answer so far, or nothing where it does not say.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    top: Sequence[Sequence[tuple[int, float]]] = ()


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

    def version(self, worker_id: str) -> str:
        """The weights that a worker had when it last said so; for workers that do not say it with their tokens."""
        ...
