"""The one configuration tree of a co-serving pair, validated once and passed on explicitly.

Field names, units and defaults are those of the `--coserve-*` flags of `vllm serve`.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_coserve.api.flags import wrong_flags

Policy = Literal["dual", "ttft", "tpot", "none"]
Role = Literal["collocated", "prefill", "decode"]
MemoryMode = Literal["preemptive", "grow_only", "static"]
StartState = Literal["active", "deactivated"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]

# Arguments of the rollout engine that the pair decides, and what sets them instead.
_RESERVED_ARGS = {
    "--port": "use --coserve-rollout-port",
    "--host": "the rollout engine listens on 127.0.0.1",
    "--model": "use --coserve-rollout",
    "--api-key": "the server's --api-key guards the rollout engine too",
    "--kv-cache-memory-bytes": "use --coserve-pool-gib",
    "--num-gpu-blocks-override": "use --coserve-pool-gib",
    "--async-scheduling": "a rollout engine schedules one step at a time",
    "--tensor-parallel-size": "the rollout engine uses one device",
    "--pipeline-parallel-size": "the rollout engine uses one device",
    "--data-parallel-size": "the rollout engine uses one device",
    "-tp": "the rollout engine uses one device",
    "-pp": "the rollout engine uses one device",
    "-dp": "the rollout engine uses one device",
}


class CoserveConfig(BaseModel):
    """What `vllm serve MODEL --coserve-rollout ROLLOUT_MODEL ...` was asked to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout: str = Field(min_length=1, description="rollout model: a Hugging Face name or a local folder")
    rollout_port: int = Field(8100, ge=1, le=65535, description="port of the rollout engine's own API server")
    rollout_args: str = Field("", description="further `vllm serve` arguments of the rollout engine, as one string")
    ttft_slo_ms: Milliseconds | None = Field(None, description="P99 time to first token promised to users, in ms")
    tpot_slo_ms: Milliseconds | None = Field(None, description="P99 time per output token promised to users, in ms")
    policy: Policy = Field("dual", description="which SLOs bound the rollout's compute; none: no gate at all")
    role: Role = Field("collocated", description="what the serving instance does: both phases, or one of a P/D pair")
    pool_gib: Positive | None = Field(None, description="size of the shared KV page pool in GiB")
    headroom: float = Field(0.2, ge=0, lt=1, description="share of the pool that is kept free for serving")
    memory: MemoryMode = Field(
        "preemptive",
        description="how pages are shared: taken back for serving at once, never taken back, or half and half (the "
        "last two for comparison)",
    )
    lease_s: Seconds = Field(10.0, description="how long an idle rollout prefix-cache page is kept, in s")
    chunk_tokens: int = Field(512, ge=1, le=1 << 20, description="largest rollout prefill chunk, in tokens")
    stall_timeout_s: Seconds = Field(2.0, description="a running rollout request without progress for so long ends")
    start: StartState = Field("active", description="whether the rollout engine lends itself from the start")

    @field_validator("rollout_args")
    @classmethod
    def _splits(cls, text: str) -> str:
        try:
            words = shlex.split(text)
        except ValueError as exc:
            raise ValueError(f"cannot be split into arguments ({exc}): check its quotes") from exc
        for word in words:
            flag = word.split("=", 1)[0].replace("_", "-")
            if flag.startswith("--coserve-"):
                raise ValueError(f"{flag} belongs to the server itself: give it beside --coserve-rollout-args")
            if flag in _RESERVED_ARGS:
                raise ValueError(f"{flag} cannot be set here: {_RESERVED_ARGS[flag]}")
        return text

    @model_validator(mode="after")
    def _agrees(self) -> CoserveConfig:
        for policy, role, slo_ms in (("ttft", "decode", self.ttft_slo_ms), ("tpot", "prefill", self.tpot_slo_ms)):
            if self.policy != policy:
                continue
            if self.role == role:
                raise ValueError(
                    f"--coserve-policy {policy} binds nothing on a {role} instance: use --coserve-policy dual, or "
                    "another --coserve-role"
                )
            if slo_ms is None:
                raise ValueError(f"--coserve-policy {policy} needs --coserve-{policy}-slo-ms MS beside it")
        return self

    @property
    def gated(self) -> bool:
        """False with `--coserve-policy none`: both engines compute whenever they like."""
        return self.policy != "none"

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
        raise wrong_flags(exc, flag_of, describe) from None


def describe(field: str) -> str:
    """The help text of a field, empty for an unknown one."""
    info = CoserveConfig.model_fields.get(field)
    return (info.description or "") if info else ""
