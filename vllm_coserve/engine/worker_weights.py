"""The rollout worker's weights: freed while deactivated, loaded again, or replaced by another checkpoint's.

Functions of this module run in the rollout worker, between two steps (`collective_rpc`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word

_FREED_FROM_BYTES = 64 << 10  # smaller parameters stay: some of them (scales) are in no checkpoint
_SCHED_IDLE = getattr(os, "SCHED_IDLE", 5)
_SHAPES: dict[str, list[int]] = {}  # tensors of the first checkpoint; later ones must have the same
_SIZES = "coserve_weight_bytes"  # attribute of the model while its weights are freed


def run_job(worker: Any, number: int, kind: str, path: str) -> str:
    """Do one job on the worker's weights; returns "" or what went wrong, in which case the old weights are in use.

    It raises when the weights can no longer be trusted: the rollout engine must end then.

    Args:
        worker: vLLM's worker.
        number: published as `Word.WEIGHTS_JOB_DONE` when the job has ended.
        kind: "free", "restore" or "load".
        path: folder of a Hugging Face checkpoint, for "load".
    """
    from vllm_coserve.engine.install import installed_block

    block = installed_block()
    jobs: dict[str, Callable[[], str]] = {
        "free": lambda: _free(worker),
        "restore": lambda: _restore(worker),
        "load": lambda: _load(worker, path),
    }
    try:
        return _run_when_idle(jobs[kind])
    finally:
        _publish(block, number)


def _publish(block: ControlBlock, number: int) -> None:
    block.set(Word.WEIGHTS_JOB_DONE, number)
    block.ring(Bell.ROLLOUT_CORE)


def _run_when_idle(job: Callable[[], str]) -> str:
    """Run a job on a thread that gets the device only while nobody else wants it (CPU devices: SCHED_IDLE)."""
    result: list[str | BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError):  # then it competes like any other thread
            os.sched_setscheduler(0, _SCHED_IDLE, os.sched_param(0))
        try:
            result.append(job())
        except BaseException as exc:  # recovery: raised again on the caller's thread
            result.append(exc)

    thread = threading.Thread(target=run, name="coserve-weights")
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _weights(worker: Any) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, parameter in worker.model_runner.get_model().named_parameters():
        storage = parameter.untyped_storage()
        if id(parameter) not in seen and storage.nbytes() >= _FREED_FROM_BYTES:
            seen.add(id(parameter))
            yield name, storage


def _can_reload(worker: Any) -> bool:
    from vllm.model_executor.model_loader import get_model_loader

    return hasattr(get_model_loader(worker.vllm_config.load_config), "get_all_weights")


def _free(worker: Any) -> str:
    model = worker.model_runner.get_model()
    if not _can_reload(worker):
        return f"weights of --load-format {worker.vllm_config.load_config.load_format} cannot be loaded again: kept"
    sizes = {}
    for name, storage in _weights(worker):
        sizes[name] = storage.nbytes()
        storage.resize_(0)  # shapes and Python objects stay, for reload_weights
    for module in model.modules():
        if "cpu_linear" in vars(module):  # a closure over the packed copy of the weight
            module.cpu_linear = None
    setattr(model, _SIZES, sizes)
    gc.collect()
    _trim()
    return ""


def _restore(worker: Any) -> str:
    model = worker.model_runner.get_model()
    sizes: dict[str, int] = getattr(model, _SIZES, {})
    if sizes:
        for name, parameter in model.named_parameters():
            if name in sizes:
                parameter.untyped_storage().resize_(sizes[name])
        delattr(model, _SIZES)
        worker.reload_weights()
    return ""


def _load(worker: Any, path: str) -> str:
    before = worker.vllm_config.model_config.model
    if wrong := difference(_known_shapes(before), Path(path)):
        return wrong
    try:
        worker.reload_weights(weights_path=path)
    except Exception as exc:  # recovery: the old weights come back; what a loader raises is not documented
        worker.reload_weights(weights_path=before)
        return f"{path} could not be loaded ({type(exc).__name__}: {exc}); the old weights are in use"
    return ""


def _known_shapes(model: str) -> dict[str, list[int]]:
    """Tensors of the checkpoint that was loaded first; it is still whole when it is first replaced."""
    if not _SHAPES:
        from huggingface_hub import snapshot_download

        folder = Path(model)
        _SHAPES.update(
            read_shapes(folder if folder.is_dir() else Path(snapshot_download(model, local_files_only=True)))
        )
    return _SHAPES


def difference(known: dict[str, list[int]], path: Path) -> str:
    """What makes the checkpoint at `path` one of another model than one with the tensors `known`; "" when nothing."""
    try:
        found = read_shapes(path)
    except (OSError, ValueError, struct.error) as exc:
        return f"{path} is no folder of whole safetensors files ({exc})"
    if not found:
        return f"{path} has no safetensors files"
    if missing := sorted(known.keys() - found.keys()):
        return f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}"
    if further := sorted(found.keys() - known.keys()):
        return f"{path} has {len(further)} tensors that the model has not, such as {further[0]}"
    for name, shape in known.items():
        if found[name] != shape:
            return f"{path}: {name} has shape {found[name]}, not {shape}"
    return ""


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the safetensors files of a folder; empty where there are none.

    Raises:
        OSError, ValueError, struct.error: a file cannot be read, is truncated or not in that format.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > 100 << 20:
                raise ValueError(f"{file.name} is not a safetensors file")
            header = json.loads(f.read(length))
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        end = max((v["data_offsets"][1] for v in entries.values()), default=0)
        if file.stat().st_size != 8 + length + end:
            raise ValueError(f"{file.name} is truncated")
        shapes.update({k: v["shape"] for k, v in entries.items()})
    return shapes


def _trim() -> None:
    with contextlib.suppress(AttributeError):  # another C library: the memory is reused, but not given back
        ctypes.CDLL(None).malloc_trim(0)
