"""The proxy's OpenAPI document, made from the very types that check and write its messages."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_driver.api import openai
from rl_driver.api.trajectory import Trajectory
from vllm_coserve import __version__

_REF = "#/components/schemas/{name}"
_TYPES: tuple[type, ...] = (
    openai.CompletionRequest,
    openai.ChatRequest,
    openai.WorkerRequest,
    openai.Publication,
    openai.TrajectoryBegin,
    openai.TrajectoryEnd,
    Trajectory,
    openai.ProxyState,
    openai.Completion,
    openai.ChatCompletion,
    openai.Models,
    openai.ErrorAnswer,
)
_ERRORS = {
    "400": "a field is missing, out of its range or not offered; the message says which",
    "401": "the API key is missing or wrong",
    "404": "there is no such model, worker, trajectory or page",
    "408": "the body did not come in time",
    "409": "it contradicts what is stored",
    "413": "the body is too large",
    "429": "too many calls wait already; Retry-After says when to come again",
    "502": "no worker makes progress with it",
    "503": "no worker is available",
}
_HEADERS = (
    ("X-Trajectory-Id", {"type": "string", "maxLength": 256}, "calls of one trajectory go where its prefix is cached"),
    ("X-Turn-Index", {"type": "string", "pattern": "^[0-9]{1,9}$"}, "a turn that is stored already is given again"),
    ("X-Min-Weight-Version", {"type": "string"}, "only workers with these weights or newer ones take the call"),
)


def _schema(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _answers(name: str, codes: str, stream: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _schema(name)}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    out: dict[str, Any] = {"200": {"description": "done", "content": content}}
    return out | _failures(codes)


def _failures(codes: str) -> dict[str, Any]:
    schema = {"application/json": {"schema": _schema("ErrorAnswer")}}
    return {code: {"description": _ERRORS[code], "content": schema} for code in codes.split()}


def _operation(
    summary: str, answers: dict[str, Any], body: str = "", parameters: Any = (), guarded: bool = True
) -> dict[str, Any]:
    out: dict[str, Any] = {"summary": summary, "responses": answers, "security": [{"key": []}] if guarded else []}
    if body:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
    if parameters:
        out["parameters"] = list(parameters)
    return out


def _document() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    headers = [{"name": n, "in": "header", "schema": s, "description": d} for n, s, d in _HEADERS]
    calls = "400 401 404 408 409 413 429 502 503"
    url = {"name": "url", "in": "query", "required": True, "schema": {"type": "string"}}
    name = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,99}$"},
    }
    plain = {"200": {"description": "done"}}
    text = {"200": {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    states = "ProxyState"
    paths: dict[str, Any] = {
        "/v1/completions": {
            "post": _operation("Complete a prompt", _answers("Completion", calls, True), "CompletionRequest", headers)
        },
        "/v1/chat/completions": {
            "post": _operation("Go on with a chat", _answers("ChatCompletion", calls, True), "ChatRequest", headers)
        },
        "/v1/models": {"get": _operation("What the workers serve", _answers("Models", "401"))},
        "/health": {"get": _operation("Whether there is a worker", plain | _failures("503"), guarded=False)},
        "/metrics": {"get": _operation("Prometheus metrics", text, guarded=False)},
        "/coserve/v1/workers": {
            "get": _operation("What the proxy knows of its workers", _answers(states, "401")),
            "post": _operation("Use one more worker", _answers(states, "400 401 408 413"), "WorkerRequest"),
            "delete": _operation("Use a worker no longer", _answers(states, "401 404"), "", [url]),
        },
        "/coserve/v1/trajectories/{id}": {
            "get": _operation("A stored trajectory", _answers("Trajectory", "401 404"), "", [name]),
            "put": _operation(
                "Begin a trajectory", _answers("Trajectory", "400 401 404 408 409 413"), "TrajectoryBegin", [name]
            ),
        },
        "/coserve/v1/trajectories/{id}/end": {
            "post": _operation(
                "End a trajectory", _answers("Trajectory", "400 401 404 408 409 413"), "TrajectoryEnd", [name]
            )
        },
        "/coserve/v1/weights": {
            "post": _operation("Publish weights", _answers(states, "400 401 408 409 413"), "Publication")
        },
        "/coserve/v1/step": {"post": _operation("Announce an RL step", _answers(states, "401"))},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-coserve rollout proxy", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


DOCUMENT: bytes = msgspec.json.encode(_document())
