"""Which RL job holds the rollout engine: at most one at a time, for as long as its heartbeats come."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.words import Note


class HeldByAnotherError(Exception):
    """Another job holds the engine; `holder` says which."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(
            f"RL job {holder.job!r} holds this rollout engine for another {holder.expires_in_s:.1f} s, unless it renews"
        )
        self.holder = holder


@dataclass(frozen=True, slots=True)
class Holder:
    """A registration; `since_s` is Unix time."""

    job: str
    since_s: float
    expires_in_s: float


class Registration:
    """The register in the control block, shared by the sidecar's API servers and kept over their restarts.

    Changes are made under a lock on a file of the pair: it dies with the process that holds it.
    """

    def __init__(self, block: ControlBlock, lock_fd: int) -> None:
        """`lock_fd`: a descriptor of our own for the pair's control file."""
        self._block, self._lock_fd = block, lock_fd

    def holder(self) -> Holder | None:
        """Who holds the engine now."""
        try:
            job, since_s, until_s = json.loads(self._block.note(Note.REGISTRATION))
        except ValueError:  # nobody, or its writer was killed within the change
            return None
        left_s = until_s - time.time()
        return Holder(job, since_s, left_s) if left_s > 0 else None

    def take(self, job: str, ttl_s: float) -> Holder:
        """Register a job, or renew its registration.

        Raises:
            HeldByAnotherError: a live registration of another job.
        """
        with self._locked():
            held = self.holder()
            if held and held.job != job:
                raise HeldByAnotherError(held)
            if held is None:
                self._expire()
                self._block.events.put(Writer.API, EventKind.REGISTER, int(ttl_s * 1000), job)
            since_s = held.since_s if held else time.time()
            self._block.set_note(Note.REGISTRATION, json.dumps([job, since_s, time.time() + ttl_s]))
            return Holder(job, since_s, ttl_s)

    def release(self, job: str) -> bool:
        """End a job's registration; False when it has none.

        Raises:
            HeldByAnotherError: a live registration of another job.
        """
        with self._locked():
            held = self.holder()
            if held and held.job != job:
                raise HeldByAnotherError(held)
            self._expire()
            if held is None:
                return False
            self._block.set_note(Note.REGISTRATION, "")
            self._block.events.put(Writer.API, EventKind.RELEASE, 0, job)
            return True

    def expire(self) -> None:
        """Note the end of a registration whose heartbeats have stopped; call it now and then."""
        if self._block.note(Note.REGISTRATION) and self.holder() is None:
            with self._locked():
                self._expire()

    def _expire(self) -> None:
        text = self._block.note(Note.REGISTRATION)
        if text and self.holder() is None:
            self._block.set_note(Note.REGISTRATION, "")
            with contextlib.suppress(ValueError):
                self._block.events.put(Writer.API, EventKind.RELEASE, 1, json.loads(text)[0])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
