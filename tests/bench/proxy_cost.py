"""What the proxy costs against a direct connection: time to first token, memory of idle streams, tokens/s of a core.

The worker is synthetic and the proxy has a core for itself; the worker and the clients share the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pstats
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.servers import free_port, running_server

_CLIENT_CORE, _PROXY_CORE = 0, 1
_STREAMS = 64
_STEP_S = 0.05  # between two tokens of a stream
_TTFT_TOKENS = 8
_IDLE = 2000
_BLOCK_S = 3.0
_OUT = Path("out") / "bench"


@contextlib.contextmanager
def _both(step_ms: float, profile: Path | None = None) -> Iterator[tuple[str, str, int]]:
    """A worker and a proxy before it: (worker's address, proxy's address, the proxy's process)."""
    worker_url, proxy_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    worker = [
        sys.executable,
        "-m",
        "tests.bench.synthetic_worker",
        f"--port={worker_url.rpartition(':')[2]}",
        f"--step-ms={step_ms}",
    ]
    proxy = ["-m", "rl_driver.proxy.main", f"--port={proxy_url.rpartition(':')[2]}", f"--dedicated={worker_url}"]
    proxy += [f"--turns-per-dedicated={1 << 16}", "--lost-after-s=30"]
    if profile:
        proxy = ["-m", "cProfile", "-o", str(profile), *proxy]
    with contextlib.ExitStack() as stack:
        for argv, url, core in ((worker, worker_url, _CLIENT_CORE), ([sys.executable, *proxy], proxy_url, _PROXY_CORE)):
            os.sched_setaffinity(0, {core})  # which the child has from us
            process = stack.enter_context(running_server(argv, [url], _OUT / "proxy_cost.log", {}, bound_s=60))
        os.sched_setaffinity(0, {_CLIENT_CORE})
        yield worker_url, proxy_url, process.pid


async def _stream(session: aiohttp.ClientSession, url: str, count: int, hold: bool = False) -> tuple[float, int]:
    """(seconds to the first token, tokens)."""
    body = {"prompt": [1] if hold else [1, 2, 3], "max_tokens": count, "stream": True, "return_token_ids": True}
    start, first, last = time.monotonic(), 0.0, b""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for data in answer.content.iter_any():
            first = first or time.monotonic() - start
            last = last[-4096:] + data
            if hold:
                await asyncio.sleep(3600)
    return first, count if b'"length"' in last else 0  # a part may hold several tokens


@contextlib.asynccontextmanager
async def _session() -> Any:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def _ttft(worker_url: str, proxy_url: str, rounds: int, lockstep: bool = False) -> dict[str, Any]:
    """Blocks of direct and proxied streams alternate; `_STREAMS` at a time on average, begun at random moments.

    `lockstep`: streams begin in the very moment in which the engine's step ends, since its tokens come for all streams
    at once and a client asks again without a pause. They wait for each other then, whoever answers.
    """
    samples: dict[str, list[float]] = {"direct": [], "proxy": []}
    rng = random.Random(0)
    loops = _STREAMS if lockstep else round(_STREAMS * (1 + 0.5 / (_TTFT_TOKENS + 0.5)))
    async with _session() as session:

        async def loop(url: str, until: float, into: list[float]) -> None:
            while time.monotonic() < until:
                first, tokens = await _stream(session, url, _TTFT_TOKENS)
                assert tokens == _TTFT_TOKENS
                into.append(first)
                await asyncio.sleep(0 if lockstep else rng.uniform(0, _STEP_S))

        for round_ in range(-1, rounds):
            for name, url in (("direct", worker_url), ("proxy", proxy_url)):
                into = samples[name] if round_ >= 0 else []
                until = time.monotonic() + _BLOCK_S
                jobs = []
                for _ in range(loops):
                    jobs.append(asyncio.create_task(loop(url, until, into)))
                    await asyncio.sleep(0.007)
                await asyncio.gather(*jobs)
    out: dict[str, Any] = {
        name: {f"p{q}_ms": 1e3 * percentile(values, q) for q in (50, 99)} | {"samples": len(values)}
        for name, values in samples.items()
    }
    for q in ("p50_ms", "p99_ms"):
        out[f"added_{q}"] = out["proxy"][q] - out["direct"][q]
    return out


async def _idle(proxy_url: str, pid: int) -> dict[str, Any]:
    """Memory of the proxy with many streams that have begun and wait."""
    async with _session() as session:
        before = _rss_mib(pid)
        tasks = [asyncio.create_task(_stream(session, proxy_url, 1000, hold=True)) for _ in range(_IDLE)]
        deadline, running = time.monotonic() + 60, 0
        while running < _IDLE and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            async with session.get(f"{proxy_url}/coserve/v1/workers") as answer:
                running = (await answer.json())["running"]
        await asyncio.sleep(3)
        dead = sum(t.done() for t in tasks)
        after = _rss_mib(pid)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"streams": running - dead, "rss_before_mib": before, "rss_mib": after}


async def _tokens_per_s(url: str, seconds: float) -> float:
    tokens = 0

    async def loop(session: aiohttp.ClientSession, until: float) -> None:
        nonlocal tokens
        while time.monotonic() < until:
            _, count = await _stream(session, url, 200)
            tokens += count  # behind the await, or other streams' counts were lost

    async with _session() as session:
        start = time.monotonic()
        await asyncio.gather(*(loop(session, start + seconds) for _ in range(_STREAMS)))
        return tokens / (time.monotonic() - start)


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _top(profile: Path, count: int = 14) -> list[list[Any]]:
    """Where the time goes: [share of all, calls, function]."""
    stats = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    rows = [(v[2], v[1], k) for k, v in stats.items() if "select" not in k[2] and "epoll" not in k[2]]
    total = sum(r[0] for r in rows)
    rows.sort(key=lambda r: -r[0])
    named = [(t, n, f"{Path(file).name}:{line} {name}" if line else name) for t, n, (file, line, name) in rows]
    return [[round(t / total, 3), n, what] for t, n, what in named[:count]]


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """All three."""
    os.sched_setaffinity(0, {_CLIENT_CORE})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
    _OUT.mkdir(parents=True, exist_ok=True)
    out: dict[str, Any] = {}
    with _both(1e3 * _STEP_S) as (worker_url, proxy_url, pid):
        out["ttft"] = asyncio.run(_ttft(worker_url, proxy_url, rounds))
        out["ttft_lockstep"] = asyncio.run(_ttft(worker_url, proxy_url, max(1, rounds // 2), lockstep=True))
        print("ttft", out["ttft"], out["ttft_lockstep"], flush=True)
        out["idle"] = asyncio.run(_idle(proxy_url, pid))
        print("idle", out["idle"], flush=True)
    with _both(0.0) as (worker_url, proxy_url, pid):
        direct = asyncio.run(_tokens_per_s(worker_url, seconds))
        cpu_s, start = _cpu_s(pid), time.monotonic()
        proxied = asyncio.run(_tokens_per_s(proxy_url, seconds))
        busy = (_cpu_s(pid) - cpu_s) / (time.monotonic() - start)
    out["rate"] = {"direct_tokens_per_s": direct, "tokens_per_s": proxied, "core_busy": busy}
    out["rate"]["tokens_per_core_s"] = proxied / busy
    print("rate", out["rate"], flush=True)
    profile = _OUT / "proxy.prof"
    profile.unlink(missing_ok=True)
    with _both(0.0, profile) as (_, proxy_url, _pid):
        asyncio.run(_tokens_per_s(proxy_url, min(seconds, 5.0)))
    out["profile"] = _top(profile)
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    return out
