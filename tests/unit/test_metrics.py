"""The pair's metrics in both of vLLM's registry modes, and the dashboard and alerts over them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine.metrics import CoserveCollector, with_collector, with_page
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger

_DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def block():
    made = ControlBlock.create(16, 2 << 20)[0]
    made.owners[:] = [Owner.FREE_CLEAN] * 4 + [Owner.FREE_DIRTY] * 2 + [Owner.SERVING] * 5 + [Owner.ROLLOUT] * 5
    made.set(Word.SERVING_CACHED_PAGES, 3)
    made.set(Word.ROLLOUT_TOKENS, 1234)
    made.set(Word.SERVING_BUSY_NS, 2_500_000_000)
    made.set(Word.TOO_LARGE_ABORTS, 2)
    made.set(Word.GENERATION, 4)
    for ns in (300_000, 3_000_000, 9_000_000_000):
        made.reclaim_latency.observe(ns)
    return made


def _samples(registry):
    text = generate_latest(registry).decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def _collector(block):
    return CoserveCollector(0.25, block, lambda b: "active")


def _one_process_registry(block):
    registry = CollectorRegistry()
    return with_collector(lambda: registry, _collector(block))


def test_values_are_those_of_the_control_block(block):
    samples = _samples(_one_process_registry(block)())
    pages = {labels: v for (name, labels), v in samples.items() if name == "coserve_pages"}
    assert sum(pages.values()) == samples["coserve_pool_pages", ()] == 16
    assert pages[("owner", "serving"), ("state", "cached")] == 3
    assert pages[("owner", "rollout"), ("state", "held")] == 5
    assert samples["coserve_headroom_pages", ()] == 4
    assert samples["coserve_rollout_tokens_total", ()] == 1234
    assert samples["coserve_serving_busy_seconds_total", ()] == 2.5
    assert samples["coserve_rollout_aborts_total", (("reason", "too_large"),)] == 2
    assert samples["coserve_sidecar_restarts_total", ()] == 3
    assert samples["coserve_sidecar_state", (("state", "active"),)] == 1
    assert samples["coserve_sidecar_state", (("state", "starting"),)] == 0
    assert samples["coserve_reclaim_seconds_bucket", (("le", "0.0005"),)] == 1
    assert samples["coserve_reclaim_seconds_bucket", (("le", "0.005"),)] == 2
    assert samples["coserve_reclaim_seconds_count", ()] == 3
    assert samples["coserve_reclaim_seconds_sum", ()] == pytest.approx(9.0033)


def test_the_pool_grows_by_weight_pages_only_while_serving_has_them():
    block, fd = ControlBlock.create(16, 4096, weight_pages=6)
    os.close(fd)
    get = _one_process_registry(block)

    def pool():
        samples = _samples(get())
        assert (
            sum(v for (name, _), v in samples.items() if name == "coserve_pages") == samples["coserve_pool_pages", ()]
        )
        assert samples["coserve_headroom_pages", ()] == 4, "of what is there at any time"
        return samples["coserve_pool_pages", ()], samples["coserve_weight_pages", ()]

    assert pool() == (16, 0)
    RolloutLedger(block.owners).lend_weight_pages(16, 4)
    assert pool() == (20, 4)
    ledger = ServingLedger(block.owners, lambda page, count: None, weight_pages=6)
    ledger.withhold(False)
    ledger.make_weight_pages(4)
    assert ledger.take(20, Owner.SERVING) == list(range(20))
    assert pool() == (20, 4)


def test_the_page_follows_the_control_block(block):
    get = _one_process_registry(block)
    _samples(get())
    block.add(Word.ROLLOUT_TOKENS, 6)
    assert _samples(get())["coserve_rollout_tokens_total", ()] == 1240


def test_one_registry_gets_one_collector_and_keeps_what_it_had(block):
    registry = CollectorRegistry()
    Counter("vllm_own", "of vLLM", registry=registry).inc()
    get = with_collector(lambda: registry, _collector(block))
    assert get() is get() is registry
    samples = _samples(registry)
    assert samples["vllm_own_total", ()] == 1 and ("coserve_pool_pages", ()) in samples


def test_several_api_servers_make_a_fresh_registry_each_time(block, tmp_path, monkeypatch):
    from prometheus_client import multiprocess

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def fresh():
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return registry

    get = with_collector(fresh, _collector(block))
    first, second = get(), get()
    assert first is not second
    for registry in (first, second):
        assert _samples(registry)["coserve_rollout_tokens_total", ()] == 1234


@pytest.mark.parametrize("servers", ["one", "several"])
def test_the_page_that_vllm_serves_has_each_metric_once(block, servers, tmp_path, monkeypatch):
    from fastapi import FastAPI
    from prometheus_client import multiprocess
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator import metrics as vllm_page

    registry = CollectorRegistry()
    if servers == "several":
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        multiprocess.MultiProcessCollector(registry)
        other = "from prometheus_client import Counter as C; C('http_requests', '').inc(3); C('vllm_own', '').inc(3)"
        subprocess.run([sys.executable, "-c", other], check=True, timeout=60)
    else:
        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
        Counter("vllm_own", "of vLLM", registry=registry).inc(3)
    collector = _collector(block)
    monkeypatch.setattr(vllm_page, "get_prometheus_registry", with_collector(lambda: registry, collector))
    app = FastAPI()
    with_page(vllm_page.attach_router, collector)(app)
    client = TestClient(app)
    for tokens, path in ((1234, "/metrics"), (1235, "/metrics/")):
        block.set(Word.ROLLOUT_TOKENS, tokens)
        answer = client.get(path, follow_redirects=False)
        assert answer.status_code == 200
        families = [f.name for f in text_string_to_metric_families(answer.text)]
        assert len(families) == len(set(families))
        assert set(_families(block)) | {"vllm_own"} <= set(families)
        assert f"coserve_rollout_tokens_total {tokens}.0\n" in answer.text and "vllm_own_total 3.0\n" in answer.text


def test_pages_of_no_known_owner_are_missing_from_the_sum(block):
    block.owners[0] = 9
    samples = _samples(_one_process_registry(block)())
    assert sum(v for (name, _), v in samples.items() if name == "coserve_pages") == 15


def _names(text):
    return set(re.findall(r"\bcoserve_[a-z_]+", text)) - {"coserve_"}


def _families(block):
    return {m.name: m.type for m in _collector(block).collect()}


def _series(block):
    """All names that a query may use."""
    out = set()
    for name, kind in _families(block).items():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[kind]
        out |= {name + s for s in suffixes}
    return out


def test_the_dashboard_shows_every_metric_and_no_other(block):
    dashboard = json.loads((_DEPLOY / "grafana" / "coserve.json").read_text())
    queries = "\n".join(t["expr"] for p in dashboard["panels"] for t in p.get("targets", ()))
    assert _names(queries) <= _series(block), _names(queries) - _series(block)
    missing = {f for f in _families(block) if not re.search(rf"\b{f}(_total|_bucket)?\b", queries)}
    assert not missing
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and dashboard["schemaVersion"] >= 39
    places = [tuple(p["gridPos"].values()) for p in dashboard["panels"]]
    assert all(x + w <= 24 for _, w, x, _ in places), "panels stay within the page's 24 columns"
    assert "vllm:time_to_first_token_seconds" in queries


def test_alerts_use_metrics_that_exist(block):
    text = (_DEPLOY / "prometheus" / "alerts.yml").read_text()
    used = _names("\n".join(re.findall(r"expr: (.*)", text)))
    assert used and used <= _series(block), used - _series(block)
    tested = (_DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    for alert in re.findall(r"alert: (\w+)", text):
        assert f"  - name: {alert}\n" in tested, f"{alert} has no test in which it fires"


@pytest.mark.parametrize(
    "command",
    [["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]],
    ids=" ".join,
)
def test_promtool_accepts_them(command):
    promtool = shutil.which("promtool") or shutil.which("promtool", path=str(_DEPLOY.parent / ".venv" / "bin"))
    if promtool is None:
        pytest.skip("promtool is missing: run deploy/setup/promtool.sh, or apt-get install prometheus")
    done = subprocess.run([promtool, *command], cwd=_DEPLOY / "prometheus", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
