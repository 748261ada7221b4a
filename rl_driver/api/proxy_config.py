"""The configuration of the rollout proxy: names, units and defaults are those of the flags of `coserve proxy`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_coserve.api.flags import check_url, wrong_flags

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
PolicyName = Literal["turnwise", "turnwise_no_affinity", "pinned", "balanced", "round_robin", "least_loaded"]


class ProxyConfig(BaseModel):
    """What `coserve proxy ...` was asked to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dedicated: tuple[str, ...] = Field((), description="address of a dedicated vLLM server; repeat the flag for more")
    borrowed: tuple[str, ...] = Field(
        (), description="address of a borrowed rollout engine (of `vllm serve --coserve-rollout`); may be repeated"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8200, ge=0, le=65535, description="port to listen on; 0: any free one")
    api_key: str | None = Field(None, min_length=1, description="key that callers must give (or $COSERVE_API_KEY)")
    worker_api_key: str | None = Field(
        None, min_length=1, description="key of the workers (or $COSERVE_WORKER_API_KEY)"
    )
    job: str = Field(
        "coserve-proxy", pattern=r"^[A-Za-z0-9._:-]{1,80}$", description="name under which borrowed engines are held"
    )
    borrow: Count | None = Field(None, description="use at most so many of the borrowed engines, the emptiest ones")
    policy: PolicyName = Field("turnwise", description="how turns are placed")
    turns_per_dedicated: Count = Field(16, description="most turns on a dedicated engine at a time")
    turns_per_borrowed: Count = Field(16, description="most turns on a borrowed engine at a time")
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="use only workers whose weight version is at most so many behind the newest"
    )
    queue_turns: Count = Field(4096, description="calls that may wait for a worker; further ones get 429")
    queue_timeout_s: Seconds = Field(600.0, description="longest wait for a worker, in s")
    chunk_timeout_s: Seconds = Field(60.0, description="a worker that sends nothing for so long is left, in s")
    lost_after_s: Seconds = Field(5.0, description="a worker without a sign of life for so long is left, in s")
    weights_timeout_s: Seconds = Field(120.0, description="longest wait for workers to take new weights, in s")
    poll_s: Annotated[float, Field(ge=0.05, le=60, allow_inf_nan=False)] = Field(
        1.0, description="how often each worker is asked how it is, in s"
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="folder or Hugging Face name of the tokenizer (default: that of the workers)"
    )
    store: str | None = Field(None, min_length=1, description="SQLite file in which every finished turn is saved")

    @field_validator("dedicated", "borrowed")
    @classmethod
    def _urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_url(u) for u in urls)

    @model_validator(mode="after")
    def _agrees(self) -> ProxyConfig:
        urls = [*self.dedicated, *self.borrowed]
        if len(urls) != len(set(urls)):
            raise ValueError("a worker is named twice: give each address once, as --dedicated or as --borrowed")
        if self.borrow is not None and self.borrow > max(1, len(self.borrowed)):
            raise ValueError(f"--borrow {self.borrow} of {len(self.borrowed)} borrowed engines: name more of them")
        return self


def flag_of(field: str) -> str:
    """The command-line flag that sets `field`."""
    return "--" + field.replace("_", "-")


def parse_proxy_config(values: dict[str, object]) -> ProxyConfig:
    """Validate flag values.

    Raises:
        ConfigurationError: names each flag, the value it was given and what is allowed. Keys are not repeated.
    """
    try:
        return ProxyConfig.model_validate(values)
    except ValidationError as exc:
        raise wrong_flags(exc, flag_of) from None
