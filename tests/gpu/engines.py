"""Two engines on one device: models of real size with random weights, token ids in and out.

    python -m tests.gpu.engines [--out DIR] [--work DIR] [--steps imports,kernel,alone,pair] [--pool-gib 40]

One step builds on another: vLLM imports, a compiled kernel computes, an engine alone generates, then the pair serves,
generates, gives pages back under a burst, and survives the death of its rollout engine. vLLM and the plugin must be on
PYTHONPATH, as `run.sh` puts them. What fails is written down with the end of its log, and the next step is tried.
Results are written after each step, beside those of earlier calls of the same commit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.results import earlier
from tests.gpu.machine import commit, report, why_not
from tests.gpu.models import write_model

_ENGINE = "--load-format dummy --skip-tokenizer-init --enforce-eager --max-model-len 4096 --enable-scale-out"
_START_BOUND_S, _REQUEST_BOUND_S = 420.0, 180.0
_STEPS = ("imports", "kernel", "alone", "pair")

_IMPORTS = """
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCoreProc
import vllm._custom_ops, vllm.v1.attention.backends.flash_attn, vllm.v1.attention.backends.triton_attn
import vllm.v1.worker.gpu_worker, vllm.v1.executor.uniproc_executor
assert current_platform.is_cuda(), current_platform
"""
_KERNEL = """
import torch, vllm._custom_ops
x, weight = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (7, 1))
out = torch.empty_like(x)
torch.ops._C.rms_norm(out, x, weight[0], 1e-6)
right = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
torch.testing.assert_close(out.float(), right, atol=0.05, rtol=0.05)
"""
_ALONE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
              max_model_len=1024, gpu_memory_utilization=0.3)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * 3, sampling)
    assert [len(o.outputs[0].token_ids) for o in out] == [8] * 3, out
"""


def _python(code: str, *args: str, bound_s: float = _START_BOUND_S) -> dict[str, Any]:
    """Run a program in a process of its own, as vLLM wants; raises RuntimeError with the end of what it said."""
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"} | {"VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", code, *args]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=bound_s, check=False)
    if run.returncode:
        raise RuntimeError("\n".join((run.stdout + run.stderr).splitlines()[-15:]))
    return {}


def _generate(url: str, prompt: int, tokens: int, seed: int) -> tuple[int, str]:
    """One request with made-up token ids; returns how many tokens came, and how it ended."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": [(seed * 7919 + 31 * i) % 150000 for i in range(prompt)], "sampling_params": sampling}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_REQUEST_BOUND_S) as answer:
        (choice,) = json.load(answer)["choices"]
    return len(choice["token_ids"]), choice["finish_reason"]


def _pair(work: Path, pool_gib: float) -> dict[str, Any]:
    from vllm_coserve.demo.servers import descendants, free_port, get_json, running_server, vllm_serve

    serving, rollout = (str(write_model(name, work / "models")) for name in ("qwen2.5-7b", "qwen3-8b"))
    port, rollout_port, log = free_port(), free_port(), work / "pair.log"
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{rollout_port}"]
    flags = [*_ENGINE.split(), f"--port={port}", "--host=127.0.0.1", f"--coserve-rollout={rollout}"]
    flags += [f"--coserve-rollout-port={rollout_port}", f"--coserve-rollout-args={_ENGINE}"]
    flags += [f"--coserve-pool-gib={pool_gib}", "--coserve-ttft-slo-ms=500", "--coserve-tpot-slo-ms=150"]
    found: dict[str, Any] = {}
    start = time.monotonic()
    log.unlink(missing_ok=True)
    with running_server(vllm_serve(serving, *flags), urls, log, {}, bound_s=_START_BOUND_S) as process:
        found["start_s"] = time.monotonic() - start
        with concurrent.futures.ThreadPoolExecutor(96) as pool:
            rollouts = [pool.submit(_generate, urls[1], 200, 1000, i) for i in range(32)]
            time.sleep(3)
            start = time.monotonic()
            burst = [pool.submit(_generate, urls[0], 1000, 200, i) for i in range(64)]
            served = [f.result() for f in burst]
            found["burst_s"] = time.monotonic() - start
            assert all(answer == (200, "length") for answer in served), served[:5]
            ends = [f.result() for f in rollouts]
        found["rollouts_whole"] = sum(n == 1000 for n, _ in ends)
        found["rollouts_ended_early"] = sum(reason == "abort" for _, reason in ends)
        assert found["rollouts_whole"] + found["rollouts_ended_early"] == len(ends), ends
        found["status"] = get_json(f"{urls[1]}/coserve/v1/status")
        children = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)}
        (sidecar,) = [pid for pid, line in children.items() if b"vllm_coserve.engine.sidecar" in line]
        os.killpg(os.getpgid(sidecar), signal.SIGKILL)
        served = [_generate(urls[0], 500, 50, i) for i in range(10)]
        assert all(answer == (50, "length") for answer in served), served
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("out") / "gpu")
    parser.add_argument("--steps", default=",".join(_STEPS))
    parser.add_argument("--pool-gib", type=float, default=40.0)
    args = parser.parse_args()
    if reason := why_not():
        print(f"engines: not run: {reason}")
        return 1
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "imports": lambda: _python(_IMPORTS, bound_s=300),
        "kernel": lambda: _python(_KERNEL, bound_s=300),
        "alone": lambda: _python(_ALONE, str(write_model("qwen3-8b", args.work / "models"))),
        "pair": lambda: _pair(args.work, args.pool_gib),
    }
    args.work.mkdir(parents=True, exist_ok=True)
    options = {"pool_gib": args.pool_gib}
    found: dict[str, Any] = earlier("gpu_engines", args.out, commit(), options).get("steps", {})
    steps = args.steps.split(",")
    for step in steps:
        start = time.monotonic()
        try:
            found[step] = {"ok": True, **calls[step]()}
        except Exception as exc:  # recovery: the next step is tried, and the report says what became of this one
            found[step] = {"ok": False, "error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()}
        found[step]["seconds"] = time.monotonic() - start
        rows = [
            (s, "passed" if f["ok"] else "failed", f["seconds"], _line(f.get("error", ""))) for s, f in found.items()
        ]
        report("gpu_engines", ("step", "outcome", "s", "error"), rows, {"options": options, "steps": found}, args.out)
    for step in steps:
        if not found[step]["ok"]:
            print(f"{step}: {found[step]['error']}")
    return int(not all(found[step]["ok"] for step in steps))


def _line(error: str) -> str:
    return error.strip().splitlines()[-1].replace("|", "/")[:160] if error else ""


if __name__ == "__main__":
    sys.exit(main())
