"""The --coserve-* flags of `vllm serve`, and what happens around the server when they are given."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from vllm_coserve.api.config import CoserveConfig, MemoryMode, Policy, Role, StartState, flag_of, parse_config
from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError, CoserveError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Note, Word
from vllm_coserve.engine.device import device_type
from vllm_coserve.engine.life import socket_folder
from vllm_coserve.engine.preflight import (
    DEFAULT_POOL_GIB,
    DEFAULT_POOL_SHARE,
    PAGE_BYTES,
    preflight,
    weight_pages_of,
)
from vllm_coserve.engine.seams import original, patch
from vllm_coserve.engine.supervisor import EXIT_CONFIGURATION, GPU_SHARE_AT_START, Supervisor

_CHOICES = {
    "policy": get_args(Policy),
    "role": get_args(Role),
    "start": get_args(StartState),
    "memory": get_args(MemoryMode),
}
_NUMBERS = {
    "rollout_port": int,
    "ttft_slo_ms": float,
    "tpot_slo_ms": float,
    "pool_gib": float,
    "headroom": float,
    "lease_s": float,
    "chunk_tokens": int,
    "stall_timeout_s": float,
}


def install_flags() -> None:
    """Have `vllm serve` know the flags. Idempotent."""
    patch("cli_args", _with_flags)
    patch("serve_cmd", _with_pair)


def _with_flags(genuine: Any) -> Any:
    def add_cli_args(parser: Any) -> Any:
        parser = genuine(parser)
        group = parser.add_argument_group(
            title="Co-serving",
            description="Lend this server's idle compute and KV memory to a second model (vllm-coserve).",
        )
        for name, info in CoserveConfig.model_fields.items():
            text = info.description or ""
            if name == "rollout":
                text += ". Turns co-serving on; without it nothing of vLLM changes"
            elif name == "pool_gib":
                text += (
                    " (default: on a GPU what both models leave of --gpu-memory-utilization; on a CPU "
                    f"{DEFAULT_POOL_GIB:g}, at most {DEFAULT_POOL_SHARE:.0%} of available memory)"
                )
            elif name.endswith("slo_ms"):
                text += " (default: none; without an SLO only idle windows are lent)"
            else:
                text += f" (default: {info.default!r})"
            kwargs: dict[str, Any] = {"choices": _CHOICES[name]} if name in _CHOICES else {}
            kwargs["type"] = _NUMBERS.get(name, str)
            metavar = {"rollout": "ROLLOUT_MODEL", "rollout_args": '"ARGS"'}.get(name)
            if metavar:
                kwargs["metavar"] = metavar
            group.add_argument(flag_of(name), default=None, help=text.replace("%", "%%"), **kwargs)
        return parser

    return add_cli_args


def _with_pair(genuine: Any) -> Any:
    return serve


def serve(args: argparse.Namespace) -> None:
    """`vllm serve`: as it was, or with a rollout engine beside it.

    A function of this module, because vLLM pickles it with the arguments for its further API servers.
    """
    from vllm_coserve.api.context import current_context

    vllm_serve = original("serve_cmd")
    given = {n: getattr(args, f"coserve_{n}", None) for n in CoserveConfig.model_fields}
    given = {n: v for n, v in given.items() if v is not None}
    if not given or (current_context() is not None and "rollout" not in given):
        return vllm_serve(args)  # plain vLLM, or the sidecar itself
    try:
        if "rollout" not in given:
            raise ConfigurationError(f"{flag_of(next(iter(given)))} needs --coserve-rollout ROLLOUT_MODEL beside it")
        with socket_folder() as folder:
            if folder is not None and "VLLM_RPC_BASE_PATH" not in os.environ:
                os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
            with pair(args, parse_config(given)):
                vllm_serve(args)
    except CoserveError as exc:
        print(f"vllm serve: error: {exc}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    return None


def pages_socket() -> Path:
    """Where handles to the pool's pages are passed: beside vLLM's own sockets, with this process's number."""
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    return Path(folder) / f"coserve-pages-{os.getpid()}"


def suit_gpu(args: argparse.Namespace) -> None:
    """Set what the serving engine needs on a GPU that it shares; the rollout engine is started with the same.

    No step is in flight between two steps, or the device could not be lent there. And vLLM would not start where less
    memory is free than its share of the device, which is there for KV memory: here the pool is that.
    """
    print("coserve: co-serving on a GPU has not been run on a device yet; see the README", file=sys.stderr)
    args.async_scheduling = False
    args.gpu_memory_utilization = GPU_SHARE_AT_START


@contextlib.contextmanager
def pair(args: argparse.Namespace, config: CoserveConfig) -> Iterator[Context]:
    """Make the shared memory of a pair, start its rollout engine, and end all of it with the server.

    Raises:
        ConfigurationError: the flags, the model, the ports or the memory do not allow it; nothing was started.
    """
    from vllm_coserve.engine.install import install
    from vllm_coserve.memory.host import create_pool

    device = device_type()
    pool_pages, weight_pages = preflight(args, config, device), weight_pages_of(config)
    block, control_fd = ControlBlock.create(pool_pages, PAGE_BYTES, weight_pages)
    context = Context(
        side="serving",
        owner_pid=os.getpid(),
        control_fd=control_fd,
        # On a GPU the engine core makes the pool, in the process that computes.
        pool_fd=create_pool(pool_pages, PAGE_BYTES, weight_pages) if device == "cpu" else create_pool(1, PAGE_BYTES),
        members_fd=os.memfd_create("coserve-members", os.MFD_CLOEXEC),
        rollout_port=config.rollout_port,
        serving_port=args.port or 8000,
        device=device,
        pages_socket=str(pages_socket()),
        config=config,
    )
    # The pool takes the place of vLLM's own KV memory; its size is what get_kv_cache_configs is told instead.
    args.kv_cache_memory_bytes = 64 << 20
    if device == "cuda":
        suit_gpu(args)
    block.set(Word.ACTIVE_WANTED, int(config.start == "active"))
    context.export()
    install(context)
    keys = args.api_key if isinstance(args.api_key, list) else [args.api_key] if args.api_key else []
    supervisor = Supervisor(context, block, api_keys=[k for k in keys if k])
    supervisor.start()
    try:
        yield context
    finally:
        supervisor.stop()
        if failure := block.note(Note.START_REFUSAL) or supervisor.failure:
            raise ConfigurationError(failure)
