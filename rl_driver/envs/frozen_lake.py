"""FrozenLake (gymnasium) as text: find the way over a small grid to the goal without falling into a hole."""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache

from rl_driver.envs.base import Observation

_MOVES = "LDRU"  # gymnasium's actions 0 to 3
_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of each
_TRIES = 10_000


class FrozenLake:
    """Random maps that can be solved, with a random start; not slippery. Reward 1 at the goal, else 0."""

    def __init__(self, size: int = 4, frozen: float = 0.9, turns_max: int = 8) -> None:
        """`frozen`: probability of a cell to be no hole.

        Raises:
            ValueError: no map of these numbers can be solved.
        """
        if size < 2 or not 0 < frozen <= 1 or turns_max < 1:
            raise ValueError(f"no lake of size {size} with {frozen:.0%} ice can be crossed in {turns_max} turns")
        self.size, self.frozen, self.turns_max = size, frozen, turns_max

    def episode(self, seed: int) -> FrozenLakeEpisode:
        """See `Task`."""
        rng = random.Random(f"frozen-lake {seed}")
        for _ in range(_TRIES):
            grid = tuple(
                "".join("F" if rng.random() < self.frozen else "H" for _ in range(self.size)) for _ in range(self.size)
            )
            goal = rng.randrange(self.size), rng.randrange(self.size)
            if grid[goal[0]][goal[1]] != "F":
                continue
            near = [c for c, n in _distances(grid, goal).items() if 0 < n <= self.turns_max]
            if near:
                return FrozenLakeEpisode(grid, rng.choice(sorted(near)), goal, self.turns_max)
        raise ValueError(f"no lake of size {self.size} with {self.frozen:.0%} ice that can be crossed was found")

    def texts(self) -> list[str]:
        """See `Task`."""
        return [self.episode(-1 - i).begin().text for i in range(200)] + list(_MOVES)


class FrozenLakeEpisode:
    """One walk. The grid is shown with P for the player, and a line says what lies to the left, down, right and up."""

    def __init__(self, grid: tuple[str, ...], start: tuple[int, int], goal: tuple[int, int], turns_max: int) -> None:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        self._grid, self._goal, self._left = grid, goal, turns_max
        cells = [list(row) for row in grid]
        cells[goal[0]][goal[1]], cells[start[0]][start[1]] = "G", "S"
        self._cells = ["".join(row).replace("S", "F") for row in cells]
        self._env = FrozenLakeEnv(desc=["".join(row) for row in cells], is_slippery=False)
        state, _ = self._env.reset(seed=0)
        self._at = divmod(int(state), len(grid))

    def begin(self) -> Observation:
        """See `Episode`."""
        return Observation(self._text())

    def answer(self, text: str) -> Observation:
        """See `Episode`. One letter: L, D, R or U."""
        move = text.strip()
        if len(move) != 1 or move not in _MOVES:
            return Observation("", done=True)
        state, reward, ended, _, _ = self._env.step(_MOVES.index(move))
        self._at = divmod(int(state), len(self._grid))
        self._left -= 1
        done = bool(ended) or self._left == 0
        return Observation("" if done else self._text(), done, float(reward))

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """See `Episode`."""
        if rng.random() >= skill:
            return rng.choice(_MOVES)
        far = _distances(self._grid, self._goal)
        best = [m for m, cell in zip(_MOVES, self._around(), strict=True) if far.get(cell, 99) == far[self._at] - 1]
        return rng.choice(best)

    def _around(self) -> list[tuple[int, int]]:
        return [(self._at[0] + r, self._at[1] + c) for r, c in _STEPS]

    def _text(self) -> str:
        size = range(len(self._grid))
        rows = ["".join("P" if (r, c) == self._at else self._cells[r][c] for c in size) for r in size]
        around = ["#" if r not in size or c not in size else self._cells[r][c] for r, c in self._around()]
        return "\n".join([*rows, " ".join(m + cell for m, cell in zip(_MOVES, around, strict=True))])


@lru_cache(maxsize=1024)
def _distances(grid: tuple[str, ...], goal: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Moves to the goal from each cell that has a way there."""
    out, todo = {goal: 0}, deque([goal])
    while todo:
        at = todo.popleft()
        for r, c in _STEPS:
            cell = at[0] + r, at[1] + c
            inside = 0 <= cell[0] < len(grid) and 0 <= cell[1] < len(grid)
            if inside and cell not in out and grid[cell[0]][cell[1]] == "F":
                out[cell] = out[at] + 1
                todo.append(cell)
    return out
