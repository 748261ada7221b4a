"""How old a sample's weights may be (ECHO-2): one number S for how far sampling runs ahead of learning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staleness:
    """The bound S: a sample that is trained on was made by weights at most S steps older.

    S = 0: a step's samples are made after the step before it has ended. S = 1: they are made while the step before
    them is learnt. Larger: sampling and learning run side by side.
    """

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(f"staleness is {self.bound}: give 0 or more")

    @property
    def period(self) -> int:
        """Steps from one publication of weights to the next: max(1, S - 1)."""
        return max(1, self.bound - 1)

    def publishes(self, version: int) -> bool:
        """Whether the weights after `version` steps are published."""
        return version % self.period == 0

    def published(self, version: int) -> int:
        """The newest published version when the learner has done `version` steps."""
        return version - version % self.period

    def may_begin(self, for_step: int, sampler_version: int) -> bool:
        """Whether samples for the step with this number (from 0) may be made by weights of this version.

        The step with number n turns version n into version n + 1, so its samples have staleness n - version.
        """
        return for_step - sampler_version <= self.bound

    def oldest(self, step: int) -> int:
        """The oldest version whose samples the step with this number may use."""
        return max(0, step - self.bound)

    def admits(self, step: int, version: int) -> bool:
        """Whether the step with this number may use samples of a version."""
        return self.oldest(step) <= version <= step
