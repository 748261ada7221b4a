"""How much of the first device's memory is taken, as the driver tells it to anyone (NVML): no engine need be asked."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

_PROCESSES_MAX = 64
_SAMPLE_S = 0.005


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@functools.cache
def _device() -> tuple[Any, ctypes.c_void_p] | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    return nvml, handle


def used_bytes() -> int | None:
    """Memory of the device that is taken, by whomever; None where NVML cannot say."""
    if (found := _device()) is None:
        return None
    nvml, handle = found
    memory = _Memory()
    return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.used


def process_bytes() -> dict[int, int]:
    """Memory of the device by process id, as far as NVML tells: in some containers it knows no process."""
    if (found := _device()) is None:
        return {}
    nvml, handle = found
    count, processes = ctypes.c_uint(_PROCESSES_MAX), (_Process * _PROCESSES_MAX)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
        return {}
    unknown = ctypes.c_ulonglong(-1).value
    return {p.pid: p.used for p in processes[: count.value] if p.used != unknown}


class Lowest:
    """The least memory of the device that was taken since `reset`, by a thread that looks all the time."""

    def __init__(self) -> None:
        self._lowest: int | None = None
        self._since_s = self._at_s = 0.0
        self._stop = threading.Event()

    def reset(self) -> None:
        """Begin anew."""
        self._lowest, self._since_s = used_bytes(), time.monotonic()
        self._at_s = self._since_s

    @property
    def lowest(self) -> tuple[int | None, float]:
        """(bytes, seconds after `reset` when it came to that)."""
        return self._lowest, self._at_s - self._since_s

    @contextlib.contextmanager
    def watching(self) -> Iterator[Lowest]:
        """Look until the block ends."""
        thread = threading.Thread(target=self._watch, daemon=True)
        self.reset()
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            used = used_bytes()
            if used is not None and self._lowest is not None and used < self._lowest:
                self._lowest, self._at_s = used, time.monotonic()
