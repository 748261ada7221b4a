"""The rollout proxy over real engines: a borrowed one (of a pair that serves) and a dedicated one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from rl_driver.api.proxy_config import ProxyConfig
from rl_driver.api.trajectory import VersionSpan
from rl_driver.policy.routing import Turn
from rl_driver.proxy.continuation import Answer, Limits, generate
from rl_driver.proxy.server import Proxy
from rl_driver.proxy.upstream import Chunk, GenerateRequest, Upstream
from rl_driver.store.sqlite import SqliteStore
from tests.scenario.harness import KEY, RunningPair, bearer, prompt, wait_for
from tests.scenario.proxy_harness import (
    AUTH,
    Framework,
    Relay,
    Users,
    dedicated_engine,
    running_proxy,
    wait_usable,
)
from vllm_coserve.demo.servers import free_port

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]

_TIE_NATS = 0.1  # bf16 ties
_LOGPROB_NATS = 0.15  # the same token scored in another batch


@pytest.fixture(scope="module")
def proxy(pair: RunningPair, dedicated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    with running_proxy(log, f"--dedicated={dedicated}", f"--borrowed={pair.pair.rollout_url}") as (url, _):
        wait_usable(url, 2)
        yield url
    assert KEY not in log.read_text() and "proxy-key" not in log.read_text()


def _complete(url: str, tokens: list[int], count: int, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = requests.post(f"{url}/v1/completions", json=body | more, headers=AUTH | (headers or {}), timeout=90)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def _score(url: str, text: list[int]) -> list[dict[str, Any] | None]:
    """Logprobs of each token of a text and of the best one in its place, by one engine in one go."""
    body = {"model": "rollout", "prompt": text, "max_tokens": 1, "prompt_logprobs": 1}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=bearer(), timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["prompt_logprobs"]


def _check_scores(url: str, tokens: list[int], choice: dict[str, Any], greedy: bool) -> None:
    out = choice["token_ids"]
    scored = _score(url, [*tokens, *out])[len(tokens) :]
    for token, own, entry in zip(out, choice["logprobs"], scored, strict=True):
        logprob = entry[str(token)]["logprob"]
        assert abs(logprob - own) < _LOGPROB_NATS, (token, logprob, own)
        if greedy:
            assert max(e["logprob"] for e in entry.values()) - logprob < _TIE_NATS


# ---- exactness


class _Cut:
    """An upstream whose engines give every leg up after so many tokens, as one does that gives its memory back."""

    def __init__(self, upstream: Upstream, every: int) -> None:
        self._upstream, self._every = upstream, every
        self.version = upstream.version

    async def generate(self, worker_id: str, request: GenerateRequest) -> AsyncIterator[Chunk]:
        left = self._every
        async with aclosing(self._upstream.generate(worker_id, request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                count = len(chunk.token_ids)
                if count < left or (count == left and chunk.finish_reason):
                    left -= count
                    yield chunk
                    continue
                end = self._every
                spans = tuple(VersionSpan(s.version, s.start, min(s.end, end)) for s in chunk.spans if s.start < end)
                yield Chunk(chunk.token_ids[:left], chunk.logprobs[:left], spans, "abort", "test", chunk.top[:left])
                return


async def _disturbed(config: ProxyConfig, tokens: list[int], count: int, every: int, greedy: bool) -> dict[str, Any]:
    """An answer whose turn leaves its worker after every so many tokens."""
    proxy = Proxy(config)
    await proxy.start()
    try:
        async with asyncio.timeout(60):
            while len(proxy.fleet.usable()) < 2:
                await asyncio.sleep(0.05)
        sampling = {"temperature": 0.0 if greedy else 1.0, "ignore_eos": True}
        answer = Answer(GenerateRequest(tuple(tokens), count, 0, 0, sampling))
        logprobs: list[float] = []
        moves: list[str] = []
        parts = generate(
            Turn("turn", "trajectory"),
            answer,
            proxy.scheduler,
            _Cut(proxy.upstream, every),
            Limits(),
            lambda worker, outcome, why: moves.append(worker),
        )
        async for chunk in parts:
            logprobs += chunk.logprobs
        spans = answer.spans(len(answer.tokens))
        return {"token_ids": answer.tokens, "logprobs": logprobs, "spans": spans, "moves": moves}
    finally:
        await proxy.stop()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("every", [1, 7, random.Random(0).randrange(8, 30)])
def test_a_trajectory_that_moves_all_the_time_is_as_if_it_had_not(
    pair: RunningPair, dedicated: str, every: int, greedy: bool
) -> None:
    config = ProxyConfig(dedicated=(dedicated,), borrowed=(pair.pair.rollout_url,), worker_api_key=KEY, poll_s=0.2)
    tokens = prompt(31 + every, 60)
    got = asyncio.run(_disturbed(config, tokens, 48, every, greedy))
    assert len(got["token_ids"]) == len(got["logprobs"]) == 48
    assert len(got["moves"]) == 47 // every
    assert every > 24 or set(got["moves"]) == {dedicated, pair.pair.rollout_url}
    assert got["spans"][0].start == 0 and got["spans"][-1].end == 48
    _check_scores(dedicated, tokens, got, greedy)


def test_memory_taken_back_in_the_middle_is_not_seen(pair: RunningPair, proxy: str, dedicated: str) -> None:
    """The borrowed engine is deactivated and activated again and again, under load."""
    results: list[Any] = []
    stop_at = time.monotonic() + 12

    def load(index: int) -> None:
        n = 0
        while time.monotonic() < stop_at:
            tokens = prompt(1000 * index + n, 40)
            n += 1
            results.append((tokens, _complete(proxy, tokens, 60, logprobs=0)))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop_at:
        pair.coserve("POST", "deactivate")
        time.sleep(0.5)
        pair.coserve("POST", "activate")
        time.sleep(1.5)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(results) >= 24
    metrics = requests.get(f"{proxy}/metrics", timeout=5).text
    moved = [line for line in metrics.splitlines() if line.startswith('coserve_proxy_legs_total{outcome="moved"}')]
    assert moved and float(moved[0].split()[-1]) > 0, "nothing was taken back"
    for tokens, choice in random.Random(1).sample(results, 8):
        assert choice["finish_reason"] == "length" and choice["weight_versions"][-1]["end"] == 60
        flat = {"token_ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}
        _check_scores(dedicated, tokens, flat, greedy=True)


# ---- clients


def test_an_unmodified_openai_client(proxy: str) -> None:
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="proxy-key", max_retries=0)
    model = client.models.list().data[0].id
    done = client.completions.create(model=model, prompt="ba be bi bo", max_tokens=12, logprobs=2, temperature=0)
    assert done.usage.completion_tokens >= 1 and done.choices[0].text
    assert len(done.choices[0].logprobs.tokens) == done.usage.completion_tokens
    assert "".join(done.choices[0].logprobs.tokens).startswith(done.choices[0].text[:3])
    parts = client.completions.create(
        model=model,
        prompt="ba be bi bo",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(parts)
    assert "".join(c.text for p in parts for c in p.choices) == done.choices[0].text
    assert parts[-1].usage.completion_tokens == done.usage.completion_tokens
    messages = [{"role": "user", "content": "ba be bi bo"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, logprobs=True)
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].logprobs.content
    deltas = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(d.choices[0].delta.content or "" for d in deltas if d.choices)
    assert text == chat.choices[0].message.content
    stop = done.choices[0].text[4:6]
    cut = client.completions.create(model=model, prompt="ba be bi bo", max_tokens=12, temperature=0, stop=[stop])
    assert cut.choices[0].text == done.choices[0].text.partition(stop)[0] and cut.choices[0].finish_reason == "stop"
    with pytest.raises(openai.NotFoundError, match="the workers serve"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{proxy}/v1", api_key="wrong", max_retries=0).models.list()


def test_what_the_proxy_says_is_what_vllm_says(proxy: str, dedicated: str) -> None:
    """Text, logprobs and stop strings, against the engine itself."""
    for more in (
        {"logprobs": 2},
        {"stop": ["a", "e"]},
        {"stop": ["i"], "include_stop_str_in_output": True, "min_tokens": 3},
        {"echo": True},
    ):
        body = {"model": "rollout", "prompt": "ga ge gi go gu", "max_tokens": 16, "temperature": 0, **more}
        want = requests.post(f"{dedicated}/v1/completions", json=body, headers=bearer(), timeout=30).json()
        got = requests.post(f"{proxy}/v1/completions", json=body, headers=AUTH, timeout=30).json()
        assert "choices" in want and "choices" in got, (more, want, got)
        for a, b in zip(want["choices"], got["choices"], strict=True):
            assert (a["text"], a["finish_reason"], a["stop_reason"]) == (
                b["text"],
                b["finish_reason"],
                b["stop_reason"],
            )
            if a["logprobs"]:
                assert a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
                assert a["logprobs"]["text_offset"] == b["logprobs"]["text_offset"]
                assert b["logprobs"]["token_logprobs"] == pytest.approx(a["logprobs"]["token_logprobs"], abs=0.15)
                assert [len(t) for t in a["logprobs"]["top_logprobs"]] == [
                    len(t) for t in b["logprobs"]["top_logprobs"]
                ]
        assert want["usage"]["completion_tokens"] == got["usage"]["completion_tokens"]


def test_an_unmodified_vllm_bench_serve(proxy: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", proxy, "--endpoint", "/v1/completions", "--model", "rollout"]
    command += ["--tokenizer", str(models[1]), "--dataset-name", "random", "--random-input-len", "32"]
    command += ["--random-output-len", "16", "--num-prompts", "16", "--max-concurrency", "8", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--disable-tqdm"]
    env = {**os.environ, "OPENAI_API_KEY": "proxy-key", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 16 and result["total_output_tokens"] == 16 * 16


def test_schemathesis_finds_no_answer_outside_the_schema(proxy: str) -> None:
    schema = schemathesis.openapi.from_url(f"{proxy}/openapi.json")
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.label)

        @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def try_it(case: Any) -> None:
            changes_fleet = case.method in ("POST", "DELETE") and case.path.endswith(("/workers", "/weights"))
            # Whether a prompt's tokens exist and fit depends on the model, which no schema knows.
            by_model = [positive_data_acceptance] if case.path.startswith("/v1/") else []
            headers = {} if changes_fleet else AUTH  # no key: the fleet and its weights stay as they are
            case.call_and_validate(headers=headers, timeout=60, excluded_checks=by_model)

        try_it()
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /coserve/v1/workers"} <= tried
    assert _complete(proxy, prompt(1, 8), 4)["finish_reason"] == "length"


# ---- faults


def test_kills_stops_and_partitions_lose_no_turn(pair: RunningPair, models: tuple[Path, Path], tmp_path: Path) -> None:
    """The way to the borrowed engine is cut, it is stopped and killed, and the proxy is killed."""
    wait_for("the rollout engine is active", lambda: pair.coserve("POST", "activate")["state"] == "active", 120)
    relay = Relay(int(pair.pair.rollout_url.rpartition(":")[2]))
    store, port = tmp_path / "turns.sqlite", free_port()
    proxy_url, log = f"http://127.0.0.1:{port}", tmp_path / "proxy.log"
    flags = [f"--borrowed={relay.url}", f"--store={store}", "--lost-after-s=2"]
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(dedicated_engine(models[1], tmp_path / "dedicated.log"))
        _, proxy = stack.enter_context(running_proxy(log, f"--dedicated={url}", *flags, port=port))
        wait_usable(proxy_url, 2)
        users = Users(pair)
        stack.callback(users.stop)
        framework = Framework(proxy_url, 20)
        stack.callback(framework.stop)
        time.sleep(3)
        relay.cut = True  # a partition: nobody is told
        time.sleep(5)
        wait_usable(proxy_url, 1, 5)
        relay.cut = False
        wait_usable(proxy_url, 2)
        core = pair.pid(True, "EngineCore")
        os.kill(core, signal.SIGSTOP)
        time.sleep(4)
        with contextlib.suppress(ProcessLookupError):  # it may owe pages, and be killed
            os.kill(core, signal.SIGCONT)
        time.sleep(2)
        proxy.kill()
        proxy.wait()
        stack.enter_context(running_proxy(log, f"--dedicated={url}", *flags, port=port))
        time.sleep(3)
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(pair.pid(True, "Worker"), signal.SIGKILL)
        done = len(framework.turns)
        time.sleep(4)
        assert len(framework.turns) > done, "the dedicated engine goes on alone"
        framework.stop()
        users.stop()
    relay.close()
    wait_for("the rollout engine is back", lambda: pair.coserve("GET", "status")["state"] == "active", 120)
    assert not framework.wrong and not users.failed
    assert len(framework.turns) >= 40 and users.count > 10
    with contextlib.closing(SqliteStore(store)) as kept:
        for name, index in framework.turns:
            assert list(kept.get(name).turns[index].output_token_ids) == framework.turns[name, index]


# ---- mistakes people make


def test_mistakes_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_coserve.console.main", "proxy"]

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=30, check=False)

    bad = run("--dedicated=localhost:8000")
    assert bad.returncode == 2 and "http://127.0.0.1:8000" in bad.stderr
    assert run("--nonsense").returncode == 2
    (tmp_path / "x.sqlite").write_text("no database, but longer than its header would be" * 3)
    broken = run("--port=0", f"--store={tmp_path / 'x.sqlite'}")
    assert broken.returncode == 2 and "--store" in broken.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = run(f"--port={taken.getsockname()[1]}")
        assert busy.returncode == 1 and "--port" in busy.stderr
    assert "Traceback" not in bad.stderr + broken.stderr + busy.stderr
