"""One seamless answer over workers that come and go: what was received is kept, the next worker goes on behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from rl_driver.proxy.upstream import (
    MOVED_REASONS,
    Chunk,
    GenerateRequest,
    NoRoomError,
    RefusedError,
    Upstream,
    WorkerFailedError,
)


class Places(Protocol):
    """Who gives workers to turns; the proxy's scheduler is one."""

    async def acquire(self, turn_id: str, avoid: frozenset[str]) -> str:
        """A worker for a turn, not one of `avoid` while there is another. Waits for its turn in the queue.

        Raises:
            RefusedError: there is none and none is coming.
        """
        ...

    def release(self, turn_id: str, outcome: str) -> None:
        """The turn has left its worker: "done", "moved", "failed", "no_room", "refused" or "cancelled"."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one answer."""

    moves: int = 32  # times that it may go to another worker
    chunk_s: float = 60.0  # longest wait for the next tokens
    pause_s: float = 0.05  # before it goes to a worker that has just failed it


class GaveUpError(Exception):
    """No worker could finish the answer within its bounds; the tokens that came are with the client already."""


async def generate(
    turn_id: str,
    request: GenerateRequest,
    places: Places,
    upstream: Upstream,
    limits: Limits,
    on_move: Callable[[str, str], None] = lambda worker_id, why: None,
) -> AsyncIterator[Chunk]:
    """The answer to a request, over as many workers as it takes.

    No token is sent twice or lost: the next worker gets the prompt and all tokens so far, and makes only those that are
    missing. Whatever happens, the turn leaves its worker exactly once for each time that it got one.

    Raises:
        RefusedError: the request is at fault.
        GaveUpError: the bounds are used up.
    """
    tokens: list[int] = []
    avoid: set[str] = set()
    why = "no worker was tried"
    for _ in range(limits.moves + 1):
        worker_id = await places.acquire(turn_id, frozenset(avoid))
        outcome = "cancelled"  # unless the loop below ends in another way
        try:
            async with aclosing(_stream(worker_id, request.after(tokens), upstream, limits.chunk_s)) as chunks:
                async for chunk in chunks:
                    _check(chunk, request.max_tokens - len(tokens))
                    tokens += chunk.token_ids
                    if chunk.finish_reason == "abort" and chunk.stop_reason in MOVED_REASONS:
                        outcome, why = "moved", str(chunk.stop_reason)
                        if chunk.token_ids:
                            yield Chunk(chunk.token_ids, chunk.logprobs, chunk.version)
                        break
                    outcome = "done" if chunk.finish_reason else outcome
                    yield chunk
                    if outcome == "done":
                        return
                else:
                    raise WorkerFailedError("its answer ended without a finish reason")
        except WorkerFailedError as exc:
            outcome, why = "failed", str(exc)
        except NoRoomError as exc:
            outcome, why = "no_room", str(exc)
        except RefusedError:
            outcome = "refused"
            raise
        finally:
            places.release(turn_id, outcome)
        if len(tokens) == request.max_tokens:  # nothing is missing but the end
            yield Chunk((), (), "", "length")
            return
        on_move(worker_id, why)
        avoid = _next_avoid(avoid, worker_id, outcome)
        if outcome == "failed":
            await asyncio.sleep(limits.pause_s)
    raise GaveUpError(f"{limits.moves + 1} workers could not finish it; the last one: {why}")


def _next_avoid(avoid: set[str], worker_id: str, outcome: str) -> set[str]:
    # A worker that gave its memory back may take the turn again later; one without room or one that failed not so soon.
    return {worker_id} if outcome == "moved" else avoid | {worker_id}


async def _stream(worker_id: str, request: GenerateRequest, upstream: Upstream, chunk_s: float) -> AsyncIterator[Chunk]:
    """A worker's chunks; one that says nothing for too long has failed."""
    async with aclosing(upstream.generate(worker_id, request)) as chunks:  # type: ignore[type-var]
        while True:
            try:
                chunk = await asyncio.wait_for(anext(chunks), chunk_s)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise WorkerFailedError(f"{worker_id} sent nothing for {chunk_s:g} s") from None
            yield chunk


def _check(chunk: Chunk, most: int) -> None:
    """A worker that sends what it was not asked for cannot be trusted with the rest."""
    if len(chunk.logprobs) != len(chunk.token_ids):
        raise WorkerFailedError(f"it sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} logprobs")
    if len(chunk.token_ids) > most:
        raise WorkerFailedError(f"it sent {len(chunk.token_ids)} tokens where {most} were missing")
    if any(not isinstance(t, int) or t < 0 for t in chunk.token_ids):
        raise WorkerFailedError("it sent something else than token ids")
