"""Environment workers as actors: they play groups of episodes against the rollout proxy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from rl_driver.api.train_config import TrainConfig
from rl_driver.api.trajectory import Trajectory
from rl_driver.envs.dialogue import Frame, load_tokenizer
from rl_driver.envs.rollout import Limits, Player, Sampling
from rl_driver.envs.tasks import make_task


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """A group to be played: `size` trajectories of the instance `seed`, with weights of at least `min_version`."""

    name: str
    seed: int
    size: int
    min_version: str


class EnvironmentRole:
    """Plays many groups at a time; one event loop."""

    def __init__(self, config_json: str, proxy_url: str, proxy_key: str) -> None:
        self._config = TrainConfig.model_validate_json(config_json)
        self._tokenizer = load_tokenizer(self._config.model)
        self._task = make_task(self._config.task)
        self._url, self._headers = proxy_url, {"Authorization": f"Bearer {proxy_key}"}
        self._player: Player | None = None

    async def play(self, order: GroupOrder) -> list[bytes]:
        """Play a group to its end; trajectories as MessagePack. Raises RolloutError."""
        if self._player is None:
            self._player = self._make_player()
        player = self._player
        sampling = Sampling(None, self._config.sampling.temperature, order.min_version)
        jobs = [
            player.play(f"{order.name}-{i}", order.name, self._task.episode(order.seed), sampling)
            for i in range(order.size)
        ]
        return [msgspec.msgpack.encode(t) for t in await asyncio.gather(*jobs)]

    def _make_player(self) -> Player:
        import aiohttp

        config = self._config
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), connector=aiohttp.TCPConnector(limit=0)
        )
        limits = Limits(config.sampling.answer_tokens)
        return Player(session, self._url, self._headers, self._tokenizer, Frame(**config.frame.model_dump()), limits)


def decode_group(data: list[bytes]) -> list[Trajectory]:
    """What `play` returns."""
    return [msgspec.msgpack.decode(d, type=Trajectory) for d in data]
