"""What pages cost on the device: each call per page, over runs of neighbours, and 10 GiB that change hands.

    python -m tests.gpu.pages [--out DIR] [--reclaim-gib 10] [--kvcached FOLDER]

`--kvcached` is a folder with the installed public library kvcached (`run.sh` makes it of a source archive): the same
number of 2 MiB pages is mapped and unmapped with it. It makes and frees physical memory each time, as it has no pool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.machine import report, why_not

_RUNS = (1, 16, 256, 4096)
_PAGE = 2 << 20
_KVCACHED_BOUND_S = 300

# Layers and KV buffers are one each, so that one offset is one page of 2 MiB, as it is here.
_KVCACHED = """
import json, statistics, sys, time
import torch
from kvcached import vmm_ops
runs, page = json.loads(sys.argv[1]), 2 << 20
torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
vmm_ops.init_kvcached("cuda:0", page, False)
vmm_ops.create_kv_tensors(page * max(runs), 1, "cuda:0", 1, 1)
out = {}
for run in runs:
    offsets, took = [i * page for i in range(run)], {"map": [], "unmap": []}
    for i in range(max(5, 200 // run) + 1):
        for name, call in (("map", vmm_ops.map_to_kv_tensors), ("unmap", vmm_ops.unmap_from_kv_tensors)):
            start = time.perf_counter_ns()
            assert call(offsets)
            torch.cuda.synchronize()
            if i:
                took[name].append((time.perf_counter_ns() - start) / 1e3 / run)
    out[str(run)] = {name: statistics.median(us) for name, us in took.items()}
print(json.dumps(out))
"""


def _us(call: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def costs() -> dict[str, dict[str, float]]:
    """Microseconds a page of each step, medians; by length of the run. `map_run` and `unmap_run` are the driver's."""
    from vllm_coserve.memory.cuda import CudaDriver, CudaEraser
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import SharedPages, make_pool

    device, count = Device(), max(_RUNS)
    pool = make_pool(device, count, _PAGE)
    driver, call = CudaDriver(device, pool, count), device.call
    eraser = CudaEraser(device, pool) if isinstance(pool, SharedPages) else None
    handles = [pool.take(page) for page in range(count)]
    at, out = driver.address, {}

    def map_all(run: int) -> None:
        for i in range(run):
            call("cuMemMap", at + i * _PAGE, _PAGE, 0, handles[i], 0)

    def unmap_all(run: int) -> None:
        for i in range(run):
            call("cuMemUnmap", at + i * _PAGE, _PAGE)

    for run in _RUNS:
        access, size = device.read_write(), run * _PAGE
        took: dict[str, list[float]] = {}
        for i in range(max(5, 200 // run) + 1):
            once = {"map": _us(lambda n=run: map_all(n))}
            once["access"] = _us(lambda n=size, a=access: call("cuMemSetAccess", at, n, a, 1))
            once["unmap"] = _us(lambda n=size: call("cuMemUnmap", at, n))
            map_all(run)
            once["unmap one by one"] = _us(lambda n=run: unmap_all(n))
            once["map_run"] = _us(lambda n=run: driver.map_run(0, 0, n))
            once["unmap_run"] = _us(lambda n=run: driver.unmap_run(0, n))
            if eraser is not None:
                once["zero"] = _us(lambda n=run: eraser.zero(0, n))
            if i:
                for name, us in once.items():
                    took.setdefault(name, []).append(us / run)
        out[str(run)] = {name: statistics.median(us) for name, us in took.items()}
    driver.close()
    if eraser is not None:
        eraser.close()
    pool.close()
    return out


def reclaim(gib: float) -> dict[str, float]:
    """Milliseconds in which pages go from another process to this one: unmapped there, zeroed, mapped here."""
    from tests.gpu.device import Helper
    from vllm_coserve.memory.cuda import CudaDriver, CudaEraser
    from vllm_coserve.memory.cuda_calls import Device
    from vllm_coserve.memory.cuda_pages import SharedPages
    from vllm_coserve.memory.handles import HandleServer, Offer

    device, pages = Device(), int(gib * 2**30) // _PAGE
    pool = SharedPages.create(device, pages, _PAGE)
    driver, eraser = CudaDriver(device, pool, pages), CudaEraser(device, pool)
    with tempfile.TemporaryDirectory(prefix="coserve-") as folder:
        path = Path(folder) / "pages"
        server = HandleServer(path, Offer(True, pages, _PAGE), pool.export)
        passed_ms = time.perf_counter_ns()
        rollout = Helper("rollout", path, pages)
        passed_ms = (time.perf_counter_ns() - passed_ms) / 1e6
        took: dict[str, list[float]] = {"all": [], "unmap there": [], "zero": [], "map": []}
        for _ in range(4):
            rollout.ask(f"map 0 0 {pages}")
            rollout.ask(f"fill 0 {pages} 7")
            start = time.perf_counter_ns()
            there_ns = int(rollout.ask(f"unmap 0 {pages}"))
            zero_us = _us(lambda: eraser.zero(0, pages))
            map_us = _us(lambda: driver.map_run(0, 0, pages))
            all_ns = time.perf_counter_ns() - start
            for name, ms in zip(took, (all_ns / 1e6, there_ns / 1e6, zero_us / 1e3, map_us / 1e3), strict=True):
                took[name].append(ms)
            driver.unmap_run(0, pages)
        rollout.close()
        server.close()
    driver.close()
    eraser.close()
    pool.close()
    medians = {name: statistics.median(ms) for name, ms in took.items()}
    return {"gib": gib, "pages": pages, "helper's start with all handles": passed_ms, **medians}


def kvcached(folder: Path) -> dict[str, Any]:
    """The same pages with kvcached; {"error": why} where it does not work."""
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _KVCACHED, json.dumps(_RUNS)]
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_KVCACHED_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {_KVCACHED_BOUND_S} s"}
    if run.returncode:
        return {"error": (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]}
    return json.loads(run.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--reclaim-gib", type=float, default=10.0)
    parser.add_argument("--kvcached", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        print(f"pages: not run: {reason}")
        return 1
    parts = {"costs": lambda: _report_costs(args.kvcached, args.out)}
    parts["reclaim"] = lambda: _report_reclaim(args.reclaim_gib, args.out)
    failed = False
    for name, part in parts.items():
        try:
            wrong = part()
        except Exception as exc:  # recovery: the other part is measured
            traceback.print_exc()
            wrong = f"{type(exc).__name__}: {exc}"
        if wrong:
            failed = True
            print(f"pages, {name}: failed: {wrong}", flush=True)
    return int(failed)


def _report_costs(public_folder: Path | None, out: Path | None) -> str:
    found = costs()
    public = kvcached(public_folder) if public_folder else {}
    names = ("map", "access", "unmap", "unmap one by one", "zero", "map_run", "unmap_run")
    rows = []
    for run, each in found.items():
        theirs = public.get(run, {}) if isinstance(public.get(run), dict) else {}
        rows.append([run, *(each.get(name) for name in names), theirs.get("map"), theirs.get("unmap")])
    header = ("pages in a run", *(f"{name} us/page" for name in names), "kvcached map", "kvcached unmap")
    report("gpu_pages", header, rows, {"us_per_page": found, "kvcached": public}, out)
    return f"kvcached: {public['error']}" if "error" in public else ""


def _report_reclaim(gib: float, out: Path | None) -> str:
    back = reclaim(gib)
    report("gpu_reclaim", tuple(back), [tuple(back.values())], {"ms": back}, out)
    return ""


if __name__ == "__main__":
    sys.exit(main())
