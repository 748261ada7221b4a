"""Which page driver and which eraser a kind of device has; the engines ask here and know no more of it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ContractError
from vllm_coserve.memory.driver import PageDriver
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.host import HostDriver, PoolEraser
from vllm_coserve.memory.slots import NULL_BLOCK

if TYPE_CHECKING:
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, WithWeightPages

_OWNER_WAIT_S = 1200.0  # for the serving engine to load its weights; a rollout engine that starts may have to


class Eraser(Protocol):
    """Zeroes free pages in place."""

    def zero(self, page: int, count: int = 1) -> None:
        """Zero `count` consecutive pages; the caller knows that no engine maps them. Any thread.

        Raises:
            OSError: the memory of weight pages cannot be had.
        """
        ...

    def discard(self, page: int, count: int) -> None:
        """Give the memory of weight pages back, which no engine maps.

        Raises:
            OSError: it cannot be given back now; try again.
        """
        ...

    def close(self) -> None:
        """Give back what it needs for that."""
        ...


def make_driver(
    context: Context,
    pool_pages: int,
    page_bytes: int,
    index: int = 0,
    kept_slots: int = 0,
    api: Any = None,
    weight_pages: int = 0,
) -> PageDriver:
    """The driver of this process's engine over the pair's pool; its range has a slot for each page.

    Args:
        context: of the engine.
        pool_pages: pages of the pool.
        page_bytes: bytes of a page.
        index: of the device, as CUDA counts them.
        kept_slots: see `kept_slots`; "cuda" only.
        api: stands in for cuda-python in tests.
        weight_pages: further pages and slots, for serving only: in place of the rollout's weights.

    Raises:
        ConfigurationError: the device cannot do it, and what to change.
        ContractError: the owner of the pool is not there, or has another pool.
        OSError: the range or the pages cannot be had.
    """
    if context.device == "cpu":
        fd = context.open(context.pool_fd)
        try:
            return HostDriver(fd, pool_pages + weight_pages, page_bytes)
        finally:
            os.close(fd)
    from vllm_coserve.memory.cuda import CudaDriver

    cuda = _cuda_pool(context, pool_pages, page_bytes, index, api, weight_pages)
    return CudaDriver(cuda.device, cuda.pages, pool_pages + weight_pages, kept_slots)


def make_eraser(
    context: Context, pool_pages: int, page_bytes: int, index: int = 0, api: Any = None, weight_pages: int = 0
) -> Eraser:
    """The eraser of the pair's pool, for the serving engine core. Arguments and errors as for `make_driver`.

    On "cuda" it must be the process that also has the serving engine's driver: pages are made once.
    """
    if context.device == "cpu":
        fd = context.open(context.pool_fd)
        try:
            return PoolEraser(fd, pool_pages, page_bytes, weight_pages)
        finally:
            os.close(fd)
    from vllm_coserve.memory.cuda import CudaEraser, NoEraser
    from vllm_coserve.memory.cuda_pages import BudgetPages

    cuda = _cuda_pool(context, pool_pages, page_bytes, index, api, weight_pages)
    return NoEraser() if isinstance(cuda.pages, BudgetPages) else CudaEraser(cuda.device, cuda.pages)


def make_own_range(num_pages: int, page_bytes: int, index: int = 0, api: Any = None) -> PageDriver:
    """A range of a GPU's addresses under which this process maps memory of its own, none of any pool.

    Arguments and errors as for `make_driver`. Which page is mapped where makes no difference. What is mapped holds
    anything: zeroing it would be work for the device, at a moment when that may be the other engine's.
    """
    from vllm_coserve.memory.cuda import CudaDriver
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import BudgetPages

    device = Device(index, api)
    return CudaDriver(device, BudgetPages(device, num_pages, page_bytes, fresh=False), num_pages)


def kept_slots(geometry: Geometry, device: str) -> int:
    """How many first slots have memory of the engine's own: on CUDA those under vLLM's placeholder block.

    Kernels touch that block whenever a batch is padded, also while pages come and go. On CPU nothing does.
    """
    return len(geometry.slots_of(NULL_BLOCK)) if device == "cuda" else 0


@dataclass(frozen=True, slots=True)
class _CudaPool:
    device: Device
    pages: SharedPages | BudgetPages | WithWeightPages
    server: Any  # lives as long as the process


_pool: _CudaPool | None = None
_lock = threading.Lock()


def _cuda_pool(
    context: Context, pool_pages: int, page_bytes: int, index: int, api: Any, weight_pages: int
) -> _CudaPool:
    """The pool as this process has it; made, or asked for, once."""
    global _pool
    with _lock:
        if _pool is None:
            if context.side == "serving":
                _pool = _own(context, pool_pages, page_bytes, index, api, weight_pages)
            else:
                _pool = _ask_for(context, pool_pages, page_bytes, index, api)
        return _pool


def _own(context: Context, pool_pages: int, page_bytes: int, index: int, api: Any, weight_pages: int) -> _CudaPool:
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import SharedPages, WithWeightPages, make_pool
    from vllm_coserve.memory.handles import HandleServer, Offer

    device = Device(index, api)
    pages = make_pool(device, pool_pages, page_bytes)
    export = pages.export if isinstance(pages, SharedPages) else int
    try:
        offer = Offer(isinstance(pages, SharedPages), pool_pages, page_bytes)
        server = HandleServer(Path(context.pages_socket), offer, export)
    except BaseException:
        pages.close()
        raise
    return _CudaPool(device, WithWeightPages(device, pages, weight_pages) if weight_pages else pages, server)


def _ask_for(context: Context, pool_pages: int, page_bytes: int, index: int, api: Any) -> _CudaPool:
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, import_page
    from vllm_coserve.memory.handles import fetch

    device = Device(index, api)
    path = Path(context.pages_socket)
    offer, handles = fetch(path, lambda fd: import_page(device, fd), device.release, _OWNER_WAIT_S)
    if (offer.num_pages, offer.page_bytes) != (pool_pages, page_bytes):
        device.release(*handles)
        raise ContractError(f"the owner's pool is {offer}, not {pool_pages} pages of {page_bytes} bytes")
    if offer.shared:
        return _CudaPool(device, SharedPages(device, handles, page_bytes), None)
    return _CudaPool(device, BudgetPages(device, pool_pages, page_bytes), None)
