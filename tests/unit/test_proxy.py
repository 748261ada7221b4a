"""The answers of the rollout proxy over HTTP, with workers that fail in every scripted way."""

import asyncio
import contextlib

import pytest

from rl_driver.api.proxy_config import parse_proxy_config
from tests.unit.fake_worker import MODEL, FakeWorker, undisturbed, workers
from tests.unit.proxy_world import PROMPT, check_choice, run, running
from vllm_coserve.api.errors import ConfigurationError

# ---- one answer


def test_tokens_in_and_out_whole_and_streamed():
    async def test():
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            answer = await client.complete(12)
            (choice,) = answer["choices"]
            check_choice(choice, 12, ["step-1"])
            assert choice["finish_reason"] == "length" and choice["prompt_token_ids"] == PROMPT
            assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
            body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, "logprobs": 1}
            events = [e async for e in client.stream({**body, "stream_options": {"include_usage": True}})]
            assert events[-1] is None and events[-2]["usage"]["completion_tokens"] == 12
            choices = [c for e in events[:-1] for c in e["choices"]]
            assert [t for c in choices for t in c["token_ids"]] == undisturbed(PROMPT, 12)
            assert choices[-1]["finish_reason"] == "length" and choices[-1]["weight_versions"][0]["end"] == 12
            assert all(len(t) == 1 for c in choices for t in c["logprobs"]["top_logprobs"])

    run(test())


_FAULTS = ["coserve:reclaimed", "coserve:stalled", "lost", "garbage", "endless", "lies", "error", "500", "503", "413"]


@pytest.mark.parametrize("how", _FAULTS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_call_goes_on_elsewhere_and_nobody_sees_it(how, after):
    async def test():
        async with workers(FakeWorker(version="step-1"), FakeWorker(version="step-2")) as fakes:
            async with running(*fakes) as client:
                for fake in fakes:
                    fake.faults = [(after, how)]
                (choice,) = (await client.complete(12))["choices"]
                check_choice(choice, 12)
                assert choice["finish_reason"] == "length"
                legs = fakes[0].calls + fakes[1].calls
                assert len(legs) == 3 and all(
                    len(b["token_ids"]) + b["sampling_params"]["max_tokens"] == 16 for b in legs
                )
                assert not any(b["sampling_params"]["detokenize"] for b in legs)
        assert client.proxy.scheduler._places == {} and client.proxy.scheduler.queued == 0

    run(test())


def test_spans_name_the_weights_of_each_worker():
    async def test():
        async with workers(FakeWorker(version="step-1"), FakeWorker(version="step-2")) as fakes:
            async with running(*fakes) as client:
                for fake in fakes:
                    fake.faults = [(4, "coserve:reclaimed")]
                (choice,) = (await client.complete(12))["choices"]
                check_choice(choice, 12)
                assert [s["version"] for s in choice["weight_versions"]] in (
                    ["step-1", "step-2", "step-1"],
                    ["step-2", "step-1", "step-2"],
                )
                assert [s["end"] for s in choice["weight_versions"]] == [4, 8, 12]

    run(test())


def test_a_worker_with_older_weights_than_it_said_is_left():
    async def test():
        async with workers(FakeWorker(version="step-5"), FakeWorker(version="step-5")) as fakes:
            async with running(*fakes) as client:
                for fake in fakes:  # plain vLLM says its version only with its answers
                    client.proxy.fleet.note_version(fake.url, "step-5")
                fakes[0].faults = fakes[1].faults = [(3, "old")]  # whoever is first
                (choice,) = (await client.complete(9, headers={"X-Min-Weight-Version": "step-5"}))["choices"]
                check_choice(choice, 9, ["step-5"])

    run(test())


def test_a_worker_that_hangs_is_left_by_its_bound():
    async def test():
        async with workers(FakeWorker(), FakeWorker()) as fakes, running(*fakes, chunk_timeout_s=0.3) as client:
            for fake in fakes:
                fake.faults = [(3, "hangs")]
            check_choice((await client.complete(12))["choices"][0], 12)

    run(test())


def test_a_dead_worker_is_left_at_once_and_comes_back():
    async def test():
        async with workers(FakeWorker(step_s=0.05, chunk=1), FakeWorker(step_s=0.05, chunk=1)) as fakes:
            async with running(*fakes) as client:
                task = asyncio.create_task(client.complete(30))
                while not any(f.open for f in fakes):
                    await asyncio.sleep(0.01)
                busy = next(f for f in fakes if f.open)
                await busy.die()
                check_choice((await task)["choices"][0], 30)
                await client.usable(1)

    run(test())


def test_a_client_that_leaves_frees_the_worker():
    async def test():
        async with workers(FakeWorker(step_s=0.02, chunk=1)) as fakes, running(*fakes) as client:
            for stream in (True, False):
                body = {"prompt": PROMPT, "max_tokens": 4000, "stream": stream}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        async with client.session.post(client.url + "/v1/completions", json=body) as answer:
                            await answer.read()
                async with asyncio.timeout(3):
                    while fakes[0].open or client.proxy.scheduler._places:
                        await asyncio.sleep(0.01)

    run(test())


def test_several_answers_to_several_prompts():
    async def test():
        async with workers(FakeWorker(), FakeWorker()) as fakes, running(*fakes) as client:
            fakes[0].faults = [(2, "lost")]
            prompts = [[1, 2], [3, 4, 5]]
            answer = await client.complete(6, prompt=prompts, n=2, seed=7)
            assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
            for choice in answer["choices"]:
                assert choice["token_ids"] == undisturbed(prompts[choice["index"] // 2], 6)
            seeds = {b["sampling_params"]["seed"] for f in fakes for b in f.calls}
            assert seeds == {7, 8} and answer["usage"]["completion_tokens"] == 24
            body = {"prompt": prompts, "n": 2, "max_tokens": 6, "return_token_ids": True}
            out = [[] for _ in range(4)]
            async for event in client.stream(body):
                for choice in event["choices"] if event else ():
                    out[choice["index"]] += choice["token_ids"]
            assert out == [undisturbed(prompts[i // 2], 6) for i in range(4)]

    run(test())


def test_stop_tokens_and_sampling_parameters_reach_the_worker():
    async def test():
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            stop = undisturbed(PROMPT, 5)[-1]
            answer = await client.complete(20, stop_token_ids=[stop], temperature=0.25, top_k=7)
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("stop", stop, 5)
            sampling = fakes[0].calls[-1]["sampling_params"]
            assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.25, 7, 1.0)
            await client.complete(3)
            assert fakes[0].calls[-1]["sampling_params"]["temperature"] == 0.7, "the model's own default"
            await client.complete(3, bad_words=["x"])
            assert fakes[0].calls[-1]["sampling_params"]["bad_words"] == ["x"], "rendered by the worker"

    run(test())


def test_chat_is_rendered_by_a_worker_and_tools_are_read_by_one():
    async def test():
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "return_token_ids": True}
            status, answer, _ = await client.post("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2})
            (choice,) = answer["choices"]
            assert status == 200 and choice["token_ids"] == undisturbed([11], 5)
            assert choice["message"]["role"] == "assistant" and answer["prompt_token_ids"] == [11]
            assert [len(e["top_logprobs"]) for e in choice["logprobs"]["content"]] == [2] * 5
            events = [e async for e in client.stream(chat, "/v1/chat/completions")]
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            tools = [{"type": "function", "function": {"name": "f"}}]
            _, answer, _ = await client.post("/v1/chat/completions", {**chat, "tools": tools})
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "5"
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            events = [e async for e in client.stream({**chat, "tools": tools}, "/v1/chat/completions")]
            (last,) = events[-2]["choices"]
            assert last["delta"]["tool_calls"][0]["index"] == 0 and last["finish_reason"] == "tool_calls"

    run(test())


# ---- stored turns


def test_a_finished_turn_is_kept_over_a_restart_and_not_made_again(tmp_path):
    async def test():
        store = str(tmp_path / "turns.sqlite")
        async with workers(FakeWorker()) as fakes:
            async with running(*fakes, store=store) as client:
                headers = {"X-Trajectory-Id": "t1", "X-Turn-Index": "0"}
                first = await client.complete(6, headers=headers)
                text = PROMPT + first["choices"][0]["token_ids"] + [50, 51]
                await client.complete(4, headers={**headers, "X-Turn-Index": "1"}, prompt=text)
                trajectory = await client.proxy.records._run(lambda: client.proxy.records._store.get("t1"))
                assert trajectory.token_ids() == text + undisturbed(text, 4)
                assert trajectory.turns[1].input_token_ids == (50, 51) and trajectory.turns[1].kept is None
                path = f"{client.url}/coserve/v1/trajectories/t1"
                async with client.session.post(path + "/end", json={"state": "done", "reward": 0.5}) as ended:
                    stored = await ended.json()
                    assert (stored["state"], stored["reward"], len(stored["turns"])) == ("done", 0.5, 2)
                for method, url, body, status in (
                    ("PUT", path, {"group": "other"}, 409),
                    ("POST", path + "/end", {"state": "failed"}, 409),
                    ("GET", path + "x", None, 404),
                    ("PUT", path + "y", {"group": ""}, 400),
                    ("PUT", path + "y", {"group": "g", "task": {"seed": 1}}, 200),
                    ("PUT", path + "y", {"group": "g", "task": {"seed": 1}}, 200),
                ):
                    async with client.session.request(method, url, json=body) as answer:
                        assert answer.status == status, await answer.text()
            calls = len(fakes[0].calls)
            async with running(*fakes, store=store) as client:
                again = await client.complete(6, headers=headers)
                assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
                assert (
                    again["choices"][0]["logprobs"]["token_logprobs"]
                    == (first["choices"][0]["logprobs"]["token_logprobs"])
                )
                assert len(fakes[0].calls) == calls, "not made again"
                body = {"prompt": [1, 2], "max_tokens": 6}
                status, answer, _ = await client.post("/v1/completions", body, **headers)
                assert status == 409 and "another prompt" in answer["error"]["message"]

    run(test())


# ---- bad input, keys


_BAD = [
    (b"", "JSON"),
    (b"[]", "object"),
    (b'{"prompt": "\xff"}', "JSON"),
    (b"{" * 5000, "JSON"),
    (b'{"prompt": []}', "prompt"),
    (b'{"prompt": [[]]}', "prompt"),
    (b'{"prompt": [1, "a"]}', "prompt"),
    (b'{"prompt": [-1]}', "prompt"),
    (b'{"prompt": [1], "max_tokens": 0}', "max_tokens"),
    (b'{"prompt": [1], "max_tokens": 1e300}', "max_tokens"),
    (b'{"prompt": [1], "max_tokens": 9000}', "shorten"),
    (b'{"prompt": [1], "temperature": -1}', "temperature"),
    (b'{"prompt": [1], "temperature": NaN}', "JSON"),
    (b'{"prompt": [1], "n": 0}', "n"),
    (b'{"prompt": [1], "logprobs": 21}', "logprobs"),
    (b'{"prompt": "text"}', "tokenizer"),
    (b'{"prompt": [1], "stop": "a"}', "tokenizer"),
    (b'{"max_tokens": 3}', "prompt"),
]


def test_bad_bodies_are_refused_with_what_is_wrong_and_no_worker_is_blamed():
    async def test():
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            for body, word in _BAD:
                async with client.session.post(client.url + "/v1/completions", data=body) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == 400 and word in error["message"], (body, error)
            status, answer, _ = await client.post("/v1/completions", {"prompt": [1], "model": "other"})
            assert status == 404 and MODEL in answer["error"]["message"]
            fakes[0].faults = [(0, "400")] * 5
            for _ in range(5):
                assert (await client.post("/v1/completions", {"prompt": [1]}))[0] == 400
            check_choice((await client.complete(3))["choices"][0], 3)
            for header, value in (("X-Turn-Index", "-1"), ("X-Trajectory-Id", "x" * 257)):
                status, _, _ = await client.post("/v1/completions", {"prompt": [1]}, **{header: value})
                assert status == 400
            for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nothing", 404)):
                async with client.session.request(method, client.url + path) as answer:
                    assert answer.status == status and "error" in await answer.json()

    run(test())


def test_keys_guard_the_proxy_and_are_never_shown(caplog):
    async def test():
        async with workers(FakeWorker(key="worker-secret"), FakeWorker(key="other-secret")) as fakes:
            config = {"api_key": "proxy-secret", "worker_api_key": "worker-secret"}
            async with running(*fakes, usable=1, **config) as client:
                assert (await client.post("/v1/completions", {"prompt": [1]}))[0] == 401
                bad = {"Authorization": "Bearer wrong"}
                assert (await client.post("/v1/completions", {"prompt": [1]}, **bad))[0] == 401
                good = {"Authorization": "Bearer proxy-secret"}
                fakes[0].faults = [(0, "500"), (0, "400")]
                seen = []
                for _ in range(2):
                    seen.append(await client.post("/v1/completions", {"prompt": [1]}, **good))
                async with client.session.get(client.url + "/coserve/v1/workers", headers=good) as answer:
                    seen.append(await answer.text())
                    assert "--worker-api-key" in seen[-1]
                for path in ("/health", "/metrics", "/openapi.json"):
                    async with client.session.get(client.url + path) as answer:
                        assert answer.status == 200
                        seen.append(await answer.text())
                assert "secret" not in repr(seen) and "secret" not in caplog.text

    run(test())


def test_a_slow_client_and_half_a_request_do_not_stay(monkeypatch):
    async def test():
        monkeypatch.setattr("rl_driver.proxy.connections._FIRST_REQUEST_S", 0.2)
        monkeypatch.setattr("rl_driver.proxy.server._BODY_BOUND_S", 0.2)
        monkeypatch.setattr("rl_driver.proxy.connections._SWEEP_S", 0.1)
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            port = int(client.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            assert await reader.read() == b""
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            assert b"408" in await reader.readline()
            writer.close()

    run(test())


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"dedicated": ["localhost:1"]}, "--dedicated"),
        ({"dedicated": ["http://a", "http://a/"]}, "twice"),
        ({"borrowed": ["http://a"], "borrow": 2}, "--borrow"),
        ({"port": 70000}, "--port"),
        ({"turns_per_dedicated": 0}, "--turns-per-dedicated"),
        ({"lost_after_s": "nan"}, "--lost-after-s"),
        ({"policy": "best"}, "--policy"),
        ({"job": "a b"}, "--job"),
        ({"api_key": ""}, "--api-key"),
    ],
)
def test_bad_flags_are_named(values, word):
    with pytest.raises(ConfigurationError, match=word):
        parse_proxy_config(values)
