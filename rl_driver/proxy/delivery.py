"""How answers go to the client: as one body, or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rl_driver.api.openai import Error, ErrorAnswer
from rl_driver.proxy.answers import ChatFormatter, Formatter, Part
from rl_driver.proxy.connections import Connections
from rl_driver.proxy.continuation import GaveUpError, OverloadedError
from rl_driver.proxy.metrics import ProxyMetrics
from rl_driver.proxy.planning import Plan, Planner
from rl_driver.proxy.upstream import RefusedError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_encode = msgspec.json.Encoder().encode

Record = Callable[[list[Part]], Awaitable[None]]


def json_response(answer: Any) -> web.Response:
    """An answer that is whole."""
    return web.Response(body=_encode(answer), content_type="application/json")


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error as OpenAI's API has it."""
    body = _encode(_error(status, message))
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _error(status: int, message: str) -> ErrorAnswer:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorAnswer(Error(message, kind, status))


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call's way to its client. `record` saves a turn before its end is told; `start_s` is when the call came."""

    plan: Plan
    formatter: Formatter
    planner: Planner
    metrics: ProxyMetrics
    record: Record | None
    start_s: float

    async def whole(self, parts: AsyncIterator[Part]) -> web.Response:
        """All parts as one body."""
        groups: list[list[Part]] = [[] for _ in range(self.plan.choices)]
        first = True
        async for part in parts:
            self._count(part, first)
            first = False
            groups[part.index].append(part)
        if self.record:
            await self.record(groups[0])
        if isinstance(self.formatter, ChatFormatter) and self.plan.tools:
            return json_response(self.formatter.whole(groups, [await self._message(group) for group in groups]))
        return json_response(self.formatter.whole(groups))

    async def stream(
        self, parts: AsyncIterator[Part], request: web.Request, connections: Connections
    ) -> web.StreamResponse:
        """The parts as events, each when it comes."""
        part: Part | None = await anext(parts)  # what goes wrong before it is an HTTP error, not a broken stream
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers | {"X-Accel-Buffering": "no"})
        await response.prepare(request)

        async def send(event: Any) -> None:
            await connections.write(request.protocol, response, b"data: " + _encode(event) + b"\n\n")

        kept: list[list[Part]] = [[] for _ in range(self.plan.choices)]
        for event in self.formatter.opening():
            await send(event)
        try:
            first = True
            while part is not None:
                self._count(part, first)
                first = False
                if self.record or self.plan.tools:
                    kept[part.index].append(part)
                if part.finish_reason and self.record:
                    await self.record(kept[0])
                if isinstance(self.formatter, ChatFormatter) and self.plan.tools:
                    if part.finish_reason:  # tool calls are read from the whole text
                        await send(await self._tool_event(self.formatter, kept[part.index]))
                else:
                    await send(self.formatter.event(part))
                part = await anext(parts, None)
            for event in self.formatter.closing():
                await send(event)
        except (RefusedError, OverloadedError, GaveUpError) as exc:
            await send(_error(getattr(exc, "status", 502), str(exc)))
            self.metrics.moves.labels("broken_stream").inc()
        await connections.write(request.protocol, response, b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _count(self, part: Part, first: bool) -> None:
        if first:
            self.metrics.ttft.observe(time.monotonic() - self.start_s)
        self.metrics.tokens.inc(len(part.token_ids))

    async def _message(self, parts: list[Part]) -> dict[str, Any]:
        tokens = [t for p in parts for t in p.token_ids]
        return await self.planner.derender(self.plan, parts[0].index, tokens, parts[-1].finish_reason or "stop")

    async def _tool_event(self, formatter: ChatFormatter, parts: list[Part]) -> Any:
        derendered = await self._message(parts)
        part = parts[-1]
        part.token_ids = [t for p in parts for t in p.token_ids]
        part.logprobs = [x for p in parts for x in p.logprobs]
        part.top = [x for p in parts for x in p.top]
        message = derendered["message"]
        for i, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = i
        part.finish_reason = derendered.get("finish_reason") or part.finish_reason
        return formatter.event(part, message)
