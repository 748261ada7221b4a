"""The rollout worker's weights: freed while deactivated, brought back, or replaced by others from a disk or a relay.

On a GPU they wait in host memory (`parked_weights`). On a CPU device, which has no other memory, they are loaded again.

Functions of this module run in the rollout worker (`collective_rpc`), and no step does while a job is under way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.checkpoint import difference, known_shapes, repack_embeddings
from vllm_coserve.engine.device import use_device_of
from vllm_coserve.engine.parked_weights import PARK_PAGE_BYTES, ParkedWeights
from vllm_coserve.engine.relayed_weights import NEWER, Puller, RelayedWeights
from vllm_coserve.memory.devices import make_own_range
from vllm_coserve.memory.driver import PageDriver
from vllm_coserve.memory.host_memory import resident_bytes
from vllm_coserve.weights.peering.reader import stop_forwarding
from vllm_coserve.weights.replica import Replica

logger = logging.getLogger("vllm.coserve")

_FREED_FROM_BYTES = 64 << 10  # smaller parameters stay: some of them (scales) are in no checkpoint
_SCHED_IDLE = getattr(os, "SCHED_IDLE", 5)
_RELAYED: list[RelayedWeights] = []  # the weights in use, where they came from a relay
_PULLS: dict[int, int] = {}  # the puller's numbers by the engine core's; the last one only
_PARKED: list[ParkedWeights] = []  # the model's, on a GPU
_FREED_BYTES: list[int] = []  # of the device, by the last release
_RESULTS: dict[int, str | BaseException] = {}  # of the last job
_SIZES = "coserve_weight_bytes"  # attribute of the model while its weights are freed


def begin_job(worker: Any, number: int, kind: str, path: str) -> None:
    """Begin one job on the worker's weights, on a thread: the caller may be the engine core's own, which goes on.

    `Word.WEIGHTS_JOB_DONE` is set to `number` when it has ended, well or not; `job_result` tells which.

    Args:
        worker: vLLM's worker.
        number: of the job.
        kind: "free", "restore", "load" or "apply".
        path: folder of a Hugging Face checkpoint, for "load"; number of the pull, for "apply".
    """
    from vllm_coserve.engine.install import installed_block

    args = (installed_block(), worker, number, kind, path)
    threading.Thread(target=_run_job, args=args, name="coserve-weights", daemon=True).start()


def job_result(worker: Any, number: int) -> str:
    """Of a job that has ended: "", or what went wrong, in which case the old weights are in use.

    For "restore" that means: those of the folder that was loaded last are. It raises when the weights can no longer be
    trusted: the rollout engine must end then.
    """
    result = _RESULTS.pop(number)
    if isinstance(result, BaseException):
        raise result
    return result


def _run_job(block: ControlBlock, worker: Any, number: int, kind: str, path: str) -> None:
    jobs: dict[str, Callable[[], str]] = {
        "free": lambda: _free(worker),
        "restore": lambda: _restore(worker),
        "load": lambda: _load(worker, path),
        "apply": lambda: _apply(worker, int(path)),
    }
    use_device_of(worker)
    if not (_PARKED and _PARKED[0].parked):  # else the activation waits, and it hardly needs the host's cores
        _when_idle()
    _RESULTS.clear()
    try:
        _RESULTS[number] = jobs[kind]()
    except BaseException as exc:  # recovery: raised again where the result is asked for
        _RESULTS[number] = exc
    finally:
        _publish(block, number)


def make_parkable(worker: Any) -> None:
    """Put the weights that a GPU worker has just loaded where they can be parked from.

    To be called before anything keeps their addresses: compiled code, captured graphs.
    """
    import torch
    from vllm.model_executor.offloader import NoopOffloader, get_offloader

    if not isinstance(get_offloader(), NoopOffloader):
        return  # part of them is in host memory, under addresses of the device
    gc.collect()  # views that nobody needs any more would keep a weight where it is
    index = torch.cuda.current_device()

    def make_range(nbytes: int) -> PageDriver:
        return make_own_range(max(1, -(-nbytes // PARK_PAGE_BYTES)), PARK_PAGE_BYTES, index)

    weights = (p for _, p in _weights(worker) if p.is_cuda)
    _PARKED[:] = [ParkedWeights(weights, make_range, pin_memory=True, trim=torch.cuda.empty_cache)]
    logger.info("coserve: deactivation moves %.2f GiB of weights to host memory", _PARKED[0].nbytes / 2**30)


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
    if _FREED_BYTES:
        block.set(Word.FREED_BYTES, _FREED_BYTES[0])
    if _PARKED:
        block.set(Word.PARKED_BYTES, _PARKED[0].nbytes)
        block.set(Word.PARK_NS, int(_PARKED[0].took_s * 1e9))
    block.set(Word.WEIGHTS_JOB_DONE, number)
    block.ring(Bell.ROLLOUT_CORE)


def _weights(worker: Any) -> Iterator[tuple[str, Any]]:
    """Names and parameters whose memory is worth freeing."""
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if parameter.untyped_storage().nbytes() >= _FREED_FROM_BYTES:
            yield name, parameter


def _can_reload(worker: Any) -> bool:
    from vllm.model_executor.model_loader import get_model_loader

    return hasattr(get_model_loader(worker.vllm_config.load_config), "get_all_weights")


def _reload(worker: Any, **source: Any) -> None:
    worker.reload_weights(**source)
    repack_embeddings(worker.model_runner.get_model())


def _free(worker: Any) -> str:
    before_bytes = resident_bytes()
    not_parked = _PARKED[0].park() if _PARKED else "weights are not parked in host memory here"
    if not_parked:
        if not _can_reload(worker):
            load_format = worker.vllm_config.load_config.load_format
            return f"{not_parked}, and those of --load-format {load_format} cannot be loaded again: kept"
        _drop(worker, not_parked)
    if _PULLER.lock.acquire(blocking=False):  # else a pull is under way, which needs the copy
        _PULLER.replica.drop()
        stop_forwarding()
        _PULLER.lock.release()
    gc.collect()
    _trim()
    if worker.device.type == "cpu":  # weights are packed into objects there that do not say how large they are
        _FREED_BYTES[:] = [max(0, before_bytes - resident_bytes())]
    else:
        _FREED_BYTES[:] = [_PARKED[0].nbytes if _PARKED else 0]
    return ""


def _drop(worker: Any, why: str) -> None:
    """Free what will be loaded again."""
    if _PARKED:
        logger.warning("coserve: %s; they are loaded again on activation", why)
        _PARKED[0].drop()
        return
    model, sizes = worker.model_runner.get_model(), {}
    for name, parameter in _weights(worker):
        storage = parameter.untyped_storage()
        sizes[name] = storage.nbytes()
        storage.resize_(0)  # shapes and Python objects stay, for reload_weights
    for module in model.modules():
        if "cpu_linear" in vars(module):  # a closure over the packed copy of the weight
            module.cpu_linear = None
    setattr(model, _SIZES, sizes)


def _restore(worker: Any) -> str:
    if _PARKED:
        parked = _PARKED[0].parked
        _PARKED[0].restore()
        if parked:
            return ""
    else:
        model = worker.model_runner.get_model()
        sizes: dict[str, int] = getattr(model, _SIZES)
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
