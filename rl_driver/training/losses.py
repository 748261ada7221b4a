"""The clipped policy-gradient loss of GRPO and DAPO, per token, and how it is added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["sequence", "token"]


@dataclass(frozen=True, slots=True)
class Clip:
    """The ratio of new and old probability counts within [1 - low, 1 + high]; DAPO clips higher than lower."""

    low: float = 0.2
    high: float = 0.2


def token_losses(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip, weights: Tensor | None = None
) -> Tensor:
    """The loss of each token.

    Args:
        logprobs: of the tokens under the weights that are trained, [batch, tokens], with gradient.
        old: the same under the weights that count as old.
        advantages: [batch] or [batch, tokens].
        weights: factors of stale tokens, see `importance_weights`.

    Returns:
        [batch, tokens].
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return losses if weights is None else losses * weights


def importance_weights(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Truncated importance weights of tokens that earlier weights have sampled: min(cap, p_old / p_sampled).

    `old` are logprobs under the learner's weights, `sampled` those that came with the tokens; both [batch, tokens].
    """
    return torch.exp(old - sampled).clamp(max=cap)


def add_up(values: Tensor, mask: Tensor, aggregate: Aggregate) -> tuple[Tensor, Tensor]:
    """Values of tokens as (sum, count), so that sums of micro-batches can be added before they are divided.

    Args:
        values, mask: [batch, tokens]; where the mask is 0 a token does not count.
        aggregate: "token" counts every token alike (DAPO); "sequence" averages each sequence first (GRPO).
    """
    mask = mask.to(values.dtype)
    if aggregate == "token":
        return (values * mask).sum(), mask.sum()
    lengths = mask.sum(-1)
    means = (values * mask).sum(-1) / lengths.clamp(min=1)
    return means.sum(), (lengths > 0).to(values.dtype).sum()
