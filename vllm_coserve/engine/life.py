"""No process outlives its parent: what a co-serving pair starts, ends with it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(owner_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends, even by SIGKILL.

    Call it first thing in a child of a pair. `owner_pid` is the `vllm serve` process, which may be process 1 of a
    container; any other parent 1 means that the real one ended before this call.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or (parent == 1 and owner_pid != 1):
        os._exit(1)
