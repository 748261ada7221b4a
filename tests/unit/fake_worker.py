"""A vLLM worker as the proxy sees it, with scripted faults: real HTTP, and a model whose next token depends on all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json

from aiohttp import web

VOCAB = 4096
MODEL = "fake"
DEFAULTS = {"temperature": 0.7, "top_p": 1.0, "stop": [], "max_tokens": 16, "n": 1, "logprobs": None}


def next_token(tokens):
    """The one token that may follow."""
    return 3 + int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:2], "little") % (VOCAB - 3)


def undisturbed(prompt, count):
    """What an engine that nobody disturbs makes of a prompt."""
    out = []
    while len(out) < count:
        out.append(next_token([*prompt, *out]))
    return out


class FakeWorker:
    """`faults` is a list of (after how many tokens, what) for the next calls; an empty list means health."""

    def __init__(self, borrowed=False, version="step-1", step_s=0.0, chunk=2, key=None, max_model_len=8192):
        self.borrowed, self.version, self.step_s, self.chunk, self.key = borrowed, version, step_s, chunk, key
        self.max_model_len = max_model_len
        self.faults, self.calls, self.open, self.cancelled = [], [], 0, 0
        self.usage, self.state, self.holder, self.steps, self.healthy = 0.1, "active", None, 0, True
        self.says_versions = True
        self.pulling = []
        self.updates, self.refuses_updates, self.paused, self.update_open = [], 0, False, False

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions/render", self._render)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        for step in ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"):
            app.router.add_post(f"/{step}", self._update)
        app.router.add_post("/collective_rpc", self._pull)
        if self.borrowed:
            app.router.add_post("/coserve/v1/weights", self._load)
            app.router.add_get("/coserve/v1/status", self._status)
            app.router.add_post("/coserve/v1/step", self._step)
            app.router.add_post("/coserve/v1/register", self._register)
            app.router.add_delete("/coserve/v1/register", self._release)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc):
        await self.runner.cleanup()

    async def die(self):
        """Close the port and all connections."""
        for connection in list(self.runner.server.connections):
            connection.transport.abort()
        await self.runner.cleanup()

    def _allowed(self, request):
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _health(self, request):
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request):
        if not self._allowed(request):
            return web.json_response({"error": {"message": f"bad {request.headers.get('Authorization')}"}}, status=401)
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.max_model_len, "root": "/no/folder"}]})

    async def _render(self, request):
        body = await request.json()
        sampling = {**DEFAULTS, **{k: v for k, v in body.items() if k in ("bad_words", "temperature", "seed")}}
        return web.json_response([{"token_ids": body["prompt"], "sampling_params": sampling}])

    async def _render_chat(self, request):
        body = await request.json()
        tokens = [len(m["role"]) + 7 for m in body["messages"]]
        stop = body.get("stop") or []
        sampling = {**DEFAULTS, "stop": [stop] if isinstance(stop, str) else stop}
        return web.json_response({"token_ids": tokens, "sampling_params": sampling})

    async def _derender(self, request):
        body = await request.json()
        (choice,) = body["generate_response"]["choices"]
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": str(len(choice["token_ids"]))}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return web.json_response({"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    async def _status(self, request):
        if not self._allowed(request):
            return web.json_response({}, status=401)
        pages = {"pool": 100, "serving": int(100 * self.usage), "serving_cached": 0}
        held = self.holder and {"job": self.holder}
        status = {"state": self.state, "pages": pages, "weights": {"version": self.version}, "registration": held}
        return web.json_response(status)

    async def _weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def _load(self, request):
        body = await request.json()
        if self.refuses_updates:
            self.refuses_updates -= 1
            return web.json_response({"detail": "not weights of this model"}, status=409)
        self.updates.append(body["relay"])
        self.version = body["version"]
        return web.json_response({})

    async def _pull(self, request):
        assert not self.paused  # it generates meanwhile
        body = await request.json()
        if body["method"] == "coserve_pull":
            self.pulling = ["under way", "the relay does not answer" if self.refuses_updates else "pulled"]
            self.refuses_updates = max(0, self.refuses_updates - 1)
            return web.json_response({"results": [""]})
        assert body["method"] == "coserve_pulled"
        return web.json_response({"results": [self.pulling.pop(0)]})

    async def _update(self, request):
        step = request.path[1:]
        self.paused = step != "resume" and (self.paused or step == "pause")
        if step == "start_weight_update":
            if self.update_open:
                return web.json_response({"error": "an update is active: finish it first"}, status=500)
            self.update_open = True
        elif step == "update_weights":
            assert self.paused and self.update_open and not self.pulling
            self.updates.append((await request.json())["update_info"])
        elif step == "finish_weight_update":
            self.version, self.update_open = (await request.json())["weight_version"], False
        return web.json_response({})

    async def _step(self, request):
        self.steps += 1
        return web.json_response({})

    async def _register(self, request):
        job = (await request.json())["job"]
        if self.holder not in (None, job):
            return web.json_response({"detail": "held"}, status=409)
        self.holder = job
        return web.json_response({})

    async def _release(self, request):
        self.holder = None
        return web.Response(status=204)

    async def _generate(self, request):
        if not self._allowed(request):
            return web.json_response({"error": {"message": "no"}}, status=401)
        body = await request.json()
        self.calls.append(body)
        after, how = self.faults.pop(0) if self.faults else (1 << 30, "")
        if how.isdigit():
            message = f"said no to {request.headers.get('Authorization')}"
            return web.json_response({"error": {"message": message, "code": int(how)}}, status=int(how))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            await self._stream(request, response, body, after, how)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        return response

    async def _stream(self, request, response, body, after, how):
        sampling, text, made = body["sampling_params"], list(body["token_ids"]), 0
        stop_ids = sampling.get("stop_token_ids") or []
        count = sampling["max_tokens"]
        while made < min(count, after):
            new = []
            for _ in range(min(self.chunk, count - made, after - made)):
                new.append(next_token(text))
                text.append(new[-1])
                if new[-1] in stop_ids:
                    break
            made += len(new)
            stopped = bool(new) and new[-1] in stop_ids
            finish = "stop" if stopped else "length" if made == count and how in ("", "slow") else None
            await response.write(self._event(new, made, sampling, finish, new[-1] if stopped else None))
            if self.step_s:
                await asyncio.sleep(self.step_s)
            if finish:
                await response.write(b"data: [DONE]\n\n")
                return
        if how == "lost":
            request.transport.abort()
        elif how == "hangs":
            await asyncio.sleep(30)
        elif how == "garbage":
            await response.write(b"data: {\xff\xfe nonsense\n\n")
        elif how == "endless":
            await response.write(b"x" * (9 << 20))
        elif how == "lies":
            await response.write(self._event([7] * (count + 1), made + count + 1, sampling, None, None))
        elif how == "old":
            event = json.loads(self._event([next_token(text)], made + 1, sampling, None, None)[6:])
            event["choices"][0]["weight_versions"] = [{"version": "step-0", "start": 0, "end": made + 1}]
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(5)
        elif how == "error":
            await response.write(b'data: {"error": {"message": "engine dead", "code": 500}}\n\n')
        elif how.startswith("coserve:"):
            await response.write(self._event([], made, sampling, "abort", how))

    def _event(self, new, made, sampling, finish, stop):
        choice = {"index": 0, "token_ids": new, "finish_reason": finish, "stop_reason": stop, "logprobs": None}
        if sampling.get("logprobs") is not None:
            others = range(max(1, sampling["logprobs"]))
            entries = [{"token_id": t, "logprob": -t / 1000, "top_logprobs": self._top(t, others)} for t in new]
            choice["logprobs"] = {"content": entries}
        if self.says_versions:
            choice["weight_versions"] = [{"version": self.version, "start": 0, "end": made}]
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    @staticmethod
    def _top(token, others):
        return [{"token_id": token + i, "logprob": -token / 1000 - i} for i in others]


@contextlib.asynccontextmanager
async def workers(*fakes):
    """Run several."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(f) for f in fakes]
