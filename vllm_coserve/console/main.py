"""Entry point of the `coserve` command: `coserve status`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.console.status import show_status


def _seconds(text: str) -> float:
    value = float(text)
    if not (0.05 <= value <= 3600):  # NaN fails too
        raise argparse.ArgumentTypeError(f"{text}: give between 0.05 and 3600 seconds")
    return value


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://127.0.0.1:8100")
    return text.rstrip("/")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="coserve", description="Tools around a co-serving pair of vLLM engines.")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status", help="watch a running pair: pages, gate, rollout", description="Watch a pair."
    )
    status.add_argument(
        "--url", type=_url, default="http://127.0.0.1:8100", help="the rollout engine's server (%(default)s)"
    )
    status.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="the server's key (default: $VLLM_API_KEY)"
    )
    status.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between looks (%(default)s)"
    )
    status.add_argument("--once", action="store_true", help="show it once and end")
    status.add_argument("--json", action="store_true", help="print the server's answer as it is, once")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; exit code 0 done, 1 the server cannot be reached, 2 bad input or key, 130 interrupted."""
    args = make_parser().parse_args(argv)
    try:
        interval_s = math.inf if args.once or args.json else args.interval
        return show_status(args.url, args.api_key, interval_s, as_json=args.json)
    except ConfigurationError as exc:
        print(f"coserve {args.command}: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
