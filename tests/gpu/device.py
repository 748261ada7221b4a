"""What the tests and benchmarks here do with a real device: bytes in and out, memory that is free, a second process.

python -m tests.gpu.device ROLE SOCKET PAGES PAGE_BYTES      # the second process, see `Helper`
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_coserve.memory.cuda import CudaDriver
from vllm_coserve.memory.cuda_calls import Device
from vllm_coserve.memory.cuda_pages import SharedPages, import_page
from vllm_coserve.memory.handles import fetch

ROOT = Path(__file__).parents[2]
PAGE = 2 << 20
_ANSWER_BOUND_S = 120.0


def write(device: Device, address: int, data: bytes) -> None:
    """Copy bytes to the device."""
    device.activate()
    buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
    device.call("cuMemcpyHtoD", address, ctypes.addressof(buffer), len(data))


def read(device: Device, address: int, nbytes: int) -> bytes:
    """Copy bytes from the device."""
    device.activate()
    buffer = (ctypes.c_char * nbytes)()
    device.call("cuMemcpyDtoH", ctypes.addressof(buffer), address, nbytes)
    return buffer.raw


def fill(device: Device, address: int, nbytes: int, byte: int) -> None:
    """Set bytes on the device, and wait for it."""
    device.activate()
    device.call("cuMemsetD8", address, byte, nbytes)
    device.wait_idle()


def free_bytes(device: Device) -> int:
    """Memory of the device that nobody has."""
    device.activate()
    return device.call("cuMemGetInfo")[0]


def until(condition: Any, bound_s: float) -> float | None:
    """Wait for a condition; returns after how many seconds it came, None when it did not."""
    start = time.monotonic()
    while time.monotonic() - start < bound_s:
        if condition():
            return time.monotonic() - start
        time.sleep(0.002)
    return None


class Helper:
    """A second process with the device: it is sent lines and answers each with one."""

    def __init__(self, role: str, socket: Path, pages: int, page_bytes: int = PAGE) -> None:
        command = [sys.executable, "-m", "tests.gpu.device", role, str(socket), str(pages), str(page_bytes)]
        pipe = subprocess.PIPE
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)
        self.answer()

    def ask(self, line: str) -> str:
        """Send a line, return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """The next line; raises RuntimeError when none comes within the bound."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _ANSWER_BOUND_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the helper process does not answer (exit code {self.process.poll()})")
        return line.strip()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class _Rollout:
    """The helper's part: a driver over imported pages. Commands are methods, their words arguments."""

    def __init__(self, socket: str, pages: int, page_bytes: int) -> None:
        self.device = Device()
        _, handles = fetch(Path(socket), lambda fd: import_page(self.device, fd), self.device.release, 20)
        self.pages = SharedPages(self.device, handles, page_bytes)
        self.driver = CudaDriver(self.device, self.pages, pages)

    def _at(self, slot: str) -> int:
        return self.driver.address + int(slot) * self.driver.page_bytes

    def map(self, slot: str, page: str, count: str) -> str:
        self.driver.map_run(int(slot), int(page), int(count))
        return "mapped"

    def unmap(self, slot: str, count: str) -> str:
        start = time.perf_counter_ns()
        self.driver.unmap_run(int(slot), int(count))
        return str(time.perf_counter_ns() - start)

    def fill(self, slot: str, count: str, byte: str) -> str:
        fill(self.device, self._at(slot), int(count) * self.driver.page_bytes, int(byte))
        return "filled"

    def first(self, slot: str) -> str:
        return str(read(self.device, self._at(slot), 1)[0])

    def touch(self, slot: str) -> str:
        """Access what may not be mapped; says what CUDA says."""
        try:
            fill(self.device, self._at(slot), 1, 1)
        except OSError as exc:
            return str(exc)
        return "no error"

    def storm(self, slot: str, count: str) -> str:
        """Kernels without end that write into pages."""
        import torch

        from vllm_coserve.memory.tensors import int8_over

        tensor = int8_over(self._at(slot), int(count) * self.driver.page_bytes, "cuda", 0)
        tensor.fill_(1)
        torch.cuda.synchronize()
        print("storming", flush=True)
        while True:
            for _ in range(200):  # as many as fit the queue: the device is busy when this process is killed
                tensor.add_(1)


class _Holder:
    """Has a pool of its own, for a test that kills it."""

    def __init__(self, socket: str, pages: int, page_bytes: int) -> None:
        self.device = Device()
        self.pool = SharedPages.create(self.device, pages, page_bytes)


def main() -> None:
    """Serve one role until standard input ends."""
    role, socket, pages, page_bytes = sys.argv[1:]
    me: Any = {"rollout": _Rollout, "holder": _Holder}[role](socket, int(pages), int(page_bytes))
    print("ready", flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        print(getattr(me, name)(*words), flush=True)


if __name__ == "__main__":
    main()
