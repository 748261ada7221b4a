"""The rollout worker's weights: freed while deactivated, loaded again, or replaced by others from a disk or a relay.

Functions of this module run in the rollout worker, between two steps (`collective_rpc`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.checkpoint import difference, known_shapes, repack_embeddings
from vllm_coserve.engine.relayed_weights import NEWER, Puller, RelayedWeights
from vllm_coserve.weights.peers import stop_forwarding
from vllm_coserve.weights.replica import Replica

_FREED_FROM_BYTES = 64 << 10  # smaller parameters stay: some of them (scales) are in no checkpoint
_SCHED_IDLE = getattr(os, "SCHED_IDLE", 5)
_RELAYED: list[RelayedWeights] = []  # the weights in use, where they came from a relay
_PULLS: dict[int, int] = {}  # the puller's numbers by the engine core's; the last one only
_SIZES = "coserve_weight_bytes"  # attribute of the model while its weights are freed


def run_job(worker: Any, number: int, kind: str, path: str) -> str:
    """Do one job on the worker's weights; returns "" or what went wrong, in which case the old weights are in use.

    For "restore" that means: those of the folder that was loaded last are.

    It raises when the weights can no longer be trusted: the rollout engine must end then.

    Args:
        worker: vLLM's worker.
        number: published as `Word.WEIGHTS_JOB_DONE` when the job has ended.
        kind: "free", "restore", "load" or "apply".
        path: folder of a Hugging Face checkpoint, for "load"; number of the pull, for "apply".
    """
    from vllm_coserve.engine.install import installed_block

    block = installed_block()
    jobs: dict[str, Callable[[], str]] = {
        "free": lambda: _free(worker),
        "restore": lambda: _restore(worker),
        "load": lambda: _load(worker, path),
        "apply": lambda: _apply(worker, int(path)),
    }
    try:
        return _run_when_idle(jobs[kind])
    finally:
        _publish(block, number)


def begin_pull(worker: Any, number: int, source: dict[str, Any]) -> None:
    """Begin to read weights from a relay, on a thread that gets the CPU while nobody else wants it.

    `Word.WEIGHTS_PULLED` is set to `number` when it has ended, well or not; the job "apply" tells which.

    Args:
        source: fields of `RelayedWeights`.
    """
    from vllm_coserve.engine.install import installed_block

    block, model = installed_block(), worker.vllm_config.model_config.model

    def ended(pull: int) -> None:
        block.set(Word.WEIGHTS_PULLED, number)
        block.ring(Bell.ROLLOUT_CORE)

    _PULLS.clear()
    _PULLS[number] = _PULLER.begin(RelayedWeights(**source), known_shapes(model), ended)


def _when_idle() -> None:
    with contextlib.suppress(OSError):  # then it competes like any other thread
        os.sched_setscheduler(0, _SCHED_IDLE, os.sched_param(0))


_PULLER = Puller(Replica(), _when_idle)


def _publish(block: ControlBlock, number: int) -> None:
    block.set(Word.WEIGHTS_JOB_DONE, number)
    block.ring(Bell.ROLLOUT_CORE)


def _run_when_idle(job: Callable[[], str]) -> str:
    """Run a job on a thread that gets the device only while nobody else wants it (CPU devices: SCHED_IDLE)."""
    result: list[str | BaseException] = []

    def run() -> None:
        _when_idle()
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


def _reload(worker: Any, **source: Any) -> None:
    worker.reload_weights(**source)
    repack_embeddings(worker.model_runner.get_model())


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
    if _PULLER.lock.acquire(blocking=False):  # else a pull is under way, which needs the copy
        _PULLER.replica.drop()
        stop_forwarding()
        _PULLER.lock.release()
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
        if not _RELAYED:
            _reload(worker)
            return ""
        with _PULLER.lock:
            try:
                _RELAYED[0].bring(_PULLER.replica, known_shapes(worker.vllm_config.model_config.model))
            except Exception as exc:  # recovery: the relay ended with its RL job; those of the folder are still there
                _RELAYED.clear()
                _reload(worker)
                return f"the weights in use before are not to be had any more ({exc})"
            _reload(worker, weights_iterator=_PULLER.replica.tensors.items())
    return ""


def _apply(worker: Any, number: int) -> str:
    """Use what was pulled. The old weights are nowhere else: an error in the middle ends the engine."""
    found = _PULLER.result(_PULLS.get(number, 0))
    if found is None:
        return NEWER
    source, wrong = found
    if wrong:
        return wrong
    with _PULLER.lock:  # nobody has it for long: the latest pull has ended, and older ones give up
        if _PULLER.replica.version != source.version:
            return NEWER
        _reload(worker, weights_iterator=_PULLER.replica.tensors.items())
    _RELAYED[:] = [source]
    return ""


def _load(worker: Any, path: str) -> str:
    before = worker.vllm_config.model_config.model
    if wrong := difference(known_shapes(before), Path(path)):
        return wrong
    try:
        _reload(worker, weights_path=path)
    except Exception as exc:  # recovery: the old weights come back; what a loader raises is not documented
        if _RELAYED:
            raise
        _reload(worker, weights_path=before)
        return f"{path} could not be loaded ({type(exc).__name__}: {exc}); the old weights are in use"
    _RELAYED.clear()
    return ""


def _trim() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # else torch keeps what was freed, and no other engine can have it
    with contextlib.suppress(AttributeError):  # another C library: the memory is reused, but not given back
        ctypes.CDLL(None).malloc_trim(0)
