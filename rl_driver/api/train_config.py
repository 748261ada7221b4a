"""The configuration of `coserve train`: one tree, read from YAML. Names carry units; unknown ones are refused."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl_driver.api.proxy_config import ProxyConfig
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.flags import check_url, is_own_machine

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]

_RELAY_HOST = "127.0.0.1"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FrozenLakeConfig(_Section):
    """Walk over a frozen lake, a letter a turn."""

    name: Literal["frozen_lake"] = "frozen_lake"
    size: int = Field(4, ge=2, le=16, description="rows and columns of the grid")
    frozen: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="probability of a cell to be no hole")
    turns_max: Count = Field(8, description="moves until the walk is over")


class ArithmeticConfig(_Section):
    """Add or subtract two numbers."""

    name: Literal["arithmetic"] = "arithmetic"
    largest: int = Field(20, ge=1, le=10**6, description="largest operand")


class FrameConfig(_Section):
    """What stands around observations; the defaults are ChatML."""

    before: str = "<|im_start|>user\n"
    after: str = "<|im_end|>\n<|im_start|>assistant\n"
    between: str = "\n"
    stop: str = Field("<|im_end|>", min_length=1, description="the token that ends an answer")


class DynamicSamplingConfig(_Section):
    """DAPO: groups whose rewards are all equal are dropped, and others made in their place."""

    enabled: bool = False
    cap: Annotated[float, Field(ge=1, le=100)] = Field(
        4.0, description="at most so many times the groups of a step are made; then the step goes on with fewer"
    )


class AlgorithmConfig(_Section):
    """How is learnt. `name: dapo` changes the defaults of clip_high, aggregate, dynamic_sampling and overlong."""

    name: Literal["grpo", "dapo"] = "grpo"
    groups: Count = Field(16, description="groups of a step")
    group_size: int = Field(8, ge=2, le=1024, description="trajectories of a group, which share their task")
    minibatches: Count = Field(4, description="optimiser steps in which a step's groups are used")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.2
    aggregate: Literal["sequence", "token"] = Field("sequence", description="what counts alike in the loss")
    scale_by_std: bool = Field(True, description="advantages in standard deviations of their group")
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: Literal["keep", "mask", "penalty"] = Field(
        "keep", description="trajectories that were cut: as they are, not trained on, or with DAPO's soft punishment"
    )
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    importance_cap: Positive = Field(2.0, description="truncation of the weights of stale samples")
    entropy_bonus: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_dapo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "dapo":
            dapo = {
                "clip_high": 0.28,
                "aggregate": "token",
                "dynamic_sampling": {"enabled": True},
                "overlong": "penalty",
            }
            return {**dapo, **values}
        return values

    @model_validator(mode="after")
    def _agrees(self) -> AlgorithmConfig:
        if self.groups % self.minibatches:
            raise ValueError(f"groups ({self.groups}) must be a multiple of minibatches ({self.minibatches})")
        return self


class OptimizerConfig(_Section):
    """AdamW with float32 master weights."""

    learning_rate: Positive = 1e-6
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    gradient_clip: Positive = 1.0
    micro_batch_tokens: Count = Field(16_384, description="places of a micro-batch, padding included")
    bf16: bool = Field(True, description="matrix products in bfloat16")


class WorkersConfig(_Section):
    """The rollout engines."""

    dedicated: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    borrow: Count | None = Field(None, description="use at most so many of the borrowed engines, the emptiest ones")
    tensor_parallel: int = Field(1, ge=1, le=64, description="of the engines, the largest: weights are cut along it")
    turns_per_dedicated: Count = 16
    turns_per_borrowed: Count = 16
    policy: str = Field("turnwise", description="how turns are placed")
    api_key: str | None = Field(None, min_length=1, description="key of the engines (or $COSERVE_WORKER_API_KEY)")

    @field_validator("dedicated", "borrowed")
    @classmethod
    def _urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_url(u) for u in urls)

    @model_validator(mode="after")
    def _some(self) -> WorkersConfig:
        if not self.dedicated and not self.borrowed:
            raise ValueError("there is no engine: name some under dedicated or borrowed")
        self.proxy({})  # what the proxy would refuse is refused here
        return self

    def proxy(self, more: dict[str, Any]) -> ProxyConfig:
        """What the rollout proxy is to do."""
        values = self.model_dump(exclude={"api_key", "tensor_parallel"}) | {"worker_api_key": self.api_key}
        return ProxyConfig.model_validate(values | more)


class SamplingConfig(_Section):
    """How the policy is sampled."""

    temperature: Positive = 1.0
    answer_tokens: Count = Field(64, description="longest answer of a turn")
    concurrency: Count = Field(64, description="trajectories under way at a time")
    environment_workers: Count = Field(1, description="actors that run the task's environments")


class BroadcastConfig(_Section):
    """Engines hand the weights on to each other, where the learner's uplink is the bound."""

    uplink_mbytes_per_s: Positive = Field(description="what the learner may send in all, in 10^6 bytes a second")
    host: str = Field(
        _RELAY_HOST,
        pattern=r"^[A-Za-z0-9.-]{1,200}$",
        description="address of the learner's machine by which the engines reach its relay",
    )
    worker_memory_gib: Annotated[float, Field(gt=0, le=1024)] = Field(
        2.0, description="what each engine's worker keeps for others at most"
    )


class CheckpointConfig(_Section):
    """What is kept for a restart."""

    every_steps: Count = 10
    keep: Count = 2


class TrainConfig(_Section):
    """What `coserve train` was asked to do."""

    model: str = Field(min_length=1, description="folder or Hugging Face name of the policy to begin with")
    out: str = Field("out/train", min_length=1, description="folder of checkpoints, trajectories and logs")
    task: Annotated[FrozenLakeConfig | ArithmeticConfig, Field(discriminator="name")]
    frame: FrameConfig = FrameConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    workers: WorkersConfig
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: str | None = Field(
        None,
        max_length=200,
        pattern=r"^mooncake://[A-Za-z0-9.:-]+:\d+$",
        description="mooncake://MASTER:PORT: weights go through that store (default: a relay of the learner's own)",
    )
    broadcast: BroadcastConfig | None = Field(
        None, description="have engines hand weights on to each other (default: all read from the learner's relay)"
    )
    staleness: Annotated[int, Field(ge=0, le=1000)] = Field(
        1, description="steps that sampling may run ahead of learning: 0 on-policy, 1 one step off, more asynchronous"
    )
    steps: Count = Field(100, description="steps until the job is done")
    seed: int = 0
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port of Prometheus metrics (default: none)"
    )

    @model_validator(mode="after")
    def _one_way(self) -> TrainConfig:
        if self.store and self.broadcast:
            raise ValueError("broadcast is the learner's own relay's: leave out store, or broadcast")
        return self

    @model_validator(mode="after")
    def _engines_reach_the_weights(self) -> TrainConfig:
        host = self.relay_host
        if self.store or not is_own_machine(host):
            return self
        engines = (*self.workers.dedicated, *self.workers.borrowed)
        if far := [u for u in engines if not is_own_machine(urlsplit(u).hostname or "")]:
            raise ValueError(
                f"engines on other machines ({', '.join(far)}) cannot read weights from the learner's relay on {host}: "
                "give the learner's address in broadcast: {uplink_mbytes_per_s: MB_A_SECOND, host: ADDRESS}, or a "
                "store: mooncake://MASTER:PORT; if they are on the learner's machine, name them by 127.0.0.1"
            )
        return self

    @property
    def relay_host(self) -> str:
        """Address by which the engines reach the learner's own relay."""
        return self.broadcast.host if self.broadcast else _RELAY_HOST

    @field_validator("model")
    @classmethod
    def _model_exists(cls, model: str) -> str:
        is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
        if is_path and not (Path(model).expanduser() / "config.json").is_file():
            raise ValueError(f"{model} is no folder of a model: it has no config.json")
        return model


def read_train_config(path: Path) -> TrainConfig:
    """Read and check a file.

    Raises:
        ConfigurationError: names each key that is wrong, and what to do.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read ({exc.strerror}): give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path} is no YAML: {exc}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold names and values, such as `model: /path/to/model`")
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as exc:
        raise ConfigurationError("\n".join(_line(error, path) for error in exc.errors())) from None


def _line(error: Any, path: Path) -> str:
    # A tagged choice puts its tag into the location; no key has that name.
    keys = [str(k) for k in error["loc"] if k not in ("frozen_lake", "arithmetic")]
    name = ".".join(keys) or "the file"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _names(keys[:-1]), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "names here are " + ", ".join(sorted(_names(keys[:-1])))
        return f"{path}: {name}: there is no such key: {hint}"
    if error["type"] == "missing":
        return f"{path}: {name}: this key is needed"
    shown = "" if "key" in keys[-1:] or isinstance(error.get("input"), dict) else f" {error.get('input')!r}"
    return f"{path}: {name}{shown}: {error['msg'].removeprefix('Value error, ')}"


def _names(keys: list[str]) -> set[str]:
    """Valid keys of a section."""
    sections: list[type[BaseModel]] = [TrainConfig]
    for key in keys:
        found: list[type[BaseModel]] = []
        for section in sections:
            info = section.model_fields.get(key)
            kinds = [info.annotation, *getattr(info.annotation, "__args__", ())] if info else []
            found += [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        sections = found
    return {name for section in sections for name in section.model_fields}


def dump_config(config: TrainConfig) -> str:
    """The resolved tree as YAML; the engines' key is not shown."""
    values = config.model_dump(mode="json")
    if values["workers"]["api_key"]:
        values["workers"]["api_key"] = "***"
    return yaml.safe_dump(values, sort_keys=False)
