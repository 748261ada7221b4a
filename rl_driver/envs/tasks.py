"""The tasks by the names that configurations give them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_driver.envs.arithmetic import Arithmetic
from rl_driver.envs.base import Task
from rl_driver.envs.frozen_lake import FrozenLake

if TYPE_CHECKING:
    from rl_driver.api.train_config import ArithmeticConfig, FrozenLakeConfig


def make_task(config: FrozenLakeConfig | ArithmeticConfig) -> Task:
    """The task of a job."""
    kinds = {"frozen_lake": FrozenLake, "arithmetic": Arithmetic}
    return kinds[config.name](**config.model_dump(exclude={"name"}))
