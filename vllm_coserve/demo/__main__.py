"""Command line of the demo; see `--help`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.demo.run import Demo, Options, minutes_needed
from vllm_coserve.demo.servers import DemoError


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 10000")
    return value


def parse(argv: list[str] | None = None) -> Options:
    """Options from the command line."""
    p = argparse.ArgumentParser(prog="python -m vllm_coserve.demo", description=__doc__)
    p.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of models, logs and report")
    p.add_argument("--trace", type=Path, help="arrivals in the Azure CSV format (default: a bursty generator)")
    p.add_argument("--seconds", type=_positive, default=80.0, help="length of each serving phase (%(default)s)")
    p.add_argument("--rollout-alone-seconds", type=_positive, default=40.0, help="length of that phase (%(default)s)")
    p.add_argument("--rate", type=_positive, default=3.8, help="mean serving requests per second (%(default)s)")
    p.add_argument("--rollouts", type=int, default=16, help="rollout requests at a time (%(default)s)")
    p.add_argument("--pool-gib", type=_positive, default=0.09, help="shared KV page pool in GiB (%(default)s)")
    p.add_argument("--ttft-slo-ms", type=_positive, help="default: --slo-factor x P99 of serving alone")
    p.add_argument("--tpot-slo-ms", type=_positive, help="default: --slo-factor x P99 of serving alone")
    p.add_argument("--slo-factor", type=_positive, default=3.0, help="see --ttft-slo-ms (%(default)s)")
    p.add_argument("--train-steps", type=_count, default=60, help="steps of the RL job, 0: leave it out (%(default)s)")
    p.add_argument(
        "--train-steps-alone", type=_count, default=12, help="steps of it without the borrowed engine (%(default)s)"
    )
    p.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (%(default)s)")
    a = p.parse_args(argv)
    return Options(
        out=a.out,
        trace=a.trace,
        seconds=a.seconds,
        rollout_alone_seconds=a.rollout_alone_seconds,
        rate_per_s=a.rate,
        rollouts=a.rollouts,
        pool_gib=a.pool_gib,
        ttft_slo_ms=a.ttft_slo_ms,
        tpot_slo_ms=a.tpot_slo_ms,
        slo_factor=a.slo_factor,
        train_steps=a.train_steps,
        train_steps_alone=max(2, a.train_steps_alone),
        seed=a.seed,
    )


def main() -> int:
    """Run the demo; exit code 0 done, 1 an engine failed, 2 bad input."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a parent shell had them ignored
        signal.signal(number, signal.default_int_handler)
    print(f"vllm-coserve demo, about {minutes_needed(options):.0f} minutes", flush=True)
    try:
        report = Demo(options).run()
    except ConfigurationError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except DemoError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    brief = {
        k: report[k]
        for k in report
        if k in ("slo", "serving_alone", "coserve", "no_gate", "harvest_efficiency", "memory", "rl")
    }
    print(json.dumps(brief, indent=2))
    print(f"report: {options.out / 'report.html'} and {options.out / 'report.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
