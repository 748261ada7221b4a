"""Futexes on shared memory: sleep until a word changes, without spinning and with a bound.

One-way hand-over through this module costs a few microseconds when the waiter is asleep on another core. The waiter
releases the GIL while it sleeps (ctypes foreign call).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the _PRIVATE forms: waiters live in other processes

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def futex_wait(address: int, expected: int, timeout_s: float) -> bool:
    """Sleep until the 32-bit word at `address` is rung, unless it no longer holds `expected`.

    Args:
        address: address of an aligned 32-bit word in shared memory.
        expected: the value that the caller saw last.
        timeout_s: bound on the sleep, in seconds (> 0).

    Returns:
        False when the bound passed, else True (also on spurious wake-ups: look at the facts again).
    """
    ts = _Timespec(int(timeout_s), int((timeout_s % 1) * 1e9))
    rc = _syscall(
        _SYS_FUTEX,
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint32(expected & 0xFFFFFFFF),
        ctypes.byref(ts),
        None,
        0,
    )
    return not (rc == -1 and ctypes.get_errno() == errno.ETIMEDOUT)


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


_fence_lock = threading.Lock()


def fence() -> None:
    """A full memory barrier: what was stored before is visible before anything that is loaded after.

    Taking a lock is the one portable way that CPython offers (vLLM's shm_broadcast.memory_fence does the same).
    """
    with _fence_lock:
        pass
