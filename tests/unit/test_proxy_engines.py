"""The rollout proxy and its engines: places and queue, engines that come and go, borrowed ones, new weights."""

import asyncio

from tests.unit.fake_worker import FakeWorker, workers
from tests.unit.proxy_world import check_choice, run, running

# ---- places


def test_overload_is_429_and_the_queue_is_first_come_first_served():
    async def test():
        async with workers(FakeWorker(step_s=0.05, chunk=1)) as fakes:
            async with running(*fakes, turns_per_dedicated=1, queue_turns=2) as client:
                calls = []
                for i in range(3):
                    calls.append(asyncio.create_task(client.complete(6, prompt=[9, i])))
                    await asyncio.sleep(0.03)
                body = {"prompt": [1], "max_tokens": 1}
                status, answer, headers = await client.post("/v1/completions", body)
                assert status == 429 and int(headers["Retry-After"]) >= 1 and "wait" in answer["error"]["message"]
                await asyncio.gather(*calls)
                assert [b["token_ids"][:2] for b in fakes[0].calls] == [[9, 0], [9, 1], [9, 2]]

    run(test())


def test_nothing_waits_for_ever():
    async def test():
        async with workers(FakeWorker(step_s=0.05, chunk=1)) as fakes:
            async with running(*fakes, turns_per_dedicated=1, queue_timeout_s=0.2) as client:
                first = asyncio.create_task(client.complete(20))
                await asyncio.sleep(0.05)
                status, answer, _ = await client.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
                assert status == 429 and "no room" in answer["error"]["message"]
                await first
        async with running(usable=0, queue_timeout_s=0.2) as client:
            status, answer, _ = await client.post("/v1/completions", {"prompt": [1]})
            assert status == 503 and "no worker" in answer["error"]["message"]
            async with client.session.get(client.url + "/health") as answer:
                assert answer.status == 503

    run(test())


def test_a_worker_taken_off_gives_its_calls_away():
    async def test():
        async with workers(FakeWorker(step_s=0.03, chunk=1), FakeWorker(step_s=0.03, chunk=1)) as fakes:
            async with running(fakes[0]) as client:
                task = asyncio.create_task(client.complete(30))
                while not fakes[0].open:
                    await asyncio.sleep(0.01)
                status, _, _ = await client.post("/coserve/v1/workers", {"url": fakes[1].url, "kind": "dedicated"})
                assert status == 200
                await client.usable(2)
                async with client.session.delete(f"{client.url}/coserve/v1/workers?url={fakes[0].url}") as answer:
                    assert answer.status == 200 and len((await answer.json())["workers"]) == 1
                check_choice((await task)["choices"][0], 30)
                assert len(fakes[1].calls) == 1

    run(test())


def test_continuous_migration_moves_a_pending_call_to_a_free_worker():
    async def test():
        async with workers(FakeWorker(), FakeWorker()) as fakes, running(fakes[0], policy="balanced") as client:
            fakes[0].faults = [(0, "hangs")] * 2
            calls = [asyncio.create_task(client.complete(8)) for _ in range(2)]
            while fakes[0].open < 2:
                await asyncio.sleep(0.01)
            client.proxy.fleet.add(fakes[1].url, "dedicated")
            for call in calls:
                check_choice((await call)["choices"][0], 8)
            assert len(fakes[1].calls) == 2

    run(test())


# ---- borrowed engines


def test_the_emptiest_borrowed_engines_are_held_and_given_free():
    async def test():
        fakes = [FakeWorker(borrowed=True) for _ in range(4)]
        for fake, usage in zip(fakes, (0.9, 0.2, 0.1, 0.0), strict=True):
            fake.usage = usage
        fakes[3].holder = "another-job"
        async with workers(*fakes):
            async with running(*fakes, usable=2, borrow=2, job="mine") as client:
                assert [f.holder for f in fakes] == [None, "mine", "mine", "another-job"]
                assert (await client.post("/coserve/v1/step", {}))[0] == 200
                assert [f.steps for f in fakes] == [0, 1, 1, 0]
                check_choice((await client.complete(5))["choices"][0], 5)
                fakes[2].state = "deactivated"
                while fakes[0].holder != "mine":
                    await asyncio.sleep(0.01)
                states = client.proxy._state().workers
                assert [w.usable for w in states][1] and "another RL job" in states[3].wrong
            assert [f.holder for f in fakes][:2] == [None, None] and fakes[3].holder == "another-job"

    run(test())


# ---- weights


_PUBLISHED = {"url": "http://127.0.0.1:1", "version": 7, "key": "relay-key"}


def test_published_weights_reach_every_kind_of_engine():
    async def test():
        async with workers(FakeWorker(), FakeWorker(borrowed=True)) as fakes, running(*fakes) as client:
            status, state, _ = await client.post("/coserve/v1/weights", _PUBLISHED)
            assert status == 200 and [w["version"] for w in state["workers"]] == ["step-7", "step-7"]
            assert all(f.updates == [_PUBLISHED] and not f.paused for f in fakes)
            status, answer, _ = await client.post("/coserve/v1/weights", {**_PUBLISHED, "version": 6})
            assert status == 409 and "newer" in answer["error"]["message"]
            assert "relay-key" not in str(state) + str(answer)
            (choice,) = (await client.complete(4, {"X-Min-Weight-Version": "step-7"}))["choices"]
            check_choice(choice, 4, ["step-7"])

    run(test())


def test_an_update_that_a_killed_proxy_left_open_is_closed():
    async def test():
        async with workers(FakeWorker()) as fakes, running(*fakes) as client:
            fakes[0].update_open = True
            status, state, _ = await client.post("/coserve/v1/weights", _PUBLISHED)
            assert status == 200 and [w["version"] for w in state["workers"]] == ["step-7"]
            assert not fakes[0].paused and not fakes[0].update_open

    run(test())


def test_who_comes_back_gets_the_published_weights():
    async def test():
        late = FakeWorker(borrowed=True)
        late.state = "deactivated"
        async with workers(FakeWorker(), late) as fakes, running(*fakes, usable=1) as client:
            await client.post("/coserve/v1/weights", _PUBLISHED)
            assert fakes[0].updates and not late.updates
            late.state = "active"
            await client.usable(2)
            async with asyncio.timeout(5):
                while late.version != "step-7":
                    await asyncio.sleep(0.01)
            assert late.updates == [_PUBLISHED]

    run(test())


def test_a_worker_that_cannot_take_weights_says_why_and_is_asked_again_later(monkeypatch):
    monkeypatch.setattr("rl_driver.proxy.publication._RETRY_S", 0.3)

    async def test():
        async with workers(FakeWorker(), FakeWorker(borrowed=True)) as fakes, running(*fakes) as client:
            for fake in fakes:
                fake.refuses_updates = 1
            _, state, _ = await client.post("/coserve/v1/weights", _PUBLISHED)
            why = [w["wrong"] for w in state["workers"]]
            assert "does not answer" in why[0] and "not weights of this model" in why[1]
            assert [w["version"] for w in state["workers"]] == ["step-1", "step-1"]
            assert not fakes[0].paused  # it goes on with the old ones
            async with asyncio.timeout(5):
                while any(f.version != "step-7" for f in fakes):
                    await asyncio.sleep(0.02)

    run(test())
