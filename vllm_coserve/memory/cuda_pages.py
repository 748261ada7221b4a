"""Physical pages of a CUDA device, and how two processes come to hold them.

`SharedPages`: one process makes all pages, another imports handles to them (`handles`). Which of the two maps a page
is then a matter of the ledger alone; a page keeps its memory, and its contents, whoever maps it. Both sides hold
handles to all pages, so that nothing but unmapping and mapping is left to do when a page changes hands.

`BudgetPages`: where handles cannot be exported a page is the right to hold so much memory. The old owner's memory goes
when it unmaps the page, the new owner makes some when it maps it. The ledger is the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory.cuda_calls import OUT_OF_MEMORY, CudaCallError, Device

logger = logging.getLogger("vllm.coserve")

_CANNOT_EXPORT = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_OPERATING_SYSTEM")


class Pages(Protocol):
    """Where a driver has the memory of a page from."""

    page_bytes: int
    num_pages: int
    fresh: range  # of these pages memory comes anew with each mapping, and must be zeroed: it may hold anything

    def take(self, page: int) -> Any:
        """A handle to map the page with."""
        ...

    def mapped(self, page: int, handle: Any) -> None:
        """The page is mapped with this handle, or mapping it has failed."""
        ...

    def close(self) -> None:
        """Give the handles back."""
        ...


class SharedPages:
    """Handles to all pages of a pool. See `Pages`."""

    def __init__(self, device: Device, handles: Sequence[Any], page_bytes: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, len(handles)
        self.fresh = range(0)
        self._device, self._handles = device, list(handles)

    @classmethod
    def create(cls, device: Device, num_pages: int, page_bytes: int) -> SharedPages:
        """Take the pool's memory from the device, all of it now.

        Raises:
            ConfigurationError: the page size does not fit the device, or there is not that much memory.
            CudaCallError: any other failure; nothing is kept.
        """
        device.activate()
        device.check_page_bytes(page_bytes)
        prop = device.allocation(shareable=True)
        handles: list[Any] = []
        try:
            for _ in range(num_pages):
                handles.append(device.call("cuMemCreate", page_bytes, prop, 0))
        except CudaCallError as exc:
            with contextlib.suppress(CudaCallError):
                device.release(*handles)
            if exc.code != OUT_OF_MEMORY:
                raise
            raise ConfigurationError(
                f"cannot get {num_pages * page_bytes / 2**30:.2f} GiB of device memory for the page pool, only "
                f"{len(handles) * page_bytes / 2**30:.2f} GiB ({exc}): lower --coserve-pool-gib"
            ) from exc
        return cls(device, handles, page_bytes)

    def export(self, page: int) -> int:
        """A file descriptor by which another process can import the page; the caller closes it."""
        fd = int(self._device.call("cuMemExportToShareableHandle", self._handles[page], self._device.fd_handle, 0))
        os.set_inheritable(fd, False)
        return fd

    def take(self, page: int) -> Any:
        return self._handles[page]

    def mapped(self, page: int, handle: Any) -> None:
        pass

    def close(self) -> None:
        handles, self._handles = self._handles, []
        self._device.release(*handles)


class BudgetPages:
    """Memory that is made with each mapping and goes with it. See `Pages`."""

    def __init__(self, device: Device, num_pages: int, page_bytes: int, fresh: bool = True) -> None:
        """`fresh`: False where whoever maps a page writes all of it before anything reads it.

        Raises:
            ConfigurationError: the page size does not fit the device.
        """
        device.check_page_bytes(page_bytes, shareable=False)
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.fresh = range(num_pages if fresh else 0)
        self._device, self._prop = device, device.allocation(shareable=False)

    def take(self, page: int) -> Any:
        return self._device.call("cuMemCreate", self.page_bytes, self._prop, 0)

    def mapped(self, page: int, handle: Any) -> None:
        # The mapping holds the memory from now on: unmapping alone gives it back.
        self._device.release(handle)

    def close(self) -> None:
        self._device.release()


class WithWeightPages:
    """The pages of a pool, and after them weight pages, for the pool's owner alone. See `Pages`.

    A weight page has memory from `make` to `discard`, if the device has some: while it has the rollout's weights, it
    has none to spare. What is mapped keeps its memory until it is unmapped.
    """

    def __init__(self, device: Device, pool: SharedPages | BudgetPages, weight_pages: int) -> None:
        self.pool, self._device = pool, device
        self.page_bytes, self.num_pages, self.fresh = pool.page_bytes, pool.num_pages + weight_pages, pool.fresh
        self._prop = device.allocation(shareable=False)
        self._handles: dict[int, Any] = {}

    def make(self, page: int) -> None:
        """Get the memory of a weight page, unless it has some.

        Raises:
            CudaCallError: the device has none.
        """
        if page not in self._handles:
            self._handles[page] = self._device.call("cuMemCreate", self.page_bytes, self._prop, 0)

    def discard(self, page: int) -> None:
        """Give the memory of a weight page back, if it has some."""
        handles = [self._handles.pop(page)] if page in self._handles else []
        self._device.release(*handles)  # and what it could not release before

    def take(self, page: int) -> Any:
        return self.pool.take(page) if page < self.pool.num_pages else self._handles[page]

    def mapped(self, page: int, handle: Any) -> None:
        if page < self.pool.num_pages:
            self.pool.mapped(page, handle)

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        self._device.release(*handles.values())
        self.pool.close()


def import_page(device: Device, fd: int) -> Any:
    """A handle to a page of another process, from the descriptor it was sent. The descriptor may be closed after."""
    return device.call("cuMemImportFromShareableHandle", fd, device.fd_handle)


def make_pool(device: Device, num_pages: int, page_bytes: int) -> SharedPages | BudgetPages:
    """The pool of the process that owns it: pages that can be shared, or budgets where that cannot be; says so once.

    Raises:
        ConfigurationError: the page size does not fit the device, or there is not that much memory.
    """
    reason = _why_not_exported(device, page_bytes)
    if reason is None:
        return SharedPages.create(device, num_pages, page_bytes)
    logger.warning(
        "coserve: device memory cannot be shared between processes (%s); pages are released and made anew when they "
        "change hands, which takes longer",
        reason,
    )
    return BudgetPages(device, num_pages, page_bytes)


def _why_not_exported(device: Device, page_bytes: int) -> str | None:
    if not device.attribute("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        return "the device has no handles that are file descriptors"
    device.activate()
    try:
        device.check_page_bytes(page_bytes)
        trial = SharedPages.create(device, 1, page_bytes)
        try:
            os.close(trial.export(0))
        finally:
            trial.close()
    except CudaCallError as exc:
        if exc.code not in _CANNOT_EXPORT:
            raise
        return str(exc)
    return None
