"""The policy's weights and their optimiser. Gradients are added up micro-batch by micro-batch as groups finish."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.func import functional_call

from rl_driver.training.losses import Aggregate, Clip, add_up, importance_weights, token_losses
from rl_driver.training.samples import Batch, Sample, micro_batches


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyperparameters; see `rl_driver.api.train_config` for what they mean to users."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    gradient_clip: float = 1.0
    clip: Clip = field(default_factory=Clip)
    aggregate: Aggregate = "sequence"
    importance_cap: float = 2.0
    entropy_bonus: float = 0.0
    micro_batch_tokens: int = 16_384
    bf16: bool = True  # matrix products in bfloat16; master weights and the optimiser's state are float32
    temperature: float = 1.0  # that the sampler has


class Learner:
    """Trains a Hugging Face causal language model.

    In a process group of several ranks (torchrun) the model is sharded by FSDP2, and each rank adds its own samples;
    all ranks must call `add`, `step` and the checkpoint methods equally often.
    """

    def __init__(self, model: torch.nn.Module, config: LearnerConfig) -> None:
        self.config = config
        self.version = 0  # of the weights, as samplers know it: RL steps, each of which may be several optimiser steps
        self.updates = 0  # optimiser steps
        self._sampled_with: dict[int, list[Tensor]] = {}  # weights of the latest versions that samplers have
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.model = model.float()
        if self._ranks > 1:
            _shard(self.model, config.bf16)
        self.device = next(self.model.parameters()).device
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), config.learning_rate, config.betas, weight_decay=config.weight_decay
        )
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)

    def end_step(self) -> int:
        """The RL step is over; returns the number of the weights that it has made."""
        self.version += 1
        return self.version

    # ---- gradients

    def remember(self, versions: int) -> None:
        """Samplers get the weights of now, in bfloat16: keep those of the latest `versions` for `agreement`."""
        self._sampled_with[self.version] = [p.detach().to(torch.bfloat16) for p in self.model.parameters()]
        for old in sorted(self._sampled_with)[:-versions]:
            del self._sampled_with[old]

    @torch.no_grad()
    def agreement(self, samples: Sequence[Sample]) -> float | None:
        """Mean |log ratio| of learner and sampler over tokens whose very weights `remember` has kept; None: no such."""
        now = [p.detach().clone() for p in self.model.parameters()]
        apart = count = 0.0
        for version, weights in self._sampled_with.items():
            same = [s for s in samples if s.versions == (version, version)]
            if not same:
                continue
            _put(self.model, weights)
            for sample, logprobs in zip(same, self.score(same), strict=True):
                apart += sum(abs(a - b) for a, b in zip(logprobs, sample.logprobs, strict=True))
                count += len(logprobs)
        _put(self.model, now)
        return apart / count if count else None

    def add(self, samples: Sequence[Sample]) -> None:
        """Add the gradients of samples to those of the next step, in micro-batches."""
        for group in micro_batches(samples, self.config.micro_batch_tokens):
            self._backward(Batch.of(group, self.device))

    def _backward(self, batch: Batch) -> None:
        config = self.config
        logprobs, entropies = self._logprobs(batch)
        now = logprobs.detach()
        # Stale samples are compared with the policy as it is before this step; how far the sampler was from that is
        # made up for by a truncated weight. The others are compared with the sampler itself.
        stale = (batch.oldest != self.version).unsqueeze(-1)
        old = torch.where(stale, now, batch.sampled)
        weights = importance_weights(old, batch.sampled, config.importance_cap)
        losses = token_losses(logprobs, old, batch.advantages, config.clip, weights)
        if config.entropy_bonus:
            losses = losses - config.entropy_bonus * entropies
        total, count = add_up(losses, batch.mask, config.aggregate)
        total.backward()
        apart = ((now - batch.sampled) * batch.mask).detach()
        ratio = torch.exp(apart)
        clipped = ((ratio < 1 - config.clip.low) | (ratio > 1 + config.clip.high)) & batch.mask
        tokens = batch.mask.sum()
        values = [
            total.detach(),
            count,
            tokens,
            apart.abs().sum(),
            clipped.sum(),
            (entropies.detach() * batch.mask).sum(),
        ]
        self._sums += torch.stack([v.double().cpu() for v in values])

    def _logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens at their places, [batch, tokens]; 0 at place 0."""
        # As the samplers compute: with the weights of now rounded to bfloat16, norms too; gradients pass the rounding.
        # Sharded weights are rounded by FSDP.
        rounds = self.config.bf16 and self._ranks == 1
        weights = {n: p.bfloat16() for n, p in self.model.named_parameters()} if rounds else {}
        inputs = {"input_ids": batch.token_ids, "attention_mask": batch.attention}
        logits = functional_call(self.model, weights, kwargs=inputs).logits[:, :-1]
        spread = torch.log_softmax(logits.float() / self.config.temperature, -1)
        logprobs = spread.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
        entropies = -(spread.exp() * spread).sum(-1)
        first = torch.zeros_like(logprobs[:, :1])
        return torch.cat([first, logprobs], 1), torch.cat([first, entropies], 1)

    def step(self) -> dict[str, float]:
        """Apply what was added; returns figures of these samples.

        Raises:
            ValueError: nothing was added.
        """
        sums = self._sums.clone()
        if self._ranks > 1:
            dist.all_reduce(sums)
        loss, count, tokens, apart, clipped, entropy = sums.tolist()
        if not count:
            raise ValueError("no sample was added since the last step")
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._ranks / count)  # FSDP has averaged them over the ranks
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        for group in self._optimizer.param_groups:
            warmth = min(1.0, (self.updates + 1) / (self.config.warmup_steps + 1))
            group["lr"] = self.config.learning_rate * warmth
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.zero_()
        self.updates += 1
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return {
            "loss": loss / count,
            "tokens": tokens,
            "log_ratio_abs_mean": apart / max(1.0, tokens),
            "clipped_share": clipped / max(1.0, tokens),
            "entropy": entropy / max(1.0, tokens),
            "gradient_norm": float(norm),
        }

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Logprobs of the policy's tokens in samples under the current weights."""
        out = []
        for sample in samples:
            logprobs, _ = self._logprobs(Batch.of([sample], self.device))
            out.append(logprobs[0, sample.outputs].tolist())
        return out

    # ---- weights

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole bfloat16 tensors on the CPU, as the checkpoint of the model has them; tied ones once."""
        for name, parameter in self.model.named_parameters():
            value = parameter.detach()
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield name, full.to("cpu", torch.bfloat16)

    # ---- checkpoints

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write weights, the optimiser's state and `extra` (JSON-like) with torch DCP. Raises OSError."""
        model, optimizer = get_state_dict(self.model, self._optimizer)
        dcp.save(
            {
                "model": model,
                "optimizer": optimizer,
                "version": self.version,
                "updates": self.updates,
                "extra": json.dumps(extra),
            },
            checkpoint_id=folder,
        )

    def load(self, folder: Path) -> dict[str, Any]:
        """Read what `save` has written, also by another number of ranks; returns `extra`."""
        model, optimizer = get_state_dict(self.model, self._optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "version": 0, "updates": 0, "extra": ""}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        self.version, self.updates = int(state["version"]), int(state["updates"])
        return json.loads(state["extra"])


_SUMS = ("loss", "count", "tokens", "apart", "clipped", "entropy")


def _put(model: torch.nn.Module, weights: Sequence[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)


def _shard(model: torch.nn.Module, bf16: bool) -> None:
    """FSDP2, a unit a layer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    layers = getattr(getattr(model, "model", model), "layers", [])
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
