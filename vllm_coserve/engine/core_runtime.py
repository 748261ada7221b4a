"""What the engine cores of both sides have in common: the KV pool's pager, step costs, and errors that stay inside."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.latency_cache import LatencyCache
from vllm_coserve.engine.steps import StepClock
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.policy.latency import LatencyModel

if TYPE_CHECKING:
    from vllm_coserve.engine.block_pool import ElasticBlockPool

logger = logging.getLogger("vllm.coserve")

SIDE_SERVING, SIDE_ROLLOUT = 1, 2
KIND_API, KIND_CORE, KIND_WORKER = 1, 2, 3


class CoreRuntime:
    """State of one engine core process. Subclasses add the side's part of gate and memory.

    All methods run on the engine core's main thread unless they say otherwise.
    """

    side: int
    who: int
    _table_version: Word
    _table_applied: Word
    _mapper_bell: Bell
    _mapped_bell: Bell
    _faults: Word

    def __init__(self, context: Context, block: ControlBlock) -> None:
        self.context, self.config, self.block = context, context.config, block
        self.pool: ElasticBlockPool | None = None
        self.geometry: Geometry | None = None
        self.core: Any = None
        self.scheduler: Any = None
        self.clock = StepClock(LatencyModel())
        self._table = block.serving_table if self.side == SIDE_SERVING else block.rollout_table
        self._pending: list[tuple[int, list[int]]] = []  # (table version, pages that are free once it is applied)
        self._latency_cache: LatencyCache | None = None
        self.stopping = threading.Event()

    # ---- start-up, in the order in which vLLM gets there

    def kv_capacity_bytes(self) -> int:
        """KV memory that vLLM may count on: each engine may come to hold the whole pool."""
        return self.block.pool_pages * self.block.page_bytes

    def kv_range_bytes(self) -> int:
        """Virtual bytes of the KV range: serving's has room for weight pages too, which come and go."""
        return self._table.size * self.block.page_bytes

    def learn_geometry(self, kv_cache_config: Any) -> None:
        """Take the block stride from vLLM's KV cache configuration.

        Raises:
            ConfigurationError: the model's KV cache does not consist of equal, contiguous blocks.
        """
        strides = {t.block_stride for t in kv_cache_config.kv_cache_tensors}
        if len(strides) != 1 or any(t.host_resident for t in kv_cache_config.kv_cache_tensors):
            raise ConfigurationError(
                f"the model's KV cache mixes block sizes {sorted(strides)} and cannot share pages: choose a model in "
                "which all layers use the same full attention"
            )
        self.geometry = Geometry(strides.pop(), self.block.page_bytes, self._table.size)

    def attach(self, core: Any) -> None:
        """The engine core is about to serve."""
        self.core, self.scheduler = core, core.scheduler
        if self.pool is None:
            raise ConfigurationError("vLLM built no elastic block pool: the plugin is not active in its scheduler")
        self._latency_cache = LatencyCache(self.context.side, core.vllm_config)
        self._latency_cache.load_or_profile(core, self.clock, self.profile_step())
        self.block.join(self.side, KIND_CORE, _pid())
        threading.Thread(target=self._background, name="coserve-background", daemon=True).start()

    def profile_step(self) -> Callable[[], Any] | None:
        """How to run one step while profiling, None when this engine cannot now."""
        raise NotImplementedError

    def _background(self) -> None:
        """The side's background thread."""
        raise NotImplementedError

    def wake_main(self) -> None:
        """Have the main thread come by `between_steps`, also when it is idle. Any thread."""
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def between_steps(self) -> None:
        """All that must not run beside the scheduler."""
        raise NotImplementedError

    def after_message(self, woken: bool) -> None:
        """A message was handled, maybe out of the sleep without requests; `woken`: it was `wake_main`'s."""
        if woken:
            self.between_steps()

    # ---- pages

    def set_slots(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Write the slot table; the worker's mapper thread applies it at once."""
        self._table[list(slots)] = list(pages)
        self.block.add(self._table_version)
        self.block.ring(self._mapper_bell)

    def _release_later(self, pages: list[int]) -> None:
        if pages:
            self._pending.append((self.block.get(self._table_version), pages))

    def finish_releases(self, wait_s: float = 0.0) -> int:
        """Give on the pages that the worker has unmapped by now; returns how many are still pending."""
        deadline = time.monotonic() + wait_s
        while self._pending:
            seen = self.block.bell(self._mapped_bell)
            applied = self.block.get(self._table_applied)
            while self._pending and self._pending[0][0] <= applied:
                self._give_back(self._pending.pop(0)[1])
            left = deadline - time.monotonic()
            if not self._pending or left <= 0:
                break
            self.block.wait(self._mapped_bell, seen, left)
        return sum(len(pages) for _, pages in self._pending)

    def _give_back(self, pages: list[int]) -> None:
        """Pages that no process of this engine maps any more."""
        raise NotImplementedError

    # ---- steps

    def after_schedule(self, scheduler_output: Any) -> None:
        """The step is known and goes to the worker."""
        raise NotImplementedError

    def after_send(self) -> None:
        """The step is with the worker, which computes: what nobody waits for is done now."""

    def guarded(self, what: str, fn: Callable[[], Any], default: Any = None) -> Any:
        """Run hook code that must never end an engine: an error is counted, logged and answered with `default`."""
        try:
            return fn()
        except Exception:  # recovery: the engine goes on as plain vLLM would
            if self.block.add(self._faults) <= 20:
                logger.exception("coserve: %s failed; the engine goes on without it", what)
            return default


def _pid() -> int:
    import os

    return os.getpid()
