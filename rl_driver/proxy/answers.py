"""From chunks of tokens to the parts of OpenAI's answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rl_driver.api.openai import ChatChoice, ChatCompletion, ChatMessage, Completion, CompletionChoice, Usage
from rl_driver.api.trajectory import VersionSpan
from rl_driver.proxy.continuation import Answer
from rl_driver.proxy.planning import Plan
from rl_driver.proxy.text import StopStrings, TextTokenizer
from rl_driver.proxy.upstream import Chunk


@dataclass(slots=True)
class Part:
    """The next part of a choice; `spans` cover all of its tokens, and come with the finish reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top: list[Any]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    spans: list[VersionSpan] = field(default_factory=list)


class Choice:
    """One answer of a call as it grows."""

    def __init__(self, plan: Plan, index: int, tokenizer: TextTokenizer | None) -> None:
        self.plan, self.index = plan, index
        self.answer = Answer(plan.request(index))
        self.count = 0  # tokens, up to the one that ended it
        self._text = tokenizer.stream(self.answer.request.token_ids, plan.skip_special) if tokenizer else None
        self._stops = StopStrings(plan.stops, plan.include_stop)

    async def parts(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Part]:
        """The parts, the last one with a finish reason."""
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                part = self._part(chunk)
                yield part
                if part.finish_reason:
                    return

    def _part(self, chunk: Chunk) -> Part:
        text, stopped = "", None
        taken = len(chunk.token_ids)
        if self._text is not None:
            if not self.plan.stops:
                text = "".join([self._text.step(t) for t in chunk.token_ids])
            else:
                text, stopped, taken = self._until_stop(chunk)
        self.count += taken
        part = Part(
            self.index,
            text,
            list(chunk.token_ids[:taken]),
            list(chunk.logprobs[:taken]),
            list(chunk.top[:taken]),
            "stop" if stopped else chunk.finish_reason,
            stopped or chunk.stop_reason,
        )
        if part.finish_reason:
            if not stopped:
                part.text += self._stops.rest()
            part.spans = self.answer.spans(self.count)
        return part

    def _until_stop(self, chunk: Chunk) -> tuple[str, str | None, int]:
        out = ""
        for i, token_id in enumerate(chunk.token_ids):
            assert self._text is not None
            new = self._text.step(token_id)
            if self.count + i + 1 <= self.plan.min_tokens:
                out += new  # vLLM looks for no stop string in these either
                continue
            more, stopped = self._stops.add(new)
            out += more
            if stopped:
                return out, stopped, i + 1
        return out, None, len(chunk.token_ids)


class Formatter:
    """The parts of a call as events of a stream, or all of them as one answer. `token` gives a token's text."""

    def __init__(self, plan: Plan, tokenizer: TextTokenizer | None) -> None:
        self.plan = plan
        self._token: Callable[[int], str] = tokenizer.token if tokenizer else lambda t: f"token_id:{t}"
        self._tokenizer = tokenizer
        self._counts = [0] * plan.choices
        self._offsets = [0] * plan.choices

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, out = sum(map(len, self.plan.prompts)), sum(self._counts)
        return Usage(prompt, out, prompt + out)

    def opening(self) -> list[Any]:
        """Events before the first tokens."""
        return []

    def event(self, part: Part) -> Any:
        """A part as an event."""
        raise NotImplementedError

    def closing(self) -> list[Any]:
        """Events behind the last tokens."""
        return [self._usage_event()] if self.plan.stream_options.include_usage else []

    def whole(self, parts: list[list[Part]]) -> Any:
        """All parts, by choice, as one answer."""
        raise NotImplementedError

    def _usage_event(self) -> Any:
        raise NotImplementedError

    def _running_usage(self) -> Usage | None:
        return self.usage() if self.plan.stream_options.continuous_usage_stats else None

    def _count(self, part: Part) -> None:
        self._counts[part.index] += len(part.token_ids)


class CompletionFormatter(Formatter):
    """`/v1/completions`."""

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(self.plan.call_id, self.plan.created, self.plan.model, choices, usage=usage)

    def event(self, part: Part) -> Completion:
        first = not self._counts[part.index]
        self._count(part)
        return self._answer([self._choice(part, first)], self._running_usage())

    def _usage_event(self) -> Completion:
        return self._answer([], self.usage())

    def whole(self, parts: list[list[Part]]) -> Completion:
        for group in parts:
            for part in group:
                self._count(part)
        return self._answer([self._choice(_joined(group), True) for group in parts], self.usage())

    def _choice(self, part: Part, first: bool) -> CompletionChoice:
        plan = self.plan
        choice = CompletionChoice(part.index, part.text, finish_reason=part.finish_reason, stop_reason=part.stop_reason)
        prompt = plan.prompts[part.index // plan.n]
        if first and plan.echo and self._tokenizer:
            choice.text = self._tokenizer.decode(prompt, plan.skip_special) + choice.text
        if plan.show_logprobs:
            choice.logprobs = self._logprobs(part)
        if plan.return_token_ids:
            choice.token_ids = part.token_ids
            choice.prompt_token_ids = prompt if first else None
        if part.finish_reason:
            choice.weight_versions = part.spans
        return choice

    def _logprobs(self, part: Part) -> dict[str, Any]:
        tokens = [self._token(t) for t in part.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[part.index])
            self._offsets[part.index] += len(token)
        top = [{self._token(t): p for t, p in entries} for entries in part.top] if self.plan.logprobs else None
        return {"tokens": tokens, "token_logprobs": part.logprobs, "top_logprobs": top, "text_offset": offsets}


class ChatFormatter(Formatter):
    """`/v1/chat/completions`."""

    def _event(self, choices: list[ChatChoice], usage: Usage | None = None) -> ChatCompletion:
        plan = self.plan
        return ChatCompletion(plan.call_id, plan.created, plan.model, choices, "chat.completion.chunk", usage)

    def opening(self) -> list[ChatCompletion]:
        events = [
            self._event([ChatChoice(i, delta=ChatMessage("assistant", ""), logprobs=None, finish_reason=None)])
            for i in range(self.plan.choices)
        ]
        if self.plan.return_token_ids:
            events[0].prompt_token_ids = self.plan.prompts[0]
        return events

    def event(self, part: Part, message: dict[str, Any] | None = None) -> ChatCompletion:
        self._count(part)
        choice = self._choice(part)
        choice.delta = _message(message) if message else ChatMessage(content=part.text)
        return self._event([choice], self._running_usage())

    def _usage_event(self) -> ChatCompletion:
        return self._event([], self.usage())

    def whole(self, parts: list[list[Part]], messages: list[dict[str, Any]] | None = None) -> ChatCompletion:
        choices = []
        for i, group in enumerate(parts):
            part = _joined(group)
            self._count(part)
            choice = self._choice(part)
            choice.message = ChatMessage("assistant", part.text)
            if messages:
                choice.message = _message(messages[i]["message"])
                choice.finish_reason = messages[i].get("finish_reason") or part.finish_reason
            choices.append(choice)
        plan = self.plan
        answer = ChatCompletion(plan.call_id, plan.created, plan.model, choices, "chat.completion", self.usage())
        if plan.return_token_ids:
            answer.prompt_token_ids = plan.prompts[0]
        return answer

    def _choice(self, part: Part) -> ChatChoice:
        choice = ChatChoice(part.index, finish_reason=part.finish_reason, stop_reason=part.stop_reason, logprobs=None)
        if self.plan.show_logprobs:
            choice.logprobs = {"content": [self._logprob(part, i) for i in range(len(part.token_ids))]}
        if self.plan.return_token_ids:
            choice.token_ids = part.token_ids
        if part.finish_reason:
            choice.weight_versions = part.spans
        return choice

    def _logprob(self, part: Part, i: int) -> dict[str, Any]:
        entry = self._entry(part.token_ids[i], part.logprobs[i])
        top = part.top[i][: self.plan.logprobs] if self.plan.logprobs else ()
        return {**entry, "top_logprobs": [self._entry(t, p) for t, p in top]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def _message(message: dict[str, Any]) -> ChatMessage:
    return ChatMessage(
        message.get("role") or "assistant",
        message.get("content"),
        message.get("reasoning") or message.get("reasoning_content"),
        message.get("tool_calls") or None,
    )


def _joined(parts: list[Part]) -> Part:
    out = Part(parts[0].index, "".join([p.text for p in parts]), [], [], [])
    for part in parts:
        out.token_ids += part.token_ids
        out.logprobs += part.logprobs
        out.top += part.top
    last = parts[-1]
    out.finish_reason, out.stop_reason, out.spans = last.finish_reason, last.stop_reason, last.spans
    return out


async def merged(sources: list[AsyncIterator[Part]]) -> AsyncIterator[Part]:
    """Parts of several sources as they come; the first error ends them all."""
    queue: asyncio.Queue[Part | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(source: AsyncIterator[Part]) -> None:
        try:
            async with aclosing(source) as parts:  # type: ignore[type-var]
                async for part in parts:
                    await queue.put(part)
            await queue.put(None)
        except Exception as exc:  # recovery: raised again where the parts are read
            await queue.put(exc)

    tasks = [asyncio.create_task(pump(s)) for s in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(*tasks, return_exceptions=True)
