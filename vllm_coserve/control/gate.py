"""The compute gate: one engine computes at a time, and serving decides which (ROSE 4.1, temporal sharing).

Two ways for the rollout to step, both taken back by serving within one rollout step:
- the gate is open while serving is idle: steps follow each other until a request arrives;
- a turn is granted for exactly one step while serving has work but slack (`policy.slack`, `policy.admission`).

The engine cores decide who comes next, ahead of time: each sends its step to its worker while the other's still
computes. The workers wait for each other (`control.handover`), so the device does not stand idle while a step is
scheduled, sent and answered. Steps are numbered, and each knows the one of the other engine that goes before it.

Each core stores its own word, puts up a fence and then looks at the other's: of two that decide at once, at least one
sees the other (Dekker). Every wait has a bound; a rollout that is stopped or killed while it holds the turn costs
serving that bound once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.futex import fence
from vllm_coserve.control.handover import RolloutDevice
from vllm_coserve.control.words import Bell, Word

START_BOUND_S = 0.010  # a granted turn that is not taken up for so long is revoked
SERVING_STOPPED_S = 1.0  # a serving step that is so much late was stopped on the device
_NS = 1_000_000_000


class ServingGate:
    """The serving engine core's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block
        self._turn = block.get(Word.ROLLOUT_TURN)
        self.is_open = False

    def raise_flag(self) -> None:
        """A request has arrived: the rollout starts no further free step. Called on the input thread."""
        self._block.add(Word.SERVING_WANTS)
        fence()

    def open(self, wants_seen: int, chunk_tokens: int) -> None:
        """Serving is idle: let the rollout step freely.

        Args:
            wants_seen: SERVING_WANTS, read before the caller found nothing to do.
            chunk_tokens: most prefill tokens of a free step.
        """
        block = self._block
        block.set(Word.SERVING_ENGAGED, wants_seen)
        block.set(Word.GRANT_CHUNK_TOKENS, chunk_tokens)
        block.set(Word.GATE_OPEN, 1)
        self.is_open = True
        fence()
        block.ring(Bell.ROLLOUT_CORE)

    def close(self) -> None:
        """Serving has work: no further free step. The one in flight goes before serving's next."""
        self._block.set(Word.GATE_OPEN, 0)
        self.is_open = False
        fence()

    def sending(self) -> None:
        """A serving step goes to the worker: after the rollout step in flight, before all that enter from now on."""
        block = self._block
        block.set(Word.GRANT, 0)
        fence()
        block.set(Word.SERVING_SENT_AFTER, block.get(Word.ROLLOUT_ENTERED) if self.rollout_is_active() else 0)
        block.add(Word.SERVING_SENT)

    def rollout_is_active(self) -> bool:
        """A rollout step is on the device or has leave to go there."""
        return self._block.get(Word.ROLLOUT_ENTERED) != self._block.get(Word.ROLLOUT_LEFT)

    def rollout_is_stuck(self) -> bool:
        """A step that overran its bound is still on the device."""
        block = self._block
        return self.rollout_is_active() and block.get(Word.SERVING_GAVE_UP) == block.get(Word.ROLLOUT_ENTERED)

    def grant(self, chunk_tokens: int, from_s: float = 0.0) -> None:
        """Give the rollout one step, after the last serving step that was sent.

        `from_s`: when that step should end (CLOCK_MONOTONIC). The rollout goes ahead when it takes twice as long and a
        second: then its worker has been stopped.
        """
        block, now_ns = self._block, time.monotonic_ns()
        self._turn = max(self._turn, block.get(Word.ROLLOUT_TURN)) + 1
        block.set(Word.GRANT_SINCE_NS, now_ns)
        block.set(Word.GRANT_CHUNK_TOKENS, chunk_tokens)
        left_ns = max(0, int(from_s * _NS) - now_ns)
        block.set(Word.GRANT_AFTER_UNTIL_NS, now_ns + 2 * left_ns + int(SERVING_STOPPED_S * _NS))
        block.set(Word.GRANT_AFTER, block.get(Word.SERVING_SENT))
        block.set(Word.GRANT, self._turn)
        fence()
        block.ring(Bell.ROLLOUT_CORE)

    def await_taken(self) -> bool:
        """Wait until the granted turn is taken up; False: it was not within `START_BOUND_S`, and no longer can be."""
        block = self._block
        deadline_ns = block.get(Word.GRANT_SINCE_NS) + int(START_BOUND_S * _NS)
        while block.get(Word.ROLLOUT_TURN) != self._turn:
            seen = block.bell(Bell.SERVING_CORE)
            left_ns = deadline_ns - time.monotonic_ns()
            if block.get(Word.ROLLOUT_TURN) == self._turn or left_ns <= 0:
                break
            block.wait(Bell.SERVING_CORE, seen, left_ns / _NS)
        return self.end_grant()

    def end_grant(self) -> bool:
        """Nobody may take up the granted turn any more; returns whether somebody has."""
        self._block.set(Word.GRANT, 0)
        fence()
        return self._block.get(Word.ROLLOUT_TURN) == self._turn

    def free_at_ns(self, begun_ns: int | None = None) -> int:
        """When the device is expected to be free of the rollout step in flight; 0: it is, or that step is stuck.

        `begun_ns` stands for the time at which one begins that has not got the device yet; None: now.
        """
        block = self._block
        if not self.rollout_is_active() or self.rollout_is_stuck():
            return 0
        since_ns = block.get(Word.ROLLOUT_STEP_SINCE_NS) or begun_ns or time.monotonic_ns()
        return since_ns + block.get(Word.ROLLOUT_STEP_PREDICTED_NS)

    def await_nearly_free(self, lead_s: float) -> bool:
        """Wait until the rollout step in flight has ended, or should end within `lead_s`. True where that took time."""
        waited, start_ns = False, time.monotonic_ns()
        while True:
            seen = self._block.bell(Bell.SERVING_CORE)
            left_s = (self.free_at_ns(start_ns) - time.monotonic_ns()) / _NS - lead_s
            if left_s <= 0:
                return waited
            self._block.wait(Bell.SERVING_CORE, seen, left_s)
            waited = True


@dataclass(frozen=True, slots=True)
class Turn:
    """Leave to run one rollout step."""

    free: bool
    chunk_tokens: int


class RolloutGate:
    """The rollout engine core's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block, self._device = block, RolloutDevice(block)
        self.leave()  # a predecessor may have died in its turn

    def enter(self, expected_s: float, timeout_s: float) -> Turn | None:
        """Wait for leave to step, at most `timeout_s`.

        Args:
            expected_s: expected length of the largest step, the base of serving's bound on its wait.
            timeout_s: the caller has messages to look after; keep it at a few milliseconds.
        """
        block = self._block
        deadline = time.monotonic() + timeout_s
        while True:
            seen = block.bell(Bell.ROLLOUT_CORE)
            if (self._may_step_freely() or self._granted()) and (turn := self._try_enter(expected_s)):
                return turn
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            block.wait(Bell.ROLLOUT_CORE, seen, left)

    def expect(self, predicted_s: float) -> None:
        """The step is scheduled: how long it should have the device."""
        self._block.set(Word.ROLLOUT_STEP_PREDICTED_NS, int(predicted_s * _NS))

    def _may_step_freely(self) -> bool:
        block = self._block
        return bool(block.get(Word.GATE_OPEN)) and block.get(Word.SERVING_WANTS) == block.get(Word.SERVING_ENGAGED)

    def _granted(self) -> int:
        grant = self._block.get(Word.GRANT)
        return grant if grant > self._block.get(Word.ROLLOUT_TURN) else 0

    def _try_enter(self, expected_s: float) -> Turn | None:
        block = self._block
        block.set(Word.ROLLOUT_STEP_SINCE_NS, 0)
        block.set(Word.ROLLOUT_STEP_EXPECTED_NS, int(expected_s * _NS))
        self.expect(expected_s)
        block.add(Word.ROLLOUT_ENTERED)
        fence()
        if self._may_step_freely():
            block.set(Word.ROLLOUT_AFTER, 0)
            return Turn(True, block.get(Word.GRANT_CHUNK_TOKENS))
        if grant := self._granted():
            chunk = block.get(Word.GRANT_CHUNK_TOKENS)
            block.set(Word.ROLLOUT_AFTER_UNTIL_NS, block.get(Word.GRANT_AFTER_UNTIL_NS))
            block.set(Word.ROLLOUT_AFTER, block.get(Word.GRANT_AFTER))
            block.set(Word.ROLLOUT_TURN, grant)
            block.ring(Bell.SERVING_CORE)
            return Turn(False, chunk)
        self.leave()
        return None

    def leave(self) -> None:
        """The worker has answered, or nothing was sent to it."""
        self._device.release()
