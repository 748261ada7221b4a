"""The device that a pair shares, as vLLM sees it."""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm_coserve.api.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm_coserve.api.context import Context


def device_type() -> Literal["cpu", "cuda"]:
    """What vLLM computes on here.

    Raises:
        ConfigurationError: a kind of device that cannot be shared.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not current_platform.is_cuda()):
        raise ConfigurationError(f"--coserve-rollout shares CPUs and NVIDIA GPUs, not {kind!r}: leave co-serving off")
    return cast(Literal["cpu", "cuda"], kind)


def device_memory_bytes() -> int:
    """Memory of the GPU in all. Asked of the driver's management library: no context is made in this process."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """A GPU's memory as this process sees it."""

    free_bytes: int  # nobody has it
    transient_bytes: int  # this process needed so much more at its peak than it holds now


def memory_left() -> MemoryLeft:
    """Memory of the current GPU now, after this process has given back what PyTorch only keeps at hand."""
    import torch

    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    transient = stats["allocated_bytes.all.peak"] - stats["reserved_bytes.all.current"]
    return MemoryLeft(torch.cuda.mem_get_info()[0], max(0, transient))


def device_index(context: Context) -> int:
    """Which device this process's engine computes on, once vLLM has chosen it."""
    if context.device == "cpu":
        return 0
    import torch

    return torch.cuda.current_device()


def use_device_of(worker: Any) -> None:
    """Have this thread compute where a worker does: CUDA's current device is a matter of each thread."""
    if worker.device.type == "cuda":
        import torch

        torch.cuda.set_device(worker.device)


def wait_for_device(context: Context) -> None:
    """Wait until the device has done what this thread gave it.

    On a GPU the worker's answer says only that the tokens have been copied; the device is another engine's when the
    stream is empty.
    """
    if context.device == "cuda":
        import torch

        torch.cuda.current_stream().synchronize()


def has_ended(pid: int) -> bool:
    """Whether no thread of a process is left; 0 stands for a process that there never was."""
    if not pid:
        return True
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            return bool(select.select([fd], [], [], 0)[0])
        finally:
            os.close(fd)
    return True
