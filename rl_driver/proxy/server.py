"""The rollout proxy's HTTP server: one OpenAI endpoint over all workers (`coserve proxy`)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
from aiohttp import web

from rl_driver.api.openai import (
    ModelCard,
    Models,
    ProxyState,
    Publication,
    TrajectoryBegin,
    TrajectoryEnd,
    WorkerRequest,
    WorkerState,
)
from rl_driver.api.proxy_config import ProxyConfig
from rl_driver.policy.baselines import POLICIES
from rl_driver.policy.routing import Turn
from rl_driver.policy.versions import version_number
from rl_driver.proxy.answers import ChatFormatter, Choice, CompletionFormatter, Formatter, Part, merged
from rl_driver.proxy.connections import Connections
from rl_driver.proxy.continuation import GaveUpError, Limits, OverloadedError, generate
from rl_driver.proxy.delivery import Delivery, Record, error_response, json_response
from rl_driver.proxy.fleet import Fleet
from rl_driver.proxy.http import HttpUpstream
from rl_driver.proxy.metrics import ProxyMetrics
from rl_driver.proxy.openapi import DOCUMENT
from rl_driver.proxy.planning import Plan, Planner, convert, decode
from rl_driver.proxy.records import Records, StoredTurn
from rl_driver.proxy.scheduler import QueueLimits, Scheduler
from rl_driver.proxy.upstream import RefusedError
from rl_driver.store.base import ConflictError
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.flags import check_url

logger = logging.getLogger("coserve.proxy")

_BODY_MAX_BYTES = 64 << 20
_BODY_BOUND_S = 30.0
_BALANCE_S = 0.1
_TRAJECTORY_MAX_CHARS = 256
_OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """The proxy's parts, wired up. `app()` serves them; one event loop owns it all."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.metrics = ProxyMetrics()
        self._digests = [hashlib.sha256(config.api_key.encode()).digest()] if config.api_key else []
        self._limits = Limits(chunk_s=config.chunk_timeout_s)
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.connections = Connections()

    # ---- life

    async def start(self) -> None:
        """Begin to watch the workers."""
        config = self.config
        self.records = _open(config.store) if config.store else None
        # vLLM closes idle connections after 5 s; we do it first.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20, trust_env=False)
        limits = QueueLimits(config.queue_turns, config.queue_timeout_s, min(30.0, config.queue_timeout_s))
        self.scheduler = Scheduler(POLICIES[config.policy](), limits, on_start=self._note_start, on_end=self._note_end)
        self.fleet = Fleet(config, self._session, self.scheduler.put_worker, self.scheduler.move_all)
        self.upstream = HttpUpstream(self._session, self.fleet)
        self.planner = Planner(self.fleet, self._session, config.tokenizer)
        await self.fleet.start()
        self._tasks = [asyncio.create_task(self.connections.run()), asyncio.create_task(self._balance())]

    async def stop(self) -> None:
        """Give the borrowed engines free and end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.stop()
        if self.records:
            await self.records.close()
        await self._session.close()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY_MAX_BYTES)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics_page)
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/coserve/v1/workers", self.workers)
        app.router.add_post("/coserve/v1/workers", self.add_worker)
        app.router.add_delete("/coserve/v1/workers", self.remove_worker)
        app.router.add_post("/coserve/v1/step", self.step)
        app.router.add_post("/coserve/v1/weights", self.weights)
        app.router.add_put("/coserve/v1/trajectories/{id}", self.begin_trajectory)
        app.router.add_get("/coserve/v1/trajectories/{id}", self.get_trajectory)
        app.router.add_post("/coserve/v1/trajectories/{id}/end", self.end_trajectory)
        return app

    def _note_start(self, worker_id: str) -> None:
        self.fleet.note_start(worker_id)

    def _note_end(self, worker_id: str, outcome: str) -> None:
        self.metrics.legs.labels(outcome).inc()
        self.fleet.note_end(worker_id, outcome)

    async def _balance(self) -> None:
        while True:
            await asyncio.sleep(_BALANCE_S)
            self.scheduler.balance()

    # ---- every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            with self.connections.busy(request.protocol):
                self._authorize(request)
                return await handler(request)
        except RefusedError as exc:
            return error_response(exc.status, str(exc))
        except OverloadedError as exc:
            headers = {"Retry-After": str(max(1, round(exc.retry_after_s)))}
            return error_response(exc.status, str(exc), headers)
        except GaveUpError as exc:
            return error_response(502, str(exc))
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the body is larger than {_BODY_MAX_BYTES >> 20} MiB")
        except web.HTTPException as exc:
            return error_response(exc.status, exc.reason, {k: v for k, v in exc.headers.items() if k == "Allow"})

    def _authorize(self, request: web.Request) -> None:
        if not self._digests or request.path in _OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise RefusedError(401, "give the proxy's API key as `Authorization: Bearer KEY`")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_BODY_BOUND_S):
                data = await request.read()
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {_BODY_BOUND_S:g} s") from None
        return decode(data)

    # ---- completions

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        plan = await self.planner.completion(await self._body(request))
        return await self._answer(request, plan, CompletionFormatter(plan, self.planner.tokenizer()))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        plan = await self.planner.chat(await self._body(request))
        return await self._answer(request, plan, ChatFormatter(plan, self.planner.tokenizer()))

    async def _answer(self, request: web.Request, plan: Plan, formatter: Formatter) -> web.StreamResponse:
        trajectory_id = _trajectory(request, plan)
        min_version = version_number(request.headers.get("X-Min-Weight-Version", ""))
        stored = await self._stored(request, plan, trajectory_id)
        source = _once(stored) if stored else self._parts(plan, trajectory_id or plan.call_id, min_version)
        self._running += 1
        start_s, status = time.monotonic(), "cancelled"
        try:
            async with aclosing(source) as parts:  # type: ignore[type-var]
                record = self._record(request, plan, trajectory_id) if not stored else None
                delivery = Delivery(plan, formatter, self.planner, self.metrics, record, start_s)
                if plan.stream:
                    response = await delivery.stream(parts, request, self.connections)
                else:
                    response = await delivery.whole(parts)
            status = "ok"
            return response
        except (RefusedError, OverloadedError, GaveUpError) as exc:
            status = type(exc).__name__.removesuffix("Error").lower()
            raise
        finally:
            self._running -= 1
            self.metrics.calls.labels(status).inc()

    async def _parts(self, plan: Plan, trajectory_id: str, min_version: int) -> AsyncIterator[Part]:
        """Parts of all choices as they come."""
        tokenizer = self.planner.tokenizer()
        choices = [Choice(plan, i, tokenizer) for i in range(plan.choices)]
        sources = [c.parts(self._chunks(plan, c, trajectory_id, min_version)) for c in choices]
        if len(sources) == 1:
            async with aclosing(sources[0]) as parts:  # type: ignore[type-var]
                async for part in parts:
                    yield part
            return
        async with aclosing(merged(sources)) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield part

    def _chunks(self, plan: Plan, choice: Choice, trajectory_id: str, min_version: int) -> AsyncIterator[Any]:
        turn = Turn(f"{plan.call_id}-{choice.index}", trajectory_id, min_version)

        def on_move(worker_id: str, outcome: str, why: str) -> None:
            logger.info(
                "call %s leaves %s after %d tokens: %s", turn.turn_id, worker_id, len(choice.answer.tokens), why
            )
            self.metrics.moves.labels(outcome).inc()

        return generate(turn, choice.answer, self.scheduler, self.upstream, self._limits, on_move)

    # ---- trajectories

    async def _stored(self, request: web.Request, plan: Plan, trajectory_id: str | None) -> Part | None:
        """The answer to a turn that was finished before: it is given again, not made again."""
        index = _turn_index(request)
        if self.records is None or trajectory_id is None or index is None or plan.choices != 1:
            return None
        turn = await self.records.find(trajectory_id, index, plan.prompts[0])
        if turn is None:
            return None
        tokenizer = self.planner.tokenizer()
        text = tokenizer.decode(turn.output_token_ids, plan.skip_special) if tokenizer else ""
        return Part(
            0,
            text,
            list(turn.output_token_ids),
            list(turn.logprobs),
            [[] for _ in turn.output_token_ids],
            turn.finish_reason,
            None,
            list(turn.spans),
        )

    def _record(self, request: web.Request, plan: Plan, trajectory_id: str | None) -> Record | None:
        if self.records is None or trajectory_id is None or plan.choices != 1:
            return None
        records, index = self.records, _turn_index(request)
        if plan.logprobs is None:
            plan.logprobs = 0  # the store keeps them, whether or not the caller wants to see them

        async def record(parts: list[Part]) -> None:
            await records.add(StoredTurn.of(trajectory_id, index, plan.prompts[0], parts))

        return record

    # ---- the rest

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        cards: dict[str, ModelCard] = {}
        for member in self.fleet.usable():
            for name in member.models:
                cards.setdefault(name, ModelCard(name, member.max_model_len, member.root))
        return json_response(Models(list(cards.values())))

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`: 200 while there is a worker."""
        if not self.fleet.usable():
            return error_response(503, "no worker is available; GET /coserve/v1/workers says why")
        return web.Response()

    async def metrics_page(self, request: web.Request) -> web.Response:
        """`GET /metrics`."""
        page = self.metrics.page(self._state())
        return web.Response(body=page, content_type="text/plain", charset="utf-8")

    async def openapi(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return web.Response(body=DOCUMENT, content_type="application/json")

    def _state(self) -> ProxyState:
        workers = [
            WorkerState(
                m.url,
                m.kind,
                m.listed is not None and m.listed.eligible,
                self.scheduler.load_of(m.url),
                self.scheduler.tokens_of(m.url),
                m.version,
                m.held,
                m.usage,
                m.slack_ms,
                m.pause_s,
                m.wrong or m.refused or m.update_failed,
            )
            for m in self.fleet.members.values()
        ]
        return ProxyState(workers, self.scheduler.queued, self._running)

    async def workers(self, request: web.Request) -> web.Response:
        """`GET /coserve/v1/workers`: what the proxy knows of its workers."""
        return json_response(self._state())

    async def add_worker(self, request: web.Request) -> web.Response:
        """`POST /coserve/v1/workers`: use one more worker."""
        body = convert(await self._body(request), WorkerRequest)
        try:
            url = check_url(body.url)
        except ValueError as exc:
            raise RefusedError(400, str(exc)) from None
        self.fleet.add(url, body.kind)
        return json_response(self._state())

    async def remove_worker(self, request: web.Request) -> web.Response:
        """`DELETE /coserve/v1/workers?url=`: its turns go on elsewhere."""
        url = request.query.get("url", "").rstrip("/")
        if not await self.fleet.remove(url):
            raise RefusedError(404, f"there is no worker {url!r}")
        self.scheduler.remove_worker(url, "it was taken off")
        return json_response(self._state())

    async def step(self, request: web.Request) -> web.Response:
        """`POST /coserve/v1/step`: an RL step begins; borrowed engines compute their budgets anew."""
        await self.fleet.announce_step()
        self.scheduler.begin_step()
        return json_response(self._state())

    async def weights(self, request: web.Request) -> web.Response:
        """`POST /coserve/v1/weights`: returns when all workers that are up use them, or have said why not."""
        body = convert(await self._body(request), Publication)
        try:
            await self.fleet.publish(body, self.config.weights_timeout_s)
        except ValueError as exc:
            raise RefusedError(409, str(exc)) from None
        return json_response(self._state())

    # ---- trajectories as records

    def _kept(self) -> Records:
        if self.records is None:
            raise RefusedError(404, "trajectories are not stored: start the proxy with --store FILE")
        return self.records

    async def begin_trajectory(self, request: web.Request) -> web.Response:
        """`PUT /coserve/v1/trajectories/ID`."""
        body = convert(await self._body(request), TrajectoryBegin)
        await self._kept().begin(_trajectory_id(request), body.group, body.task)
        return json_response(await self._kept().get(_trajectory_id(request)))

    async def get_trajectory(self, request: web.Request) -> web.Response:
        """`GET /coserve/v1/trajectories/ID`."""
        return json_response(await self._kept().get(_trajectory_id(request)))

    async def end_trajectory(self, request: web.Request) -> web.Response:
        """`POST /coserve/v1/trajectories/ID/end`."""
        body = convert(await self._body(request), TrajectoryEnd)
        await self._kept().end(_trajectory_id(request), body.state, body.reward)
        return json_response(await self._kept().get(_trajectory_id(request)))


def _open(store: str) -> Records:
    try:
        return Records(store)
    except (sqlite3.Error, ConflictError) as exc:
        raise ConfigurationError(f"--store {store!r} cannot be used ({exc}): give another file") from None


def _trajectory(request: web.Request, plan: Plan) -> str | None:
    name = request.headers.get("X-Trajectory-Id") or plan.user
    if name is not None and len(name) > _TRAJECTORY_MAX_CHARS:
        raise RefusedError(400, f"X-Trajectory-Id has {len(name)} characters; {_TRAJECTORY_MAX_CHARS} are allowed")
    return name or None


def _trajectory_id(request: web.Request) -> str:
    name = request.match_info["id"]
    if len(name) > _TRAJECTORY_MAX_CHARS:
        raise RefusedError(400, f"a trajectory's id may have {_TRAJECTORY_MAX_CHARS} characters")
    return name


def _turn_index(request: web.Request) -> int | None:
    text = request.headers.get("X-Turn-Index")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RefusedError(400, f"X-Turn-Index {text!r}: give a number from 0")
    return int(text)


async def _once(part: Part) -> AsyncIterator[Part]:
    yield part
