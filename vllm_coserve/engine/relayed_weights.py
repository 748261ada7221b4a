"""Weights that a relay holds, as engines take them: a copy of the worker's own is brought to a version, then loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_coserve.engine.checkpoint import other_model
from vllm_coserve.weights.peering.reader import open_reader
from vllm_coserve.weights.replica import Replica

# Dedicated engines have no configuration of this project's own. Only used where a job has engines forward weights.
_PEER_HOST_ENV = "VLLM_COSERVE_PEER_HOST"

NEWER = "another update came in between"


@dataclass(frozen=True)
class RelayedWeights:
    """A version at a relay."""

    url: str
    key: str
    version: int
    wait_s: float = 0.0  # for a version that is on its way to the relay

    def bring(self, replica: Replica, known: dict[str, list[int]], shard: str = "") -> None:
        """Bring a copy to this version.

        Where the relay offers it, it is read from workers that have it, and handed on to others afterwards: by threads
        with the scheduling of the one that calls this first, on 127.0.0.1 or the address in $VLLM_COSERVE_PEER_HOST.

        Args:
            known: names and shapes of the model's checkpoint.
            shard: the same for all workers that read the same parts of it.

        Raises:
            RelayError: it is not there, or damaged.
            ValueError: it is of another model; nothing of that may be loaded, for a fused parameter of which a part is
                missing would be silently wrong.
        """

        def accept(shapes: Mapping[str, list[int]]) -> None:
            if wrong := other_model(known, dict(shapes), f"version {self.version}"):
                raise ValueError(wrong)

        store = open_reader(self.url, self.key, shard, os.environ.get(_PEER_HOST_ENV, "127.0.0.1"))
        try:
            replica.advance(store, self.version, accept, self.wait_s)
        finally:
            store.close()


class Puller:
    """Brings a worker's copy to the version that was asked for last, on a thread of its own. Any thread may use it."""

    def __init__(self, replica: Replica, prepare: Callable[[], None] = lambda: None, shard: str = "") -> None:
        """`prepare` is called on each of its threads, first; `shard`: see `RelayedWeights.bring`."""
        self.replica, self.shard = replica, shard
        self.lock = threading.Lock()  # hold it to use the copy
        self._prepare = prepare
        self._latest = 0  # pulls are numbered
        self._ended: tuple[int, RelayedWeights, str] | None = None

    def begin(
        self, source: RelayedWeights, known: dict[str, list[int]], ended: Callable[[int], None] = lambda number: None
    ) -> int:
        """Begin a pull, for which any other is given up; returns its number, which `ended` gets as well."""
        self._latest += 1
        args = (self._latest, source, known, ended)
        threading.Thread(target=self._run, args=args, name="coserve-pull", daemon=True).start()
        return self._latest

    def result(self, number: int) -> tuple[RelayedWeights, str] | None:
        """What a pull brought and why it did not, or ""; None: it is under way, or was given up."""
        ended = self._ended
        return ended[1:] if ended is not None and ended[0] == number == self._latest else None

    def _run(
        self, number: int, source: RelayedWeights, known: dict[str, list[int]], ended: Callable[[int], None]
    ) -> None:
        self._prepare()
        wrong = ""
        try:
            with self.lock:
                if number != self._latest:  # given up, and the copy may be another's
                    return
                source.bring(self.replica, known, self.shard)
        except Exception as exc:  # recovery: whatever it is, the old weights stay in use and the caller is told
            wrong = f"version {source.version} of {source.url} could not be read: {exc}"
        if number == self._latest:
            self._ended = number, source, wrong
            ended(number)
