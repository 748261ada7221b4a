"""The sidecar's own API: `/coserve/v1/...` on the rollout engine's server, beside vLLM's OpenAI routes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query

from vllm_coserve import __version__
from vllm_coserve.api.context import Context, current_context
from vllm_coserve.api.messages import Gate, Pages, Reclaims, RolloutEngine, State, Status, TurnRecord, Turns
from vllm_coserve.control.block import WHO_ROLLOUT, WHO_SERVING, ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.policy.memory import MemoryConfig, headroom_pages

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

_CHANGE_BOUND_S = 10.0
_POLL_S = 0.01


class SidecarRoutes:
    """vLLM endpoint plugin (see vllm/plugins/endpoint_plugins/interface.py)."""

    name = "coserve"
    required_tasks: tuple[Any, ...] | None = None

    def __init__(self) -> None:
        self._context = current_context()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, on the rollout engine's server only."""
        if self._context is not None and self._context.side == "rollout":
            from vllm_coserve.engine.install import install

            block = install(self._context)
            app.include_router(make_router(self._context, block, _token_digests(app.state.args)))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """All state is in the control block, but for the weight version."""
        state.coserve_engine_client = engine_client


def _token_digests(args: Namespace) -> list[bytes]:
    import vllm.envs as envs

    keys = args.api_key if isinstance(args.api_key, list) else [args.api_key]
    return [hashlib.sha256(k.encode()).digest() for k in [*keys, envs.VLLM_API_KEY] if k]


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
        responses={401: {"description": "the API key is missing or wrong"}},
    )
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

    @router.post("/step")
    async def step() -> Status:
        """Announce a new RL step: the page budget is computed anew from serving's recent usage."""
        block.add(Word.RL_STEP)
        block.ring(Bell.ARBITER)
        return read_status(context, block)

    return router


async def _change(context: Context, block: ControlBlock, active: bool) -> Status:
    block.set(Word.ACTIVE_WANTED, int(active))
    block.ring(Bell.ROLLOUT_CORE)
    block.ring(Bell.ARBITER)
    deadline = time.monotonic() + _CHANGE_BOUND_S
    while block.get(Word.ROLLOUT_DEACTIVATED) == int(active):
        if time.monotonic() > deadline:
            raise HTTPException(503, f"the rollout engine did not follow within {_CHANGE_BOUND_S:.0f} s")
        await asyncio.sleep(_POLL_S)
    return read_status(context, block)


def read_status(context: Context, block: ControlBlock) -> Status:
    """The control block in words."""
    get, config = block.get, context.config
    owners = [int((block.owners == i).sum()) for i in range(4)]
    return Status(
        version=__version__,
        state=_state(block),
        model=config.rollout,
        generation=get(Word.GENERATION),
        step=get(Word.RL_STEP),
        pages=Pages(
            pool=block.pool_pages,
            free=owners[0] + owners[1],
            serving=owners[2],
            serving_cached=get(Word.SERVING_CACHED_PAGES),
            rollout=owners[3],
            rollout_max=get(Word.ROLLOUT_PAGES_MAX),
            budget=get(Word.BUDGET_PAGES),
            headroom=headroom_pages(block.pool_pages, MemoryConfig(headroom_fraction=config.headroom)),
            page_bytes=block.page_bytes,
        ),
        reclaims=_reclaims(block),
        gate=Gate(
            policy=config.policy,
            open=bool(get(Word.GATE_OPEN)),
            grants=get(Word.GRANTS),
            denials=get(Word.DENIALS),
            overruns=get(Word.OVERRUNS),
            slack_ms=get(Word.SLACK_US) / 1000,
            handover_ms=get(Word.HANDOVER_US) / 1000,
            serving_steps=get(Word.SERVING_STEPS),
            serving_busy_s=get(Word.SERVING_BUSY_NS) / 1e9,
            rollout_busy_s=get(Word.ROLLOUT_BUSY_NS) / 1e9,
            faults=get(Word.SERVING_GATE_FAULTS) + get(Word.ROLLOUT_GATE_FAULTS),
        ),
        rollout=RolloutEngine(
            running=get(Word.ROLLOUT_RUNNING),
            waiting=get(Word.ROLLOUT_WAITING),
            tokens=get(Word.ROLLOUT_TOKENS),
            steps=get(Word.ROLLOUT_STEPS),
            stalled_requests=get(Word.STALL_ABORTS),
        ),
    )


def _state(block: ControlBlock) -> State:
    if not block.get(Word.ROLLOUT_READY):
        return "starting"
    deactivated = bool(block.get(Word.ROLLOUT_DEACTIVATED))
    if block.get(Word.ACTIVE_WANTED):
        return "starting" if deactivated else "active"
    return "deactivated" if deactivated else "deactivating"


def _reclaims(block: ControlBlock) -> Reclaims:
    ms = sorted(block.reclaim_latencies_ms())
    return Reclaims(
        count=block.get(Word.RECLAIMS),
        pages=block.get(Word.RECLAIMED_PAGES),
        cuts=block.get(Word.CUTS),
        ms_p50=ms[len(ms) // 2] if ms else None,
        ms_p99=ms[min(len(ms) - 1, int(len(ms) * 0.99))] if ms else None,
        aborted_requests=block.get(Word.RECLAIM_ABORTS),
    )


def read_turns(block: ControlBlock, after: int) -> Turns:
    """Steps of both engines; the cursor packs the two rings' positions, 26 bits for serving's above the rollout's."""
    serving_after, rollout_after = after >> 26, after & ((1 << 26) - 1)
    serving_last, serving = block.turns(WHO_SERVING, serving_after)
    rollout_last, rollout = block.turns(WHO_ROLLOUT, rollout_after)
    records = [
        TurnRecord(seq=t.seq, who=t.who, start_s=t.start_s, end_s=t.end_s, tokens=t.tokens)  # type: ignore[arg-type]
        for t in sorted([*serving, *rollout], key=lambda t: t.start_s)
    ]
    return Turns(next=(serving_last << 26) | rollout_last, turns=records)
