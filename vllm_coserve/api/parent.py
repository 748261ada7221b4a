"""No process outlives its parent: what a pair or a job starts, ends with it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(owner_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL.

    Call it first thing in a child. `owner_pid` is the process that started the whole family, which may be process 1 of
    a container; any other parent 1 means that the real one ended before this call.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent or (parent == 1 and owner_pid != 1):
        os._exit(1)
