"""Page driver for CPU devices: a memory file (memfd) is the device memory, mmap(MAP_FIXED) the mapping.

It is not a simulation: two processes map pages of one file at addresses of their own, and an access to a slot that is
not mapped ends the process with SIGSEGV. Pages are mapped with their page tables (MAP_POPULATE): page faults one by one
cost the step that touches a page first some three times as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.memory.host_memory import spare_host_bytes

_PROT_NONE, _PROT_RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_POPULATE = 0x8000
_MADV_POPULATE_WRITE = 23
_HOST_RESERVE_BYTES = 512 << 20  # stays with others
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, size, prot, flags, fd, offset)
    if got == _FAILED:
        err = ctypes.get_errno()
        raise OSError(err, f"mmap of {size} bytes at slot address {address}: {os.strerror(err)}")
    return got


def create_pool(pool_pages: int, page_bytes: int, weight_pages: int = 0) -> int:
    """Make the physical pool, all of it resident and zero; returns its file descriptor.

    Touching a cold page of a memory file costs milliseconds, so that is paid here, before any traffic. Further
    `weight_pages` take no memory before somebody zeroes them.

    Raises:
        ConfigurationError: there is not that much memory.
    """
    fd = os.memfd_create("coserve-pool", os.MFD_CLOEXEC)
    size = pool_pages * page_bytes
    try:
        os.ftruncate(fd, size + weight_pages * page_bytes)
        base = _mmap(None, size, _PROT_RW, _MAP_SHARED, fd)
        try:
            if _libc.madvise(base, size, _MADV_POPULATE_WRITE) != 0:  # Linux < 5.14: touch each small page
                for at in range(0, size, mmap.PAGESIZE):
                    ctypes.memset(base + at, 0, 1)
        finally:
            _libc.munmap(base, size)
    except OSError as exc:
        os.close(fd)
        raise ConfigurationError(
            f"cannot get {size / 2**30:.2f} GiB of memory for the page pool ({exc}): lower --coserve-pool-gib"
        ) from exc
    return fd


class HostDriver:
    """See `PageDriver`. One instance per worker process and engine side."""

    def __init__(self, pool_fd: int, num_slots: int, page_bytes: int) -> None:
        self.page_bytes, self.num_slots = page_bytes, num_slots
        self._size = num_slots * page_bytes
        # One huge page more than needed, so that the range starts at a multiple of the page size.
        self._raw_size = self._size + page_bytes
        self._raw = _mmap(None, self._raw_size, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE)
        self._fd = os.dup(pool_fd)
        self._address = -(-self._raw // page_bytes) * page_bytes

    @property
    def address(self) -> int:
        return self._address

    def map_run(self, slot: int, page: int, count: int) -> None:
        self._check(slot, count)
        where = self._address + slot * self.page_bytes
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        _mmap(where, count * self.page_bytes, _PROT_RW, flags, self._fd, page * self.page_bytes)

    def unmap_run(self, slot: int, count: int) -> None:
        self._check(slot, count)
        where = self._address + slot * self.page_bytes
        flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE
        _mmap(where, count * self.page_bytes, _PROT_NONE, flags)

    def _check(self, slot: int, count: int) -> None:
        if slot < 0 or count < 1 or slot + count > self.num_slots:
            raise ValueError(f"slots {slot}..{slot + count - 1} are outside the range of {self.num_slots} slots")

    def close(self) -> None:
        if self._fd >= 0:
            _libc.munmap(self._raw, self._raw_size)
            os.close(self._fd)
            self._fd = -1


class PoolEraser:
    """Zeroes free pages in place, through a mapping of the whole pool that no engine computes on.

    The C call releases the GIL, so a thread of the engine core can zero while the core works.
    """

    def __init__(
        self,
        pool_fd: int,
        pool_pages: int,
        page_bytes: int,
        weight_pages: int = 0,
        spare_bytes: Callable[[], int] = spare_host_bytes,
    ) -> None:
        """`spare_bytes`: memory of the host that can be had, for weight pages; the pool has its own."""
        self._page_bytes, self._size = page_bytes, (pool_pages + weight_pages) * page_bytes
        self._pool_pages, self._spare_bytes = pool_pages, spare_bytes
        self._fd = os.dup(pool_fd)
        self._base: int | None = _mmap(None, self._size, _PROT_RW, _MAP_SHARED, pool_fd)

    def zero(self, page: int, count: int = 1) -> None:
        """Zero `count` consecutive pages; the caller knows that nobody maps them.

        Raises:
            OSError: the host has no memory to spare for weight pages. It would end some process to get it.
        """
        assert self._base is not None, "the eraser is closed"
        if page + count > self._pool_pages and self._spare_bytes() < count * self._page_bytes + _HOST_RESERVE_BYTES:
            raise OSError(errno.ENOMEM, f"the host has no memory to spare for {count} pages in place of weights")
        _memset(self._base + page * self._page_bytes, 0, count * self._page_bytes)

    def discard(self, page: int, count: int) -> None:
        """Give the memory under pages back to the host; they are zero when they are used again.

        Raises:
            OSError: it cannot be given back now.
        """
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(self._fd, mode, page * self._page_bytes, count * self._page_bytes) != 0:
            err = ctypes.get_errno()
            raise OSError(err, f"fallocate over pages {page}..{page + count - 1}: {os.strerror(err)}")

    def close(self) -> None:
        """Give the mapping back."""
        if self._base is not None:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                _libc.munmap(self._base, self._size)
            self._base = None


# ctypes.memset is a PYFUNCTYPE and keeps the GIL; the CDLL one lets it go.
_memset = _libc.memset
_memset.restype = ctypes.c_void_p
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
