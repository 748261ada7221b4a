"""10 GiB taken back from a rollout engine that generates: until the pages are free, and until serving has used them.

    python -m tests.gpu.reclaim [--gib 10] [--times 5] [--graphs] [--out DIR]

1. The request that serving's engine core makes, made by hand: milliseconds until so many pages are nobody's.
2. A burst of serving's users whose prompts need that much KV memory while the rollout has all but the headroom: until
   serving has the pages, and until every request has its first token. The same burst beside a deactivated rollout
   engine says how long prefill takes anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.bench import machine
from tests.bench.core import await_held, reclaim_once
from tests.bench.coserve import slo_flags
from tests.bench.machine import Bed
from tests.bench.turns import TurnLoad
from tests.gpu import beds
from tests.gpu.machine import report, why_not
from tests.gpu.models import kv_bytes_per_token
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.demo.load import Served, stream_one
from vllm_coserve.demo.phases import percentile
from vllm_coserve.demo.run import warm_up
from vllm_coserve.demo.servers import DemoError, Pair
from vllm_coserve.memory.ledger import Owner

_SPARE_PAGES = 40  # more than are asked for: what the engine fills at that moment stays
_OUTPUT_TOKENS = 8
_BOUND_S = 120.0
_WATCH_S = 0.001


async def by_request(block: ControlBlock, pages: int, times: int) -> dict[str, Any]:
    """Milliseconds until pages that are asked back are free, and how often they did not all come within two seconds."""
    took_ms, missed = [], 0
    while len(took_ms) < times and missed <= times:
        await await_held(block, pages + _SPARE_PAGES)
        if (ms := reclaim_once(block, pages)) is None:
            missed += 1
        else:
            took_ms.append(ms)
    return {"ms": took_ms, "missed": missed}


async def burst(
    pair: Pair, block: ControlBlock, bed: Bed, prompts: Sequence[int], pages: int, seed: int
) -> dict[str, Any]:
    """Requests with prompts of so many tokens, all at once; when serving has `pages` more, and when all have begun."""
    rng = random.Random(seed)
    served = [Served(0.0) for _ in prompts]
    texts = [[rng.randrange(3, bed.vocab) for _ in range(tokens)] for tokens in prompts]
    before, start, grown_s = _owned(block), time.monotonic(), None
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_BOUND_S), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        jobs = [
            asyncio.create_task(stream_one(session, pair.serving_url, "serving", text, _OUTPUT_TOKENS, s))
            for text, s in zip(texts, served, strict=True)
        ]
        while not all(j.done() for j in jobs):
            if grown_s is None and _owned(block) >= before + pages:
                grown_s = time.monotonic() - start
            await asyncio.sleep(_WATCH_S)
    ok = [s for s in served if s.ok]
    return {
        "requests": len(served),
        "failed": len(served) - len(ok),
        "errors": sorted({s.error for s in served if s.error})[:3],
        "pages_before": before,
        "has_pages_s": grown_s,
        "first_tokens_s": max((s.ttft_s for s in ok), default=None),
        "ttft_ms_p50": 1e3 * percentile([s.ttft_s for s in ok], 50) if ok else None,
    }


def _owned(block: ControlBlock) -> int:
    return int(np.count_nonzero(block.owners == Owner.SERVING))


def prompts_for(nbytes: int, bytes_per_token: int, tokens_most: int) -> list[int]:
    """Lengths of prompts that need so much KV memory together, none longer than `tokens_most`."""
    tokens = -(-nbytes // bytes_per_token)
    whole, rest = divmod(tokens, tokens_most)
    return [tokens_most] * whole + ([rest] if rest else [])


async def _measure(pair: Pair, bed: Bed, o: argparse.Namespace, found: dict[str, Any]) -> None:
    block = machine.control_block(pair)
    pages = int(o.gib * 2**30) // block.page_bytes
    prompts = prompts_for(pages * block.page_bytes, kv_bytes_per_token(beds.config_of(bed.serving())), o.prompt_tokens)
    await warm_up(pair.serving_url, pair.rollout_url, bed.warm_up_tokens)
    load = TurnLoad(pair.rollout_url, "rollout", o.rollouts, bed.vocab, 1, bed.turns)
    rollouts = asyncio.create_task(load.run())
    try:
        found["by_request"] = await by_request(block, pages, o.times)
        _report(found, o.out)
        lent = block.pool_pages - pair.status()["pages"]["headroom"]
        await await_held(block, int(0.9 * lent))
        found["burst"] = await burst(pair, block, bed, prompts, pages, 2)
        found["burst"] |= {
            "rollout_requests_ended": sum(load.totals.aborts.values()),
            "reclaims": pair.status()["reclaims"],
        }
        _report(found, o.out)
    finally:
        load.stop.set()
        await rollouts
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_BOUND_S)) as session:
        async with session.post(f"{pair.rollout_url}/coserve/v1/deactivate") as answer:
            answer.raise_for_status()
    found["burst_alone"] = await burst(pair, block, bed, prompts, pages, 3)
    _report(found, o.out)


def _report(found: dict[str, Any], out: Path | None) -> None:
    rows: list[tuple[Any, ...]] = []
    if asked := found.get("by_request"):
        p50, most = (percentile(asked["ms"], 50), max(asked["ms"])) if asked["ms"] else (None, None)
        rows.append((f"{found['gib']} GiB asked back: free after ms, P50 / most", p50, most))
    for name, title in (("burst", "a burst beside rollouts"), ("burst_alone", "the burst beside a deactivated engine")):
        if one := found.get(name):
            rows.append((f"{title}: failed / requests", one["failed"], one["requests"]))
            rows.append((f"{title}: has the pages / all have begun after s", one["has_pages_s"], one["first_tokens_s"]))
    report("gpu_reclaim_engine", ("", "", ""), rows, found, out)


def main() -> int:
    bed = beds.chosen_bed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = bed.pinned
    parser.add_argument("--gib", type=float, default=0.03 if small else 10.0)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--pool-gib", type=float, default=bed.pool_gib if small else 24.0)
    parser.add_argument("--prompt-tokens", type=int, default=512 if small else 8192, help="of a request of the burst")
    parser.add_argument("--rollouts", type=int, default=bed.rollouts)
    parser.add_argument("--out", type=Path)
    o = beds.parse(beds.common_options(parser))
    if not o.on_cpu and (reason := why_not()):
        print(f"reclaim: not run: {reason}")
        return 1
    found: dict[str, Any] = {"gib": o.gib, "pool_gib": o.pool_gib}
    # A long lease: most of what the rollout has is prefix cache, and it has all that it may.
    flags = [*slo_flags(bed.slo_ms or {}), "--coserve-lease-s=600", "--coserve-headroom=0.05"]
    try:
        with machine.start(flags, "reclaim.log", o.pool_gib, bed=bed) as pair:
            asyncio.run(_measure(pair, bed, o, found))
    except (RuntimeError, OSError, DemoError, aiohttp.ClientError) as exc:  # what was measured before is written
        print(f"reclaim: failed: {exc}")
        return 1
    bursts = (found["burst"], found["burst_alone"])
    return int(any(b["failed"] for b in bursts) or len(found["by_request"]["ms"]) < o.times)


if __name__ == "__main__":
    sys.exit(main())
