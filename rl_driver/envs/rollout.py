"""Plays episodes: asks the rollout proxy for a trajectory's turns and tells the task what the policy says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from rl_driver.api.trajectory import Trajectory, Turn, VersionSpan
from rl_driver.envs.base import Episode
from rl_driver.envs.dialogue import Dialogue, Frame

_RETRY_S, _RETRY_MAX_S = 0.2, 5.0


class RolloutError(Exception):
    """The proxy refuses a turn, or did not answer it within the bound; the text says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a trajectory."""

    answer_tokens: int = 64  # of a turn
    context_tokens: int = 1 << 30  # a trajectory that would become longer ends as it is
    turn_s: float = 600.0  # until a turn must be answered, waits and retries included


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy is sampled. `min_version`: the name of the oldest weights that may answer."""

    model: str | None = None  # None: whatever the engines serve
    temperature: float = 1.0
    min_version: str = ""


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    weight_versions: list[VersionSpan]
    logprobs: dict[str, Any]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Player:
    """Plays episodes against one proxy; one event loop owns it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: dict[str, str],
        tokenizer: Tokenizer,
        frame: Frame,
        limits: Limits,
    ) -> None:
        """`headers` go with each call, such as the proxy's key."""
        self._session, self._url, self._headers = session, url, headers
        self._tokenizer, self._frame, self._limits = tokenizer, frame, limits
        self._stop_id = frame.stop_id(tokenizer)

    async def play(self, trajectory_id: str, group: str, episode: Episode, sampling: Sampling) -> Trajectory:
        """Play an episode to its end.

        Where the proxy has a store, turns that were finished before are given again, so that an episode that repeats
        (as those of one seed do) goes on where it was interrupted.

        Raises:
            RolloutError: a turn was refused, or not answered in time.
        """
        dialogue = Dialogue(self._tokenizer, self._frame)
        turns: list[Turn] = []
        observation, cut = episode.begin(), False
        while not observation.done:
            added = dialogue.observe(observation.text)
            room = self._limits.context_tokens - len(dialogue.token_ids)
            if room < 1:
                cut = True
                break
            tokens = min(room, self._limits.answer_tokens)
            choice = await self._turn(trajectory_id, len(turns), dialogue.token_ids, tokens, sampling)
            turns.append(
                Turn(
                    len(turns),
                    tuple(added),
                    tuple(choice.token_ids),
                    tuple(choice.logprobs["token_logprobs"]),
                    tuple(choice.weight_versions),
                    choice.finish_reason,
                )
            )
            cut = choice.finish_reason == "length"
            observation = episode.answer(dialogue.answered(choice.token_ids))
        reward = observation.reward if observation.done else 0.0
        return Trajectory(trajectory_id, group, {"cut": cut}, "done", reward, tuple(turns))

    async def _turn(
        self, trajectory_id: str, index: int, prompt: list[int], tokens: int, sampling: Sampling
    ) -> _Choice:
        body = {
            "model": sampling.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": [self._stop_id],
            "logprobs": 0,
            "return_token_ids": True,
        }
        headers = {**self._headers, "X-Trajectory-Id": trajectory_id, "X-Turn-Index": str(index)}
        if sampling.min_version:
            headers["X-Min-Weight-Version"] = sampling.min_version
        why, pause_s = "", _RETRY_S
        try:
            async with asyncio.timeout(self._limits.turn_s):
                while True:
                    try:
                        async with self._session.post(
                            f"{self._url}/v1/completions", json=body, headers=headers
                        ) as answer:
                            data = await answer.read()
                            if answer.status == 200:
                                return msgspec.json.decode(data, type=_Answer).choices[0]
                            why = f"HTTP {answer.status}: {data[:300].decode('utf-8', 'replace')}"
                            if answer.status not in (408, 429, 500, 502, 503, 504):
                                raise RolloutError(f"turn {index} of {trajectory_id}: {why}")
                    except aiohttp.ClientError as exc:  # the proxy is being started again, maybe
                        why = repr(exc)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _RETRY_MAX_S)
        except TimeoutError:
            bound_s = self._limits.turn_s
            raise RolloutError(
                f"turn {index} of {trajectory_id} was not answered within {bound_s:g} s: {why}"
            ) from None
