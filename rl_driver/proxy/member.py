"""A worker behind the proxy: what is known of it, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl_driver.policy.health import Breaker, BreakerConfig
from rl_driver.policy.routing import Kind, Worker


class UnusableError(Exception):
    """The worker answers, but cannot be used; the text says what to do."""


class HeldByAnotherError(Exception):
    """HTTP 409."""


# ---- of the engines' answers, as much as is read


class Pages(msgspec.Struct):
    pool: int
    serving: int
    serving_cached: int


class Gate(msgspec.Struct):
    slack_ms: float


class Weights(msgspec.Struct):
    version: str


class Holder(msgspec.Struct):
    job: str


class Status(msgspec.Struct):
    state: str
    pages: Pages
    weights: Weights
    gate: Gate | None = None
    registration: Holder | None = None


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None


class Models(msgspec.Struct):
    data: list[Model]


@dataclass(slots=True)
class Member:
    """What is known of a worker."""

    url: str
    kind: Kind
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerConfig()))
    models: tuple[str, ...] = ()
    root: str = ""  # where its weights and tokenizer are
    max_model_len: int = 0
    sampling: dict[str, Any] | None = None  # vLLM's sampling parameters of a request that gives none
    version: str = ""
    seen_s: float = -1e18
    alive: bool = False
    active: bool = True  # borrowed: it is not deactivated
    held: bool = False  # borrowed: by us
    refused_until_s: float = -1e18
    usage: float | None = None  # borrowed: share of the pool that serving uses, moving average
    slack_ms: float | None = None  # borrowed: see `WorkerState`
    wrong: str = ""  # why it cannot be used, for people
    refused: str = ""  # borrowed: why it cannot be held
    renewed_s: float = -1e18
    updating: bool = False  # it gets other weights
    paused: bool = False  # dedicated: it does not generate meanwhile
    pause_s: float | None = None  # dedicated: how long that took the last time
    update_failed: str = ""  # why it did not take weights, for people
    update_failed_s: float = -1e18
    update_refused: str = ""  # the weights that it did not take
    listed: Worker | None = None  # as the scheduler knows it
