"""The worker's part: the KV tensor lies over a reserved range, and pages under it come and go."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ContractError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.handover import RolloutDevice, ServingDevice
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.device import device_index
from vllm_coserve.memory.devices import kept_slots, make_driver
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.mapper import TableMapper
from vllm_coserve.memory.tensors import int8_over

logger = logging.getLogger("vllm.coserve")

_SLEEP_S = 0.5
_TRIES, _PAUSE_FIRST_S, _PAUSE_MAX_S = 20, 0.001, 0.064  # 0.9 s in all: a rollout that owes pages is killed after 1 s


def with_retries(
    fn: Callable[[], None], on_fault: Callable[[OSError], None], sleep: Callable[[float], object] = time.sleep
) -> None:
    """Call `fn` until it raises no OSError, with growing pauses; `on_fault` hears of each.

    Raises:
        OSError: the last of `_TRIES` in a row.
    """
    pause_s = _PAUSE_FIRST_S
    for left in reversed(range(_TRIES)):
        try:
            return fn()
        except OSError as exc:
            on_fault(exc)
            if not left:
                raise
        sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


class WorkerRuntime:
    """Maps and unmaps pages of one worker process as its engine core writes the slot table.

    A mapper thread applies changes as they come, so that pages are given back without waiting for a step; `sync`
    applies them before a step. Both work under one lock.

    Attributes:
        device: this worker's end of the hand-over of the device.
        faults: driver calls that failed; all but the last of a series were made good by a retry.
    """

    def __init__(self, context: Context, block: ControlBlock) -> None:
        self._context, self._block = context, block
        serving = context.side == "serving"
        self.device = ServingDevice(block) if serving else RolloutDevice(block)
        self._table = block.serving_table if serving else block.rollout_table
        self._version = Word.SERVING_TABLE_VERSION if serving else Word.ROLLOUT_TABLE_VERSION
        self._applied = Word.SERVING_TABLE_APPLIED if serving else Word.ROLLOUT_TABLE_APPLIED
        self._bell = Bell.SERVING_MAPPER if serving else Bell.ROLLOUT_MAPPER
        self._mapped_bell = Bell.SERVING_MAPPED if serving else Bell.ROLLOUT_MAPPED
        self._lock = threading.Lock()
        self._mapper: TableMapper | None = None
        self._uncover: Callable[[], None] | None = None
        self._members_fd = -1
        self.faults = 0

    def kv_tensor(self, nbytes: int, block_bytes: int) -> Any:
        """int8[nbytes] over the reserved range; nothing is mapped yet.

        On a GPU the slots under block 0 have memory of their own, and the others stand on one page until the engine
        core writes the first table: vLLM's warm-up and graph capture touch blocks that no scheduler has given out.

        Raises:
            ContractError: vLLM wants more than the range's virtual capacity, or asks twice.
        """
        import torch

        capacity = self._table.size * self._block.page_bytes
        if self._mapper is not None or nbytes > capacity:
            raise ContractError(f"vLLM asked for a KV cache of {nbytes} bytes; the pool has {capacity}, for one tensor")
        if self._context.side == "rollout":
            # Held until this process ends, however it ends: pages are reused only when nobody holds it.
            self._members_fd = self._context.open(self._context.members_fd)
            fcntl.flock(self._members_fd, fcntl.LOCK_SH)
        pool_pages, page_bytes = self._block.pool_pages, self._block.page_bytes
        device, index = self._context.device, device_index(self._context)
        kept = kept_slots(Geometry(block_bytes, page_bytes, self._table.size), device)
        weight_pages = self._table.size - pool_pages  # none for the rollout
        driver = make_driver(self._context, pool_pages, page_bytes, index, kept, weight_pages=weight_pages)
        if device == "cuda":
            driver.cover()
            self._uncover = driver.uncover
            tensor = int8_over(driver.address, nbytes, device, index)
        else:
            tensor = torch.frombuffer((ctypes.c_int8 * nbytes).from_address(driver.address), dtype=torch.int8)
        self._mapper = TableMapper(driver, self._table)
        threading.Thread(target=self._follow, name="coserve-mapper", daemon=True).start()
        return tensor

    def sync(self) -> None:
        """Have everything mapped that the engine core has written so far; ends this process when that cannot be had."""
        if self._mapper is None or self._block.get(self._version) == self._block.get(self._applied):
            return
        try:
            with_retries(self._apply, self._note_fault)
        except OSError:
            # A half-mapped range would compute on the wrong pages: end this engine, the other goes on.
            logger.exception("coserve: mapping pages failed %d times, ending this worker", self.faults)
            os._exit(1)

    def _note_fault(self, error: OSError) -> None:
        self.faults += 1
        if self.faults == 1:
            logger.warning("coserve: mapping pages failed, trying again (said once): %s", error)

    def _apply(self) -> None:
        assert self._mapper is not None
        with self._lock:
            version = self._block.get(self._version)
            if self._uncover is not None:
                self._uncover()
                self._uncover = None
            self._mapper.apply()
            self._block.set(self._applied, version)
        self._block.ring(self._mapped_bell)

    def _follow(self) -> None:
        while True:
            seen = self._block.bell(self._bell)
            self.sync()
            self._block.wait(self._bell, seen, _SLEEP_S)


class TorchWithKvTensor:
    """Stands in for the module `torch` inside vLLM's allocate_kv_cache: its one `zeros` is the KV tensor."""

    def __init__(self, torch_module: Any, make: Any) -> None:
        self._torch, self._make = torch_module, make
        self.calls = 0

    def zeros(self, size: int, *, dtype: Any, device: Any) -> Any:
        """The reserved range instead of fresh memory."""
        self.calls += 1
        if dtype is not self._torch.int8:
            raise ContractError(f"allocate_kv_cache made a {dtype} tensor; vllm-coserve expects one int8 buffer")
        return self._make(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)
