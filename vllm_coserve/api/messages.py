"""Messages of the sidecar's `/coserve/v1` API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal["starting", "active", "deactivating", "deactivated"]


class Pages(BaseModel):
    """Pages of the shared pool by owner."""

    pool: int
    from_weights: int = Field(description="of these, pages in place of weights that deactivation has freed")
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


class Aborts(BaseModel):
    """Rollout requests that were ended early, by reason; each kept its tokens."""

    reclaimed: int
    stalled: int
    deactivated: int
    too_large: int


class Weights(BaseModel):
    """The rollout engine's weights."""

    version: str
    number: int = Field(description="counts weight versions since the pair was started")
    loaded: bool = Field(description="false while deactivation has freed them")
    load_ms: float = Field(description="how long the latest load or release took")
    parked_bytes: int = Field(0, description="moved to host memory by deactivation; 0: they are loaded again (CPU)")
    park_ms: float = Field(0.0, description="how long the latest move to host memory or back took")


class Holder(BaseModel):
    """The RL job that holds the rollout engine."""

    job: str
    since_s: float = Field(description="Unix time")
    expires_in_s: float = Field(description="unless it renews")


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
    tokens: int = Field(description="tokens generated since the pair was started")
    steps: int
    stalled_requests: int
    prefix_query_tokens: int = Field(description="prompt tokens looked up in its prefix cache")
    prefix_hit_tokens: int


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
    aborts: Aborts
    weights: Weights
    registration: Holder | None


class RegisterRequest(BaseModel):
    """Body of POST /coserve/v1/register; send it again before `ttl_s` is over to stay registered."""

    model_config = ConfigDict(extra="forbid")

    job: str = Field(min_length=1, max_length=80, pattern=r"^[\x21-\x7e]+$", description="name of the RL job")
    ttl_s: float = Field(30.0, gt=0, le=3600, allow_inf_nan=False, description="seconds without a heartbeat it lives")


# What a dedicated engine's worker says of a version that it was told to read, beside why it could not.
PULLED, UNDER_WAY = "pulled", "under way"


class RelaySource(BaseModel):
    """Weights that a relay holds."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(
        max_length=300,
        pattern=r"^(http://[A-Za-z0-9.:\[\]-]+|mooncake://[A-Za-z0-9.:-]+/[A-Za-z0-9._-]+)$",
        description="address of the relay, or mooncake://MASTER:PORT/JOB",
    )
    version: int = Field(ge=0, lt=10**15, description="number of the version there")
    key: str = Field("", max_length=200, description="the relay's key, where it has one")
    wait_s: float = Field(
        0.0, ge=0, le=600, allow_inf_nan=False, description="for a version that is still on its way to the relay"
    )


VersionName = Annotated[
    str, Field(min_length=1, max_length=96, pattern=r"^[\x21-\x7e]+$", description="name of the new weights")
]


class FolderWeights(BaseModel):
    """Body of POST /coserve/v1/weights: the weights of a checkpoint."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096, description="folder of safetensors files of the same model")
    version: VersionName


class RelayWeights(BaseModel):
    """Body of POST /coserve/v1/weights: what a relay holds."""

    model_config = ConfigDict(extra="forbid")

    relay: RelaySource
    version: VersionName


WeightsRequest = FolderWeights | RelayWeights


class EventRecord(BaseModel):
    """One event of GET /coserve/v1/events, the `data` of a server-sent event."""

    id: str = Field(description="send it as Last-Event-ID to go on behind this event")
    time_s: float = Field(description="Unix time")
    kind: str
    value: int
    text: str


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
