"""How soon a deactivated rollout engine is back, and what it holds of the device meanwhile.

    python -m tests.gpu.activation [--cycles 5] [--graphs] [--out DIR]

Bars: a deactivated engine holds at most 2 GB of the device (that much comes back when it is killed), serving may use
at least 0.9 of the memory of its weights, its model is active again within 1.5 times of what its bytes take over the
bus at the bandwidth measured here, and generates the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.coserve import slo_flags
from tests.bench.machine import Bed
from tests.gpu import beds, nvml
from tests.gpu.machine import report, why_not
from tests.gpu.models import parameters
from vllm_coserve.demo.servers import DemoError, Pair

_FOOTPRINT_MOST_BYTES = 2_000_000_000
_OVER_BUS_MOST = 1.5
_LENT_LEAST = 0.9  # of the bytes of the weights
_BOUND_S, _WEIGHTS_BOUND_S = 120.0, 60.0
_SETTLE_S = 3.0  # shorter than a killed engine takes to be at the device again
_PROMPT_TOKENS, _OUTPUT_TOKENS = 200, 16

_BANDWIDTH = """
import statistics, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
rates = []
for i in range(12):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    device.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    rates.append((1 << 30) / start.elapsed_time(end) * 1e3)
print(statistics.median(rates[2:]))
"""


def bandwidth() -> float:
    """Bytes/s from pinned host memory to the device."""
    run = subprocess.run([sys.executable, "-c", _BANDWIDTH], capture_output=True, text=True, timeout=120, check=False)
    if run.returncode:
        raise RuntimeError(f"the bandwidth cannot be measured: {(run.stderr.strip().splitlines() or ['?'])[-1]}")
    return float(run.stdout)


def _post(url: str, body: Any = None) -> dict[str, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=_BOUND_S) as answer:
        return json.load(answer)


def _change(pair: Pair, active: bool) -> dict[str, Any]:
    """Activate or deactivate; returns the status once the weights are there, or gone.

    Raises:
        RuntimeError: they were not within the bound.
    """
    _post(f"{pair.rollout_url}/coserve/v1/{'activate' if active else 'deactivate'}")
    deadline = time.monotonic() + _WEIGHTS_BOUND_S
    while True:
        status = pair.status()
        if status["state"] == ("active" if active else "deactivated") and status["weights"]["loaded"] == active:
            return status
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{status['state']} for {_WEIGHTS_BOUND_S:.0f} s, but the weights are {status['weights']}"
            )
        time.sleep(0.005)


def _tokens(pair: Pair) -> list[int]:
    body = {"model": "rollout", "prompt": list(range(3, 3 + _PROMPT_TOKENS)), "max_tokens": _OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return _post(f"{pair.rollout_url}/v1/completions", body)["choices"][0]["token_ids"]


def cycle(pair: Pair) -> dict[str, Any]:
    """Deactivate, activate, generate."""
    before, used, start = _tokens(pair), nvml.used_bytes(), time.monotonic()
    _change(pair, active=False)
    gone_s, left = time.monotonic() - start, nvml.used_bytes()
    pages = pair.status()["pages"]
    start = time.monotonic()
    load_ms = _change(pair, active=True)["weights"]["load_ms"]
    active_s = time.monotonic() - start
    same = _tokens(pair) == before
    return {
        "deactivate_s": gone_s,
        "freed_bytes": None if used is None or left is None else used - left,
        "lent_bytes": pages["from_weights"] * pages["page_bytes"],
        "activate_s": active_s,
        "load_ms": load_ms,
        "to_tokens_s": time.monotonic() - start,
        "same_tokens": same,
    }


def footprint(pair: Pair) -> dict[str, Any]:
    """What a deactivated engine holds: as NVML tells of its processes, and what comes back when they are killed."""
    _change(pair, active=False)
    time.sleep(1.0)
    pids = set(machine.processes(pair, rollout=True).values())
    told = [used for pid, used in nvml.process_bytes().items() if pid in pids]
    used = nvml.used_bytes()
    with nvml.Lowest().watching() as watch:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SETTLE_S)
        lowest, _ = watch.lowest
    back = None if used is None or lowest is None else used - lowest
    return {"of_its_processes_bytes": sum(told) if told else None, "back_when_killed_bytes": back}


def measure(bed: Bed, cycles: int, pool_gib: float, found: dict[str, Any], out: Path | None) -> None:
    """Fill `found`, and write it after each part."""
    with machine.start(slo_flags(bed.slo_ms or {}), "activation.log", pool_gib, bed=bed) as pair:
        _tokens(pair)  # warms up
        for _ in range(cycles):
            found["cycles"].append(cycle(pair))
            _report(found, out)
        found["footprint"] = footprint(pair)
        _report(found, out)


def missed(found: dict[str, Any]) -> list[str]:
    """The bars that were not met, of what was measured."""
    wrong = []
    bound_s = found.get("bound_s")
    for number, each in enumerate(found["cycles"], 1):
        if bound_s is not None and each["activate_s"] > bound_s:
            wrong.append(f"cycle {number}: active again after {each['activate_s']:.2f} s, not {bound_s:.2f} s")
        if each["lent_bytes"] < _LENT_LEAST * found["weight_bytes"]:
            wrong.append(f"cycle {number}: serving was lent {each['lent_bytes'] / 1e9:.2f} GB of the weights' memory")
        if not each["same_tokens"]:
            wrong.append(f"cycle {number}: other tokens than before")
    held = (found.get("footprint") or {}).get("back_when_killed_bytes")
    if held is not None and held > _FOOTPRINT_MOST_BYTES:
        wrong.append(f"a deactivated engine holds {held / 1e9:.2f} GB of the device")
    return wrong


def _report(found: dict[str, Any], out: Path | None) -> None:
    header = (
        "cycle",
        "deactivated s",
        "freed GB",
        "lent to serving GB",
        "active s",
        "load s (its own word)",
        "first tokens s",
        "same tokens",
    )
    rows: list[tuple[Any, ...]] = []
    for number, c in enumerate(found["cycles"], 1):
        freed = None if c["freed_bytes"] is None else c["freed_bytes"] / 1e9
        times = (c["deactivate_s"], freed, c["lent_bytes"] / 1e9)
        times += (c["activate_s"], c["load_ms"] / 1e3, c["to_tokens_s"])
        rows.append((number, *times, "yes" if c["same_tokens"] else "no"))
    facts = found | {"missed": missed(found)}
    if found.get("bound_s"):
        weights_gb, bus_s = found["weight_bytes"] / 1e9, found["bound_s"] / _OVER_BUS_MOST
        rows.append(("the bus", None, weights_gb, None, bus_s, None, None, "–"))
    if held := found.get("footprint"):
        gb = [None if v is None else v / 1e9 for v in held.values()]
        rows.append(("deactivated, killed", None, gb[1], None, None, None, None, "–"))
    report("gpu_activation", header, rows, facts, out)


def main() -> int:
    bed = beds.chosen_bed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--pool-gib", type=float, default=min(bed.pool_gib, 8.0))
    parser.add_argument("--out", type=Path)
    o = beds.parse(beds.common_options(parser))
    if not o.on_cpu and (reason := why_not()):
        print(f"activation: not run: {reason}")
        return 1
    weight_bytes = 2 * parameters(beds.config_of(bed.rollout()))
    found: dict[str, Any] = {"weight_bytes": weight_bytes, "cycles": []}
    try:
        if not o.on_cpu:
            found["bandwidth_bytes_per_s"] = bandwidth()
            found["bound_s"] = _OVER_BUS_MOST * weight_bytes / found["bandwidth_bytes_per_s"]
        measure(bed, o.cycles, o.pool_gib, found, o.out)
    except (RuntimeError, OSError, DemoError) as exc:  # what was measured before is written
        print(f"activation: failed: {exc}")
        return 1
    for what in missed(found):
        print(f"bar not met: {what}")
    return int(bool(missed(found)))


if __name__ == "__main__":
    sys.exit(main())
