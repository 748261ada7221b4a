"""One seamless answer over workers that come and go: what was received is kept, the next worker goes on behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from rl_driver.api.trajectory import VersionSpan
from rl_driver.policy.routing import Turn
from rl_driver.policy.versions import version_number
from rl_driver.proxy.upstream import (
    TOO_LARGE,
    Chunk,
    GenerateRequest,
    NoRoomError,
    RefusedError,
    Upstream,
    WorkerFailedError,
)

UNKNOWN_VERSION = "unknown"  # of tokens whose worker contradicted itself


class Lease(Protocol):
    """A turn's place on a worker."""

    @property
    def worker_id(self) -> str:
        """Who has the turn."""
        ...

    async def next_chunk(self, chunks: AsyncIterator[Chunk], bound_s: float) -> Chunk:
        """The next chunk of the worker's answer.

        Raises:
            StopAsyncIteration: there is none.
            TimeoutError: it did not come within `bound_s`.
            MovedError: the turn is to go to another worker.
        """
        ...

    def release(self, outcome: str) -> None:
        """The turn has left: "done", "moved", "failed", "no_room", "refused" or "cancelled"."""
        ...


class MovedError(Exception):
    """The scheduler takes the turn to another worker."""


class Places(Protocol):
    """Who gives workers to turns; the proxy's scheduler is one."""

    async def acquire(self, turn: Turn) -> Lease:
        """A worker for a turn. Waits for it in the queue.

        Raises:
            OverloadedError: the queue is full, or the wait was too long.
        """
        ...


class OverloadedError(Exception):
    """There is no place now, or no worker at all; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s, self.status = retry_after_s, status


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one answer."""

    fruitless: int = 32  # tries in succession that may bring no token
    chunk_s: float = 60.0  # longest wait for the next tokens
    pause_s: float = 0.05  # before the next try behind one that brought no token; doubled each time
    pause_max_s: float = 2.0


class GaveUpError(Exception):
    """No worker makes progress with the answer; the tokens that came are with the client already."""


async def generate(
    turn: Turn,
    answer: Answer,
    places: Places,
    upstream: Upstream,
    limits: Limits,
    on_move: Callable[[str, str, str], None] = lambda worker_id, outcome, why: None,
) -> AsyncIterator[Chunk]:
    """Fill an answer and yield what comes, over as many workers as it takes.

    No token is sent twice or lost: the next worker gets the prompt and all tokens so far, and makes only those that are
    missing. Whatever happens, the turn leaves its worker exactly once for each time that it got one.

    Raises:
        RefusedError: the request is at fault.
        GaveUpError: the bounds are used up.
        OverloadedError: there is no place for it.
    """
    avoid: frozenset[str] = frozenset()
    pause_s, why = limits.pause_s, "no worker was tried"
    fruitless = 0
    while fruitless <= limits.fruitless:
        lease = await places.acquire(replace(turn, avoid=avoid))
        outcome = "cancelled"  # unless the leg ends in another way
        answer.begin_leg(upstream.version(lease.worker_id))
        try:
            async with aclosing(upstream.generate(lease.worker_id, answer.rest())) as chunks:  # type: ignore[type-var]
                while True:
                    chunk = await _next(lease, chunks, limits.chunk_s)
                    answer.take(chunk, turn.min_version)
                    if chunk.finish_reason == "abort":  # the engine's doing: nobody here has asked for it
                        outcome = "no_room" if chunk.stop_reason == TOO_LARGE else "moved"
                        why = f"the engine ended it: {chunk.stop_reason}"
                        if chunk.token_ids:
                            yield replace(chunk, finish_reason=None, stop_reason=None)
                        break
                    if chunk.finish_reason:
                        outcome = "done"
                    yield chunk
                    if outcome == "done":
                        return
        except MovedError as exc:
            outcome, why = "moved", str(exc)
        except WorkerFailedError as exc:
            outcome, why = "failed", str(exc)
        except NoRoomError as exc:
            outcome, why = "no_room", str(exc)
        except RefusedError:
            outcome = "refused"
            raise
        finally:
            lease.release(outcome)
        gained = answer.end_leg()
        if answer.missing == 0:  # but the end
            yield Chunk((), finish_reason="length")
            return
        if answer.tokens and answer.request.sampling.get("structured_outputs"):
            raise GaveUpError(f"a structured output cannot go on at another engine, send the call again: {why}")
        on_move(lease.worker_id, outcome, why)
        # Who gave its memory back may take the turn again later; who failed or had no room should not.
        avoid = frozenset({lease.worker_id}) | (frozenset() if outcome == "moved" else avoid)
        if gained:
            fruitless, pause_s = 0, limits.pause_s
        else:
            fruitless += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.pause_max_s)
    raise GaveUpError(f"{fruitless} tries in succession brought no token; the last one: {why}")


class Answer:
    """A request and what has come of its answer: the tokens, and which weights made them.

    A leg is the part of one worker.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self._spans: list[VersionSpan] = []  # of earlier legs
        self._start = 0  # of the leg
        self._assumed = ""
        self._leg_spans: tuple[VersionSpan, ...] = ()

    @property
    def missing(self) -> int:
        """Tokens that may still come."""
        return self.request.max_tokens - len(self.tokens)

    def rest(self) -> GenerateRequest:
        """What is to be asked of the next worker."""
        return self.request.after(self.tokens)

    def begin_leg(self, version: str) -> None:
        """A worker begins; `version` is what its weights are thought to be unless it says so itself."""
        self._start, self._assumed, self._leg_spans = len(self.tokens), version, ()

    def take(self, chunk: Chunk, min_version: int) -> None:
        """Add a chunk, unless the worker sends what it was not asked for: then it cannot be trusted with the rest."""
        count = len(chunk.token_ids)
        if len(chunk.logprobs) != (0 if self.request.logprobs is None else count):
            raise WorkerFailedError(f"it sent {count} tokens with {len(chunk.logprobs)} logprobs")
        if count > self.missing:
            raise WorkerFailedError(f"it sent {count} tokens where {self.missing} were missing")
        if any(type(t) is not int or t < 0 for t in chunk.token_ids):
            raise WorkerFailedError("it sent something else than token ids")
        if chunk.spans:
            if not _covers(chunk.spans, len(self.tokens) + count - self._start):
                raise WorkerFailedError(f"its weight versions do not fit its tokens: {chunk.spans}")
            if any(version_number(s.version) < min_version for s in chunk.spans):
                raise WorkerFailedError(f"it has older weights than it said: {chunk.spans[-1].version}")
            self._leg_spans = chunk.spans
        self.tokens += chunk.token_ids

    def end_leg(self) -> int:
        """A worker has ended; returns how many tokens it made."""
        self._spans = self.spans(len(self.tokens))
        gained = len(self.tokens) - self._start
        self._start, self._leg_spans = len(self.tokens), ()
        return gained

    def spans(self, count: int) -> list[VersionSpan]:
        """Which weights made the first `count` tokens."""
        start, covered = self._start, 0
        spans = list(self._spans)
        for span in self._leg_spans:
            _add(spans, span.version, start + span.start, start + span.end)
            covered = span.end
        last = self._leg_spans[-1].version if self._leg_spans else self._assumed
        _add(spans, last or UNKNOWN_VERSION, start + covered, len(self.tokens))
        return [VersionSpan(s.version, s.start, min(s.end, count)) for s in spans if s.start < count]


def _add(spans: list[VersionSpan], version: str, start: int, end: int) -> None:
    if end > start:
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(version, start, end))


def _covers(spans: tuple[VersionSpan, ...], count: int) -> bool:
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start:
            return False
        at = span.end
    return at == count


async def _next(lease: Lease, chunks: AsyncIterator[Chunk], bound_s: float) -> Chunk:
    try:
        return await lease.next_chunk(chunks, bound_s)
    except StopAsyncIteration:
        raise WorkerFailedError("its answer ended without a finish reason") from None
    except TimeoutError:
        raise WorkerFailedError(f"it sent nothing for {bound_s:g} s") from None
