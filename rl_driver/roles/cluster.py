"""The job's actors on Ray: a cluster that is there (`RAY_ADDRESS`), or a local one that ends with the job."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_driver.api.train_config import TrainConfig
from rl_driver.policy.staleness import Staleness
from rl_driver.roles.environments import EnvironmentRole, GroupOrder
from rl_driver.roles.learner import LearnerRole
from rl_driver.roles.proxy_process import ProxyHandle
from rl_driver.training.samples import Sample
from vllm_coserve.api.errors import ConfigurationError

logger = logging.getLogger("coserve.train")

_OBJECT_STORE_BYTES = 200 << 20
_PUBLISH_BOUND_S = 150.0
_RESTARTS = 3  # of an environment worker
_PUBLISHING = "publishing"
_END_BOUND_S = 10.0
_RELAY_WAIT_S = 60.0  # of an engine, for what the learner is putting into the relay
_PUT_TRIES, _PUT_RETRY_S = 3, 2.0


@contextlib.contextmanager
def running_actors(config: TrainConfig, proxy: ProxyHandle) -> Iterator[Actors]:
    """Connect to Ray, or start it, and have the actors there until the block ends.

    Raises:
        ConfigurationError: Ray cannot be reached or started.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # engines on the same machine would starve Ray's default of 15
    import ray

    address = os.environ.get("RAY_ADDRESS")
    local = {} if address else {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
    except Exception as exc:  # recovery: Ray raises many kinds of errors here; the user can mend the address
        raise ConfigurationError(f"Ray at {address or 'this machine'} cannot be used: {exc}") from None
    actors = None
    try:
        actors = Actors(config, proxy)
        yield actors
    finally:
        try:
            if actors is not None and config.store:
                actors.end()
        finally:
            ray.shutdown()


class Actors:
    """Calls of the learner and the environment workers."""

    def __init__(self, config: TrainConfig, proxy: ProxyHandle) -> None:
        import ray

        self._get, self._config = ray.get, config
        text = config.model_dump_json()
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        groups = {_PUBLISHING: 1}  # a thread of its own
        learner = ray.remote(num_cpus=0, num_gpus=gpus, concurrency_groups=groups)(LearnerRole)
        self._learner = learner.remote(text)
        role = ray.remote(EnvironmentRole).options(
            num_cpus=0, max_concurrency=config.sampling.concurrency, max_restarts=_RESTARTS
        )
        count = config.sampling.environment_workers
        environments = [role.remote(text, proxy.url, proxy.key) for _ in range(count)]
        self._environments = itertools.cycle(environments)

    def end(self) -> None:
        """The job is over, well or not."""
        with contextlib.suppress(Exception):  # recovery: what is in the store stays there
            self._get(self._learner.end.remote(), timeout=_END_BOUND_S)

    def play(self, order: GroupOrder) -> Any:
        """Have a group played; returns Ray's reference to it."""
        return next(self._environments).play.remote(order)

    def restore(self) -> dict[str, Any] | None:
        """See `LearnerRole`."""
        return self._get(self._learner.restore.remote())

    def train(self, samples: Sequence[Sample]) -> None:
        """See `LearnerRole.add`."""
        self._get(self._learner.add.remote(list(samples)))

    def update(self) -> dict[str, float]:
        """See `LearnerRole.step`."""
        return self._get(self._learner.step.remote())

    def end_step(self) -> int:
        """See `LearnerRole`."""
        return self._get(self._learner.end_step.remote())

    def checkpoint(self, step: int, extra: dict[str, Any]) -> str:
        """See `LearnerRole`."""
        return self._get(self._learner.checkpoint.remote(step, extra))

    def publisher(self, proxy: ProxyHandle, prefix: str, staleness: Staleness) -> Publisher:
        """Brings the learner's weights to the engines, under names that begin with `prefix`."""
        keep = staleness.bound + 2
        put = self._learner.put.options(concurrency_group=_PUBLISHING)
        return Publisher(
            lambda: self._get(self._learner.hand_over.remote(keep)), lambda: self._get(put.remote(keep)), proxy, prefix
        )


class Publisher:
    """Publishes in the background, one version at a time."""

    def __init__(
        self, hand_over: Callable[[], dict[str, Any]], put: Callable[[], None], proxy: ProxyHandle, prefix: str
    ) -> None:
        """`hand_over` takes a copy of the weights and returns where they will be; `put` puts it there, into a relay."""
        self._hand_over, self._put, self._proxy, self._prefix = hand_over, put, proxy, prefix
        self._thread: threading.Thread | None = None

    def publish(self) -> None:
        """Begin to bring the learner's present weights to the relay and to the engines; it may go on learning."""
        self.wait()
        source = self._hand_over()
        self._thread = threading.Thread(target=self._spread, args=(source,), name="coserve-publish")
        self._thread.start()

    def wait(self) -> None:
        """Until the engines that are up have what was published, or could not get it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _spread(self, source: dict[str, Any]) -> None:
        """Engines read what has come to the relay while the rest is on its way."""
        with ThreadPoolExecutor(1, "coserve-put") as pool:
            stored = pool.submit(self._store)
            try:
                body = source | {"prefix": self._prefix, "wait_s": _RELAY_WAIT_S}
                state = self._proxy.call("POST", "/coserve/v1/weights", body, _PUBLISH_BOUND_S)
            except OSError as exc:  # the next version will do
                logger.warning("the engines were not told of new weights: %s", exc)
                state = {"workers": []}
            stored.result()
        for worker in state["workers"]:
            if worker["wrong"]:
                logger.warning("%s: %s", worker["url"], worker["wrong"])

    def _store(self) -> None:
        from ray.exceptions import RayTaskError

        for tries in range(1, _PUT_TRIES + 1):
            try:
                return self._put()
            except RayTaskError as exc:  # the next try puts them whole; engines ask again by themselves
                logger.warning("weights were not put into the relay (%d of %d): %s", tries, _PUT_TRIES, exc)
                time.sleep(_PUT_RETRY_S)
        return None
