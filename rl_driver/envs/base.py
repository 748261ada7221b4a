"""What a task is: text in, text out, a reward at the end. A new task is one file beside this one.

Tasks know nothing of tokens; `dialogue` turns what they say into tokens and what the policy's tokens say into text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Observation:
    """What an episode says next. `reward` counts once, when `done`."""

    text: str
    done: bool = False
    reward: float = 0.0


class Episode(Protocol):
    """One attempt at one instance of a task."""

    def begin(self) -> Observation:
        """What the policy sees first."""
        ...

    def answer(self, text: str) -> Observation:
        """What follows an answer of the policy; an answer that makes no sense ends the episode with reward 0."""
        ...

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """An answer in the right form, for a warm start: the right one with probability `skill`, else any."""
        ...


class Task(Protocol):
    """Makes episodes."""

    turns_max: int

    def episode(self, seed: int) -> Episode:
        """The instance of a seed; the same seed gives the same instance."""
        ...

    def texts(self) -> list[str]:
        """Some texts that occur in observations and answers, from which a small tokenizer can be trained."""
        ...
