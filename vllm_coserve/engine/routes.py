"""The sidecar's own API: `/coserve/v1/...` on the rollout engine's server, beside vLLM's OpenAI routes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.responses import StreamingResponse

from vllm_coserve.api.context import Context, current_context
from vllm_coserve.api.messages import Holder, RegisterRequest, RelayWeights, Status, Turns, WeightsRequest
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.registration import HeldByAnotherError, Registration
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.event_stream import EVENT_ID, parse_cursor, stream
from vllm_coserve.engine.install import LOAD_WEIGHTS, PULL_WEIGHTS
from vllm_coserve.engine.rollout_weights import PULL_BOUND_S
from vllm_coserve.engine.status import read_status, read_turns
from vllm_coserve.memory.ledger import has_weight_pages

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

_CHANGE_BOUND_S = 60.0
_WEIGHTS_BOUND_S = 120.0
_MEMORY_IN_USE = ": serving's requests still use the memory of its weights, and it becomes active when they have ended"
_ALIVE_S = 0.5
_POLL_S = 0.01


class SidecarRoutes:
    """vLLM endpoint plugin (see vllm/plugins/endpoint_plugins/interface.py)."""

    name = "coserve"
    required_tasks: tuple[Any, ...] | None = None

    def __init__(self) -> None:
        self._context = current_context()
        self._upkeep: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, on the rollout engine's server only."""
        if self._context is not None and self._context.side == "rollout":
            from vllm_coserve.engine.install import install

            block = install(self._context)
            app.include_router(make_router(self._context, block, _token_digests(app.state.args)))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the engine client, and begin to show that this server's event loop runs."""
        state.coserve_engine_client = engine_client
        if self._context is not None and self._context.side == "rollout":
            from vllm_coserve.engine.install import installed_block

            self._upkeep = asyncio.create_task(_keep_up(self._context, installed_block()))


async def _keep_up(context: Context, block: ControlBlock) -> None:
    registration = Registration(block, context.open(context.control_fd))
    while True:
        block.set(Word.ROLLOUT_API_ALIVE_NS, time.monotonic_ns())
        registration.expire()
        await asyncio.sleep(_ALIVE_S)


def _token_digests(args: Namespace) -> list[bytes]:
    import vllm.envs as envs

    keys = args.api_key if isinstance(args.api_key, list) else [args.api_key]
    return [hashlib.sha256(k.encode()).digest() for k in [*keys, envs.VLLM_API_KEY] if k]


_Answers = dict[int | str, dict[str, Any]]
_HELD: _Answers = {409: {"description": "another RL job holds the engine; the answer says which"}}
_BAD_WEIGHTS: _Answers = {409: {"description": "not weights of this model, or it is deactivated; the old ones stay"}}
_EVENT_ANSWERS: _Answers = {
    200: {"content": {"text/event-stream": {}}},
}


def make_router(context: Context, block: ControlBlock, token_digests: list[bytes]) -> APIRouter:
    """The routes over a control block; guarded by the server's API keys where it has any."""

    def authorize(authorization: Annotated[str | None, Header()] = None) -> None:
        if not token_digests:
            return
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        matches = [secrets.compare_digest(digest, known) for known in token_digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise HTTPException(401, "give the server's API key as `Authorization: Bearer KEY`")

    router = APIRouter(
        prefix="/coserve/v1",
        tags=["coserve"],
        dependencies=[Depends(authorize)],
        responses={
            400: {"description": "a field is missing or out of its range; the message says which"},
            401: {"description": "the API key is missing or wrong"},
        },
    )
    registration = Registration(block, context.open(context.control_fd))
    changes = {503: {"description": "the rollout engine did not follow in time"}}

    @router.get("/status")
    async def status() -> Status:
        """What the pair does now."""
        return read_status(context, block)

    @router.get("/turns")
    async def turns(after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0) -> Turns:
        """Who computed when: the latest engine steps. Pass `next` of the last answer as `after`."""
        return read_turns(block, after)

    @router.post("/activate", responses=changes)
    async def activate() -> Status:
        """Borrow compute and memory (again)."""
        return await _change(context, block, active=True)

    @router.post("/deactivate", responses=changes)
    async def deactivate() -> Status:
        """End the rollout's requests and give all pages back; the process stays warm."""
        return await _change(context, block, active=False)

    @router.get("/events", response_class=StreamingResponse, responses=_EVENT_ANSWERS)
    async def events(
        last_event_id: Annotated[str, Header(pattern=EVENT_ID)] = "", follow: bool = True
    ) -> StreamingResponse:
        """What happens, as server-sent events; with Last-Event-ID also what happened behind that event.

        With `follow=false` the answer ends after the events that there are, all that are kept where no id is given.
        """
        cursor = block.events.last() if follow else (0,) * len(block.events.last())
        if last_event_id:
            cursor = parse_cursor(last_event_id)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(block, cursor, follow), media_type="text/event-stream", headers=headers)

    @router.post("/register", responses=_HELD)
    def register(body: RegisterRequest) -> Holder:
        """Take the rollout engine for an RL job, or renew that; it ends when no renewal comes for `ttl_s`."""
        with _conflicts():
            held = registration.take(body.job, body.ttl_s)
        return Holder(job=held.job, since_s=held.since_s, expires_in_s=held.expires_in_s)

    @router.delete("/register", status_code=204, responses=_HELD | {404: {"description": "that job is not registered"}})
    def release(job: Annotated[str, Query(min_length=1, max_length=80)]) -> None:
        """Give the rollout engine free for another RL job."""
        with _conflicts():
            if not registration.release(job):
                raise HTTPException(404, f"RL job {job!r} is not registered here")

    @router.post("/weights", responses=changes | _BAD_WEIGHTS)
    async def weights(body: WeightsRequest, request: Request) -> Status:
        """Replace the weights by those of a checkpoint folder or a relay; running requests go on with the new ones.

        What a relay holds is pulled while the engine computes on, and used between two steps.
        """
        await _load_weights(request.app.state.coserve_engine_client, body)
        return read_status(context, block)

    @router.post("/step")
    async def step() -> Status:
        """Announce a new RL step: the page budget is computed anew from serving's recent usage."""
        block.add(Word.RL_STEP)
        block.ring(Bell.ARBITER)
        return read_status(context, block)

    return router


@contextlib.contextmanager
def _conflicts() -> Iterator[None]:
    try:
        yield
    except HeldByAnotherError as exc:
        raise HTTPException(409, str(exc)) from None


async def _load_weights(engine_client: Any, body: WeightsRequest) -> None:
    core, bound_s = engine_client.engine_core, _WEIGHTS_BOUND_S
    if isinstance(body, RelayWeights):
        call = core.call_utility_async(PULL_WEIGHTS, body.relay.model_dump(), body.version)
        bound_s += PULL_BOUND_S
    else:
        call = core.call_utility_async(LOAD_WEIGHTS, body.path, body.version)
    try:
        wrong = await asyncio.wait_for(call, bound_s)
    except TimeoutError:
        raise HTTPException(503, f"the weights were not loaded within {bound_s:.0f} s") from None
    if wrong:
        raise HTTPException(409, wrong)


async def _change(context: Context, block: ControlBlock, active: bool) -> Status:
    block.set(Word.ACTIVE_WANTED, int(active))
    block.ring(Bell.ROLLOUT_CORE)
    block.ring(Bell.ARBITER)
    deadline = time.monotonic() + _CHANGE_BOUND_S
    while block.get(Word.ROLLOUT_DEACTIVATED) == int(active):
        if time.monotonic() > deadline:
            why = "" if has_weight_pages(block.owners, block.pool_pages) else _MEMORY_IN_USE
            raise HTTPException(503, f"the rollout engine did not follow within {_CHANGE_BOUND_S:.0f} s{why}")
        await asyncio.sleep(_POLL_S)
    return read_status(context, block)
