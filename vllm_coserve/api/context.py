"""How the processes of a co-serving pair find each other: one environment variable, set by `vllm serve`."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.api.errors import ContractError

CONTEXT_ENV = "VLLM_COSERVE_CONTEXT"

Side = Literal["serving", "rollout"]


class Context(BaseModel):
    """Which engine this process belongs to, and where the shared memory of the pair is.

    The descriptors are those of process `owner_pid`; others open `/proc/owner_pid/fd/N`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    side: Side
    owner_pid: int
    control_fd: int
    pool_fd: int
    members_fd: int  # every process that maps the pool for the rollout holds a shared file lock on it
    rollout_port: int
    serving_port: int
    device: Literal["cpu", "cuda"] = "cpu"
    pages_socket: str = ""  # "cuda": where the serving engine gives handles to the pool's pages; pool_fd is empty
    config: CoserveConfig

    def open(self, fd: int) -> int:
        """A descriptor of our own for one of the owner's files.

        Raises:
            ContractError: the owner is gone.
        """
        try:
            return os.open(f"/proc/{self.owner_pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise ContractError(f"the `vllm serve` process {self.owner_pid} of this pair is gone: {exc}") from exc

    def export(self) -> None:
        """Make this the context of all processes started from here."""
        os.environ[CONTEXT_ENV] = self.model_dump_json()


def current_context() -> Context | None:
    """The context this process was started in, None outside a co-serving pair."""
    text = os.environ.get(CONTEXT_ENV)
    return Context.model_validate_json(text) if text else None
