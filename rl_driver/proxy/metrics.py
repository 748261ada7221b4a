"""The proxy's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rl_driver.api.openai import ProxyState

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProxyMetrics:
    """Counters of one proxy; gauges are read from its state when the page is asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common = {"registry": self.registry}
        self.calls = Counter("coserve_proxy_calls", "Calls by how they ended", ["status"], **common)
        self.legs = Counter("coserve_proxy_legs", "Turns that have left a worker, by why", ["outcome"], **common)
        self.moves = Counter(
            "coserve_proxy_moves", "Turns that went on at another worker, by why", ["reason"], **common
        )
        self.tokens = Counter("coserve_proxy_tokens", "Tokens given to callers", **common)
        self.ttft = Histogram("coserve_proxy_ttft_seconds", "Time to first token", buckets=_TTFT_S, **common)
        self._queued = Gauge("coserve_proxy_queued_turns", "Turns that wait for a worker", **common)
        self._running = Gauge("coserve_proxy_running_calls", "Calls under way", **common)
        self._workers = Gauge(
            "coserve_proxy_workers", "Workers by kind and whether they are usable", ["kind", "usable"], **common
        )
        self._turns = Gauge("coserve_proxy_worker_turns", "Turns on a worker", ["worker"], **common)
        self._pauses = Gauge(
            "coserve_proxy_worker_pause_seconds", "Pause of the last change of weights", ["worker"], **common
        )

    def page(self, state: ProxyState) -> bytes:
        """The text of `/metrics`."""
        self._queued.set(state.queued)
        self._running.set(state.running)
        for kind in ("dedicated", "borrowed"):
            for usable in (True, False):
                count = sum(1 for w in state.workers if w.kind == kind and w.usable == usable)
                self._workers.labels(kind, str(usable).lower()).set(count)
        self._turns.clear()
        for worker in state.workers:
            self._turns.labels(worker.url).set(worker.turns)
            if worker.pause_s is not None:
                self._pauses.labels(worker.url).set(worker.pause_s)
        return generate_latest(self.registry)
