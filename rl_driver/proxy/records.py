"""Saves finished turns, one after the other, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_driver.api.trajectory import State, Trajectory, Turn, VersionSpan
from rl_driver.proxy.answers import Part
from rl_driver.proxy.upstream import RefusedError
from rl_driver.store.base import ConflictError
from rl_driver.store.sqlite import SqliteStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A finished call, before its place in the trajectory is known. `index` None: it is the next turn."""

    trajectory_id: str
    index: int | None
    prompt: list[int]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str

    @classmethod
    def of(cls, trajectory_id: str, index: int | None, prompt: list[int], parts: list[Part]) -> StoredTurn:
        """From all parts of an answer."""
        return cls(
            trajectory_id,
            index,
            prompt,
            tuple(t for p in parts for t in p.token_ids),
            tuple(x for p in parts for x in p.logprobs),
            tuple(parts[-1].spans),
            parts[-1].finish_reason or "stop",
        )


class Records:
    """A trajectory store behind one thread."""

    def __init__(self, path: str) -> None:
        """Open the store; see `SqliteStore` for what it raises."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coserve-store")
        self._store = self._thread.submit(SqliteStore, Path(path)).result()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def add(self, turn: StoredTurn) -> None:
        """Durable when it returns. Raises RefusedError where it contradicts what is stored."""
        await self._run(lambda: self._add(turn))

    async def find(self, trajectory_id: str, index: int, prompt: list[int]) -> Turn | None:
        """A turn that was finished before.

        Raises:
            RefusedError: it was finished with another prompt.
        """
        return await self._run(lambda: self._find(trajectory_id, index, prompt))

    async def begin(self, trajectory_id: str, group: str, task: dict[str, Any]) -> None:
        """Begin a trajectory; again with the same group and task: nothing happens. Raises RefusedError."""
        await self._run(lambda: self._checked(trajectory_id, lambda: self._store.begin(trajectory_id, group, task)))

    async def end(self, trajectory_id: str, state: State, reward: float | None) -> None:
        """A trajectory is over. Raises RefusedError."""
        await self._run(lambda: self._checked(trajectory_id, lambda: self._store.end(trajectory_id, state, reward)))

    async def get(self, trajectory_id: str) -> Trajectory:
        """A trajectory with its turns. Raises RefusedError."""
        return await self._run(lambda: self._checked(trajectory_id, lambda: self._store.get(trajectory_id)))

    async def close(self) -> None:
        """Give the file back."""
        await self._run(self._store.close)
        self._thread.shutdown()

    def _checked(self, trajectory_id: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ConflictError as exc:
            raise RefusedError(409, str(exc)) from None
        except KeyError:
            raise RefusedError(404, f"there is no trajectory {trajectory_id!r}") from None

    def _add(self, turn: StoredTurn) -> None:
        try:
            trajectory = self._store.get(turn.trajectory_id)
        except KeyError:  # nobody has begun it: it is a group of its own
            self._store.begin(turn.trajectory_id, turn.trajectory_id, {})
            trajectory = self._store.get(turn.trajectory_id)
        index = len(trajectory.turns) if turn.index is None else turn.index
        before = trajectory.token_ids(index)
        kept = _common(before, turn.prompt)
        new = tuple(turn.prompt[kept:])
        record = Turn(
            index, new, turn.output, turn.logprobs, turn.spans, turn.finish_reason, kept if kept < len(before) else None
        )
        self._checked(turn.trajectory_id, lambda: self._store.add_turn(turn.trajectory_id, record))

    def _find(self, trajectory_id: str, index: int, prompt: list[int]) -> Turn | None:
        try:
            trajectory = self._store.get(trajectory_id)
        except KeyError:
            return None
        if index >= len(trajectory.turns):
            return None
        turn = trajectory.turns[index]
        if trajectory.prompt(index) != prompt:
            raise RefusedError(409, f"turn {index} of {trajectory_id!r} was finished with another prompt")
        return turn


def _common(before: list[int], prompt: list[int]) -> int:
    """Tokens with which both begin."""
    count = min(len(before), len(prompt))
    if before[:count] == prompt[:count]:
        return count
    return next(i for i in range(count) if before[i] != prompt[i])
