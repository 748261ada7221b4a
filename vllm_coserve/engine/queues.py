"""vLLM's shared-memory queue with waiters that sleep.

`SpinCondition` yields in a loop for a second after each message. With two engines on one device (one core, on CPU) the
waiting one takes half of it. Here a waiter sleeps on a futex word of the control block, found by the queue's address.
Serving spins where nobody else wants the core: to wake a sleeper would cost serving's users some tenths of a
millisecond, four times a step. It naps meanwhile and does not yield, see `nap`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_coserve.control.block import ControlBlock

_SLEEP_S = 0.2  # bound of one sleep: how late a shutdown is seen at worst
_PR_SET_TIMERSLACK = 29
_SAME_WAIT_S = 200e-6  # who comes back later than that has found something, and waits for the next thing
_NAP_SHARE = 1 / 8  # of the time waited so far
_NAP_MAX_S = 17e-6  # in a wait as long as a step, whose end somebody counts on
_LONG_WAIT_S, _LONG_NAP_MAX_S = 20e-3, 50e-6
_thread = threading.local()


def nap() -> None:
    """Leave the core to others for some 20 to 35 us, or 70 in a longer wait; stands in for vLLM's sched_yield().

    A loop of sched_yield() has been seen to keep other processes of the same core from running for up to ten seconds:
    since Linux 6.18 each call gives up a whole time slice of virtual time, without bound in a group of tasks (cgroup,
    or session with autogroup) that has no other task on the core, and the group's clock is wrong from then on.
    """
    now_s = time.monotonic()
    if not hasattr(_thread, "woke_s"):  # the kernel rounds a sleep up by 50 us, unless told otherwise
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _thread.woke_s = -1.0
    if now_s - _thread.woke_s > _SAME_WAIT_S:
        _thread.since_s = now_s
    waited_s = now_s - _thread.since_s
    time.sleep(min(waited_s * _NAP_SHARE, _NAP_MAX_S if waited_s < _LONG_WAIT_S else _LONG_NAP_MAX_S))
    _thread.woke_s = time.monotonic()


def futex_condition_class(original: type, block: ControlBlock, may_spin: Callable[[], bool]) -> type:
    """A drop-in for vLLM's SpinCondition on the pair's control block; `may_spin`: nobody else wants the core now."""

    class FutexCondition(original):  # type: ignore[misc, valid-type]
        def __init__(self, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float = 1) -> None:
            super().__init__(is_reader, context, notify_address, busy_loop_s)
            self._bell = block.queue_bell_index(notify_address)
            # The value before the reader looks at the queue: a message that comes between is not slept through.
            self._seen = block.bell_at(self._bell)

        def wait(self, timeout_ms: int | None = None) -> None:
            if time.monotonic() <= self.last_read + self.busy_loop_s and may_spin():
                nap()
                return
            bound_s = _SLEEP_S if timeout_ms is None else min(_SLEEP_S, timeout_ms / 1000)
            self._seen = block.wait_at(self._bell, self._seen, bound_s)

        def notify(self) -> None:
            block.ring_at(self._bell)

        def cancel(self) -> None:
            if self.is_reader:
                self.last_read = time.monotonic()
                block.ring_at(self._bell)

    return FutexCondition
