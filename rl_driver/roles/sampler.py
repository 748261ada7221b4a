"""Has groups of episodes played, as far ahead of learning as the staleness bound allows."""

from __future__ import annotations

import logging
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from rl_driver.api.train_config import TrainConfig
from rl_driver.policy.staleness import Staleness
from rl_driver.roles.environments import GroupOrder, decode_group
from rl_driver.training.groups import Group

logger = logging.getLogger("coserve.train")

_TRIES = 3
_WAIT_BOUND_S = 3600.0


class Sampler:
    """Orders groups of steps, first those of earlier steps, and gives them back as they are finished."""

    def __init__(self, config: TrainConfig, staleness: Staleness, actors: Any, runs: list[str], first: int) -> None:
        """`runs`: names of runs of this job, see `main.Job`; `first`: the step that it goes on with."""
        self._config, self._staleness, self._actors = config, staleness, actors
        self._runs, self._first, self._next = runs, first, first
        self._waiting: deque[tuple[int, GroupOrder, int]] = deque()  # (step, order, tries)
        self._playing: dict[Any, tuple[int, GroupOrder, int]] = {}
        self._finished: dict[int, list[Group]] = defaultdict(list)
        self._ordered: dict[int, int] = defaultdict(int)

    def prefixes(self, step: int) -> list[str]:
        """How names of weights begin whose samples a step may use."""
        runs = self._runs if step == self._first else self._runs[-1:]
        return [f"{run}-" for run in runs]

    def sample_up_to(self, step: int) -> None:
        """Have the groups of all steps up to this one played."""
        last = min(step, self._config.steps - 1)
        while self._next <= last:
            for _ in range(self._config.algorithm.groups):
                self._order(self._next)
            self._next += 1
        self._play()

    def replace(self, step: int) -> None:
        """A group of this step has taught nothing: have another one played, if the bound allows that."""
        algorithm = self._config.algorithm
        if self._ordered[step] < algorithm.groups * algorithm.dynamic_sampling.cap:
            self.play_again(step)

    def play_again(self, step: int) -> None:
        """Have one more group of this step played."""
        self._order(step, urgent=True)
        self._play()

    def groups_of(self, step: int) -> Iterator[Group]:
        """Groups of a step as they are finished, until none is left."""
        while True:
            while self._finished[step]:
                yield self._finished[step].pop()
            if not any(s == step for s, *_ in (*self._playing.values(), *self._waiting)):
                return
            self._collect()

    def _order(self, step: int, urgent: bool = False) -> None:
        number = self._ordered[step]
        self._ordered[step] += 1
        run = self._runs[0] if step == self._first else self._runs[-1]
        name = f"{run}-s{step}-g{number}"
        seed = random.Random(f"{self._config.seed}/{step}/{number}").randrange(1 << 40)
        oldest = f"{self._staleness.oldest(step)}"
        order = step, GroupOrder(name, seed, self._config.algorithm.group_size, oldest), 0
        if urgent:
            self._waiting.appendleft(order)
        else:
            self._waiting.append(order)

    def _play(self) -> None:
        algorithm = self._config.algorithm
        most = max(1, self._config.sampling.concurrency // algorithm.group_size)
        while self._waiting and len(self._playing) < most:
            order = self._waiting.popleft()
            self._playing[self._actors.play(order[1])] = order

    def _collect(self) -> None:
        import ray

        done, _ = ray.wait(list(self._playing), num_returns=1, timeout=_WAIT_BOUND_S)
        if not done:
            raise RuntimeError(f"no group of episodes was finished within {_WAIT_BOUND_S:.0f} s")
        for reference in done:
            step, order, tries = self._playing.pop(reference)
            try:
                trajectories = decode_group(ray.get(reference))
            except ray.exceptions.RayError as exc:
                if tries + 1 >= _TRIES:
                    raise
                logger.warning("group %s is played again: %s", order.name, str(exc).splitlines()[-1])
                self._waiting.appendleft((step, order, tries + 1))
                continue
            self._finished[step].append(Group(trajectories, self._config.sampling.answer_tokens))
        self._play()
