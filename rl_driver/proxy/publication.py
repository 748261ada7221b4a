"""Brings workers to the published weights: each by the routes that its kind of engine has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rl_driver.api.openai import Publication
from rl_driver.policy.routing import Kind

_PULL_BOUND_S = 750.0  # more than an engine's own bound
_SWITCH_BOUND_S = 60.0

Call = Callable[..., Awaitable[bytes]]  # (method, path, body=None, bound_s=None, **query), to one worker


async def update(kind: Kind, call: Call, published: Publication) -> None:
    """Have a worker use the published weights.

    Raises what `call` raises; the worker has its old weights then, or does not generate until a later try succeeds.
    """
    if kind == "borrowed":
        body = {"relay": source(published), "version": published.name}
        await call("POST", "/coserve/v1/weights", body, _PULL_BOUND_S)
        return
    # vLLM's own routes. Nothing is generated between `pause` and `resume`: what is under way ends as aborted, and goes
    # on elsewhere, or here with KV that is computed anew.
    await call("POST", "/pause", None, _SWITCH_BOUND_S, mode="abort")
    try:
        await call("POST", "/start_weight_update", None, _SWITCH_BOUND_S)
        await call("POST", "/update_weights", {"update_info": source(published)}, _PULL_BOUND_S)
        await call("POST", "/finish_weight_update", {"weight_version": published.name}, _SWITCH_BOUND_S)
    finally:  # the old weights are in use, or the engine has ended
        await call("POST", "/resume", None, _SWITCH_BOUND_S)


def source(published: Publication) -> dict[str, Any]:
    """Where the weights are, as engines want to be told."""
    return {"url": published.url, "version": published.version, "key": published.key}
