"""The one configuration tree of a co-serving pair, validated once and passed on explicitly.

Field names, units and defaults are those of the `--coserve-*` flags of `vllm serve`.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_coserve.api.errors import ConfigurationError

Policy = Literal["dual", "ttft", "tpot", "none"]
Role = Literal["collocated", "prefill", "decode"]
StartState = Literal["active", "deactivated"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CoserveConfig(BaseModel):
    """What `vllm serve MODEL --coserve-rollout ROLLOUT_MODEL ...` was asked to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout: str = Field(min_length=1, description="rollout model: a Hugging Face name or a local folder")
    rollout_port: int = Field(8100, ge=1, le=65535, description="port of the rollout engine's own API server")
    rollout_args: str = Field("", description="further `vllm serve` arguments of the rollout engine, as one string")
    ttft_slo_ms: Positive | None = Field(None, description="P99 time to first token promised to serving users, in ms")
    tpot_slo_ms: Positive | None = Field(None, description="P99 time per output token promised to serving users, in ms")
    policy: Policy = Field("dual", description="which SLOs bound the rollout's compute; none: no gate at all")
    role: Role = Field("collocated", description="what the serving instance does: both phases, or one of a P/D pair")
    pool_gib: Positive | None = Field(None, description="size of the shared KV page pool in GiB")
    headroom: float = Field(0.2, ge=0, lt=1, description="share of the pool that is kept free for serving")
    lease_s: Positive = Field(10.0, description="how long an idle rollout prefix-cache page is kept, in s")
    chunk_tokens: int = Field(512, ge=1, le=1 << 20, description="largest rollout prefill chunk, in tokens")
    stall_timeout_s: Positive = Field(2.0, description="a running rollout request without progress for so long ends")
    start: StartState = Field("active", description="whether the rollout engine lends itself from the start")

    @field_validator("rollout_args")
    @classmethod
    def _splits(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as exc:
            raise ValueError(f"cannot be split into arguments ({exc}): check its quotes") from exc
        return text

    @property
    def rollout_argv(self) -> list[str]:
        """`rollout_args` split as a shell splits words."""
        return shlex.split(self.rollout_args)


def flag_of(field: str) -> str:
    """The command-line flag that sets `field`."""
    return "--coserve-" + field.replace("_", "-")


def parse_config(values: dict[str, object]) -> CoserveConfig:
    """Validate flag values.

    Raises:
        ConfigurationError: names each flag, the value it was given and what is allowed.
    """
    try:
        return CoserveConfig.model_validate(values)
    except ValidationError as exc:
        lines = []
        for error in exc.errors():
            field = str(error["loc"][0]) if error["loc"] else "?"
            lines.append(f"{flag_of(field)} {error.get('input')!r}: {error['msg']}. It is the {describe(field)}.")
        raise ConfigurationError("\n".join(lines)) from None


def describe(field: str) -> str:
    """The help text of a field, empty for an unknown one."""
    info = CoserveConfig.model_fields.get(field)
    return (info.description or "") if info else ""
