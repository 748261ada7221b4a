"""What cannot work is found before anything is started, and the message says the fix."""

from __future__ import annotations

import argparse
import contextlib
import io
import socket
from pathlib import Path

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.engine.device import device_memory_bytes
from vllm_coserve.engine.gpu_pool import default_pool_bytes
from vllm_coserve.engine.model_size import engine_facts, rollout_args
from vllm_coserve.policy.memory import MemoryConfig, headroom_pages

PAGE_BYTES = 2 << 20
DEFAULT_POOL_GIB = 4.0
DEFAULT_POOL_SHARE = 0.4  # of the memory that is available, where that is less
_GIB = 1 << 30
_POOL_PAGES_MIN, _LENT_PAGES_MIN = 4, 2


def pool_size_pages(args: argparse.Namespace, config: CoserveConfig, device: str = "cpu") -> int:
    """Pages of the pool.

    Raises:
        ConfigurationError: it is too small to lend anything, or larger than the memory that is available; or, on a GPU
            and without `--coserve-pool-gib`, what the models leave cannot be told.
    """
    gib = pool_gib(args, config, device)
    pages = int(gib * _GIB) // PAGE_BYTES
    if pages < _POOL_PAGES_MIN:
        raise ConfigurationError(
            f"--coserve-pool-gib {gib:g}: the pool needs at least {_POOL_PAGES_MIN} pages of 2 MiB"
        )
    if pages - headroom_pages(pages, MemoryConfig(headroom_fraction=config.headroom)) < _LENT_PAGES_MIN:
        raise ConfigurationError(
            f"--coserve-headroom {config.headroom:g} leaves none of the pool's {pages} pages to lend: lower it, or "
            "raise --coserve-pool-gib"
        )
    return pages


def weight_pages_of(config: CoserveConfig) -> int:
    """Whole pages in the memory of the rollout's weights, which serving has while they are off the device; about.

    0 where their size cannot be told before they are loaded: then the memory goes back to the device only.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the rollout engine will say itself what is wrong with it
            return engine_facts(config.rollout, rollout_args(config)).weight_bytes // PAGE_BYTES
    except (Exception, SystemExit):  # recovery: files that are no checkpoint, arguments that vLLM refuses
        return 0


def pool_gib(args: argparse.Namespace, config: CoserveConfig, device: str = "cpu") -> float:
    """Size of the page pool in GiB, checked against the memory there is. Raises as `pool_size_pages` does."""
    available = available_memory_bytes(device) / _GIB
    if config.pool_gib is None and device == "cuda":
        return default_pool_bytes(args, config) / _GIB
    if config.pool_gib is None:
        return min(DEFAULT_POOL_GIB, available * DEFAULT_POOL_SHARE)
    if config.pool_gib > available:
        raise ConfigurationError(
            f"--coserve-pool-gib {config.pool_gib:g} is larger than the memory that is available "
            f"({available:.2f} GiB): lower it, both models need memory of their own beside the pool"
        )
    return config.pool_gib


def available_memory_bytes(device: str = "cpu") -> int:
    """Memory for models and pool: the GPU's in all, or what a CPU machine can give without swapping."""
    if device == "cuda":
        return device_memory_bytes()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError("/proc/meminfo does not say how much memory is available: give --coserve-pool-gib")


def preflight(args: argparse.Namespace, config: CoserveConfig, device: str = "cpu") -> int:
    """Find what cannot work before anything is started; returns the pages of the pool.

    Raises:
        ConfigurationError: says the fix.
    """
    serving_port = args.port or 8000
    if config.rollout_port == serving_port:
        raise ConfigurationError(
            f"--coserve-rollout-port {config.rollout_port} is the serving port too: give another port"
        )
    host = args.host or ""
    check_port(host, serving_port, "--port")
    check_port("127.0.0.1", config.rollout_port, "--coserve-rollout-port")
    for flag in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (getattr(args, flag, 1) or 1) > 1:
            name = "--" + flag.replace("_", "-")
            raise ConfigurationError(f"--coserve-rollout lends one device: {name} must be 1, or leave co-serving off")
    if device == "cuda" and getattr(args, "distributed_executor_backend", None) not in (None, "uni"):
        raise ConfigurationError(
            "--coserve-rollout on a GPU needs the worker in the engine core's process: leave "
            "--distributed-executor-backend out"
        )
    if getattr(args, "kv_transfer_config", None):
        raise ConfigurationError("--coserve-rollout cannot be combined with --kv-transfer-config yet: leave one out")
    if getattr(args, "headless", False) or getattr(args, "grpc", False):
        raise ConfigurationError("--coserve-rollout needs vLLM's HTTP API server: leave --headless and --grpc out")
    check_model(config.rollout)
    pages = pool_size_pages(args, config, device)
    if device == "cpu" or config.pool_gib is not None:  # else it is what the weights leave
        check_fits(args, config, pages, device)
    return pages


def check_port(host: str, port: int, flag: str) -> None:
    """Raises ConfigurationError when somebody listens on a port already."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((host, port))
    except OSError as exc:
        raise ConfigurationError(f"port {port} cannot be used ({exc.strerror}): give another with {flag}") from exc


def check_fits(args: argparse.Namespace, config: CoserveConfig, pool_pages: int, device: str = "cpu") -> None:
    """Raises ConfigurationError when weights of both models and the pool are more than the memory that is available."""
    if "dummy" in (getattr(args, "load_format", ""), *config.rollout_argv):
        return  # the files are not what will be loaded
    models = getattr(args, "model_tag", None) or getattr(args, "model", ""), config.rollout
    serving, rollout = (weight_bytes(Path(m)) / _GIB for m in models)
    available, pool = available_memory_bytes(device) / _GIB, pool_pages * PAGE_BYTES / _GIB
    if serving + rollout + pool > available:
        raise ConfigurationError(
            f"weights of {serving:.1f} GiB (serving) and {rollout:.1f} GiB (rollout) and a pool of {pool:.1f} GiB do "
            f"not fit into the {available:.1f} GiB of memory that are available: choose a smaller --coserve-rollout "
            "model or a smaller --coserve-pool-gib"
        )


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files in a local model folder, 0 for a model that is not one."""
    if not folder.is_dir():
        return 0
    return sum(f.stat().st_size for pattern in ("*.safetensors", "*.bin") for f in folder.glob(pattern))


def check_model(model: str) -> None:
    """Raises ConfigurationError when the rollout model cannot be found or is none that vLLM can read."""
    path = Path(model)
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"--coserve-rollout {model}: there is no config.json in it; give a folder with a Hugging Face model"
            )
        return
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigurationError(
            f"--coserve-rollout {model}: there is no such folder; give a Hugging Face model name or an existing folder"
        )
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model)
    except Exception as exc:  # recovery: whatever the hub client raised, the user's fix is the same
        raise ConfigurationError(
            f"--coserve-rollout {model} cannot be loaded ({type(exc).__name__}: {str(exc).splitlines()[0]}): "
            "check its name, the network and your Hugging Face token, or give a local folder"
        ) from exc
