"""What a finished group of trajectories teaches: advantages by the job's algorithm, and the samples to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_driver.api.train_config import AlgorithmConfig
from rl_driver.api.trajectory import Trajectory
from rl_driver.policy.staleness import Staleness
from rl_driver.policy.versions import version_number
from rl_driver.training.advantages import group_advantages, has_signal, overlong_penalty
from rl_driver.training.samples import Sample, samples_of


class StaleError(Exception):
    """A trajectory was made by weights that the step must not use; it is a fault of the job, never trained on."""


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories of one instance of a task.

    Args:
        limit_tokens: longest answer of a turn, for DAPO's punishment of long ones.
    """

    trajectories: Sequence[Trajectory]
    limit_tokens: int

    @property
    def rewards(self) -> list[float]:
        """As the task gave them."""
        return [t.reward or 0.0 for t in self.trajectories]

    @property
    def tokens(self) -> int:
        """That the policy made."""
        return sum(len(turn.output_token_ids) for t in self.trajectories for turn in t.turns)

    def check(self, step: int, staleness: Staleness, prefixes: Sequence[str]) -> int:
        """The staleness of the oldest token: how many steps its weights are behind those that are trained.

        Raises:
            StaleError: it is more than the bound, or the weights are of another run of the job.
        """
        oldest = step
        for trajectory in self.trajectories:
            for turn in trajectory.turns:
                for span in turn.spans:
                    version = version_number(span.version)
                    if not staleness.admits(step, version) or not span.version.startswith(tuple(prefixes)):
                        raise StaleError(
                            f"turn {turn.index} of {trajectory.trajectory_id} has tokens of weights {span.version}, "
                            f"which step {step} must not use: the oldest are {staleness.oldest(step)}"
                        )
                    oldest = min(oldest, version)
        return step - oldest

    def samples(self, config: AlgorithmConfig) -> list[Sample]:
        """What the learner gets; empty where all did equally well and the algorithm drops such groups."""
        rewards = self.rewards
        if config.dynamic_sampling.enabled and not has_signal(rewards):
            return []
        if config.overlong == "penalty":
            rewards = [r + self._penalty(t, config) for r, t in zip(rewards, self.trajectories, strict=True)]
        advantages = group_advantages(rewards, config.scale_by_std)
        return [
            sample
            for trajectory, advantage in zip(self.trajectories, advantages, strict=True)
            if not (config.overlong == "mask" and is_cut(trajectory))
            for sample in samples_of(trajectory, advantage)
        ]

    def _penalty(self, trajectory: Trajectory, config: AlgorithmConfig) -> float:
        longest = max((len(turn.output_token_ids) for turn in trajectory.turns), default=0)
        return overlong_penalty(longest, self.limit_tokens, config.overlong_buffer_tokens)


def is_cut(trajectory: Trajectory) -> bool:
    """Whether it ended because it was too long."""
    return bool(trajectory.task.get("cut"))
