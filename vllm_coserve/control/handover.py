"""The device goes from one engine's worker to the other's, in the order that the gate gave their steps.

A worker that is done wakes the other directly. On a GPU its return says only that kernels were launched: there the
engine core, which is in the same process, releases the device once the stream is empty.
"""

from __future__ import annotations

import time

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.futex import fence
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.policy.admission import turn_wait_bound_s

_SLEEP_S = 0.05
_NS = 1_000_000_000


class ServingDevice:
    """The serving worker's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block

    def acquire(self) -> None:
        """Wait until the rollout step that goes before has left, at most 1.5 x its estimate + 5 ms from its start."""
        block = self._block
        after, start_ns = block.get(Word.SERVING_SENT_AFTER), time.monotonic_ns()
        waited_until_ns = 0
        while block.get(Word.ROLLOUT_LEFT) < after and block.get(Word.SERVING_GAVE_UP) < after:
            seen = block.bell(Bell.DEVICE)
            since_ns = block.get(Word.ROLLOUT_STEP_SINCE_NS) or start_ns
            bound_ns = int(turn_wait_bound_s(block.get(Word.ROLLOUT_STEP_EXPECTED_NS) / _NS) * _NS)
            left_ns = since_ns + bound_ns - time.monotonic_ns()
            if block.get(Word.ROLLOUT_LEFT) < after:
                if left_ns <= 0:
                    block.set(Word.SERVING_GAVE_UP, after)
                    block.add(Word.OVERRUNS)
                    break
                block.wait(Bell.DEVICE, seen, min(left_ns / _NS, _SLEEP_S))
            waited_until_ns = time.monotonic_ns()
        block.set(Word.SERVING_WAITED_UNTIL_NS, waited_until_ns)

    def release(self) -> None:
        """The step in flight has left the device."""
        block = self._block
        sent = block.get(Word.SERVING_SENT)
        if block.get(Word.SERVING_DONE) != sent:
            block.set(Word.SERVING_DONE_NS, time.monotonic_ns())
            block.set(Word.SERVING_DONE, sent)
            fence()
            block.ring(Bell.DEVICE)


class RolloutDevice:
    """The rollout worker's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block

    def acquire(self) -> None:
        """Wait until the serving step that goes before has left, or is so late that it must have been stopped."""
        block = self._block
        after, until_ns = block.get(Word.ROLLOUT_AFTER), block.get(Word.ROLLOUT_AFTER_UNTIL_NS)
        while block.get(Word.SERVING_DONE) < after:
            seen = block.bell(Bell.DEVICE)
            left_ns = until_ns - time.monotonic_ns()
            if block.get(Word.SERVING_DONE) >= after or left_ns <= 0:
                break
            block.wait(Bell.DEVICE, seen, min(left_ns / _NS, _SLEEP_S))
        block.set(Word.ROLLOUT_STEP_SINCE_NS, time.monotonic_ns())

    def release(self) -> None:
        """The step in flight has left the device."""
        block = self._block
        entered = block.get(Word.ROLLOUT_ENTERED)
        if block.get(Word.ROLLOUT_LEFT) != entered:
            block.set(Word.ROLLOUT_LEFT, entered)
            fence()
            block.ring(Bell.DEVICE)
            block.ring(Bell.SERVING_CORE)
