"""The compute gate: one engine computes at a time, and serving decides which (ROSE 4.1, temporal sharing).

Two ways for the rollout to step, both taken back by serving within one rollout step:
- the gate is open while serving is idle: steps follow each other until a request arrives;
- a turn is granted for exactly one step while serving has work but slack (`policy.slack`, `policy.admission`).

Each side stores its own word, puts up a fence and then looks at the other's: of two that decide at once, at least one
sees the other (Dekker). Every wait has a bound; a rollout that is stopped or killed while it holds the turn costs
serving that bound once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.futex import fence
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.policy.admission import turn_wait_bound_s

START_BOUND_S = 0.010  # a granted turn that is not taken up for so long is revoked
_NS = 1_000_000_000


class ServingGate:
    """The serving engine core's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block
        self._turn = block.get(Word.ROLLOUT_TURN)
        self._given_up_on_ns = -1  # step that overran: wait for it no more, and grant nothing until it ends
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
        """Serving has work: no further free step, and wait (bounded) for the one in flight."""
        self._block.set(Word.GATE_OPEN, 0)
        self.is_open = False
        fence()
        self._await_inactive()

    def rollout_is_stuck(self) -> bool:
        """A step that overran its bound is still on the device."""
        block = self._block
        return bool(block.get(Word.ROLLOUT_ACTIVE)) and block.get(Word.ROLLOUT_STEP_SINCE_NS) == self._given_up_on_ns

    def grant(self, chunk_tokens: int) -> bool:
        """Give the rollout one step and wait (bounded) until it returns the device.

        Returns:
            True when the turn was used. False: it was not taken up, or not returned in time (an overrun).
        """
        block = self._block
        if self.rollout_is_stuck():
            return False
        self._turn = turn = max(self._turn, block.get(Word.ROLLOUT_TURN)) + 1
        start_ns = time.monotonic_ns()
        block.set(Word.GRANT_SINCE_NS, start_ns)
        block.set(Word.GRANT_CHUNK_TOKENS, chunk_tokens)
        block.set(Word.GRANT, turn)
        fence()
        block.ring(Bell.ROLLOUT_CORE)
        deadline_ns = start_ns + int(START_BOUND_S * _NS)
        while block.get(Word.ROLLOUT_TURN) != turn:
            seen = block.bell(Bell.SERVING_CORE)
            left_ns = deadline_ns - time.monotonic_ns()
            if block.get(Word.ROLLOUT_TURN) == turn or left_ns <= 0:
                break
            block.wait(Bell.SERVING_CORE, seen, left_ns / _NS)
        block.set(Word.GRANT, 0)  # revoked where it was not taken up
        fence()
        used = block.get(Word.ROLLOUT_TURN) == turn
        if used:
            delay_ns = max(0, block.get(Word.ROLLOUT_STEP_SINCE_NS) - start_ns)
            block.handover_latency.observe(delay_ns)
            delay_us = delay_ns // 1000
            block.set(Word.HANDOVER_US, (block.get(Word.HANDOVER_US) * 7 + delay_us) // 8)
        returned = self._await_inactive()
        return used and returned

    def _await_inactive(self) -> bool:
        """Wait until no rollout step is on the device, at most 1.5 x its estimate + 5 ms from its start."""
        block = self._block
        while block.get(Word.ROLLOUT_ACTIVE):
            seen = block.bell(Bell.SERVING_CORE)
            since_ns = block.get(Word.ROLLOUT_STEP_SINCE_NS)
            if since_ns == self._given_up_on_ns:
                return False
            bound_ns = int(turn_wait_bound_s(block.get(Word.ROLLOUT_STEP_EXPECTED_NS) / _NS) * _NS)
            left_ns = since_ns + bound_ns - time.monotonic_ns()
            if left_ns <= 0:
                if not block.get(Word.ROLLOUT_ACTIVE):
                    return True
                self._given_up_on_ns = since_ns
                block.add(Word.OVERRUNS)
                return False
            if block.get(Word.ROLLOUT_ACTIVE):
                block.wait(Bell.SERVING_CORE, seen, min(left_ns / _NS, 0.05))
        return True


@dataclass(frozen=True, slots=True)
class Turn:
    """Leave to run one rollout step."""

    free: bool
    chunk_tokens: int


class RolloutGate:
    """The rollout engine core's end."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block
        block.set(Word.ROLLOUT_ACTIVE, 0)  # a predecessor may have died in its turn

    def enter(self, expected_s: float, timeout_s: float) -> Turn | None:
        """Wait for leave to step, at most `timeout_s`.

        Args:
            expected_s: expected length of the step, the base of serving's bound on its wait.
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

    def _may_step_freely(self) -> bool:
        block = self._block
        return bool(block.get(Word.GATE_OPEN)) and block.get(Word.SERVING_WANTS) == block.get(Word.SERVING_ENGAGED)

    def _granted(self) -> int:
        grant = self._block.get(Word.GRANT)
        return grant if grant > self._block.get(Word.ROLLOUT_TURN) else 0

    def _try_enter(self, expected_s: float) -> Turn | None:
        block = self._block
        block.set(Word.ROLLOUT_STEP_SINCE_NS, time.monotonic_ns())
        block.set(Word.ROLLOUT_STEP_EXPECTED_NS, int(expected_s * _NS))
        block.set(Word.ROLLOUT_ACTIVE, 1)
        fence()
        if self._may_step_freely():
            return Turn(True, block.get(Word.GRANT_CHUNK_TOKENS))
        if grant := self._granted():
            chunk = block.get(Word.GRANT_CHUNK_TOKENS)
            block.set(Word.ROLLOUT_TURN, grant)
            return Turn(False, chunk)
        self.leave()
        return None

    def leave(self) -> None:
        """The device is free: give it back at once, before any post-processing."""
        self._block.set(Word.ROLLOUT_ACTIVE, 0)
        fence()
        self._block.ring(Bell.SERVING_CORE)
