"""From an OpenAI body to what the engines are asked: tokens, sampling parameters, and how their text ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from rl_driver.api.openai import ChatRequest, CompletionRequest, StreamOptions
from rl_driver.proxy.continuation import OverloadedError
from rl_driver.proxy.fleet import Fleet
from rl_driver.proxy.member import Member
from rl_driver.proxy.text import TextTokenizer
from rl_driver.proxy.upstream import GenerateRequest, RefusedError

logger = logging.getLogger("coserve.proxy")

_RENDER_BOUND_S = 30.0
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
# Fields of a completion that are sampling parameters of the same name.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
)
# Sampling parameters that the proxy decides or carries out itself.
_OWN = ("n", "stop", "include_stop_str_in_output", "max_tokens", "min_tokens", "logprobs", "detokenize", "output_kind")
_READ_HERE = frozenset(CompletionRequest.__struct_fields__)

T = TypeVar("T")


@dataclass(slots=True)
class Plan:
    """A call, whichever API it came by. Choice `i` is sample `i % n` of prompt `i // n`."""

    call_id: str
    created: int
    model: str
    prompts: list[list[int]]
    n: int
    max_tokens: list[int]  # of each prompt
    min_tokens: int
    logprobs: int | None  # asked of the engines
    sampling: dict[str, Any]
    show_logprobs: bool = False
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    user: str | None = None
    priority: int = 0
    tools: dict[str, Any] | None = None  # the chat's body, where the answer may hold tool calls

    @property
    def choices(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.n

    def request(self, index: int) -> GenerateRequest:
        """What choice `index` asks of an engine."""
        sampling = self.sampling
        if sampling.get("seed") is not None and self.n > 1:
            sampling = {**sampling, "seed": sampling["seed"] + index % self.n}
        prompt = index // self.n
        return GenerateRequest(
            tuple(self.prompts[prompt]),
            self.max_tokens[prompt],
            min(self.min_tokens, self.max_tokens[prompt]),
            self.logprobs,
            sampling,
            self.priority,
        )


def convert(data: Any, to: type[T]) -> T:
    """Check a body. Raises RefusedError, which names the field."""
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError as exc:
        raise RefusedError(400, str(exc)) from None


def decode(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises RefusedError."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RefusedError(400, f"the body is no JSON: {exc}") from None
    if not isinstance(data, dict):
        raise RefusedError(400, "the body must be a JSON object")
    return data


class Planner:
    """Makes plans; asks workers to render what only they know: chat templates and vLLM's rarer parameters."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, tokenizer_name: str | None) -> None:
        self._fleet, self._session, self._name = fleet, session, tokenizer_name
        self._tokenizer: TextTokenizer | None = None
        self._tokenizer_of = ""  # the name that it was loaded by, also when there is none of that name
        self._loading = asyncio.Lock()
        self._turn = 0

    def tokenizer(self) -> TextTokenizer | None:
        """The workers' tokenizer; None: there is none that could be loaded here, so only token ids go in and out."""
        return self._tokenizer

    async def _load_tokenizer(self) -> None:
        """Have the tokenizer there; off the event loop, for it may take seconds."""
        name = self._name or next((m.root for m in self._fleet.members.values() if m.root), "")
        if name == self._tokenizer_of:
            return
        async with self._loading:
            if name == self._tokenizer_of:
                return
            try:
                self._tokenizer = await asyncio.to_thread(TextTokenizer.load, name)
            except ValueError as exc:
                logger.warning("text is neither taken nor given, only token ids: %s", exc)
                self._tokenizer = None
            self._tokenizer_of = name

    async def completion(self, data: dict[str, Any]) -> Plan:
        """Plan of `POST /v1/completions`.

        Raises:
            RefusedError: the request is at fault.
            OverloadedError: there is no worker to ask.
        """
        body = convert(data, CompletionRequest)
        await self._load_tokenizer()
        worker = self._worker(body.model)
        prompts = self._prompts(body.prompt)
        if body.echo and body.logprobs is not None:
            raise RefusedError(400, "echo together with logprobs is not offered: leave one of them out")
        if data.keys() <= _READ_HERE:
            sampling = dict(worker.sampling or {})
            sampling |= {k: v for k in _SAMPLING if (v := getattr(body, k)) is not None}
        else:
            probe = {**data, "prompt": prompts[0], "model": worker.models[0], "stream": False, "stream_options": None}
            rendered = await self._render("/v1/completions/render", {**probe, "echo": False, "n": 1})
            sampling = rendered[0]["sampling_params"]
        limit = body.max_tokens or _COMPLETION_TOKENS
        plan = self._plan(worker, "cmpl", prompts, [limit] * len(prompts), sampling, body)
        plan.min_tokens, plan.logprobs, plan.echo = body.min_tokens, body.logprobs, body.echo
        plan.show_logprobs = body.logprobs is not None
        plan.stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        plan.include_stop, plan.skip_special = body.include_stop_str_in_output, body.skip_special_tokens
        plan.priority = body.priority
        self._check(plan, worker)
        return plan

    async def chat(self, data: dict[str, Any]) -> Plan:
        """Plan of `POST /v1/chat/completions`; raises as `completion` does."""
        body = convert(data, ChatRequest)
        await self._load_tokenizer()
        worker = self._worker(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError(400, "top_logprobs needs logprobs: true beside it")
        probe = {**data, "model": worker.models[0], "stream": False, "stream_options": None, "n": 1}
        rendered = await self._render("/v1/chat/completions/render", probe)
        if rendered.get("features"):
            raise RefusedError(400, "only text may be in messages: other content cannot go on at another engine")
        prompt, sampling = rendered["token_ids"], rendered["sampling_params"]
        limit = body.max_completion_tokens or body.max_tokens or max(1, worker.max_model_len - len(prompt))
        plan = self._plan(worker, "chatcmpl", [prompt], [limit], sampling, body)
        plan.min_tokens = sampling.get("min_tokens") or 0
        plan.logprobs = (body.top_logprobs or 0) if body.logprobs else None
        plan.show_logprobs = bool(body.logprobs)
        plan.stops = tuple(sampling.get("stop") or ())
        plan.include_stop = bool(sampling.get("include_stop_str_in_output"))
        plan.skip_special = sampling.get("skip_special_tokens", True)
        plan.tools = data if body.tools and data.get("tool_choice") != "none" else None
        self._check(plan, worker)
        return plan

    async def derender(self, plan: Plan, index: int, token_ids: Sequence[int], finish: str) -> dict[str, Any]:
        """The message of a chat's answer, with its tool calls, as vLLM reads them."""
        assert plan.tools is not None
        choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": finish}
        body = {
            "generate_response": {"request_id": plan.call_id, "choices": [choice]},
            "chat_request": {**plan.tools, "model": self._worker(None).models[0], "stream": False},
            "prompt_token_ids": plan.prompts[index // plan.n],
        }
        body["chat_request"].pop("stream_options", None)
        answer = await self._render("/v1/chat/completions/derender", body)
        return answer["choices"][0]

    # ---- internals

    def _plan(
        self,
        worker: Member,
        prefix: str,
        prompts: list[list[int]],
        limits: list[int],
        sampling: dict[str, Any],
        body: CompletionRequest | ChatRequest,
    ) -> Plan:
        if sampling.get("prompt_logprobs") is not None:
            raise RefusedError(400, "prompt_logprobs are not offered: ask an engine itself")
        return Plan(
            call_id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model or worker.models[0],
            prompts=prompts,
            n=body.n,
            max_tokens=limits,
            min_tokens=0,
            logprobs=None,
            sampling={k: v for k, v in sampling.items() if k not in _OWN},
            return_token_ids=bool(body.return_token_ids),
            stream=bool(body.stream),
            stream_options=body.stream_options or StreamOptions(),
            user=body.user,
        )

    def _check(self, plan: Plan, worker: Member) -> None:
        longest = worker.max_model_len
        for prompt, limit in zip(plan.prompts, plan.max_tokens, strict=True):
            if longest and len(prompt) + limit > longest:
                raise RefusedError(
                    400,
                    f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together more than the "
                    f"{longest} tokens of {plan.model}: shorten one of them",
                )
        if plan.choices > 256:
            raise RefusedError(400, f"{plan.choices} answers in one call are too many: ask for 256 at most")
        if plan.stops and self.tokenizer() is None:
            raise RefusedError(400, "stop strings need a tokenizer: start the proxy with --tokenizer FOLDER")

    def _worker(self, model: str | None) -> Member:
        """Whose model and defaults count: the usable worker with the shortest context, so that any may take over."""
        usable = self._fleet.usable()
        names = {name for m in self._fleet.members.values() for name in m.models}
        if model is not None and names and model not in names:
            raise RefusedError(404, f"there is no model {model!r}; the workers serve {', '.join(sorted(names))}")
        if not usable:
            known = [m for m in self._fleet.members.values() if m.models]
            if not known:
                raise OverloadedError("no worker has come up yet", 1.0, 503)
            usable = known  # they may come back while the call waits
        return min(usable, key=lambda m: m.max_model_len)

    def _prompts(self, prompt: str | Sequence[int | str | list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        kinds = {type(p) for p in prompt}
        if kinds == {int}:
            return [list(prompt)]  # type: ignore[arg-type]
        if kinds == {str}:
            return [self._encode(p) for p in prompt]  # type: ignore[arg-type]
        if kinds == {list} and all(prompt):
            return list(prompt)  # type: ignore[arg-type]
        raise RefusedError(400, "prompt must be a text, a list of texts, token ids, or a list of lists of token ids")

    def _encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer()
        if tokenizer is None:
            raise RefusedError(400, "the proxy has no tokenizer for text: give token ids, or start it with --tokenizer")
        ids = tokenizer.encode(text)
        if not ids:
            raise RefusedError(400, "the prompt is empty")
        return ids

    async def _render(self, path: str, body: dict[str, Any]) -> Any:
        """Ask a worker, and another one if it fails."""
        why = "no worker is available"
        usable = self._fleet.usable()
        self._turn += 1
        for i in range(min(3, len(usable))):
            worker = usable[(self._turn + i) % len(usable)]
            bound = aiohttp.ClientTimeout(total=_RENDER_BOUND_S, sock_connect=3.0)
            try:
                async with self._session.post(
                    worker.url + path, json=body, headers=self._fleet.headers, timeout=bound
                ) as answer:
                    data = await answer.read()
                    if answer.status == 200:
                        return msgspec.json.decode(data)
                    if answer.status in (400, 404, 422):
                        raise RefusedError(400, _message(data))
                    why = f"HTTP {answer.status}"
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as exc:
                why = type(exc).__name__
        raise OverloadedError(f"no worker could read the request: {why}", 1.0, 503)


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")
