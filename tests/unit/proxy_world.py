"""A rollout proxy in this process, over real HTTP, before workers that fail as scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
from aiohttp import web

from rl_driver.api.proxy_config import ProxyConfig
from rl_driver.proxy.server import Proxy
from tests.unit.fake_worker import undisturbed

PROMPT = [5, 6, 7, 8]


class Client:
    def __init__(self, proxy, session, url):
        self.proxy, self.session, self.url = proxy, session, url

    async def post(self, path, body, **headers):
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def complete(self, count=12, headers=None, **more):
        body = {"prompt": PROMPT, "max_tokens": count, "return_token_ids": True, "logprobs": 0, **more}
        status, answer, _ = await self.post("/v1/completions", body, **(headers or {}))
        assert status == 200, answer
        return answer

    async def stream(self, body, path="/v1/completions", headers=None):
        """Events of a stream; the connection stays open as long as they are read."""
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                elif line.startswith(b"data: [DONE]"):
                    yield None

    async def usable(self, count):
        async with asyncio.timeout(5):
            while len(self.proxy.fleet.usable()) != count:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(*fakes, usable=None, **config):
    urls = {"dedicated": [], "borrowed": []}
    for fake in fakes:
        urls["borrowed" if fake.borrowed else "dedicated"].append(fake.url)
    values = {"poll_s": 0.05, "lost_after_s": 0.3, **{k: tuple(v) for k, v in urls.items()}, **config}
    proxy = Proxy(ProxyConfig(**values))
    await proxy.start()
    runner = web.AppRunner(proxy.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    proxy.connections.runner = runner
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            client = Client(proxy, session, url)
            await client.usable(len(fakes) if usable is None else usable)
            yield client
    finally:
        await runner.cleanup()
        await proxy.stop()


def run(test):
    """Run an async test with a bound."""

    async def bounded():
        async with asyncio.timeout(25):
            await test

    asyncio.run(bounded())


def check_choice(choice, count, versions=None):
    """The answer to `PROMPT` is whole: tokens, logprobs and the weights that made them."""
    assert choice["token_ids"] == undisturbed(PROMPT, count)
    assert choice["logprobs"]["token_logprobs"] == [-t / 1000 for t in choice["token_ids"]]
    spans = choice["weight_versions"]
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])] and spans[-1]["end"] == count
    if versions:
        assert [s["version"] for s in spans] == versions
