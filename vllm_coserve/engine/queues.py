"""vLLM's shared-memory queue with waiters that sleep.

`SpinCondition` yields in a loop for a second after each message. With two engines on one device (one core, on CPU) the
waiting one takes half of it. Here a waiter sleeps on a futex word of the control block, found by the queue's address.
Serving waits as vLLM does where nobody else wants the core: to wake a sleeper would cost serving's users some tenths of
a millisecond, four times a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from vllm_coserve.control.block import ControlBlock

_SLEEP_S = 0.2  # bound of one sleep: how late a shutdown is seen at worst


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
                os.sched_yield()
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
