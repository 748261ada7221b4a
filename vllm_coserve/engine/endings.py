"""Rollout requests that must end early: each ends once, with its tokens and a reason that a program can read."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.words import Word
from vllm_coserve.engine.core_runtime import logger
from vllm_coserve.memory.geometry import Geometry

REASON_RECLAIMED = "coserve:reclaimed"
REASON_STALLED = "coserve:stalled"
REASON_DEACTIVATED = "coserve:deactivated"
REASON_TOO_LARGE = "coserve:too_large"

_COUNTERS = {
    REASON_RECLAIMED: Word.RECLAIM_ABORTS,
    REASON_STALLED: Word.STALL_ABORTS,
    REASON_DEACTIVATED: Word.DEACTIVATE_ABORTS,
    REASON_TOO_LARGE: Word.TOO_LARGE_ABORTS,
}
_WAITING_SEEN = 64


class Endings:
    """Ends requests of the rollout engine core and finds those that make no progress. Main thread only."""

    def __init__(self, block: ControlBlock, stall_timeout_s: float) -> None:
        self._block, self._timeout_s = block, stall_timeout_s
        self._progress: dict[str, tuple[int, float]] = {}  # request -> (computed tokens, since when)
        self._last_step = (-1, 0.0)  # (steps so far, since when)

    def end(self, core: Any, request_ids: Iterable[str], reason: str) -> None:
        """End requests; their clients get the tokens so far, finish_reason "abort" and the reason as stop_reason."""
        request_ids = list(request_ids)
        if not request_ids:
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        ended = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        by_client: dict[int, list[str]] = defaultdict(list)
        kind = EventKind.STALL if reason == REASON_STALLED else EventKind.ABORT
        for request in ended:
            by_client[request.client_index].append(request.request_id)
            text = request.request_id if kind == EventKind.STALL else f"{reason} {request.request_id}"
            self._block.events.put(Writer.ROLLOUT, kind, request.num_output_tokens, text)
        for client, ids in by_client.items():
            outputs = [EngineCoreOutput(i, [], finish_reason=FinishReason.ABORT, stop_reason=reason) for i in ids]
            core.output_queue.put_nowait((client, EngineCoreOutputs(finished_requests=set(ids), outputs=outputs)))
        self._block.add(_COUNTERS[reason], len(ended))
        # A deactivated engine says so once; clients that try again and again are only counted.
        level = logging.DEBUG if reason == REASON_DEACTIVATED else logging.INFO
        logger.log(level, "coserve: ended %d rollout requests: %s", len(ended), reason)

    def restart_clocks(self) -> None:
        """No step may run now, and that is nobody's stall."""
        self._progress.clear()
        self._last_step = (-1, 0.0)

    def stalled(self, scheduler: Any) -> list[str]:
        """Requests that were to make progress and made none for so long.

        A running request by its own tokens; one that waits, when the engine computed nothing at all meanwhile.
        """
        now_s, out = time.monotonic(), []
        progress: dict[str, tuple[int, float]] = {}
        for request in scheduler.running:
            done, since_s = self._progress.get(request.request_id, (-1, now_s))
            if request.num_computed_tokens != done:
                done, since_s = request.num_computed_tokens, now_s
            elif now_s - since_s > self._timeout_s:
                out.append(request.request_id)
            progress[request.request_id] = (done, since_s)
        self._progress = progress
        steps = self._block.get(Word.ROLLOUT_STEPS)
        if steps != self._last_step[0] or not (scheduler.running or scheduler.waiting):
            self._last_step = (steps, now_s)
        if now_s - self._last_step[1] > self._timeout_s:
            oldest_s = time.time() - self._timeout_s
            out += [r.request_id for r in _first(scheduler.waiting) if r.arrival_time < oldest_s]
        return out

    def too_large(self, scheduler: Any, geometry: Geometry, block_tokens: int) -> list[str]:
        """Requests that wait though nobody runs, and whose tokens so far need more pages than the budget has.

        They would wait for ever: a request is refused when it comes (HTTP 413), but the budget may shrink later.
        """
        if scheduler.running:
            return []
        budget, oldest_s = self._block.get(Word.BUDGET_PAGES), time.time() - self._timeout_s
        return [
            r.request_id
            for r in _first(scheduler.waiting)
            if r.arrival_time < oldest_s and geometry.pages_for(r.num_tokens // block_tokens + 1) > budget
        ]


def _first(requests: Iterable[Any]) -> Iterable[Any]:
    for i, request in enumerate(requests):
        if i >= _WAITING_SEEN:
            return
        yield request
