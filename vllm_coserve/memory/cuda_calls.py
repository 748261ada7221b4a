"""The CUDA driver API through `cuda.bindings.driver` (cuda-python): every return code is checked, and named in errors.

cuda-python is imported when a device is opened, and only then: the package installs and runs without it.
"""

from __future__ import annotations

import errno
import importlib
import threading
from typing import Any

from vllm_coserve.api.errors import ConfigurationError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_MAPPED = "CUDA_ERROR_INVALID_VALUE"  # what cuMemRetainAllocationHandle says of an address without memory


class CudaCallError(OSError):
    """A call of the CUDA driver API failed.

    An OSError, so that whoever tries a failed mapping of the host's driver again does the same with this one's.

    Attributes:
        call: the function, such as `cuMemMap`.
        code: its return code by name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    """

    def __init__(self, call: str, code: str, meaning: str) -> None:
        super().__init__(errno.ENOMEM if code == OUT_OF_MEMORY else errno.EIO, f"{call}: {code} ({meaning})")
        self.call, self.code = call, code


def load_api() -> Any:
    """The module `cuda.bindings.driver`.

    Raises:
        ConfigurationError: cuda-python is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise ConfigurationError(
            f"co-serving on a GPU needs cuda-python ({exc}): install vllm-coserve[cuda], or cuda-bindings of the "
            "version of your CUDA driver"
        ) from exc


class Device:
    """One CUDA device in this process, with its primary context, which is the one that PyTorch uses.

    All methods may be called by any thread.
    """

    def __init__(self, index: int = 0, api: Any = None) -> None:
        """`index`: as CUDA counts the visible devices; `api`: stands in for `cuda.bindings.driver` in tests.

        Raises:
            ConfigurationError: no cuda-python, no NVIDIA driver, or a device without virtual memory management.
        """
        self.api = load_api() if api is None else api
        self.index = index
        try:
            self.call("cuInit", 0)
        except RuntimeError as exc:  # cuda-python could not load the driver's library
            raise ConfigurationError(f"the NVIDIA driver cannot be loaded ({exc}): is one installed here?") from exc
        self._device = self.call("cuDeviceGet", index)
        if not self.attribute("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise ConfigurationError(f"CUDA device {index} has no virtual memory management: use another device")
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self._unreleased: list[Any] = []
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver API; returns what it gives beside its return code, None for nothing.

        Raises:
            CudaCallError: the call failed.
        """
        code, *values = getattr(self.api, name)(*args)
        if int(code) != 0:
            raise CudaCallError(name, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))
        return values[0] if len(values) == 1 else tuple(values) or None

    def _text(self, name: str, code: Any) -> str:
        failed, text = getattr(self.api, name)(code)
        return f"unknown code {int(code)}" if int(failed) != 0 or not text else text.decode(errors="replace")

    def activate(self) -> None:
        """Make the device's context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        """A device attribute."""
        return self.call("cuDeviceGetAttribute", self.api.CUdevice_attribute[name], self._device)

    def wait_idle(self) -> None:
        """Wait until the device has done all that this process gave it, on every stream.

        Another process's work is not waited for, and what is given meanwhile does not prolong the wait.
        """
        self.activate()
        self.call("cuCtxSynchronize")

    # ---- physical memory

    def allocation(self, shareable: bool) -> Any:
        """Properties of memory on this device, of which another process can be given handles if `shareable`."""
        api = self.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.index
        if shareable:
            prop.requestedHandleTypes = self.fd_handle
        return prop

    @property
    def fd_handle(self) -> Any:
        """The type of handles that are file descriptors."""
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def read_write(self) -> list[Any]:
        """The access that this device is given to a mapping."""
        api = self.api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.index
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return [access]

    def check_page_bytes(self, page_bytes: int, shareable: bool = True) -> None:
        """Raises ConfigurationError when physical memory cannot be had in pieces of this size."""
        minimum = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self.call("cuMemGetAllocationGranularity", self.allocation(shareable), minimum)
        if page_bytes < 1 or page_bytes % granularity:
            above = max(1, -(-page_bytes // granularity)) * granularity
            raise ConfigurationError(
                f"pages of {page_bytes} bytes are no multiple of the {granularity} bytes in which CUDA device "
                f"{self.index} gives memory: make pages {above} bytes large"
            )

    def release(self, *handles: Any) -> None:
        """Give handles to physical memory back; the memory goes with its last handle and mapping.

        Those for which the call fails are kept, and given back with the next that are.

        Raises:
            CudaCallError: the first call that failed.
        """
        with self._lock:
            self._unreleased += handles
            kept, error = [], None
            for handle in self._unreleased:
                try:
                    self.call("cuMemRelease", handle)
                except CudaCallError as exc:
                    kept.append(handle)
                    error = error or exc
            self._unreleased = kept
        if error is not None:
            raise error

    # ---- erasing

    def low_priority_stream(self) -> Any:
        """A stream that yields to all others of the device, and is not ordered with the default stream."""
        self.activate()
        least, _ = self.call("cuCtxGetStreamPriorityRange")
        return self.call("cuStreamCreateWithPriority", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING, least)

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero mapped memory on a stream; returns when it is done. The GIL is not held meanwhile."""
        self.activate()
        self.call("cuMemsetD8Async", address, 0, nbytes, stream)
        self.call("cuStreamSynchronize", stream)
