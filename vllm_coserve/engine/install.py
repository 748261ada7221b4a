"""Puts the side's hooks into vLLM, in each process of a co-serving pair."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ContractError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine.core_runtime import KIND_WORKER, SIDE_ROLLOUT, SIDE_SERVING, CoreRuntime, logger
from vllm_coserve.engine.device import wait_for_device
from vllm_coserve.engine.gpu_pool import check_pool_fits
from vllm_coserve.engine.process_groups import share_groups_of_a_single_rank
from vllm_coserve.engine.refusals import told_to_the_user
from vllm_coserve.engine.seams import add_method, patch
from vllm_coserve.engine.worker_hooks import TorchWithKvTensor, WorkerRuntime
from vllm_coserve.memory.devices import kept_slots

LOAD_WEIGHTS = "coserve_load_weights"  # utility methods of the rollout's engine core
PULL_WEIGHTS = "coserve_pull_weights"
_WEIGHTS_POLL_S = 0.002
KV_CACHE_LAYOUT = "BLHNC"  # block-outermost: a page holds whole blocks of every layer


class _Process:
    """What this process has of the pair; runtimes are made when vLLM first needs them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        fd = context.open(context.control_fd)
        self.block = ControlBlock.attach(fd)
        os.close(fd)
        self._core: CoreRuntime | None = None
        self._worker: WorkerRuntime | None = None

    @property
    def side(self) -> int:
        return SIDE_SERVING if self.context.side == "serving" else SIDE_ROLLOUT

    @property
    def core(self) -> CoreRuntime:
        if self._core is None:
            from vllm_coserve.engine.rollout_runtime import RolloutRuntime
            from vllm_coserve.engine.serving_runtime import ServingRuntime

            make = ServingRuntime if self.side == SIDE_SERVING else RolloutRuntime
            self._core = make(self.context, self.block)
        return self._core

    @property
    def is_worker(self) -> bool:
        return self._worker is not None

    @property
    def worker(self) -> WorkerRuntime:
        if self._worker is None:
            self._worker = WorkerRuntime(self.context, self.block)
        return self._worker


_process: _Process | None = None


def install(context: Context) -> ControlBlock:
    """Install the hooks of `context.side`, once a process. Returns the pair's control block."""
    global _process
    if _process is None:
        _process = _Process(context)
        os.environ["VLLM_KV_CACHE_LAYOUT"] = KV_CACHE_LAYOUT
        _install_queues(_process)
        _install_worker(_process)
        _install_memory(_process)
        _install_loop(_process)
        if "vllm.entrypoints.cli.serve" in sys.modules:  # an API server: engine cores and workers do not load it
            from vllm_coserve.engine.api_server import install_api

            install_api(context, _process.block)
    return _process.block


def installed_block() -> ControlBlock:
    """The control block of the pair that this process belongs to.

    Raises:
        ContractError: the hooks were not installed here.
    """
    if _process is None:
        raise ContractError("this process is not part of a co-serving pair")
    return _process.block


def _install_queues(process: _Process) -> None:
    from vllm_coserve.engine.queues import futex_condition_class, nap

    words, gated = process.block.words, process.context.config.gated

    def rollout_is_off() -> bool:
        # The worker waits on the device, where nobody else is between two rollout steps. The engine core waits on the
        # host's cores, which the rollout's processes need for as long as it has requests.
        loads = words[Word.WEIGHTS_JOB] != words[Word.WEIGHTS_JOB_DONE]
        if not words[Word.ROLLOUT_READY] or loads or words[Word.WEIGHTS_PULL] != words[Word.WEIGHTS_PULLED]:
            return False  # it starts, or loads weights on the device with the lowest priority
        if words[Word.GENERATION] == words[Word.GENERATION_DEAD]:
            return False  # its processes give their memory back
        if process.is_worker and gated:
            return words[Word.ROLLOUT_ENTERED] == words[Word.ROLLOUT_LEFT]
        return not (words[Word.ROLLOUT_RUNNING] or words[Word.ROLLOUT_WAITING])

    may_spin = rollout_is_off if process.side == SIDE_SERVING else lambda: False
    patch("queue_yield", lambda original: nap)
    patch("queue_condition", lambda original: futex_condition_class(original, process.block, may_spin))


def _install_worker(process: _Process) -> None:
    def allocate_with(original: Any) -> Any:
        def allocate_kv_cache(kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
            import vllm.v1.worker.utils as utils

            genuine = utils.torch
            tensors = kv_cache_config.kv_cache_tensors
            block_bytes = tensors[0].block_stride if tensors else 1
            shim = TorchWithKvTensor(genuine, lambda nbytes: process.worker.kv_tensor(nbytes, block_bytes))
            utils.torch = shim
            try:
                with told_to_the_user(process.context, process.block):
                    caches = original(kv_cache_config, *args, **kwargs)
            finally:
                utils.torch = genuine
            if shim.calls != 1:
                raise ContractError(f"allocate_kv_cache made {shim.calls} tensors; vllm-coserve expects one")
            process.block.join(process.side, KIND_WORKER, os.getpid())
            return caches

        return allocate_kv_cache

    def execute_after_sync(original: Any) -> Any:
        def execute_model(self: Any, scheduler_output: Any) -> Any:
            worker = process.worker
            worker.sync()
            if scheduler_output.total_num_scheduled_tokens:
                worker.device.acquire()
            output = original(self, scheduler_output)
            if process.context.device == "cuda":
                return output  # the engine core is this process, and vLLM's warm-up makes the second call itself
            if output is None and not scheduler_output.has_structured_output_requests:
                # vLLM asks for the sample in a second call, so that it can make a grammar's bitmask meanwhile. Without
                # a grammar that is one more hand-over between processes for nothing.
                output = self.sample_tokens(None)
            if output is not None:
                worker.device.release()
            return output

        return execute_model

    def parkable(original: Any) -> Any:
        def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
            from vllm_coserve.engine.worker_weights import make_parkable

            original(self, *args, **kwargs)
            make_parkable(self)

        return load_model

    def admit_block_outermost(original: Any) -> Any:
        def supported_kv_cache_layouts(cls: type) -> Any:
            from vllm.v1.kv_cache_layout import KVCacheLayout

            return (KVCacheLayout[KV_CACHE_LAYOUT], *original(cls))

        return supported_kv_cache_layouts

    if process.context.device == "cpu":
        share_groups_of_a_single_rank()
    patch("kv_alloc_v1", allocate_with)
    patch("kv_alloc_v2", allocate_with)
    patch("worker_step", execute_after_sync)
    patch("cpu_layouts", admit_block_outermost)
    if process.side == SIDE_ROLLOUT:
        patch("count_greater", lambda original: _count_greater)
        if process.context.device == "cuda":
            patch("worker_load", parkable)


def _count_greater(x: Any, values: Any) -> Any:
    return (x >= values).sum(-1)


def _install_memory(process: _Process) -> None:
    def virtual_capacity(original: Any) -> Any:
        def get_kv_cache_configs(vllm_config: Any, kv_cache_specs: Any, available_memory: list[int]) -> Any:
            with told_to_the_user(process.context, process.block):
                if process.context.device == "cuda":  # before there is a `process.core`, which makes serving's pool
                    check_pool_fits(process.context, process.block, vllm_config.model_config.enforce_eager)
                capacity = process.core.kv_capacity_bytes()
                configs = original(vllm_config, kv_cache_specs, [capacity] * len(available_memory))
                if len(configs) != 1:
                    raise ContractError(
                        "--coserve-rollout supports one device per engine: set --tensor-parallel-size 1"
                    )
                configs = [_with_room_for_weight_pages(configs[0], process.core.kv_range_bytes(), vllm_config)]
                process.core.learn_geometry(configs[0])
            return configs

        return get_kv_cache_configs

    def elastic(original: Any) -> Any:
        def make_block_pool(*args: Any, **kwargs: Any) -> Any:
            from vllm_coserve.engine.block_pool import ElasticBlockPool

            core = process.core
            core.pool = ElasticBlockPool(
                *args,
                geometry=core.geometry,
                pager=core,
                group_by_request=process.side == SIDE_ROLLOUT,
                kept_slots=kept_slots(core.geometry, process.context.device),
                weight_pages=core.geometry.num_slots - process.block.pool_pages,
                **kwargs,
            )
            return core.pool

        return make_block_pool

    def pages_first(original: Any) -> Any:
        def get_num_blocks_to_allocate(self: Any, request_id: str, *args: Any, **kwargs: Any) -> int:
            count = original(self, request_id, *args, **kwargs)
            pool = process.core.pool
            if pool is not None and count > 0:
                process.core.guarded("mapping pages", lambda: pool.ensure_free(count, request_id))
            return count

        return get_num_blocks_to_allocate

    patch("kv_configs", virtual_capacity)
    patch("block_pool", elastic)
    patch("blocks_needed", pages_first)


def _with_room_for_weight_pages(config: Any, range_bytes: int, vllm_config: Any) -> Any:
    """A KV cache configuration over a whole range, of which vLLM has been told only what is there at any time.

    So it refuses requests that would fit no more once the weight pages have gone.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        return config
    whole = get_kv_cache_config_from_groups(vllm_config, config.kv_cache_groups, range_bytes)
    whole.kv_tp_replicas = config.kv_tp_replicas
    return whole


def _install_loop(process: _Process) -> None:
    serving = process.side == SIDE_SERVING

    def run_attached(original: Any) -> Any:
        def run_busy_loop(self: Any) -> Any:
            process.core.attach(self)
            logger.info("coserve: %s engine core is active", process.context.side)
            try:
                return original(self)
            finally:
                process.core.stopping.set()

        return run_busy_loop

    def message(original: Any) -> Any:
        def _handle_client_request(self: Any, request_type: Any, request: Any) -> Any:
            from vllm.v1.engine import EngineCoreRequestType

            result = original(self, request_type, request)
            woken = request_type == EngineCoreRequestType.WAKEUP
            process.core.guarded("work between steps", lambda: process.core.after_message(woken))
            return result

        return _handle_client_request

    def scheduled(original: Any) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            core = process.core
            if core.scheduler is None:
                core.scheduler = self
            core.guarded("reading the schedule", lambda: core.after_schedule(output))
            return output

        return schedule

    def sent(original: Any) -> Any:
        def get_grammar_bitmask(self: Any, scheduler_output: Any) -> Any:
            process.core.guarded("noting a step", process.core.after_send)
            return original(self, scheduler_output)

        return get_grammar_bitmask

    def updated(original: Any) -> Any:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            def hand_over() -> None:
                wait_for_device(process.context)
                process.core.after_device(scheduler_output)

            process.core.guarded("handing over", hand_over)
            return original(self, scheduler_output, model_runner_output)

        return update_from_output

    patch("core_loop", run_attached)
    patch("core_message", message)
    patch("schedule", scheduled)
    patch("sent", sent)
    patch("update", updated)
    if serving:
        _install_serving_loop(process)
    else:
        _install_rollout_loop(process)


def _install_serving_loop(process: _Process) -> None:
    def arrival(original: Any) -> Any:
        def preprocess_add_request(self: Any, request: Any) -> Any:
            process.core.guarded("seeing an arrival", process.core.compute.on_arrival)
            return original(self, request)

        return preprocess_add_request

    def process_input(original: Any) -> Any:
        def _process_input_queue(self: Any) -> Any:
            runtime = process.core
            if not self.has_work() and self.is_running():
                runtime.guarded("opening the gate", runtime.on_idle)
            result = original(self)
            runtime.guarded("closing the gate", runtime.compute.on_busy)
            return result

        return _process_input_queue

    def step(original: Any) -> Any:
        def _process_engine_step(self: Any) -> bool:
            runtime = process.core
            if runtime.guarded("granting a turn", runtime.compute.before_step, False):
                return False  # messages first: a request may have come in meanwhile
            return original(self)

        return _process_engine_step

    patch("core_arrival", arrival)
    patch("core_input", process_input)
    patch("core_step", step)


def _install_rollout_loop(process: _Process) -> None:
    def salted_arrival(original: Any) -> Any:
        def preprocess_add_request(self: Any, request: Any) -> Any:
            process.core.guarded("salting a request", lambda: process.core.weights.salt(request))
            return original(self, request)

        return preprocess_add_request

    def never_stale(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            process.core.weights.rehash_if_stale(request)
            return original(self, request)

        return get_computed_blocks

    def load_weights(core: Any, path: str, version: str) -> Any:
        """Called by name from the sidecar's API server."""
        return process.core.load_weights(path, version)

    def pull_weights(core: Any, source: dict[str, Any], version: str) -> Any:
        """Called by name from the sidecar's API server."""
        return process.core.pull_weights(source, version)

    def step(original: Any) -> Any:
        def _process_engine_step(self: Any) -> bool:
            runtime = process.core
            runtime.guarded("work between steps", runtime.between_steps)
            if runtime.weights.busy:
                runtime.withdraw_offer()
                time.sleep(_WEIGHTS_POLL_S)
                return False
            if not (self.scheduler.running or self.scheduler.waiting):
                return original(self)  # only finished requests to tell the worker about
            turn = runtime.guarded("asking for the device", runtime.enter_turn)
            if turn is None:
                return False
            runtime.start_turn(turn)
            try:
                executed = original(self)
            finally:
                runtime.end_turn()
            if not executed:
                runtime.nothing_scheduled()
            return executed

        return _process_engine_step

    patch("core_step", step)
    patch("core_arrival", salted_arrival)
    patch("computed_blocks", never_stale)
    add_method("core_class", LOAD_WEIGHTS, load_weights)
    add_method("core_class", PULL_WEIGHTS, pull_weights)
