"""One real pair through a burst, a crash, its API and its end. Tests run in this order on one pair."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.bench.machine import PARTS, leftovers
from tests.scenario.harness import RolloutLoad, RunningPair, bearer, greedy_gap, prompt, start_pair, wait_for

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]

BF16_TIE_NATS = 0.1


def test_burst_takes_pages_from_a_generating_rollout_engine(pair: RunningPair) -> None:
    load = RolloutLoad(pair, concurrent=20, prompt_tokens=64, output_tokens=600)
    try:
        wait_for("the rollout holds most pages", lambda: pair.coserve("GET", "status")["pages"]["rollout"] >= 18, 60)
        before = pair.coserve("GET", "status")
        with ThreadPoolExecutor(16) as threads:
            burst = [(p, threads.submit(pair.complete, False, p, 40)) for p in (prompt(i, 640) for i in range(16))]
            served = [(p, f.result()) for p, f in burst]
        after = pair.coserve("GET", "status")
    finally:
        load.stop()
    need = 16 * 680 * 6144 // before["pages"]["page_bytes"]
    assert need > before["pages"]["free"], "the burst must need more than the free pages to prove anything"
    assert all(len(c["token_ids"]) == 40 and c["finish_reason"] == "length" for _, c in served)
    assert after["reclaims"]["count"] > before["reclaims"]["count"]
    assert after["reclaims"]["pages"] > 0
    assert after["gate"]["faults"] == 0

    aborted = [c for _, c in load.done if c["finish_reason"] == "abort"]
    assert len(aborted) == pair.coserve("GET", "status")["reclaims"]["aborted_requests"]
    assert all(c["stop_reason"] == "coserve:reclaimed" for c in aborted)
    kept = [(p, c) for p, c in load.done if len(c["token_ids"]) > 8][:4]
    assert kept, "some rollouts must have made progress"
    budget_is_back(pair)
    for p, choice in served[:2]:
        assert greedy_gap(pair, False, p, choice) <= BF16_TIE_NATS
    for p, choice in kept:
        assert greedy_gap(pair, True, p, choice) <= BF16_TIE_NATS


def budget_is_back(pair: RunningPair) -> None:
    """After a burst the budget is small for a while, and requests larger than it get 413."""
    wait_for("the budget grows again", lambda: pair.coserve("GET", "status")["pages"]["budget"] >= 15, 60)


def test_sidecar_api(pair: RunningPair) -> None:
    url = f"{pair.pair.rollout_url}/coserve/v1/status"
    assert requests.get(url, timeout=5).status_code == 401
    assert requests.get(url, headers={"Authorization": "Bearer nope"}, timeout=5).status_code == 401
    step = pair.coserve("GET", "status")["step"]
    assert pair.coserve("POST", "step")["step"] == step + 1
    status = pair.coserve("POST", "deactivate")
    assert status["state"] == "deactivated" and status["pages"]["rollout"] == 0
    assert pair.complete(True, prompt(1, 8), 4)["stop_reason"] == "coserve:deactivated"
    assert pair.coserve("POST", "activate")["state"] == "active"
    assert pair.complete(True, prompt(1, 8), 4)["finish_reason"] == "length"
    paths = requests.get(f"{pair.pair.rollout_url}/openapi.json", timeout=5).json()["paths"]
    assert {f"/coserve/v1/{p}" for p in ("status", "activate", "deactivate", "step", "turns")} <= set(paths)
    turns = pair.coserve("GET", "turns")["turns"]
    assert {t["who"] for t in turns} == {"serving", "rollout"}


@pytest.mark.parametrize("victim", ["API server", "EngineCore", "Worker"])
def test_sigkill_of_the_sidecar_under_load(pair: RunningPair, victim: str) -> None:
    generation = pair.coserve("GET", "status")["generation"]
    load = RolloutLoad(pair, concurrent=12, prompt_tokens=64, output_tokens=400)
    try:
        wait_for("rollouts hold pages", lambda: pair.coserve("GET", "status")["pages"]["rollout"] >= 6, 60)
        with ThreadPoolExecutor(8) as threads:
            served = [threads.submit(pair.complete, False, prompt(i, 200), 60) for i in range(8)]
            time.sleep(0.2)
            os.kill(pair.pid(True, victim), signal.SIGKILL)
            log = pair.pair.log
            marker = f"back from rollout engine {generation}, which is gone"
            usable_s = wait_for("its pages are free again", lambda: marker in log.read_text(errors="replace"), 10)
            results = [f.result() for f in served]
        assert all(len(r["token_ids"]) == 60 for r in results)
        assert usable_s < 1.0
        wait_for(
            "the sidecar is back",
            lambda: (
                pair.coserve("GET", "status")["generation"] == generation + 1
                and pair.complete(True, prompt(2, 8), 4)["finish_reason"] == "length"
            ),
            120,
        )
    finally:
        load.stop()


def test_a_request_larger_than_the_budget_and_sigterm(models: tuple[Path, Path], tmp_path: Path) -> None:
    before = leftovers()
    flags = ["--coserve-pool-gib=0.0625", "--coserve-headroom=0.75", "--api-key=sesame"]
    with start_pair(models, tmp_path / "pair.log", flags, "--max-model-len 4096") as running:
        budget = running.coserve("GET", "status")["pages"]["budget"]
        assert 0 < budget < 9, "4,096 tokens of 4 KiB need nine pages at most"
        for prompt_tokens, output_tokens, stream in ((4000, 8, False), (16, 4000, False), (4000, 8, True)):
            with pytest.raises(requests.HTTPError, match="413") as refused:
                running.complete(True, prompt(4, prompt_tokens), output_tokens, stream=stream)
            assert f"the rollout budget is {budget} pages" in refused.value.response.json()["error"]["message"]
        assert running.complete(True, prompt(4, 500), 8)["finish_reason"] == "length"
        assert running.complete(False, prompt(3, 16), 8)["finish_reason"] == "length"
        ends_without_a_trace(running, "API server", signal.SIGTERM, before)


def test_several_api_servers_and_sigkill_of_servings_engine_core(models: tuple[Path, Path], tmp_path: Path) -> None:
    before = leftovers()
    flags = ["--coserve-pool-gib=0.0625", "--api-key=sesame", "--api-server-count=2"]
    with start_pair(models, tmp_path / "pair.log", flags) as running:
        assert running.complete(True, prompt(3, 16), 8)["finish_reason"] == "length"
        assert running.complete(False, prompt(3, 16), 8)["finish_reason"] == "length"
        for url in (running.pair.serving_url, running.pair.rollout_url):
            for _ in range(4):  # whichever server answers
                page = requests.get(f"{url}/metrics", headers=bearer(), timeout=10).text
                assert "coserve_pool_pages 32.0" in page and "vllm:num_requests_running" in page
                assert re.search(r"^coserve_rollout_tokens_total ([1-9]\d*)\.0$", page, re.MULTILINE)
        ends_without_a_trace(running, "EngineCore", signal.SIGKILL, before)


def ends_without_a_trace(running: RunningPair, title: str, number: signal.Signals, before: set[str]) -> None:
    """Send a signal to a process of serving: all of the pair ends, and no shared memory or socket is left."""
    members = {running.pair.process.pid} | {running.pid(r, t) for r in (True, False) for t in PARTS}
    os.kill(running.pid(False, title), number)
    running.pair.process.wait(30)
    wait_for("all processes end", lambda: not any(Path(f"/proc/{p}").exists() for p in members), 5)
    wait_for("shared memory and sockets are gone", lambda: leftovers() <= before, 5)
