"""vLLM workers over HTTP: tokens in, tokens out (`POST /inference/v1/generate`), streamed."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from rl_driver.api.trajectory import VersionSpan
from rl_driver.proxy.fleet import Fleet
from rl_driver.proxy.upstream import Chunk, GenerateRequest, NoRoomError, RefusedError, WorkerFailedError

_CONNECT_S = 3.0
_END_S = 0.2
_EVENT_MAX_BYTES = 8 << 20  # an event longer than this is garbage
_ERROR_MAX_BYTES = 64 << 10
_KEY = re.compile(r"(?i)\bbearer\s+\S+")


class _Top(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[VersionSpan] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)
_encoder = msgspec.json.Encoder()


class HttpUpstream:
    """See `upstream.Upstream`. Worker ids are their addresses."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._session, self._fleet = session, fleet
        self._bound = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)

    def version(self, worker_id: str) -> str:
        """See `upstream.Upstream`."""
        return self._fleet.version(worker_id)

    async def generate(self, worker_id: str, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `upstream.Upstream`."""
        headers = {"Content-Type": "application/json", **self._fleet.headers}
        body = _encoder.encode(_body(request))
        try:
            async with self._session.post(
                f"{worker_id}/inference/v1/generate", data=body, headers=headers, timeout=self._bound
            ) as answer:
                if answer.status != 200:
                    raise _failure(answer.status, await _text(answer))
                rest = b""
                async for data in answer.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    if len(rest) > _EVENT_MAX_BYTES:
                        raise WorkerFailedError("it sent an event without an end")
                    if chunk := self._read(worker_id, events):
                        if chunk.finish_reason:
                            await _read_out(answer)
                        yield chunk
        except (aiohttp.ClientError, OSError) as exc:
            raise WorkerFailedError(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__) from None

    def _read(self, worker_id: str, events: list[bytes]) -> Chunk | None:
        """All that came in one read, as one chunk."""
        tokens: list[int] = []
        logprobs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        last: _Choice | None = None
        spans: tuple[VersionSpan, ...] = ()
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]" or not data:
                continue
            last = _choice(data) or last
            if last is None:
                continue
            tokens += last.token_ids or ()
            for entry in (last.logprobs.content if last.logprobs else None) or ():
                logprobs.append(entry.logprob)
                top.append([(t.token_id, t.logprob) for t in entry.top_logprobs])
            if last.weight_versions:
                spans = tuple(last.weight_versions)
            if last.finish_reason:
                break
        if last is None:
            return None
        if spans:
            self._fleet.note_version(worker_id, spans[-1].version)
        return Chunk(tokens, logprobs, spans, last.finish_reason, last.stop_reason, top)


async def _read_out(answer: aiohttp.ClientResponse) -> None:
    """Read to the end, which is near, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_END_S):
            while not answer.content.at_eof():
                await answer.content.readany()


def _body(request: GenerateRequest) -> dict[str, Any]:
    sampling = {
        **request.sampling,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "detokenize": False,  # the proxy makes the text, of all tokens of an answer
    }
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    return {
        "token_ids": request.token_ids,
        "sampling_params": sampling,
        "stream": True,
        "priority": request.priority,
    }


def _choice(data: bytes) -> _Choice | None:
    try:
        event = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WorkerFailedError(f"it sent garbage: {exc}") from None
    if event.error is not None:
        raise _failure(event.error.code if isinstance(event.error.code, int) else 500, event.error.message)
    if len(event.choices) > 1:
        raise WorkerFailedError(f"it sent {len(event.choices)} answers to one request")
    return event.choices[0] if event.choices else None


async def _text(answer: aiohttp.ClientResponse) -> str:
    data = await answer.content.read(_ERROR_MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=_Event).error.message  # type: ignore[union-attr]
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return data[:200].decode("utf-8", "replace")


def _failure(status: int, message: str) -> Exception:
    message = _KEY.sub("Bearer ***", message)
    if status in (413, 429):
        return NoRoomError(message)
    if status in (400, 422):
        return RefusedError(400, message)
    if status in (401, 403):
        return WorkerFailedError(f"HTTP {status}: it refuses the proxy's key or does not take tokens in and out")
    return WorkerFailedError(f"HTTP {status}: {message}")
