"""Brings workers to the published weights: each by the routes that its kind of engine has."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from rl_driver.api.openai import Publication
from rl_driver.proxy.member import HeldByAnotherError, Member, UnusableError
from vllm_coserve.api.messages import PULLED, UNDER_WAY

logger = logging.getLogger("coserve.proxy")

_PULL_BOUND_S = 750.0  # more than an engine's own bound
_SWITCH_BOUND_S = 60.0
_RETRY_S = 10.0  # a dedicated engine ends what is under way at each try
_POLL_S = 0.02
_PULLED_POLL_S = 0.1

Call = Callable[..., Awaitable[bytes]]  # (method, path, body=None, bound_s=None, **query), to one worker


class Publisher:
    """Keeps workers at the weights that were published last."""

    def __init__(
        self,
        members: Mapping[str, Member],
        call: Callable[..., Awaitable[bytes]],
        changed: Callable[[Member], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call` is a call of a member, with the member first; `changed` gets those that begin or end an update."""
        self._members, self._call, self._changed, self._clock = members, call, changed, clock
        self.published: Publication | None = None

    def accept(self, published: Publication) -> None:
        """Have all workers use these weights from now on, those that are away once they come back.

        Raises:
            ValueError: newer ones are published already.
        """
        if self.published is not None and published.version < self.published.version:
            raise ValueError(f"version {self.published.version} is published already, which is newer")
        self.published = published

    async def bring_all(self, bound_s: float) -> None:
        """Until all workers that are up have them or could not get them, at the latest after `bound_s`."""
        jobs = [asyncio.create_task(self.bring(m)) for m in self._members.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await asyncio.gather(*jobs)
                while any(m.updating for m in self._members.values()):  # with what was published before, at first
                    await asyncio.sleep(_POLL_S)

    async def bring(self, member: Member) -> None:
        """Bring a worker to the published weights, unless it has them or cannot take any now."""
        while (published := self._due(member)) is not None:
            member.updating = True
            self._changed(member)
            try:
                call = functools.partial(self._call, member)
                if member.kind == "borrowed":
                    body = {"relay": source(published), "version": published.name}
                    await call("POST", "/coserve/v1/weights", body, _PULL_BOUND_S)
                else:
                    await pull(call, published)
                    await self._switch(member, call, published)
                member.version, member.update_failed = published.name, ""
            except (UnusableError, HeldByAnotherError, aiohttp.ClientError, OSError, TimeoutError) as exc:
                why = f"it did not take weights {published.name}: {exc or type(exc).__name__}"
                logger.warning("worker %s: %s", member.url, why)
                member.update_failed, member.update_failed_s = why, self._clock()
                member.update_refused = published.name
            finally:
                member.updating = False
                self._changed(member)

    async def _switch(self, member: Member, call: Call, published: Publication) -> None:
        begun_s = self._clock()
        member.paused = True
        self._changed(member)
        try:
            await switch(call, published)
        finally:
            member.paused, member.pause_s = False, self._clock() - begun_s

    def _due(self, member: Member) -> Publication | None:
        """The weights that a worker should be given now."""
        published = self.published
        may = member.alive and (member.kind == "dedicated" or (member.held and member.active))
        if published is None or not may or member.updating or member.version == published.name:
            return None
        waits = member.update_failed and member.update_failed_s + _RETRY_S > self._clock()
        return None if waits and member.update_refused == published.name else published


async def pull(call: Call, published: Publication) -> None:
    """Have a dedicated engine read the published weights while it generates.

    Raises what `call` raises, and UnusableError where it cannot read them; nothing has changed then.
    """
    wanted = [json.dumps(source(published))]
    await call("POST", "/collective_rpc", {"method": "coserve_pull", "args": wanted}, _SWITCH_BOUND_S)
    async with asyncio.timeout(_PULL_BOUND_S):
        while True:
            body = {"method": "coserve_pulled", "args": wanted}
            answer = json.loads(await call("POST", "/collective_rpc", body, _SWITCH_BOUND_S))
            states = [str(state) for state in answer["results"]]  # of its workers
            if wrong := next((s for s in states if s not in (PULLED, UNDER_WAY)), ""):
                raise UnusableError(wrong)
            if UNDER_WAY not in states:
                return
            await asyncio.sleep(_PULLED_POLL_S)


async def switch(call: Call, published: Publication) -> None:
    """Have a dedicated engine use what it has pulled, by vLLM's own routes.

    Nothing is generated between `pause` and `resume`: what is under way ends as aborted, and goes on elsewhere, or here
    with KV that is computed anew. Raises what `call` raises; the worker has its old weights then, or does not generate
    until a later try succeeds.
    """
    await call("POST", "/pause", None, _SWITCH_BOUND_S, mode="abort")
    try:
        try:
            await call("POST", "/start_weight_update", None, _SWITCH_BOUND_S)
        except aiohttp.ClientPayloadError:  # a proxy that was killed in the middle has left an update open, perhaps
            await call("POST", "/finish_weight_update", {"weight_version": "unfinished"}, _SWITCH_BOUND_S)
            await call("POST", "/start_weight_update", None, _SWITCH_BOUND_S)
        await call("POST", "/update_weights", {"update_info": source(published)}, _PULL_BOUND_S)
        await call("POST", "/finish_weight_update", {"weight_version": published.name}, _SWITCH_BOUND_S)
    finally:  # the old weights are in use, or the engine has ended
        await call("POST", "/resume", None, _SWITCH_BOUND_S)


def source(published: Publication) -> dict[str, Any]:
    """Where the weights are, as engines want to be told."""
    found = {"url": published.url, "version": published.version, "key": published.key}
    return found | ({"wait_s": published.wait_s} if published.wait_s else {})
