"""Sums with one right answer, in a single turn."""

from __future__ import annotations

import random

from rl_driver.envs.base import Observation


class Arithmetic:
    """`a+b=` or `a-b=` with numbers from 0 to `largest`. Reward 1 for the right number, else 0."""

    turns_max = 1

    def __init__(self, largest: int = 20) -> None:
        """Raises ValueError where `largest` is below 1."""
        if largest < 1:
            raise ValueError(f"largest is {largest}: give 1 or more")
        self.largest = largest

    def episode(self, seed: int) -> ArithmeticEpisode:
        """See `Task`."""
        rng = random.Random(f"arithmetic {seed}")
        return ArithmeticEpisode(
            rng.randrange(self.largest + 1), rng.choice("+-"), rng.randrange(self.largest + 1), self.largest
        )

    def texts(self) -> list[str]:
        """See `Task`."""
        return [self.episode(-1 - i).begin().text for i in range(200)] + [str(n) for n in range(2 * self.largest + 1)]


class ArithmeticEpisode:
    """One sum."""

    def __init__(self, a: int, sign: str, b: int, largest: int) -> None:
        self._text, self._largest = f"{a}{sign}{b}=", largest
        self._right = a + b if sign == "+" else a - b

    def begin(self) -> Observation:
        """See `Episode`."""
        return Observation(self._text)

    def answer(self, text: str) -> Observation:
        """See `Episode`. A decimal number."""
        return Observation("", done=True, reward=float(text.strip() == str(self._right)))

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """See `Episode`."""
        if rng.random() < skill:
            return str(self._right)
        return str(rng.randrange(-self._largest, 2 * self._largest + 1))
