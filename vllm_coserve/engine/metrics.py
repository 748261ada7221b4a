"""The pair's metrics on `/metrics` of both servers, read from the control block at each scrape.

They are not counted a second time by each process, so one API server and several show the same figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.routing import Mount

from vllm_coserve.api.context import Context
from vllm_coserve.control.block import LATENCY_BOUNDS_S, ControlBlock, Histogram
from vllm_coserve.control.words import Word
from vllm_coserve.memory.ledger import Owner
from vllm_coserve.policy.memory import MemoryConfig, headroom_pages

if TYPE_CHECKING:
    from fastapi import FastAPI

_STATES = ("starting", "active", "deactivating", "deactivated")

# (name, help, word, factor): what is one word of the control block
_COUNTERS: tuple[tuple[str, str, Word, float], ...] = (
    ("coserve_reclaims", "Times that pages were taken back from the rollout engine", Word.RECLAIMS, 1),
    ("coserve_reclaimed_pages", "Pages taken back from the rollout engine", Word.RECLAIMED_PAGES, 1),
    ("coserve_emergency_cuts", "Emergency cuts of the rollout budget", Word.CUTS, 1),
    ("coserve_gate_grants", "Rollout steps granted while serving had work", Word.GRANTS, 1),
    ("coserve_gate_denials", "Times that the rollout's next step did not fit the slack", Word.DENIALS, 1),
    ("coserve_gate_overruns", "Rollout steps that did not return the device in time", Word.OVERRUNS, 1),
    ("coserve_serving_steps", "Steps of the serving engine", Word.SERVING_STEPS, 1),
    ("coserve_serving_busy_seconds", "Time with a serving step on the device", Word.SERVING_BUSY_NS, 1e-9),
    ("coserve_rollout_steps", "Steps of the rollout engine", Word.ROLLOUT_STEPS, 1),
    ("coserve_rollout_busy_seconds", "Time with a rollout step on the device", Word.ROLLOUT_BUSY_NS, 1e-9),
    ("coserve_rollout_tokens", "Tokens that the rollout engine generated", Word.ROLLOUT_TOKENS, 1),
    ("coserve_rollout_stalls", "Rollout requests ended because they made no progress", Word.STALL_ABORTS, 1),
    (
        "coserve_rollout_prefix_cache_queries",
        "Prompt tokens looked up in its prefix cache",
        Word.PREFIX_QUERY_TOKENS,
        1,
    ),
    ("coserve_rollout_prefix_cache_hits", "Prompt tokens found in its prefix cache", Word.PREFIX_HIT_TOKENS, 1),
)
_GAUGES: tuple[tuple[str, str, Word, float], ...] = (
    ("coserve_budget_pages", "Pages that the rollout engine may hold now", Word.BUDGET_PAGES, 1),
    ("coserve_slack_seconds", "Time that serving could wait, at the last decision", Word.SLACK_US, 1e-6),
    ("coserve_gate_open", "1 while serving is idle and the rollout steps freely", Word.GATE_OPEN, 1),
    ("coserve_rollout_running_requests", "Rollout requests that run", Word.ROLLOUT_RUNNING, 1),
    ("coserve_rollout_waiting_requests", "Rollout requests that wait", Word.ROLLOUT_WAITING, 1),
    ("coserve_weight_version", "Number of the rollout weights in use", Word.WEIGHT_VERSION, 1),
    ("coserve_weights_loaded", "0 while deactivation has freed the rollout weights", Word.WEIGHTS_LOADED, 1),
    ("coserve_weights_load_seconds", "How long the latest load or release of weights took", Word.LOAD_NS, 1e-9),
    ("coserve_weights_parked_bytes", "Weights that wait in host memory while deactivated", Word.PARKED_BYTES, 1),
    ("coserve_weights_park_seconds", "How long the latest move to host memory or back took", Word.PARK_NS, 1e-9),
)
_ABORTS = {
    "reclaimed": Word.RECLAIM_ABORTS,
    "stalled": Word.STALL_ABORTS,
    "deactivated": Word.DEACTIVATE_ABORTS,
    "too_large": Word.TOO_LARGE_ABORTS,
}


class CoserveCollector(Collector):
    """Reads a control block when Prometheus asks."""

    def __init__(self, headroom: float, block: ControlBlock, state: Callable[[ControlBlock], str]) -> None:
        """`headroom`: share of the pool; `state`: says what the sidecar is at, one of starting, active, ..."""
        self._headroom, self._block, self._state = headroom, block, state

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not look for names twice."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        get = self._block.get
        for name, text, word, factor in _COUNTERS:
            yield CounterMetricFamily(name, text, value=get(word) * factor)
        for name, text, word, factor in _GAUGES:
            yield GaugeMetricFamily(name, text, value=get(word) * factor)
        yield from self._pages()
        yield from self._by_label()
        yield _histogram("coserve_reclaim_seconds", "How long reclaims took", self._block.reclaim_latency)
        yield _histogram(
            "coserve_handover_seconds", "From a grant to the start of the rollout step", self._block.handover_latency
        )

    def _pages(self) -> Iterator[Metric]:
        block = self._block
        # One pass: a page that changes hands meanwhile is counted once, so that the sum is the pool's size.
        # Pages whose memory is that of the rollout's weights are none of the pool's now.
        owned = np.bincount(block.owners, minlength=len(Owner)).tolist()
        cached = min(block.get(Word.SERVING_CACHED_PAGES), owned[Owner.SERVING])
        pages = GaugeMetricFamily("coserve_pages", "Pages of the pool by owner and state", labels=["owner", "state"])
        pages.add_metric(["free", "clean"], owned[Owner.FREE_CLEAN])
        pages.add_metric(["free", "dirty"], owned[Owner.FREE_DIRTY])
        pages.add_metric(["serving", "used"], owned[Owner.SERVING] - cached)
        pages.add_metric(["serving", "cached"], cached)
        pages.add_metric(["rollout", "held"], owned[Owner.ROLLOUT])
        yield pages
        headroom = headroom_pages(block.pool_pages, MemoryConfig(headroom_fraction=self._headroom))
        from_weights = block.weight_pages - owned[Owner.WEIGHTS]
        all_now = block.pool_pages + from_weights
        yield GaugeMetricFamily("coserve_pool_pages", "Pages of the pool", value=all_now)
        yield GaugeMetricFamily(
            "coserve_weight_pages", "Of these, pages in place of a deactivated rollout's weights", value=from_weights
        )
        yield GaugeMetricFamily("coserve_headroom_pages", "Pages that are kept free for serving", value=headroom)
        yield GaugeMetricFamily("coserve_page_bytes", "Size of a page", value=block.page_bytes)

    def _by_label(self) -> Iterator[Metric]:
        get = self._block.get
        aborts = CounterMetricFamily("coserve_rollout_aborts", "Rollout requests ended early", labels=["reason"])
        for reason, word in _ABORTS.items():
            aborts.add_metric([reason], get(word))
        yield aborts
        faults = CounterMetricFamily("coserve_hook_faults", "Errors in hook code, each logged", labels=["side"])
        faults.add_metric(["serving"], get(Word.SERVING_GATE_FAULTS))
        faults.add_metric(["rollout"], get(Word.ROLLOUT_GATE_FAULTS))
        yield faults
        now = self._state(self._block)
        state = GaugeMetricFamily("coserve_sidecar_state", "1 for what the rollout engine is at", labels=["state"])
        for name in _STATES:
            state.add_metric([name], name == now)
        yield state
        restarts = max(0, get(Word.GENERATION) - 1)
        yield CounterMetricFamily(
            "coserve_sidecar_restarts", "Starts of the rollout engine but the first", value=restarts
        )


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    counts, total_s = histogram.read()
    cumulative, buckets = 0, []
    for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total_s)


def install_metrics(context: Context, block: ControlBlock) -> None:
    """Add the collector to whatever registry vLLM's `/metrics` page is made from, once for each. Idempotent."""
    from vllm_coserve.engine.seams import patch
    from vllm_coserve.engine.status import sidecar_state

    collector = CoserveCollector(context.config.headroom, block, sidecar_state)
    patch("metrics_registry", lambda original: with_collector(original, collector))
    patch("metrics_page", lambda original: with_page(original, collector))


def with_collector(original: Callable[[], CollectorRegistry], collector: Collector) -> Any:
    """Wrap vLLM's choice of a registry: one for the process, or a fresh one over the files of several processes."""
    has_it: list[CollectorRegistry] = []

    def get_prometheus_registry() -> CollectorRegistry:
        registry = original()
        if not any(registry is known for known in has_it):
            registry.register(collector)
            has_it.append(registry)
        return registry

    return get_prometheus_registry


def with_page(original: Callable[[FastAPI], None], collector: Collector) -> Any:
    """Wrap vLLM's `attach_router`: where several API servers share one page, give it the collector too.

    There the instrumentator answers /metrics from a registry that it makes at each scrape and that nobody can add to.
    vLLM's own one behind it would not do: it has the instrumentator's metrics twice.
    """

    def attach_router(app: FastAPI) -> None:
        original(app)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(collector)
        page = next(r for r in app.routes if isinstance(r, Mount) and r.path == "/metrics")
        page.app = make_asgi_app(registry=registry)
        app.routes.remove(page)
        app.routes.insert(0, page)  # before the instrumentator's route

    return attach_router
