"""What a store of trajectories does; `sqlite` is the default one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from rl_driver.api.trajectory import State, Trajectory, Turn


class ConflictError(Exception):
    """What is to be stored contradicts what is stored already."""


class TrajectoryStore(Protocol):
    """Durable once a call has returned, whatever becomes of the process. Calls may be repeated."""

    def begin(self, trajectory_id: str, group: str, task: dict[str, Any]) -> None:
        """Begin a trajectory; again with the same group and task: nothing happens, else ConflictError."""
        ...

    def add_turn(self, trajectory_id: str, turn: Turn) -> None:
        """Add the next turn; one that is stored already is no error when it is the same, else ConflictError.

        Raises:
            KeyError: there is no such trajectory.
            ValueError: the turn's parts do not line up.
        """
        ...

    def end(self, trajectory_id: str, state: State, reward: float | None) -> None:
        """A trajectory is over. Raises KeyError, or ConflictError when it ended otherwise."""
        ...

    def get(self, trajectory_id: str) -> Trajectory:
        """A trajectory with all its turns. Raises KeyError."""
        ...

    def unfinished(self) -> Iterator[Trajectory]:
        """Trajectories that are to go on after a restart, in the order in which they began."""
        ...

    def close(self) -> None:
        """Give the store back."""
        ...
