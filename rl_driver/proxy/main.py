"""`coserve proxy`: command line and life of the rollout proxy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from aiohttp import web

from rl_driver.api.proxy_config import ProxyConfig, flag_of, parse_proxy_config
from rl_driver.proxy.server import Proxy
from vllm_coserve.api.errors import ConfigurationError

logger = logging.getLogger("coserve.proxy")

_END_BOUND_S = 10.0  # open calls may go on for so long after SIGTERM
_BACKLOG = 4096


def make_parser() -> argparse.ArgumentParser:
    """The flags are the fields of `ProxyConfig`."""
    parser = argparse.ArgumentParser(
        prog="coserve proxy",
        description="One OpenAI-compatible endpoint over dedicated and borrowed rollout engines.",
    )
    for name, info in ProxyConfig.model_fields.items():
        several = name in ("dedicated", "borrowed")
        default = "" if several or info.default is None else f" ({info.default})"
        parser.add_argument(
            flag_of(name),
            dest=name,
            default=argparse.SUPPRESS,
            action="append" if several else "store",
            metavar="URL" if several else name.rpartition("_")[2].upper(),
            help=f"{info.description}{default}",
        )
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the proxy until SIGTERM or Ctrl-C; exit code 0 ended, 1 the port is taken, 2 bad input."""
    values = vars(make_parser().parse_args(argv))
    for name, variable in (("api_key", "COSERVE_API_KEY"), ("worker_api_key", "COSERVE_WORKER_API_KEY")):
        if os.environ.get(variable):
            values.setdefault(name, os.environ[variable])
    config = parse_proxy_config(values)
    if not config.dedicated and not config.borrowed:
        logger.warning("no workers given: add some with --dedicated, --borrowed or POST /coserve/v1/workers")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(_serve(config))
    return asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> int:
    try:
        listener = _listen(config.host, config.port)
    except OSError as exc:
        print(
            f"coserve proxy: error: cannot listen on {config.host}:{config.port} ({exc.strerror}): give another --port",
            file=sys.stderr,
        )
        return 1
    proxy = Proxy(config)
    try:
        await proxy.start()
    except ConfigurationError:
        listener.close()
        raise
    runner = web.AppRunner(
        proxy.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_END_BOUND_S, keepalive_timeout=75
    )
    proxy.connections.runner = runner
    await runner.setup()
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d", host, port)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    await end.wait()
    logger.info("ending; open calls have %g s", _END_BOUND_S)
    await runner.cleanup()
    await proxy.stop()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; see `vllm_coserve.console.main`."""
    try:
        return run(argv)
    except ConfigurationError as exc:
        print(f"coserve proxy: error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
