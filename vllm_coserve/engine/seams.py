"""Every name of vLLM 0.32 that vllm-coserve changes or relies on, with the reason and what would let it go.

A patch is a debt: it is applied at most once, and `tests/contract` checks each seam against the installed vLLM.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_coserve.api.errors import ContractError

VLLM_VERSION = "0.32.0"


@dataclass(frozen=True, slots=True)
class Seam:
    """One name of vLLM: `module.attr`, the parameters that our replacement counts on, and why it is touched."""

    module: str
    attr: str
    parameters: tuple[str, ...] | None
    reason: str
    until: str = "vLLM offers a hook for it"


SEAMS: dict[str, Seam] = {
    # --- command line
    "cli_args": Seam(
        "vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("parser",), "adds the --coserve-* argument group"
    ),
    "serve_cmd": Seam(
        "vllm.entrypoints.cli.serve", "ServeSubcommand.cmd", ("args",), "starts the pair around the server"
    ),
    "app_state": Seam(
        "vllm.entrypoints.launchers.api_server.entry",
        "init_app_state",
        ("engine_client", "state", "args", "supported_tasks"),
        "takes no traffic before every process has proved the plugin active",
    ),
    # --- engine core
    "kv_configs": Seam(
        "vllm.v1.engine.core",
        "get_kv_cache_configs",
        ("vllm_config", "kv_cache_specs", "available_memory"),
        "sizes the KV cache by the pool's virtual capacity",
    ),
    "block_pool": Seam(
        "vllm.v1.core.kv_cache_coordinator", "BlockPool", None, "blocks are usable only while their pages are mapped"
    ),
    "blocks_needed": Seam(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.get_num_blocks_to_allocate",
        ("self", "request_id"),
        "pages are mapped just before vLLM checks for free blocks",
    ),
    "core_loop": Seam("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", ("self",), "starts the core's runtime"),
    "core_input": Seam(
        "vllm.v1.engine.core", "EngineCoreProc._process_input_queue", ("self",), "opens the gate while idle"
    ),
    "core_step": Seam("vllm.v1.engine.core", "EngineCoreProc._process_engine_step", ("self",), "asks for the device"),
    "core_message": Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc._handle_client_request",
        ("self", "request_type", "request"),
        "does the work between two steps when woken",
    ),
    "core_arrival": Seam(
        "vllm.v1.engine.core",
        "EngineCore.preprocess_add_request",
        ("self", "request"),
        "sees an arrival on the input thread, before the core is free",
    ),
    "schedule": Seam(
        "vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self", "throttle_prefills"), "knows a step's shape"
    ),
    "sent": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "called when a step is with the worker: time for what nobody waits for",
    ),
    "update": Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "the device is free: hand it over before post-processing",
    ),
    "core_class": Seam(
        "vllm.v1.engine.core", "EngineCoreProc", None, "gets a utility method that replaces weights between steps"
    ),
    "computed_blocks": Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        ("self", "request"),
        "prefix cache of old weights must not be found",
    ),
    # --- API server
    "metrics_registry": Seam(
        "vllm.entrypoints.serve.instrumentator.metrics",
        "get_prometheus_registry",
        (),
        "adds the pair's metrics to /metrics, with one API server and with several",
    ),
    "metrics_page": Seam(
        "vllm.entrypoints.serve.instrumentator.metrics",
        "attach_router",
        ("app",),
        "gives /metrics of several API servers the pair's metrics too",
    ),
    **{
        f"max_tokens_{name}": Seam(
            f"vllm.entrypoints.{module}.serving",
            "get_max_tokens",
            ("max_model_len", "max_tokens", "input_length"),
            "refuses a request larger than the rollout's budget before its answer has begun",
            "check_admission is told how long a request is",
        )
        for name, module in (
            ("chat", "openai.chat_completion"),
            ("completion", "openai.completion"),
            ("responses", "openai.responses"),
            ("tokens", "scale_out.token_in_token_out"),
        )
    },
    "completion_output": Seam(
        "vllm.v1.engine.output_processor",
        "RequestState._new_completion_output",
        ("self", "token_ids", "finish_reason", "stop_reason"),
        "says which weights made the tokens of every chunk, not only at the end: a stream may be cut",
        "vLLM sends weight_versions with every chunk",
    ),
    # --- message queue
    "queue_condition": Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition",
        None,
        "vLLM's waiters spin for a second and starve the engine that has the device",
        "vLLM's queue can sleep without polling",
    ),
    "queue_yield": Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "sched_yield",
        (),
        "a loop of it starves other processes of the core for seconds (`queues.nap`)",
        "vLLM waits otherwise, or the kernel's scheduler is mended",
    ),
    # --- worker
    "kv_alloc_v1": Seam(
        "vllm.v1.worker.gpu_model_runner",
        "allocate_kv_cache",
        ("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        "puts the KV tensor over the reserved range",
    ),
    "kv_alloc_v2": Seam(
        "vllm.v1.worker.gpu.attn_utils",
        "allocate_kv_cache",
        ("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        "the same for the V2 model runner",
    ),
    "kv_alloc_torch": Seam(
        "vllm.v1.worker.utils", "torch", None, "the one torch.zeros of allocate_kv_cache", "it takes an allocator"
    ),
    "worker_load": Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.load_model",
        ("self",),
        "moves the rollout's weights, before anything keeps their addresses, to where memory can go and come",
    ),
    "worker_step": Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.execute_model",
        ("self", "scheduler_output"),
        "maps what the scheduler counts on before the step, and samples in the same call",
    ),
    "new_group": Seam(
        "torch.distributed",
        "new_group",
        None,
        "a dozen process groups of a single rank, each with a thread that polls, take 1.5 % of a core from the other",
        "vLLM makes none for a single rank, or Gloo's threads sleep",
    ),
    "destroy_group": Seam("torch.distributed", "destroy_process_group", ("group",), "the other end of `new_group`"),
    "count_greater": Seam(
        "vllm.v1.sample.sampler",
        "batched_count_greater_than",
        None,
        "the first request with logprobs would compile it: seconds in which the rollout engine neither returns the "
        "device nor pages",
        "vLLM compiles it at start-up",
    ),
    "cpu_layouts": Seam(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend.supported_kv_cache_layouts",
        (),
        "the CPU kernel computes the same tokens with block-outermost strides, but does not admit it",
    ),
}

_originals: dict[str, Any] = {}


def resolve(key: str) -> tuple[Any, str]:
    """The object that holds a seam's name, and the name.

    Raises:
        ContractError: the installed vLLM has no such name.
    """
    seam = SEAMS[key]
    try:
        owner: Any = importlib.import_module(seam.module)
        *path, name = seam.attr.split(".")
        for part in path:
            owner = getattr(owner, part)
        inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as exc:
        raise ContractError(
            f"this vLLM has no {seam.module}.{seam.attr} ({exc}); vllm-coserve needs vLLM {VLLM_VERSION}"
        ) from exc
    return owner, name


def patch(key: str, make: Callable[[Any], Any]) -> None:
    """Replace a seam by `make(original)`, once a process; later calls do nothing."""
    if key in _originals:
        return
    owner, name = resolve(key)
    static = inspect.getattr_static(owner, name)
    original = static.__func__ if isinstance(static, staticmethod | classmethod) else static
    replacement = make(original)
    if isinstance(static, staticmethod):
        replacement = staticmethod(replacement)
    elif isinstance(static, classmethod):
        replacement = classmethod(replacement)
    _originals[key] = original
    setattr(owner, name, replacement)


def original(key: str) -> Any:
    """What a patched seam was before. Raises KeyError for one that is not patched in this process."""
    return _originals[key]


def add_method(key: str, name: str, function: Callable[..., Any]) -> None:
    """Give the class of a seam a method of ours.

    Raises:
        ContractError: the class has one of that name already.
    """
    owner, attr = resolve(key)
    cls = getattr(owner, attr)
    if getattr(cls, name, function) is not function and name not in _originals:
        raise ContractError(f"{cls.__name__} has a method {name} already")
    _originals[name] = None
    setattr(cls, name, function)


def patched() -> frozenset[str]:
    """Seams that are replaced in this process."""
    return frozenset(_originals)
