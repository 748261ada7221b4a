"""A worker that makes up tokens at a given pace, so that what is measured is the proxy: vLLM's routes, no engine.

python -m tests.bench.synthetic_worker --port 9000 --step-ms 50
"""

from __future__ import annotations

import argparse
import asyncio
import json

from aiohttp import web

_DEFAULTS = {"temperature": 1.0, "max_tokens": 16, "n": 1, "stop": []}


class SyntheticWorker:
    """One event a token. `hold`: the first token comes, then nothing until the client leaves."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick = asyncio.Event()

    def app(self) -> web.Application:
        """The routes that the proxy needs, and `/v1/completions` for the direct connection."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions/render", self._render)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def tick(self) -> None:
        """All streams get their next token together, as those of an engine do."""
        while True:
            await asyncio.sleep(self._step_s)
            self._tick.set()
            self._tick = asyncio.Event()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "synthetic", "max_model_len": 1 << 20, "root": "/none"}]})

    async def _render(self, request: web.Request) -> web.Response:
        return web.json_response([{"token_ids": [0], "sampling_params": _DEFAULTS}])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._stream(request, body["sampling_params"]["max_tokens"], len(body["token_ids"]) == 1)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._stream(request, body["max_tokens"], len(body["prompt"]) == 1)

    async def _stream(self, request: web.Request, count: int, hold: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(count):
            finish = "length" if i == count - 1 else None
            choice = {"index": 0, "token_ids": [7 + i % 100], "finish_reason": finish, "stop_reason": None}
            choice |= {"logprobs": None, "weight_versions": [{"version": "step-1", "start": 0, "end": i + 1}]}
            await response.write(b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n")
            if hold:
                await asyncio.sleep(3600)
            if self._step_s:
                await self._tick.wait()
            else:
                await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response


async def _serve(port: int, step_s: float) -> None:
    worker = SyntheticWorker(step_s)
    runner = web.AppRunner(worker.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    if step_s:
        await worker.tick()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--step-ms", type=float, default=0.0, help="0: as fast as it can")
    o = p.parse_args()
    try:
        import uvloop

        uvloop.run(_serve(o.port, o.step_ms / 1000))
    except ImportError:
        asyncio.run(_serve(o.port, o.step_ms / 1000))


if __name__ == "__main__":
    main()
