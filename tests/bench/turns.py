"""Rollouts as an agent makes them: trajectories of several turns, each with the whole text so far as its prompt.

Between two turns the environment takes its time and answers with some tokens. Groups of trajectories share a first
prompt, as GRPO samples them. What ends a turn early (pages taken back, sidecar killed) is kept, and the turn goes on
from prompt and tokens so far, as a rollout scheduler does.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class TurnShape:
    """Sizes of trajectories; pairs are (least, most), in tokens unless the name says otherwise."""

    group: int = 8  # trajectories that share a first prompt
    turns: int = 4
    prompt: tuple[int, int] = (96, 256)
    output: tuple[int, int] = (24, 96)  # of a turn
    observation: tuple[int, int] = (8, 32)  # the environment's answer
    wait_s: tuple[float, float] = (0.1, 1.5)  # what the environment takes for it


@dataclass(slots=True)
class TurnTotals:
    """Counts of a phase. Tokens are counted as they stream."""

    tokens: int = 0
    trajectories: int = 0
    turns_s: list[float] = field(default_factory=list)  # seconds from a turn's request to its last token
    aborts: dict[str, int] = field(default_factory=dict)
    errors: int = 0  # connection refused or lost: the sidecar is away
    refused: int = 0  # HTTP 413: larger than the budget now


class TurnLoad:
    """A closed loop of `concurrent` trajectories on a rollout engine, until `stop` is set."""

    def __init__(
        self, url: str, model: str, concurrent: int, vocab: int, seed: int, shape: TurnShape | None = None
    ) -> None:
        self._shape = shape or TurnShape()
        self.totals = TurnTotals()
        self.stop = asyncio.Event()
        self._url, self._model, self._concurrent, self._vocab = url, model, concurrent, vocab
        self._rng = random.Random(seed)
        self._group: list[list[int]] = []

    async def run(self) -> None:
        """Keep the trajectories going; returns soon after `stop`."""
        timeout = aiohttp.ClientTimeout(total=600, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [asyncio.create_task(self._trajectories(session)) for _ in range(self._concurrent)]
            await self.stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _trajectories(self, session: aiohttp.ClientSession) -> None:
        rng, shape = self._rng, self._shape
        while True:
            if not self._group:
                self._group = [self._made_up(shape.prompt)] * shape.group
            text = list(self._group.pop())
            for turn in range(shape.turns):
                text += await self._turn(session, text, rng.randint(*shape.output))
                if turn < shape.turns - 1:
                    await asyncio.sleep(rng.uniform(*shape.wait_s))
                    text += self._made_up(shape.observation)
            self.totals.trajectories += 1

    def _made_up(self, tokens: tuple[int, int]) -> list[int]:
        length = self._rng.randint(*tokens)
        return [self._rng.randrange(3, self._vocab) for _ in range(length)]

    async def _turn(self, session: aiohttp.ClientSession, prompt: list[int], output_tokens: int) -> list[int]:
        out: list[int] = []
        start = time.monotonic()
        while len(out) < output_tokens:
            try:
                await self._stream(session, prompt + out, output_tokens - len(out), out)
            except (aiohttp.ClientError, TimeoutError, OSError):
                self.totals.errors += 1
                await asyncio.sleep(_RETRY_S)
        self.totals.turns_s.append(time.monotonic() - start)
        return out

    async def _stream(self, session: aiohttp.ClientSession, prompt: list[int], tokens: int, out: list[int]) -> None:
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                if response.status == 413:
                    self.totals.refused += 1
                else:
                    self.totals.errors += 1
                await asyncio.sleep(_RETRY_S)
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]), out)

    def _take(self, chunk: dict[str, Any], out: list[int]) -> None:
        if "error" in chunk:
            self.totals.errors += 1
            return
        for choice in chunk.get("choices", ()):
            tokens = choice.get("token_ids") or []
            out += tokens
            self.totals.tokens += len(tokens)
            if choice.get("finish_reason") == "abort":
                reason = str(choice.get("stop_reason"))
                self.totals.aborts[reason] = self.totals.aborts.get(reason, 0) + 1
