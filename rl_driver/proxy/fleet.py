"""The workers behind the proxy: who is alive, with which weights, and which borrowed engines are held."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from rl_driver.api.openai import Publication
from rl_driver.api.proxy_config import ProxyConfig
from rl_driver.policy.routing import Kind, Worker
from rl_driver.policy.selection import Candidate, select_borrowed
from rl_driver.policy.versions import version_number
from rl_driver.proxy.member import HeldByAnotherError, Member, Models, Status, UnusableError
from rl_driver.proxy.publication import Publisher

logger = logging.getLogger("coserve.proxy")

_TTL_S = 15.0  # of the hold on a borrowed engine: how long it stays ours when this process dies
_REFUSED_S = 10.0  # before an engine that another job holds is asked again
_USAGE_WEIGHT = 0.2
_RELEASE_BOUND_S = 3.0
_CARD_BOUND_S = 20.0


class Fleet:
    """Watches the workers and tells the scheduler who may get turns.

    Keys never appear in logs, errors or answers.
    """

    def __init__(
        self,
        config: ProxyConfig,
        session: aiohttp.ClientSession,
        put: Callable[[Worker], None],
        lost: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`put` gets a worker whose state changed, `lost` one that shows no sign of life, and why."""
        self._config, self._session, self._put, self._lost, self._clock = config, session, put, lost, clock
        self.members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._newest = 0
        self._publisher = Publisher(self.members, self._call, self._list, clock)

    # ---- life

    async def start(self) -> None:
        """Begin to watch."""
        for kind, urls in (("dedicated", self._config.dedicated), ("borrowed", self._config.borrowed)):
            for url in urls:
                self.add(url, kind)  # type: ignore[arg-type]
        self._upkeep = asyncio.create_task(self._keep_up())

    async def stop(self) -> None:
        """End all watching and give the borrowed engines free."""
        tasks = [t for t in (*self._tasks.values(), self._upkeep) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held = [m for m in self.members.values() if m.held]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_BOUND_S):
                await asyncio.gather(*(self._release(m) for m in held), return_exceptions=True)

    def add(self, url: str, kind: Kind) -> None:
        """Watch one more worker; again: nothing happens."""
        if url not in self.members:
            self.members[url] = Member(url, kind)
            self._tasks[url] = asyncio.create_task(self._watch(self.members[url]))

    async def remove(self, url: str) -> bool:
        """Watch a worker no longer, and give it free where it is borrowed; False: it is unknown."""
        member = self.members.pop(url, None)
        if member is None:
            return False
        task = self._tasks.pop(url)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if member.held:
            await self._release(member)
        return True

    # ---- what calls see

    def note_start(self, url: str) -> None:
        """A call goes to a worker."""
        if member := self.members.get(url):
            member.breaker.started(self._clock())
            self._list(member)

    def note_end(self, url: str, outcome: str) -> None:
        """A call has left a worker; see `continuation.Lease.release` for the outcomes."""
        if member := self.members.get(url):
            if outcome == "failed":
                member.breaker.failed(self._clock())
            else:
                member.breaker.succeeded(self._clock())
            self._list(member)

    def note_version(self, url: str, version: str) -> None:
        """A worker's answer said which weights it has."""
        member = self.members.get(url)
        if member is not None and member.version != version:
            member.version = version
            self._list(member)

    def version(self, url: str) -> str:
        """The weights that a worker had when it last said so."""
        member = self.members.get(url)
        return member.version if member else ""

    def usable(self) -> list[Member]:
        """Workers that answer, the dedicated ones first."""
        found = [m for m in self.members.values() if m.listed is not None and m.listed.eligible]
        return sorted(found, key=lambda m: (m.kind != "dedicated", m.url))

    @property
    def headers(self) -> dict[str, str]:
        """What workers want to see."""
        key = self._config.worker_api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def announce_step(self) -> None:
        """Tell the held engines that an RL step begins: their budgets are computed anew."""
        held = [m for m in self.members.values() if m.held and m.alive]
        calls = (self._call(m, "POST", "/coserve/v1/step") for m in held)
        await asyncio.gather(*calls, return_exceptions=True)

    async def publish(self, published: Publication, bound_s: float) -> None:
        """Have all workers use these weights; see `Publisher`. Raises ValueError."""
        self._publisher.accept(published)
        self._newest = max(self._newest, version_number(published.name))
        await self._publisher.bring_all(bound_s)

    # ---- watching

    async def _watch(self, member: Member) -> None:
        while True:
            began_s = self._clock()
            try:
                await self._look(member)
                member.seen_s, member.wrong = self._clock(), ""
                if not member.alive:
                    logger.info("worker %s is up", member.url)
                member.alive = True
            except UnusableError as exc:
                member.seen_s = self._clock()
                self._note_wrong(member, str(exc))
                member.alive = False
            except (
                aiohttp.ClientError,
                OSError,
                TimeoutError,
                msgspec.DecodeError,
                UnicodeDecodeError,
                LookupError,
            ) as exc:
                gone = isinstance(exc, aiohttp.ClientConnectorError)
                self._note_missing(member, f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__, gone)
            self._list(member)
            await self._publisher.bring(member)
            await asyncio.sleep(max(0.0, began_s + self._config.poll_s - self._clock()))

    async def _look(self, member: Member) -> None:
        if not member.alive:
            await self._read_card(member)
        if member.kind == "dedicated":
            await self._call(member, "GET", "/health")
            return
        status = msgspec.json.decode(await self._call(member, "GET", "/coserve/v1/status"), type=Status)
        member.active = status.state == "active"
        member.version = status.weights.version
        usage = (status.pages.serving - status.pages.serving_cached) / max(1, status.pages.pool)
        member.usage = usage if member.usage is None else member.usage + _USAGE_WEIGHT * (usage - member.usage)
        member.slack_ms = status.gate.slack_ms if status.gate else None
        if member.held and (status.registration is None or status.registration.job != self._config.job):
            member.held = False  # it was restarted, or the hold ran out while we could not reach it

    async def _read_card(self, member: Member) -> None:
        """What does not change while a worker lives: its model, and what it samples with by default."""
        models = msgspec.json.decode(await self._call(member, "GET", "/v1/models"), type=Models).data
        if not models:
            raise UnusableError("it serves no model")
        body = {"model": models[0].id, "prompt": [0], "max_tokens": 1}
        answer = await self._call(member, "POST", "/v1/completions/render", body, _CARD_BOUND_S)
        rendered = msgspec.json.decode(answer, type=list[dict[str, Any]])
        member.models = tuple(m.id for m in models)
        member.root, member.max_model_len = models[0].root or models[0].id, models[0].max_model_len or 0
        member.sampling = rendered[0]["sampling_params"]
        if member.kind == "dedicated":
            member.version = await self._weights_of(member)

    async def _weights_of(self, member: Member) -> str:
        """The version that a dedicated engine says it has, where it says that."""
        try:
            answer = await self._call(member, "GET", "/weight_info")
        except aiohttp.ClientPayloadError:
            return "default"
        return msgspec.json.decode(answer, type=dict[str, str]).get("weight_version", "default")

    async def _call(
        self, member: Member, method: str, path: str, body: Any = None, bound_s: float | None = None, **query: str
    ) -> bytes:
        bound = aiohttp.ClientTimeout(total=bound_s or max(2.0, self._config.poll_s))
        url = member.url + path
        async with self._session.request(
            method, url, json=body, params=query, headers=self.headers, timeout=bound
        ) as answer:
            data = await answer.read()
            if answer.status == 403 and path.endswith("/render"):
                raise UnusableError("start it with `vllm serve --enable-scale-out`: it does not take tokens in and out")
            if answer.status in (401, 403):
                raise UnusableError("it refuses the key: give its own with --worker-api-key")
            if answer.status == 404 and path in ("/collective_rpc", "/pause", "/start_weight_update"):
                raise UnusableError(
                    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "coserve"}\''
                )
            if answer.status == 404 and path.startswith("/coserve/"):
                raise UnusableError("it is no borrowed rollout engine: name it with --dedicated")
            if answer.status == 409 and path.endswith("/register"):
                raise HeldByAnotherError
            if answer.status >= 400:
                said = data[:300].decode("utf-8", "replace")
                raise aiohttp.ClientPayloadError(f"HTTP {answer.status} for {path}: {said}")
            return data

    def _note_wrong(self, member: Member, why: str) -> None:
        if member.wrong != why:
            logger.warning("worker %s cannot be used: %s", member.url, why)
            member.wrong = why

    def _note_missing(self, member: Member, why: str, gone: bool) -> None:
        """No answer: a closed port at once, silence after a while."""
        silent = self._clock() - member.seen_s > self._config.lost_after_s
        self._note_wrong(member, why)
        if member.alive and (gone or silent):
            logger.warning("worker %s is lost", member.url)
            member.alive, member.held = False, False
            self._list(member)
            self._lost(member.url, f"worker lost ({why})")

    # ---- borrowed engines

    async def _keep_up(self) -> None:
        while True:
            now_s = self._clock()
            for member in list(self.members.values()):
                self._list(member)  # a breaker may have cooled down
            try:
                await self._hold(now_s)
            except Exception:  # recovery: without it all borrowed engines would be lost, one after the other
                logger.exception("the borrowed engines could not be looked after")
            await asyncio.sleep(min(0.25, self._config.poll_s))

    async def _hold(self, now_s: float) -> None:
        borrowed = [m for m in self.members.values() if m.kind == "borrowed" and m.alive and m.active]
        free = [m for m in borrowed if m.held or m.refused_until_s <= now_s]
        candidates = [Candidate(m.url, m.usage or 0.0, m.held) for m in free]
        wanted = set(select_borrowed(candidates, self._config.borrow or len(candidates)))
        jobs = []
        for member in free:
            if member.url in wanted and (not member.held or now_s - member.renewed_s > _TTL_S / 4):
                jobs.append(self._take(member))
            elif member.held and member.url not in wanted:
                jobs.append(self._release(member))
        await asyncio.gather(*jobs)

    async def _take(self, member: Member) -> None:
        try:
            await self._call(member, "POST", "/coserve/v1/register", {"job": self._config.job, "ttl_s": _TTL_S})
        except HeldByAnotherError:
            if not member.refused:
                logger.warning("borrowed engine %s is held by another RL job", member.url)
            member.refused = "another RL job holds it"
            member.held, member.refused_until_s = False, self._clock() + _REFUSED_S
        except (UnusableError, aiohttp.ClientError, OSError, TimeoutError) as exc:
            member.refused = f"it could not be registered with: {exc or type(exc).__name__}"
        else:
            member.held, member.renewed_s, member.refused = True, self._clock(), ""
        self._list(member)

    async def _release(self, member: Member) -> None:
        member.held = False
        self._list(member)
        with contextlib.suppress(UnusableError, HeldByAnotherError, aiohttp.ClientError, OSError, TimeoutError):
            await self._call(member, "DELETE", "/coserve/v1/register", job=self._config.job)

    # ---- the scheduler's view

    def _list(self, member: Member) -> None:
        if self.members.get(member.url) is not member or not member.models:
            return
        config, number = self._config, version_number(member.version)
        eligible = member.alive and member.breaker.allows(self._clock())
        if member.kind == "borrowed":  # it computes on while weights come
            eligible = eligible and member.held and member.active
        else:
            eligible = eligible and not member.paused
        self._newest = max(self._newest, number)
        if config.max_staleness is not None and number < self._newest - config.max_staleness:
            eligible = False
        turns = config.turns_per_dedicated if member.kind == "dedicated" else config.turns_per_borrowed
        worker = Worker(member.url, member.kind, turns, number, eligible)
        if worker != member.listed:
            member.listed = worker
            self._put(worker)
