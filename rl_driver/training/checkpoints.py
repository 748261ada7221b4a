"""Checkpoints on disk: whole or not there, the newest few are kept, a full disk ends nothing."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from rl_driver.training.learner import Learner
from vllm_coserve.api.errors import ConfigurationError

logger = logging.getLogger("coserve.train")

_ERRORS = (Exception, CheckpointException)  # the latter is a BaseException
_NAME = re.compile(r"step-(\d{8})\Z")


class Checkpoints:
    """Those of one job, in a folder of their own."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Of whole checkpoints, the oldest first."""
        found = (_NAME.match(p.name) for p in self._folder.iterdir())
        return sorted(int(m[1]) for m in found if m)

    def write(self, learner: Learner, step: int, extra: dict[str, Any]) -> str:
        """Write one and forget the oldest; returns "", or why that cannot be done now: the older ones are kept then.

        It is written under another name and renamed at the end: what is interrupted is no checkpoint.
        """
        target = self._path(step)
        partial = target.with_name(target.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            learner.save(partial, extra | {"step": step})
            _sync(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except _ERRORS as exc:  # recovery: torch wraps what the disk says in errors of its own
            shutil.rmtree(partial, ignore_errors=True)
            return f"the checkpoint of step {step} could not be written, training goes on without: {_cause(exc)}"
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return ""

    def restore(self, learner: Learner) -> dict[str, Any] | None:
        """Load the newest one; returns its `extra` with the step, None where there is none.

        One that cannot be read is left out, and the one before it taken.

        Raises:
            ConfigurationError: there are some, but none can be read.
        """
        for step in reversed(self.steps()):
            try:
                return learner.load(self._path(step))
            except _ERRORS as exc:  # recovery: damaged; torch raises many kinds of errors
                logger.error("the checkpoint of step %d cannot be read: %s", step, exc)
        if self.steps():
            raise ConfigurationError(f"no checkpoint in {self._folder} can be read: remove them to begin anew")
        return None

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _cause(exc: BaseException) -> BaseException:
    """What the disk said, where torch tells."""
    failures = getattr(exc, "failures", None)  # of CheckpointException: rank -> (error, trace)
    return next(iter(failures.values()))[0] if failures else exc


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
