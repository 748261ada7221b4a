"""The bodies of OpenAI's completion API that the proxy takes, with vLLM's extensions, and what it answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rl_driver.api.trajectory import VersionSpan

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Choices = Annotated[int, Meta(ge=1, le=256)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Prompt = Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(msgspec.Struct):
    """`POST /v1/completions`. Fields that are not listed here are read by the workers, as vLLM does."""

    prompt: str | Prompt
    model: str | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    n: Choices = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool = False
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


class ChatRequest(msgspec.Struct):
    """`POST /v1/chat/completions`: what the proxy itself reads; the workers render the whole body."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    n: Choices = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    return_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None


class WorkerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /coserve/v1/workers`: use one more worker."""

    url: Annotated[str, Meta(max_length=512)]
    kind: Literal["dedicated", "borrowed"]


class Publication(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /coserve/v1/weights`: all workers are to use version `version` of the relay at `url`, under a name."""

    url: Annotated[
        str,
        Meta(max_length=300, pattern=r"^(http://[A-Za-z0-9.:\[\]-]+|mooncake://[A-Za-z0-9.:-]+/[A-Za-z0-9._-]+)$"),
    ]
    version: Annotated[int, Meta(ge=0, lt=10**15)]
    key: Annotated[str, Meta(max_length=200)] = ""
    prefix: Annotated[str, Meta(max_length=64, pattern=r"^[\x21-\x7e]*$")] = "step-"
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 0.0  # for a version that is still on its way to the relay

    @property
    def name(self) -> str:
        """What the version is called in answers."""
        return f"{self.prefix}{self.version}"


class TrajectoryBegin(msgspec.Struct, forbid_unknown_fields=True):
    """`PUT /coserve/v1/trajectories/ID`: its group (those that are compared with each other) and what it is about."""

    group: Annotated[str, Meta(min_length=1, max_length=256)]
    task: dict[str, Any] = {}


class TrajectoryEnd(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /coserve/v1/trajectories/ID/end`."""

    state: Literal["done", "failed"]
    reward: Annotated[float, Meta(ge=-1e30, le=1e30)] | None = None


class WorkerState(msgspec.Struct):
    """A worker as the proxy sees it."""

    url: str
    kind: Literal["dedicated", "borrowed"]
    usable: bool
    turns: int
    tokens: int  # that have come from it
    version: str
    held: bool
    kv_usage: float | None
    slack_ms: float | None  # borrowed: until serving's next deadline, at its last decision
    pause_s: float | None  # dedicated: for which its last change of weights kept it from generating
    wrong: str


class ProxyState(msgspec.Struct):
    """`GET /coserve/v1/workers`."""

    workers: list[WorkerState]
    queued: int
    running: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Error(msgspec.Struct):
    """What went wrong, and what to do."""

    message: str
    type: str
    code: int
    param: str | None = None


class ErrorAnswer(msgspec.Struct):
    """An answer that is none."""

    error: Error


class CompletionChoice(msgspec.Struct):
    """An answer, or the next part of one."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None


class Completion(msgspec.Struct):
    """Answer of `POST /v1/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message, or the next part of one."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct, omit_defaults=True):
    """An answer (`message`), or the next part of one (`delta`)."""

    index: int
    message: ChatMessage | msgspec.UnsetType = msgspec.UNSET
    delta: ChatMessage | msgspec.UnsetType = msgspec.UNSET
    logprobs: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    finish_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of `POST /v1/chat/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(msgspec.Struct):
    """A model that workers serve."""

    id: str
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "vllm-coserve"
    created: int = 0


class Models(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"
