"""Messages of the sidecar's `/coserve/v1` API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

State = Literal["starting", "active", "deactivating", "deactivated"]


class Pages(BaseModel):
    """Pages of the shared pool by owner."""

    pool: int
    free: int
    serving: int = Field(description="pages that serving holds, cached ones included")
    serving_cached: int = Field(description="of these, pages with nothing but unreferenced prefix cache")
    rollout: int
    rollout_max: int = Field(description="most pages that the rollout held at a time since the start")
    budget: int = Field(description="pages that the memory policy lets the rollout hold now")
    headroom: int = Field(description="pages kept free for serving")
    page_bytes: int


class Reclaims(BaseModel):
    """Pages taken back from the rollout engine for serving."""

    count: int
    pages: int
    cuts: int
    ms_p50: float | None
    ms_p99: float | None
    aborted_requests: int = Field(description="rollout requests ended because their pages went")


class Gate(BaseModel):
    """The compute gate."""

    policy: str
    open: bool = Field(description="serving is idle and the rollout steps freely")
    grants: int
    denials: int
    overruns: int = Field(description="turns that were not returned in time")
    slack_ms: float = Field(description="slack at the last decision")
    handover_ms: float = Field(description="moving average from a grant to the start of the rollout step")
    serving_steps: int
    serving_busy_s: float
    rollout_busy_s: float
    faults: int = Field(description="errors in hook code, each logged; 0 in a healthy pair")


class RolloutEngine(BaseModel):
    """The rollout engine's own counters."""

    running: int
    waiting: int
    tokens: int = Field(description="tokens generated since its start")
    steps: int
    stalled_requests: int


class Status(BaseModel):
    """Answer of GET /coserve/v1/status, activate, deactivate and step."""

    version: str
    state: State
    model: str
    generation: int = Field(description="how often the rollout engine was started")
    step: int = Field(description="RL steps announced")
    pages: Pages
    reclaims: Reclaims
    gate: Gate
    rollout: RolloutEngine


class TurnRecord(BaseModel):
    """One engine step on the device; times are CLOCK_MONOTONIC seconds of the host."""

    seq: int
    who: Literal["serving", "rollout"]
    start_s: float
    end_s: float
    tokens: int


class Turns(BaseModel):
    """Answer of GET /coserve/v1/turns: who computed when."""

    next: int = Field(description="pass it as `after` to get what comes later")
    turns: list[TurnRecord]
