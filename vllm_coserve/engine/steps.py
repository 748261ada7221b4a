"""What engine steps consist of, and how long they had the device."""

from __future__ import annotations

import time
from typing import Any

from vllm_coserve.policy.latency import LatencyModel, StepShape


def step_shape(scheduler: Any, scheduler_output: Any) -> StepShape:
    """What a scheduled step computes; the scheduler counts its tokens as computed already."""
    prefill = pairs = decodes = context = 0
    requests = scheduler.requests
    for req_id, n in scheduler_output.num_scheduled_tokens.items():
        request = requests.get(req_id)
        if request is None:  # aborted meanwhile
            continue
        before = request.num_computed_tokens - n
        if n == 1 and before >= request.num_prompt_tokens:
            decodes += 1
            context += before
        else:
            prefill += n
            pairs += n * before + n * n // 2
    return StepShape(prefill, pairs, decodes, context)


class StepClock:
    """Measures what steps cost: from the end of `schedule`, or from when the device was free, to the worker's answer.

    Attributes:
        model: what steps like these cost, by what was measured.
        shape: of the step in flight, None until it is known.
        tokens: of the step in flight.
    """

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.shape: StepShape | None = None
        self.tokens = 0
        self._start_ns = 0

    def start(self) -> None:
        """The step goes to the worker now."""
        self._start_ns = time.monotonic_ns()

    def end(self, device_since_ns: int) -> tuple[int, int]:
        """The worker has answered; returns when the step began and ended, in ns.

        `device_since_ns`: when it got the device, 0 where it had not to wait.
        """
        return max(self._start_ns, device_since_ns), time.monotonic_ns()

    def learn(self, start_ns: int, end_ns: int) -> None:
        """Let the step in flight teach the model. Not one that overlapped the other engine's."""
        if self.shape is not None and self.tokens:
            self.model.observe(self.shape, (end_ns - start_ns) / 1e9)
