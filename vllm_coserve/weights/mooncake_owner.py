"""Lends memory of this machine to a Mooncake Store, until it is ended; see deploy/mooncake."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 0 ended by a signal, 2 the store cannot be joined."""
    p = argparse.ArgumentParser(prog="python -m vllm_coserve.weights.mooncake_owner", description=__doc__)
    p.add_argument("--master", required=True, help="HOST:PORT of mooncake_master")
    p.add_argument("--host", default="127.0.0.1", help="address of this machine for others (%(default)s)")
    p.add_argument("--gib", type=float, default=8.0, help="memory to lend (%(default)s)")
    o = p.parse_args(argv)
    if not 0 < o.gib <= 4096:
        p.error(f"--gib {o.gib}: give a number above 0")
    # Blocked before Mooncake's threads begin, which inherit that: one of these must not end the process before `close`.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as exc:
        print(f"error: Mooncake cannot be used ({exc}): see deploy/mooncake/README.md", file=sys.stderr)
        return 2
    store = MooncakeDistributedStore()
    code = store.setup(o.host, "P2PHANDSHAKE", int(o.gib * 2**30), 16 << 20, "tcp", "", o.master)
    if code:
        print(f"error: no store at {o.master} ({code}): start mooncake_master first", file=sys.stderr)
        return 2
    print(f"lending {o.gib:g} GiB to the store of {o.master}", flush=True)
    signal.sigwait(ends)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
