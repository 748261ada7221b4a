"""Weights go from a trainer over a relay to a borrowed and a dedicated engine, while rollouts go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.scenario.harness import RunningPair, bearer, prompt, wait_for
from tests.scenario.proxy_harness import AUTH, dedicated_engine, running_proxy, wait_usable, workers_of
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.sharding import ModelShape, cut_for

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]

_KEY = "relay-key"
_SAME_NATS = 0.1


@pytest.fixture(scope="module")
def proxy(pair: RunningPair, dedicated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    wait_for("the rollout engine is active", lambda: pair.coserve("POST", "activate")["state"] == "active", 120)
    with running_proxy(log, f"--dedicated={dedicated}", f"--borrowed={pair.pair.rollout_url}") as (url, _):
        wait_usable(url, 2)
        yield url
    assert _KEY not in log.read_text()


def _logprobs(url: str, text: list[int]) -> torch.Tensor:
    body = {"model": "rollout", "prompt": text, "max_tokens": 1, "prompt_logprobs": 0}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=bearer(), timeout=60)
    answer.raise_for_status()
    entries = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([e[str(t)]["logprob"] for t, e in zip(text[1:], entries, strict=True)])


def _independent_logprobs(folder: Path, weights: dict[str, torch.Tensor], text: list[int]) -> torch.Tensor:
    """As Hugging Face's own model has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys  # a tied output layer's is missing
    assert not unknown, unknown
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None]).squeeze(-1)


def _publish(proxy: str, relay: Relay, version: int) -> dict[str, Any]:
    body = {"url": relay.url, "version": version, "key": _KEY}
    answer = requests.post(f"{proxy}/coserve/v1/weights", json=body, headers=AUTH, timeout=150)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_all_engines_use_what_was_published(
    pair: RunningPair, dedicated: str, proxy: str, models: tuple[Path, Path]
) -> None:
    """Other weights and back again: both engines agree with each other and with an independent model each time."""
    base = {k: v for f in models[1].glob("*.safetensors") for k, v in load_file(f).items()}
    torch.manual_seed(0)
    other = {k: (v.float() * (1 + 0.3 * torch.randn(v.shape))).to(v.dtype) for k, v in base.items()}
    engines, text = (pair.pair.rollout_url, dedicated), prompt(5, 80)
    before = [_logprobs(e, text) for e in engines]
    answers: list[Any] = []
    over = threading.Event()

    def roll(index: int) -> None:
        n = 0
        while not over.is_set():
            body = {"prompt": prompt(1000 * index + n, 30), "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
            n += 1
            answers.append(
                requests.post(
                    f"{proxy}/v1/completions", json=body | {"return_token_ids": True}, headers=AUTH, timeout=120
                )
            )

    threads = [threading.Thread(target=roll, args=(i,)) for i in range(6)]
    with Relay(key=_KEY) as relay:
        publisher = Publisher(RelayClient(relay.url, _KEY))
        publisher.publish(1, other.items())
        assert [str(r) for r in publisher.publish(2, base.items())] == ["2-from-1"]
        for thread in threads:
            thread.start()
        time.sleep(1)
        state = _publish(proxy, relay, 1)
        assert [w["version"] for w in state["workers"]] == ["step-1", "step-1"], state
        after = [_logprobs(e, text) for e in engines]
        time.sleep(1)
        state = _publish(proxy, relay, 2)
        assert {w["version"] for w in state["workers"]} == {"step-2"}, state
        again = [_logprobs(e, text) for e in engines]
        over.set()
        for thread in threads:
            thread.join(120)
        old = requests.post(
            f"{proxy}/coserve/v1/weights", json={"url": relay.url, "version": 1}, headers=AUTH, timeout=10
        )
        assert old.status_code == 409 and "newer" in old.text
    for found, weights in ((before, base), (after, other), (again, base)):
        expected = _independent_logprobs(models[1], weights, text)
        for logprobs in found:
            assert float((logprobs - expected).abs().max()) < _SAME_NATS
    assert float((after[0] - before[0]).abs().max()) > 10 * _SAME_NATS
    assert answers and all(a.status_code == 200 for a in answers), [a.text for a in answers if a.status_code != 200]
    seen = set()
    for answer in answers:
        choice = answer.json()["choices"][0]
        spans = choice["weight_versions"]
        assert len(choice["token_ids"]) == spans[-1]["end"] == 60
        seen.add(tuple(s["version"] for s in spans))
    assert any(len(versions) > 1 for versions in seen), f"no rollout went on over an update: {seen}"


def test_workers_of_a_tensor_parallel_engine_read_their_parts(models: tuple[Path, Path], tmp_path: Path) -> None:
    base = {k: v for f in models[1].glob("*.safetensors") for k, v in load_file(f).items()}
    shape, text = ModelShape.of(json.loads((models[1] / "config.json").read_text())), prompt(5, 80)
    torch.manual_seed(1)
    with (
        dedicated_engine(models[1], tmp_path / "tp.log", "--tensor-parallel-size=2", cores="0|1") as (engine, _),
        running_proxy(tmp_path / "proxy.log", f"--dedicated={engine}") as (proxy, _),
        Relay(key=_KEY) as relay,
    ):
        wait_usable(proxy, 1)
        publisher = Publisher(RelayClient(relay.url, _KEY), cut=cut_for(shape, 2))
        for version in (1, 2, 3):
            weights = {k: (v.float() * (1 + 0.2 * torch.randn(v.shape))).to(v.dtype) for k, v in base.items()}
            publisher.publish(version, weights.items())
            state = _publish(proxy, relay, version)
            assert [w["version"] for w in state["workers"]] == [f"step-{version}"], state
            expected = _independent_logprobs(models[1], weights, text)
            assert float((_logprobs(engine, text) - expected).abs().max()) < _SAME_NATS


def test_weights_of_a_relay_that_is_gone_are_those_of_the_folder_after_an_activation(
    pair: RunningPair, proxy: str, models: tuple[Path, Path]
) -> None:
    generation = pair.coserve("GET", "status")["generation"]
    assert pair.coserve("POST", "deactivate")["state"] == "deactivated"
    status = pair.coserve("POST", "activate")
    assert status["state"] == "active" and status["weights"]["version"] == "default"
    assert status["generation"] == generation
    assert pair.complete(True, prompt(1, 8), 4)["finish_reason"] == "length"


def test_weights_that_cannot_be_used_leave_the_old_ones(pair: RunningPair, dedicated: str, proxy: str) -> None:
    wait_usable(proxy, 2)  # the proxy has seen that the borrowed engine is back
    text = prompt(6, 40)
    before = [_logprobs(e, text) for e in (pair.pair.rollout_url, dedicated)]
    with Relay(key=_KEY) as relay:
        Publisher(RelayClient(relay.url, _KEY)).publish(3, [("model.norm.weight", torch.ones(3))])
        for version, why in ((3, "lacks"), (4, "404")):
            state = _publish(proxy, relay, version)
            assert all(w["version"] in ("step-2", "default") and why in w["wrong"] for w in state["workers"]), state
    assert [w["usable"] for w in workers_of(proxy)["workers"]] == [True, True]
    for engine, old in zip((pair.pair.rollout_url, dedicated), before, strict=True):
        assert float((_logprobs(engine, text) - old).abs().max()) < _SAME_NATS
