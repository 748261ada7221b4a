"""From finished trajectories to what the learner computes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_driver.api.trajectory import Trajectory
from rl_driver.policy.versions import version_number


@dataclass(frozen=True, slots=True)
class Sample:
    """A text with the tokens that the policy made.

    Args:
        token_ids: the text, inputs and outputs.
        outputs: where the policy's tokens are; only these are trained on.
        logprobs: of the policy's tokens, in order, as the sampler had them.
        versions: (oldest, newest) weights that made them.
        advantage: of the trajectory.
    """

    token_ids: list[int]
    outputs: list[int]
    logprobs: list[float]
    versions: tuple[int, int]
    advantage: float = 0.0


def samples_of(trajectory: Trajectory, advantage: float) -> list[Sample]:
    """The samples of a trajectory: one, unless its context was edited on the way; then one for each stretch between."""
    out: list[Sample] = []
    text: list[int] = []
    outputs: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []

    def end() -> None:
        if outputs:
            span = min(versions), max(versions)
            out.append(Sample(list(text), list(outputs), list(logprobs), span, advantage))
        outputs.clear()
        logprobs.clear()
        versions.clear()

    for turn in trajectory.turns:
        if turn.kept is not None:
            end()
            del text[turn.kept :]
        text += turn.input_token_ids
        outputs += range(len(text), len(text) + len(turn.output_token_ids))
        text += turn.output_token_ids
        logprobs += turn.logprobs
        versions += [version_number(span.version) for span in turn.spans]
    end()
    return out


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, padded on the right. All [batch, tokens] but `advantages` and `oldest` [batch].

    `sampled` (logprobs) and `mask` speak of the token at their place; place 0 is never an output. `oldest` is the
    version of the oldest weights that made some of a sample.
    """

    token_ids: Tensor
    attention: Tensor
    mask: Tensor
    sampled: Tensor
    advantages: Tensor
    oldest: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
        """Pad samples to the longest."""
        shape = len(samples), max(len(s.token_ids) for s in samples)
        token_ids = torch.zeros(shape, dtype=torch.long)
        attention, mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        sampled = torch.zeros(shape)
        for row, sample in enumerate(samples):
            token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
            attention[row, : len(sample.token_ids)] = True
            mask[row, sample.outputs] = True
            sampled[row, sample.outputs] = torch.tensor(sample.logprobs)
        advantages = torch.tensor([s.advantage for s in samples])
        oldest = torch.tensor([s.versions[0] for s in samples])
        return cls(*(t.to(device) for t in (token_ids, attention, mask, sampled, advantages, oldest)))


def micro_batches(samples: Iterable[Sample], tokens_max: int) -> Iterator[list[Sample]]:
    """Samples of similar length together, with at most `tokens_max` places a batch, padding included.

    A sample that is longer than that is a batch of its own.
    """
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda s: len(s.token_ids)):
        if batch and (len(batch) + 1) * len(sample.token_ids) > tokens_max:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
