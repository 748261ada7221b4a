"""The sidecar's own API on a real pair: events, the register, weights, activation; and what schemathesis thinks of."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.scenario.harness import RunningPair, bearer, greedy_gap, prompt, wait_for

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]

_TIE_NATS = 0.1


def _url(pair: RunningPair, path: str) -> str:
    return f"{pair.pair.rollout_url}/coserve/v1/{path}"


def _post(pair: RunningPair, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(_url(pair, path), json=body, headers=bearer(), timeout=90)


def _events(pair: RunningPair, last_id: str | None = None, follow: bool = False) -> Iterator[dict[str, Any]]:
    headers = bearer() | ({"Last-Event-ID": last_id} if last_id else {})
    url = _url(pair, f"events?follow={str(follow).lower()}")
    with requests.get(url, headers=headers, stream=True, timeout=20) as answer:
        answer.raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def _rss_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def test_schemathesis_finds_no_answer_outside_the_schema(pair: RunningPair) -> None:
    schema = schemathesis.openapi.from_url(f"{pair.pair.rollout_url}/openapi.json", headers=bearer())
    schema = schema.include(path_regex="^/coserve/v1/")
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.label)

        @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def try_it(case: Any) -> None:
            if case.path.endswith("/events"):
                case.query = {**(case.query or {}), "follow": "false"}  # else it never ends
            case.call_and_validate(headers=bearer(), timeout=30)

        try_it()
    assert {"GET /coserve/v1/status", "POST /coserve/v1/register", "POST /coserve/v1/weights"} <= tried
    assert len(tried) >= 9
    holder = pair.coserve("GET", "status")["registration"]
    if holder:
        requests.delete(_url(pair, "register"), params={"job": holder["job"]}, headers=bearer(), timeout=5)
    assert pair.coserve("POST", "activate")["state"] == "active"
    assert pair.complete(True, prompt(1, 8), 4)["finish_reason"] == "length"


_BAD_REGISTRATIONS: list[dict[str, Any]] = [
    {},
    {"job": ""},
    {"job": "a b"},
    {"job": "x" * 81},
    {"job": "a", "ttl_s": 0},
    {"job": "a", "ttl_s": -1},
    {"job": "a", "ttl_s": 1e9},
    {"job": "a", "ttl_s": "NaN"},
    {"job": "a", "more": 1},
    {"job": 3},
]


@pytest.mark.parametrize("body", _BAD_REGISTRATIONS, ids=str)
def test_bad_registrations_are_refused(pair: RunningPair, body: dict[str, Any]) -> None:
    assert _post(pair, "register", body).status_code in (400, 422)
    assert pair.coserve("GET", "status")["registration"] is None


def test_one_rl_job_at_a_time(pair: RunningPair) -> None:
    assert _post(pair, "register", {"job": "first", "ttl_s": 30}).status_code == 200
    second = _post(pair, "register", {"job": "second"})
    assert second.status_code == 409 and "'first' holds" in second.text
    assert _post(pair, "register", {"job": "first", "ttl_s": 0.5}).status_code == 200
    wait_for("the heartbeat is missed", lambda: _post(pair, "register", {"job": "second"}).status_code == 200, 5)
    gone = requests.delete(_url(pair, "register"), params={"job": "second"}, headers=bearer(), timeout=5)
    assert gone.status_code == 204
    assert [e["text"] for e in _events(pair) if e["kind"] == "release"][-2:] == ["first", "second"]


def test_new_weights_are_used_at_once_and_old_prefix_cache_never(pair: RunningPair, models, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base, changed = models[1], tmp_path / "changed"
    shutil.copytree(base, changed)
    for file in changed.glob("*.safetensors"):
        # Another scale of one matrix: every later layer, and with it the KV of every token, is another.
        tensors = load_file(file)
        tensors = {k: (v * 0.5 if k.endswith("embed_tokens.weight") else v.roll(1)) for k, v in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    text = prompt(7, 320)
    before = pair.complete(True, text, 24)
    hits = pair.coserve("GET", "status")["rollout"]["prefix_hit_tokens"]
    pair.complete(True, text, 1)
    assert pair.coserve("GET", "status")["rollout"]["prefix_hit_tokens"] > hits, "the prefix is cached"
    status = _post(pair, "weights", {"path": str(changed), "version": "changed"}).json()
    assert status["weights"]["version"] == "changed"
    hits = status["rollout"]["prefix_hit_tokens"]
    after = pair.complete(True, text, 24)
    assert pair.coserve("GET", "status")["rollout"]["prefix_hit_tokens"] == hits, "KV of old weights was used"
    assert after["token_ids"] != before["token_ids"]
    assert greedy_gap(pair, True, text, after) <= _TIE_NATS

    bad = tmp_path / "bad"
    shutil.copytree(changed, bad)
    file = next(bad.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 10)
    for path, says in ((bad, "truncated"), (models[0], "tensors"), (tmp_path / "none", "no safetensors files")):
        refused = _post(pair, "weights", {"path": str(path), "version": "bad"})
        assert refused.status_code == 409 and says in refused.text
    assert pair.complete(True, text, 24)["token_ids"] == after["token_ids"]
    assert _post(pair, "weights", {"path": str(base), "version": "base"}).status_code == 200
    again = pair.complete(True, text, 24)
    assert greedy_gap(pair, True, text, again) <= _TIE_NATS and again["token_ids"][:4] == before["token_ids"][:4]


def test_deactivation_frees_the_weights_and_activation_brings_them_back(pair: RunningPair) -> None:
    text = prompt(9, 64)
    before, worker = pair.complete(True, text, 16), pair.pid(True, "Worker")
    held_kib = _rss_kib(worker)
    status = pair.coserve("POST", "deactivate")
    assert status["state"] == "deactivated" and not status["weights"]["loaded"] and status["pages"]["rollout"] == 0
    assert held_kib - _rss_kib(worker) > 40_000, "a model of 50 MB"
    assert pair.complete(True, text, 4)["stop_reason"] == "coserve:deactivated"
    assert _post(pair, "weights", {"path": "/tmp", "version": "x"}).status_code == 409
    status = pair.coserve("POST", "activate")
    assert status["state"] == "active" and status["weights"]["loaded"]
    assert pair.complete(True, text, 16)["token_ids"][:4] == before["token_ids"][:4]
    kinds = [e["kind"] for e in _events(pair)]
    assert kinds.index("deactivate") < len(kinds) - 1 - kinds[::-1].index("activate")


def test_serving_has_the_memory_of_a_deactivated_rollouts_weights(pair: RunningPair) -> None:
    text = prompt(9, 64)
    before = pair.complete(True, text, 16)
    lasting = pair.coserve("GET", "status")["pages"]["pool"]
    pages = pair.coserve("POST", "deactivate")["pages"]
    wait_for("the weights' memory is lent", lambda: pair.coserve("GET", "status")["pages"]["from_weights"] >= 20, 10)
    status = pair.coserve("GET", "status")["pages"]
    assert status["pool"] == lasting + status["from_weights"] and pages["rollout"] == 0
    shared, is_over = prompt(77, 300), threading.Event()

    def keep_coming(number: int) -> int:
        count = 0
        while not is_over.is_set():
            assert len(pair.complete(False, shared + prompt(1000 * number + count, 20), 16)["token_ids"]) == 16
            count += 1
        return count

    with ThreadPoolExecutor(25) as threads:
        served = [(p, threads.submit(pair.complete, False, p, 64)) for p in (prompt(i, 900) for i in range(18))]
        others = [threads.submit(keep_coming, i) for i in range(3)]
        try:
            wait_for(
                "serving holds more than the pool was",
                lambda: pair.coserve("GET", "status")["pages"]["serving"] > lasting,
                60,
            )
            answer = _post(pair, "activate", {})
        finally:
            is_over.set()
        choices = [(p, f.result()) for p, f in served]
        assert all(f.result() for f in others)
    assert all(len(c["token_ids"]) == 64 for _, c in choices)
    assert answer.status_code == 200 and answer.json()["state"] == "active", answer.text
    pages = answer.json()["pages"]
    assert pages["pool"] == lasting and pages["from_weights"] == 0 and pages["serving"] <= lasting
    for p, choice in choices[:2] + choices[-2:]:
        assert greedy_gap(pair, False, p, choice) <= _TIE_NATS
    wait_for("what serving used is forgotten", lambda: pair.coserve("GET", "status")["pages"]["budget"] > 4, 90)
    assert pair.complete(True, text, 16)["token_ids"][:4] == before["token_ids"][:4]


def test_a_rollout_killed_while_its_weights_memory_is_lent_comes_back(pair: RunningPair) -> None:
    generation = pair.coserve("GET", "status")["generation"]
    pair.coserve("POST", "deactivate")
    wait_for("the weights' memory is lent", lambda: pair.coserve("GET", "status")["pages"]["from_weights"] >= 20, 10)
    os.kill(pair.pid(True, "EngineCore"), signal.SIGKILL)

    def lent_again() -> bool:
        status = pair.coserve("GET", "status")
        return status["generation"] > generation and status["pages"]["from_weights"] >= 20

    wait_for("it is back, deactivated as before, and lends again", lent_again, 120)
    assert pair.coserve("POST", "activate")["state"] == "active"
    assert len(pair.complete(True, prompt(3, 64), 4)["token_ids"]) == 4


def test_events_go_on_after_a_restart_of_the_sidecar(pair: RunningPair) -> None:
    generation = pair.coserve("GET", "status")["generation"]
    seen: list[dict[str, Any]] = []

    def follow() -> None:
        with contextlib.suppress(requests.RequestException):  # cut off by the restart
            seen.extend(_events(pair, follow=True))

    thread = threading.Thread(target=follow)
    thread.start()
    known = [e["id"] for e in _events(pair)][-1]
    os.kill(pair.pid(True, "EngineCore"), signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive(), "a client notices that its stream has ended"

    def is_back() -> bool:
        status = pair.coserve("GET", "status")
        return status["generation"] > generation and status["state"] == "active"

    wait_for("the sidecar is back", is_back, 120)
    missed = [e["kind"] for e in _events(pair, last_id=seen[-1]["id"] if seen else known)]
    assert "restart" in missed and "weights" in missed


def test_a_bad_event_id_is_refused(pair: RunningPair) -> None:
    answer = requests.get(_url(pair, "events"), headers=bearer() | {"Last-Event-ID": "yesterday"}, timeout=5)
    assert answer.status_code in (400, 422) and "last-event-id" in answer.text.lower()


def test_every_chunk_of_tokens_says_which_weights_made_it(pair: RunningPair) -> None:
    sampling = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": prompt(5, 20), "sampling_params": sampling, "stream": True}
    version, tokens = pair.coserve("GET", "status")["weights"]["version"], 0
    url = f"{pair.pair.rollout_url}/inference/v1/generate"
    with requests.post(url, json=body, headers=bearer(), stream=True, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                tokens += len(choice["token_ids"])
                assert choice["weight_versions"] == [{"version": version, "start": 0, "end": tokens}]
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert tokens == 6
