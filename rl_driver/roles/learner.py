"""The learner as an actor: trains, publishes weights through a relay of its own, writes checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_driver.api.train_config import TrainConfig
from rl_driver.training.checkpoints import Checkpoints
from rl_driver.training.learner import Learner, LearnerConfig
from rl_driver.training.losses import Clip
from rl_driver.training.samples import Sample
from vllm_coserve.weights.peering.messages import Broadcast
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.sharding import ModelShape, cut_for
from vllm_coserve.weights.stores import open_store

_PROBED = 16  # samples of a step that are scored anew, to see how far sampler and learner are apart


class LearnerRole:
    """One per job. Its methods are called one after the other, but for `put`."""

    def __init__(self, config_json: str) -> None:
        from transformers import AutoModelForCausalLM

        self._config = TrainConfig.model_validate_json(config_json)
        model = AutoModelForCausalLM.from_pretrained(self._config.model)
        self._learner = Learner(model, learner_config(self._config))
        self._checkpoints = Checkpoints(Path(self._config.out) / "checkpoints", self._config.checkpoint.keep)
        if self._config.store:
            self._url, self._key = f"{self._config.store}/coserve-{secrets.token_hex(8)}", ""
        else:
            self._key = secrets.token_urlsafe(16)
            self._relay = _relay(self._config, self._key)
            self._url = self._relay.url
        cut = cut_for(ModelShape.of(model.config.to_dict()), self._config.workers.tensor_parallel)
        self._publisher = Publisher(open_store(self._url, self._key), cut=cut)
        self._handed_over: tuple[int, list[tuple[str, Tensor]]] = 0, []
        self._probe_due, self._agreement = True, None

    def restore(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint; returns what was saved with it, None where there is none."""
        return self._checkpoints.restore(self._learner)

    def add(self, samples: Sequence[Sample]) -> None:
        """Add the gradients of samples to those of the next step."""
        if self._probe_due:
            self._probe_due, self._agreement = False, self._learner.agreement(samples[:_PROBED])
        self._learner.add(samples)

    def step(self) -> dict[str, float]:
        """One optimiser step; returns its figures, once an RL step with how far sampler and learner are apart."""
        figures = self._learner.step()
        if self._agreement is not None:
            figures["sampler_log_ratio_abs_mean"], self._agreement = self._agreement, None
        return figures

    def end_step(self) -> int:
        """The RL step is over; returns the number of the weights that it has made."""
        self._probe_due = True
        return self._learner.end_step()

    def hand_over(self, keep: int) -> dict[str, Any]:
        """Take a copy of the weights for `put`, and say where they will be; `keep`: versions that samplers may have."""
        self._learner.remember(keep)
        self._handed_over = self._learner.version, list(self._learner.weights())
        return {"url": self._url, "version": self._learner.version, "key": self._key}

    def put(self, keep: int) -> None:
        """Put the copy into the relay, and forget what nobody needs who has one of the newest `keep` versions.

        Runs beside the other methods. Raises RelayError; the next call puts the copy whole then.
        """
        version, weights = self._handed_over
        self._publisher.publish(version, weights)
        self._publisher.retire(keep)

    def end(self) -> None:
        """The job is over: leave nothing in a store that others use."""
        self._publisher.withdraw()

    def checkpoint(self, step: int, extra: dict[str, Any]) -> str:
        """Write a checkpoint; returns "", or why that could not be done."""
        return self._checkpoints.write(self._learner, step, extra)


def _relay(config: TrainConfig, key: str) -> Relay:
    """Where the weights are for the engines to read, and from each other where the job says so."""
    how = config.broadcast
    if how is None:
        return Relay(config.relay_host, key=key)
    broadcast = Broadcast(how.uplink_mbytes_per_s * 1e6, memory_bytes=int(how.worker_memory_gib * (1 << 30)))
    return Relay(config.relay_host, key=key, broadcast=broadcast)


def learner_config(config: TrainConfig) -> LearnerConfig:
    """The learner's part of a job's configuration."""
    algorithm, optimizer = config.algorithm, config.optimizer
    return LearnerConfig(
        learning_rate=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        warmup_steps=optimizer.warmup_steps,
        gradient_clip=optimizer.gradient_clip,
        clip=Clip(algorithm.clip_low, algorithm.clip_high),
        aggregate=algorithm.aggregate,
        importance_cap=algorithm.importance_cap,
        entropy_bonus=algorithm.entropy_bonus,
        micro_batch_tokens=optimizer.micro_batch_tokens,
        bf16=optimizer.bf16,
        temperature=config.sampling.temperature,
    )
