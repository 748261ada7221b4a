"""The rollout engine core's hand on its weights: one job at a time in the worker, while messages are still served."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.words import Note, Word
from vllm_coserve.engine.core_runtime import logger

JOB_BOUND_S = 300.0
PULL_BOUND_S = 600.0
_SALT = "coserve-weights"


@dataclass(slots=True)
class _Job:
    kind: str
    path: str = ""
    version: str = ""
    answer: Future[str] = field(default_factory=Future)
    number: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _Pull:
    number: int
    version: str
    answer: Future[str] = field(default_factory=Future)
    since_s: float = field(default_factory=time.monotonic)


class WeightsKeeper:
    """Frees, restores and replaces weights. All methods run on the engine core's main thread.

    While a job runs no step may (`busy`), but the core still gives pages back and ends requests.
    """

    def __init__(self, block: ControlBlock, on_new_version: Callable[[], None]) -> None:
        """`on_new_version` is called when other weights have come into use."""
        self._block, self._on_new_version = block, on_new_version
        self._core: Any = None
        self._queue: deque[_Job] = deque()
        self._pull: _Pull | None = None
        self._number = block.get(Word.WEIGHTS_JOB_DONE)
        self._pull_number = block.get(Word.WEIGHTS_PULLED)
        block.set(Word.WEIGHTS_JOB, self._number)  # a predecessor may have died in one
        block.set(Word.WEIGHTS_PULL, self._pull_number)
        self.loaded = True
        self.can_free = True
        self._folder_version = ""  # of the folder whose weights were loaded last

    def attach(self, core: Any) -> None:
        """The engine core is about to serve, with the weights of the model folder."""
        self._core = core
        self._block.set(Word.WEIGHTS_LOADED, 1)
        self._folder_version = core.get_weight_version()
        self._publish_version(self._folder_version)
        self._announce()

    @property
    def busy(self) -> bool:
        """A job is under way or waits."""
        return bool(self._queue)

    @property
    def waits(self) -> bool:
        """`poll` has something to do (any thread may ask)."""
        pull = self._pull
        return self.busy or (pull is not None and self._block.get(Word.WEIGHTS_PULLED) == pull.number)

    def free(self) -> None:
        """Begin to free the weights; `loaded` says when it is done."""
        self._add(_Job("free"))

    def restore(self) -> None:
        """Begin to load freed weights again."""
        self._add(_Job("restore"))

    def load(self, path: str, version: str) -> Future[str]:
        """Begin to replace the weights; the future gives "" or why the old ones are still in use."""
        job = _Job("load", path, version)
        self._replace(job)
        return job.answer

    def pull(self, source: dict[str, Any], version: str) -> Future[str]:
        """Begin to replace the weights by those of a relay (fields of `RelayedWeights`); see `load` for the future.

        Steps go on while it is pulled. A pull that is under way is given up for a newer one.
        """
        from vllm_coserve.engine.worker_weights import begin_pull

        if self._pull is not None:
            self._pull.answer.set_result("a newer update came in between")
        self._pull_number += 1
        self._block.set(Word.WEIGHTS_PULL, self._pull_number)
        self._pull = _Pull(self._pull_number, version)
        args = (self._pull_number, source)
        self._core.model_executor.collective_rpc(begin_pull, args=args, non_block=True)
        return self._pull.answer

    def _poll_pull(self) -> None:
        pull = self._pull
        if pull is None:
            return
        if self._block.get(Word.WEIGHTS_PULLED) == pull.number:
            self._pull = None
            self._replace(_Job("apply", str(pull.number), pull.version, pull.answer))
        elif time.monotonic() - pull.since_s > PULL_BOUND_S:
            self._pull = None
            pull.answer.set_result(f"the weights did not come from the relay within {PULL_BOUND_S:.0f} s")

    def _replace(self, job: _Job) -> None:
        if not self.loaded or any(j.kind == "free" for j in self._queue):
            job.answer.set_result("the rollout engine is deactivated: activate it first")
        else:
            self._add(job)

    def _add(self, job: _Job) -> None:
        self._queue.append(job)
        self.poll()

    def poll(self) -> None:
        """Start the next job, or end the one that the worker has finished. Call it between steps."""
        self._poll_pull()
        if not self._queue:
            return
        job = self._queue[0]
        if not job.number:
            from vllm_coserve.engine.worker_weights import begin_job

            self._number += 1
            job.number, job.since_s = self._number, time.monotonic()
            self._block.set(Word.WEIGHTS_JOB, job.number)
            args = (job.number, job.kind, job.path)
            self._core.model_executor.collective_rpc(begin_job, args=args, non_block=True)
            return
        if self._block.get(Word.WEIGHTS_JOB_DONE) != job.number:
            if time.monotonic() - job.since_s > JOB_BOUND_S:
                _end_engine(f"the worker did not end its weights job '{job.kind}' within {JOB_BOUND_S:.0f} s")
            return
        self._queue.popleft()
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        from vllm_coserve.engine.worker_weights import job_result

        try:
            (wrong,) = self._core.model_executor.collective_rpc(job_result, args=(job.number,))
        except Exception as exc:  # recovery: the supervisor starts a new engine, with the weights of the model folder
            _end_engine(f"weights job '{job.kind}' failed and left weights that cannot be trusted: {exc}")
        self._block.set(Word.LOAD_NS, int((time.monotonic() - job.since_s) * 1e9))
        if job.kind == "free":
            self.loaded, self.can_free = bool(wrong), not wrong
            if wrong:
                logger.warning("coserve: %s", wrong)
        elif job.kind == "restore":
            self.loaded = True
            if wrong:  # those that a relay had are gone with it
                logger.warning("coserve: %s; the rollout engine goes on with weights %s", wrong, self._folder_version)
                self._use(self._folder_version)
        elif not wrong:
            if job.kind == "load":
                self._folder_version = job.version
            self._use(job.version)
        self._block.set(Word.WEIGHTS_LOADED, int(self.loaded))
        job.answer.set_result(wrong)

    def _use(self, version: str) -> None:
        self._core.set_weight_version(version)
        self._publish_version(version)
        self._announce()
        self._on_new_version()

    def _publish_version(self, version: str) -> None:
        self._block.set_note(Note.WEIGHT_VERSION, version)
        self._block.add(Word.WEIGHT_VERSION)

    def _announce(self) -> None:
        self._block.events.put(Writer.ROLLOUT, EventKind.WEIGHTS, self.number, self._block.note(Note.WEIGHT_VERSION))

    # ---- prefix cache

    @property
    def number(self) -> int:
        """Counts weight versions, also over lives of the rollout engine."""
        return self._block.get(Word.WEIGHT_VERSION)

    def salt(self, request: Any) -> None:
        """Have a request's prefix-cache hashes depend on the weights in use (any thread, before it is hashed)."""
        request.cache_salt = salted(request.cache_salt, self.number)

    def rehash_if_stale(self, request: Any) -> None:
        """Hash a request anew that was hashed for weights no longer in use, before its prefix is looked up."""
        current = salted(request.cache_salt, self.number)
        if request.cache_salt != current:
            request.cache_salt = current
            request.block_hashes.clear()
            request.update_block_hashes()


def _end_engine(why: str) -> NoReturn:
    logger.error("coserve: %s; ending this rollout engine", why)
    os._exit(1)


def salted(cache_salt: str | None, number: int) -> str:
    """A user's cache salt together with the number of the weights; what an earlier number added is replaced."""
    user = cache_salt or ""
    if user.startswith(_SALT + ":"):
        user = user.split(":", 2)[2]
    return f"{_SALT}:{number}:{user}"
