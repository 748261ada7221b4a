"""Turns over a dedicated and a borrowed engine (ROSE's Table 3), and what the proxy costs.

    python -m tests.bench.driver [--trace azure-llm-2023-conv.csv] [--parts policies,cost]

Policies: the same trajectories of several turns, made by one framework over `coserve proxy`, until all are done; the
rows alternate, and the medians of the rounds count. The dedicated engine has one core, the borrowed one shares the
other with the engine that serves its users.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from tests.bench import machine, proxy_cost, results
from tests.scenario.harness import bearer
from tests.scenario.proxy_harness import AUTH, dedicated_engine, running_proxy, wait_usable
from vllm_coserve.demo.load import serve_schedule
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import DEVICE_CORE, HOST_CORE, Pair

_TURNS_MEAN, _TURNS_MAX = 5, 9  # of a trajectory; exponential, so that some take much longer than others
_UNBOUNDED = 4096  # turns on an engine, for policies that know no bound


@dataclass(frozen=True)
class Row:
    """A way to place turns."""

    name: str
    title: str
    policy: str
    bounded: bool = True
    borrows: bool = True


ROWS = (
    Row("alone", "the dedicated engine alone", "turnwise", bounded=False, borrows=False),
    Row("pinned", "baseline: trajectories pinned", "pinned", bounded=False),
    Row("turnwise", "+ turn-wise", "turnwise_no_affinity"),
    Row("affinity", "+ affinity", "turnwise"),
    Row("balanced", "join shortest queue, continuous migration (RLBoost)", "balanced"),
    Row("round_robin", "public router: round-robin", "round_robin", bounded=False),
    Row("least_loaded", "public router: least loaded", "least_loaded", bounded=False),
)


class Agents:
    """A fixed number of trajectories, some at a time; each turn's prompt is the whole text so far.

    The seed decides how many turns of which lengths there are; another run's name makes other tokens of the same
    lengths, so that nothing of an earlier run is in a prefix cache.
    """

    def __init__(self, url: str, trajectories: int, concurrent: int, seed: int, name: str) -> None:
        self._url, self._trajectories, self._concurrent = url, trajectories, concurrent
        self._seed, self._name = seed, f"{name}-{seed}"
        self.tokens = self.turns = self.errors = 0
        self.turns_s: list[float] = []

    async def run(self) -> float:
        """Make them all; returns the seconds that it took."""
        todo = iter(range(self._trajectories))
        start = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._loop(session, todo) for _ in range(self._concurrent)))
        return time.monotonic() - start

    async def _loop(self, session: aiohttp.ClientSession, todo: Iterator[int]) -> None:
        for number in todo:
            shape, tokens = random.Random(f"{self._seed}/{number}"), random.Random(f"{self._name}/{number}")

            def made_up(low: int, high: int, shape: Any = shape, tokens: Any = tokens) -> list[int]:
                return [tokens.randrange(3, SERVING_SPEC.vocab) for _ in range(shape.randrange(low, high))]

            text = made_up(160, 320)
            turns = min(_TURNS_MAX, 1 + int(shape.expovariate(1 / _TURNS_MEAN)))
            for turn in range(turns):
                text += await self._turn(session, f"{self._name}-{number}", text, shape.randrange(16, 64))
                if turn < turns - 1:
                    await asyncio.sleep(shape.uniform(0.05, 0.6))  # the environment takes its time
                    text += made_up(16, 48)

    async def _turn(self, session: aiohttp.ClientSession, name: str, text: list[int], count: int) -> list[int]:
        body = {"prompt": text, "max_tokens": count, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
        start = time.monotonic()
        while True:
            async with session.post(
                f"{self._url}/v1/completions", json=body, headers={**AUTH, "X-Trajectory-Id": name}
            ) as answer:
                if answer.status == 200:
                    tokens = (await answer.json())["choices"][0]["token_ids"]
                    break
                self.errors += 1
            await asyncio.sleep(0.2)
        assert len(tokens) == count
        self.tokens += count
        self.turns += 1
        self.turns_s.append(time.monotonic() - start)
        return tokens


@contextlib.contextmanager
def _engine(log: Path) -> Iterator[str]:
    """A dedicated engine with the rollout model, its worker on the host's core: a second device."""
    model = ensure_model(ROLLOUT_SPEC, Path("out") / "models")
    flags = ["--kv-cache-memory-bytes", str(96 << 20), "--max-num-batched-tokens=1024", "--stream-interval=4"]
    with dedicated_engine(model, log, *flags) as (url, process):
        machine.place(process.pid, HOST_CORE)
        yield url


@contextlib.contextmanager
def _proxy(row: Row, dedicated: str, borrowed: str, caps: tuple[int, int], log: Path) -> Iterator[str]:
    own, lent = caps if row.bounded else (_UNBOUNDED, _UNBOUNDED)
    flags = [f"--dedicated={dedicated}", f"--policy={row.policy}", "--lost-after-s=20", "--poll-s=1"]
    flags += [f"--turns-per-dedicated={own}", f"--turns-per-borrowed={lent}"]
    with running_proxy(log, *flags, *([f"--borrowed={borrowed}"] if row.borrows else [])) as (url, _):
        wait_usable(url, 1 + row.borrows)
        yield url


def _counts(url: str) -> dict[str, float]:
    """Tokens that an engine has looked up in its prefix cache, found there and made so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    names = {"looked_up": "prefix_cache_queries", "found": "prefix_cache_hits", "made": "generation_tokens"}
    return {
        key: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total"))
        for key, name in names.items()
    }


def policies(o: argparse.Namespace) -> dict[str, Any]:
    """All rows, alternating."""
    machine.OUT.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {r.name: [] for r in ROWS}
    flags = ["--coserve-ttft-slo-ms=300", "--coserve-tpot-slo-ms=40", "--coserve-stall-timeout-s=30"]
    with machine.start(flags, "driver_pair.log", o.pool_gib) as pair, _engine(machine.OUT / "dedicated.log") as url:
        machine.place(pair.process.pid, DEVICE_CORE)
        asyncio.run(warm_up(pair.serving_url, pair.rollout_url))
        asyncio.run(_warm(url))
        for round_ in range(o.rounds):
            for row in ROWS:
                with _proxy(
                    row, url, pair.rollout_url, (o.cap, o.borrowed_cap), machine.OUT / f"proxy_{row.name}.log"
                ) as proxy:
                    agents = Agents(proxy, o.trajectories, o.concurrent, 1000 * round_ + 17, row.name)
                    run = asyncio.run(_one(pair, url, agents, o))
                runs[row.name].append(run)
                print(row.name, {k: round(v, 3) for k, v in run.items()}, flush=True)
    return {
        row.name: {"title": row.title, "runs": runs[row.name]}
        | {k: median(r[k] for r in runs[row.name]) for k in runs[row.name][0]}
        for row in ROWS
    }


async def _warm(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for n in (8, 64, 256):
            body = {"prompt": list(range(3, 3 + n)), "max_tokens": 8, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body, headers=bearer()) as answer:
                answer.raise_for_status()


async def _one(pair: Pair, dedicated: str, agents: Agents, o: argparse.Namespace) -> dict[str, Any]:
    schedule = machine.arrivals(o.trace, 600.0, o.rate, 0)
    served: list[Any] = []
    serving = asyncio.create_task(
        serve_schedule(pair.serving_url, "serving", schedule, SERVING_SPEC.vocab, 0, lambda r: served.append(r))
    )
    engines = dedicated, pair.rollout_url
    before = [_counts(e) for e in engines]
    seconds = await agents.run()
    after = [_counts(e) for e in engines]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    own, borrowed = ({k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True))
    looked_up, found = own["looked_up"] + borrowed["looked_up"], own["found"] + borrowed["found"]
    return {
        "seconds": seconds,
        "hit_rate": found / looked_up,
        "tokens_per_s": agents.tokens / seconds,
        "borrowed_share": borrowed["made"] / (own["made"] + borrowed["made"]),
        "turn_s_p50": median(agents.turns_s),
        "computed_prompt_tokens": looked_up - found,
        "errors": float(agents.errors),
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    text = ""
    if rows := result.get("policies"):
        base = rows["pinned"]["seconds"]
        head = ["", "rollout time s", "speed", "prefix hits", "prompt tokens computed", "borrowed", "turn P50 s"]
        lines = [
            [
                r["title"],
                f"{r['seconds']:.1f}",
                f"{base / r['seconds']:.2f}x",
                f"{r['hit_rate']:.0%}",
                f"{r['computed_prompt_tokens']:.0f}",
                f"{r['borrowed_share']:.0%}",
                f"{r['turn_s_p50']:.2f}",
            ]
            for r in rows.values()
        ]
        text += results.table(head, lines) + "\n"
    if cost := result.get("cost"):
        t, idle, rate = cost["ttft"], cost["idle"], cost["rate"]
        text += "Time to first token at 64 concurrent streams, directly and through the proxy: "
        text += f"P50 {t['direct']['p50_ms']:.2f} and {t['proxy']['p50_ms']:.2f} ms, "
        text += f"P99 {t['direct']['p99_ms']:.2f} and {t['proxy']['p99_ms']:.2f} ms: "
        text += f"{t['added_p50_ms']:.2f} and {t['added_p99_ms']:.2f} ms more"
        lock = cost["ttft_lockstep"]
        text += f" ({lock['added_p50_ms']:.2f} and {lock['added_p99_ms']:.2f} where all begin as its steps end). "
        text += f"{idle['streams']} idle streams: {idle['rss_mib']:.0f} MiB (before: {idle['rss_before_mib']:.0f}). "
        text += f"{rate['tokens_per_s']:.0f} tokens/s through one process, at {rate['core_busy']:.0%} of a core.\n\n"
        text += results.table(
            ["share of the proxy's time", "calls", "where"], [[f"{s:.1%}", str(n), w] for s, n, w in cost["profile"]]
        )
    return text


def main() -> None:
    """Run and write driver_policies and driver_cost, as JSON and Markdown."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trace", type=Path, help="serving's arrivals in the Azure CSV format (default: the generator)")
    p.add_argument("--rate", type=float, default=3.0, help="serving requests per second (%(default)s)")
    p.add_argument("--parts", default="policies,cost")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--trajectories", type=int, default=128)
    p.add_argument("--concurrent", type=int, default=64)
    p.add_argument("--cap", type=int, default=32, help="turns on the dedicated engine at a time (%(default)s)")
    p.add_argument("--borrowed-cap", type=int, default=16, help="turns on the borrowed engine (%(default)s)")
    p.add_argument("--pool-gib", type=float, default=0.125)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = {"policies": lambda: policies(o), "cost": lambda: proxy_cost.measure(6, 8.0)}
    for name in o.parts.split(","):
        result = {name: parts[name]()}
        results.write(f"driver_{name}", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
