"""Entry point of the `coserve` command: `coserve status`, and commands of other packages.

A package adds a command by an entry point of the group `coserve.commands`: its name is the command, its value a
function that takes the arguments behind that name and returns the exit code. It is loaded only when it is called.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.flags import check_url

_GROUP = "coserve.commands"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0.05 <= value <= 3600):  # NaN fails too
        raise argparse.ArgumentTypeError(f"{text!r}: give between 0.05 and 3600 seconds")
    return value


def _url(text: str) -> str:
    try:
        return check_url(text, with_path=True)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _status(args: argparse.Namespace) -> int:
    from vllm_coserve.console.status import show_status

    interval_s = math.inf if args.once or args.json else args.interval
    return show_status(args.url, args.api_key, interval_s, as_json=args.json)


def make_parser(others: Mapping[str, EntryPoint] | None = None) -> argparse.ArgumentParser:
    """The command line; `others` are commands of other packages, which the help lists."""
    parser = argparse.ArgumentParser(prog="coserve", description="Tools around a co-serving pair of vLLM engines.")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status", help="watch a running pair: pages, gate, rollout", description="Watch a pair."
    )
    status.set_defaults(run=_status)
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
    for name, point in sorted((others or {}).items()):
        commands.add_parser(name, help=f"of {point.module.partition('.')[0]}", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; exit code 0 done, 1 the server cannot be reached, 2 bad input or key, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    others = {p.name: p for p in entry_points(group=_GROUP) if p.name != "status"}
    command = argv[0] if argv else ""
    try:
        if command in others:
            return others[command].load()(argv[1:])
        args = make_parser(others).parse_args(argv)
        return args.run(args)
    except ConfigurationError as exc:
        print(f"coserve {command}: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read us has left, as in `coserve status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
