"""The demo's script: serving alone, rollout alone, both with the gate, both without; then an RL job that borrows."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_coserve import __version__
from vllm_coserve.demo.arrivals import Arrival, Scale, bursty, from_azure_csv
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.phases import Load, PhaseResult, run_phase
from vllm_coserve.demo.report import build_report, slo_from_alone, write_html, write_json, write_picture
from vllm_coserve.demo.servers import Pair, free_port, running_engine, running_pair
from vllm_coserve.demo.training import JobResult, Learning, ensure_policy, job_of, learn

_WARMUP = (16, 64, 256)
_COMMON = "--enforce-eager --max-model-len 1024 --max-num-seqs 48 --block-size 32 --disable-uvicorn-access-log"
_DEDICATED_KV_BYTES = 64 << 20
_TRAIN_BOUND_S = 900.0  # of a job
_TRAIN_RATE = 0.5  # of the other phases' traffic: the host core has the learner and the dedicated engine as well


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. Times in seconds unless the name says otherwise."""

    out: Path
    trace: Path | None
    seconds: float
    rollout_alone_seconds: float
    rate_per_s: float
    rollouts: int
    pool_gib: float
    ttft_slo_ms: float | None
    tpot_slo_ms: float | None
    slo_factor: float
    train_steps: int  # of the RL job; 0: none
    train_steps_alone: int  # of the same job without the borrowed engine
    seed: int


class Demo:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._o = options
        self._scale = Scale()
        self._tty = sys.stdout.isatty()
        self._said_at = 0.0
        self._ports = (free_port(), free_port())

    def run(self) -> dict[str, Any]:
        """Run all phases and write the report; returns it."""
        o = self._o
        began = time.monotonic()
        o.out.mkdir(parents=True, exist_ok=True)
        self.say("making two tiny models", final=True)
        serving, rollout = (ensure_model(s, o.out / "models") for s in (SERVING_SPEC, ROLLOUT_SPEC))
        arrivals, stretch = self._arrivals()
        load = Load("serving", "rollout", SERVING_SPEC.vocab, o.rollouts, o.seed)
        flags = self._flags(serving, rollout)
        results: dict[str, PhaseResult] = {}

        def phases(extra: list[str], log: str, *plan: tuple[str, bool, bool]) -> None:
            argv = [*flags, *extra]
            with running_pair(argv, *self._ports, o.out / log, self.say) as pair:
                for name, with_serving, with_rollout in plan:
                    seconds = o.seconds if with_serving else o.rollout_alone_seconds
                    asyncio.run(warm_up(pair.serving_url, pair.rollout_url))
                    self.say(f"phase: {name}", final=True)
                    results[name] = asyncio.run(
                        run_phase(name, pair, load, arrivals if with_serving else None, with_rollout, seconds, self.say)
                    )
                    self.say(_line(results[name]), final=True)

        phases([], "pair-1.log", ("serving alone", True, False))
        slo = slo_from_alone(results["serving alone"], o.ttft_slo_ms, o.tpot_slo_ms, o.slo_factor)
        self.say(f"SLO: TTFT {slo['ttft_ms']:.0f} ms, TPOT {slo['tpot_ms']:.1f} ms", final=True)
        slo_flags = [f"--coserve-{k.removesuffix('_ms')}-slo-ms={v:.3f}" for k, v in slo.items()]
        phases(slo_flags, "pair-2.log", ("rollout alone", False, True), ("co-serving, gated", True, True))
        phases([*slo_flags, "--coserve-policy=none"], "pair-3.log", ("co-serving, no gate", True, True))
        learning = self._learn(serving, slo_flags) if o.train_steps else None
        facts = {
            "arrivals": self._arrival_facts(arrivals, stretch),
            "command": " ".join(["python -m vllm_coserve.demo", *sys.argv[1:]]),
            "serve_flags": [str(f) for f in flags] + slo_flags,
            "machine": f"{platform.platform()}, {os.cpu_count()} cores, {cpu_name()}",
            "seconds_total": time.monotonic() - began,
        }
        report = build_report(slo, results, versions(), facts, learning)
        write_json(report, o.out / "report.json")
        write_html(report, slo, results, o.out / "report.html")
        write_picture(slo, results, o.out / "report.png")
        return report

    def _learn(self, serving: Path, slo_flags: list[str]) -> Learning:
        """An RL job on a dedicated engine alone, then with the borrowed one, beside serving traffic."""
        o = self._o
        self.say("making a tiny policy", final=True)
        policy = ensure_policy(o.out / "models" / "demo-policy")
        flags = [*self._flags(serving, policy), *slo_flags]
        engine_argv = [str(policy), *_COMMON.split(), "--served-model-name=rollout", "--stream-interval=8"]
        engine_argv.append(f"--kv-cache-memory-bytes={_DEDICATED_KV_BYTES}")
        arrivals = bursty(_TRAIN_BOUND_S, o.rate_per_s * _TRAIN_RATE, o.seed)

        def job(name: str, steps: int, pair: Pair, dedicated: str, borrowed: str | None) -> JobResult:
            self.say(f"phase: learning, {name}", final=True)
            out = o.out / f"train-{name.replace(' ', '-')}"
            shutil.rmtree(out, ignore_errors=True)  # it would go on with its last step
            run = learn(
                job_of(policy, out, steps, dedicated, borrowed),
                out.with_suffix(".log"),
                pair,
                arrivals,
                SERVING_SPEC.vocab,
                _TRAIN_BOUND_S,
                self.say,
            )
            result = asyncio.run(run)
            mean_s = sum(s["step_s"] for s in result.steps) / len(result.steps)
            text = f"  {name}: {len(result.steps)} steps of {mean_s:.1f} s, success {result.steps[-1]['success']:.0%}"
            self.say(text, final=True)
            return result

        with (
            running_pair(flags, *self._ports, o.out / "pair-4.log", self.say) as pair,
            running_engine(engine_argv, o.out / "dedicated.log", self.say) as (url, _),
        ):
            asyncio.run(warm_up(pair.serving_url, pair.rollout_url))
            alone = job("dedicated only", o.train_steps_alone, pair, url, None)
            return Learning(alone, job("dedicated and borrowed", o.train_steps, pair, url, pair.rollout_url))

    def _flags(self, serving: Path, rollout: Path) -> list[str]:
        port, rollout_port = self._ports
        common = _COMMON
        rollout_args = f"{common} --served-model-name rollout --stream-interval 8 --max-num-batched-tokens 1024"
        return [
            str(serving),
            *common.split(),
            "--served-model-name=serving",
            "--max-num-batched-tokens=1024",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--coserve-rollout={rollout}",
            f"--coserve-rollout-port={rollout_port}",
            f"--coserve-rollout-args={rollout_args}",
            f"--coserve-pool-gib={self._o.pool_gib}",
            "--coserve-chunk-tokens=256",
            "--coserve-stall-timeout-s=30",
        ]

    def _arrivals(self) -> tuple[list[Arrival], float]:
        o = self._o
        if o.trace is None:
            return bursty(o.seconds, o.rate_per_s, o.seed), 1.0
        return from_azure_csv(o.trace, o.seconds, o.rate_per_s, self._scale)

    def _arrival_facts(self, arrivals: list[Arrival], stretch: float) -> dict[str, Any]:
        facts: dict[str, Any] = {"requests": len(arrivals), "seconds": self._o.seconds}
        if self._o.trace is None:
            return facts | {"source": "bursty generator", "seed": self._o.seed, "rate_per_s": self._o.rate_per_s}
        return facts | {"source": self._o.trace.name, "time_stretch": stretch, "scale": asdict(self._scale)}

    def say(self, text: str, final: bool = False) -> None:
        """Progress: one line that is overwritten on a terminal, at most one line in five seconds elsewhere."""
        now = time.monotonic()
        if self._tty:
            print(f"\r\x1b[K{text}", end="\n" if final else "", flush=True)
        elif final or now - self._said_at > 5:
            self._said_at = now
            print(text, flush=True)


async def warm_up(serving_url: str, rollout_url: str, prompt_tokens: Sequence[int] = _WARMUP) -> None:
    """A few requests of several lengths on both engines."""
    import aiohttp

    from vllm_coserve.demo.load import Served, stream_one

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for url, model in ((serving_url, "serving"), (rollout_url, "rollout")):
            jobs = [stream_one(session, url, model, range(3, 3 + n), 8, Served(0.0)) for n in prompt_tokens]
            await asyncio.gather(*jobs)


def _line(result: PhaseResult) -> str:
    ok = [s for s in result.served if s.ok]
    failed = len(result.served) - len(ok)
    text = f"  {result.name}: {result.seconds:.0f} s"
    if result.served:
        text += f", {len(ok)} served, {failed} failed, device busy with serving {result.busy_fraction:.0%}"
    if result.rollout:
        text += f", rollout {result.rollout_tokens_per_s:.0f} tok/s, {result.rollout.aborted} aborted"
    errors = {s.error for s in result.served if s.error}
    return text + (f"; errors: {sorted(errors)[:3]}" if errors else "")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    out = {"vllm-coserve": __version__, "python": platform.python_version()}
    for name in ("vllm", "torch", "transformers"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        out["commit"] = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return out


def cpu_name() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


def minutes_needed(options: Options) -> float:
    """A rough forecast, for the first line of the demo."""
    learning_s = 2 * 45 + 3 * (options.train_steps + options.train_steps_alone) if options.train_steps else 0
    return math.ceil((3 * options.seconds + options.rollout_alone_seconds + 3 * 35 + learning_s) / 60)
