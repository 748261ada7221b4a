"""How long a version takes to all workers: a star against forwarding chains, under an uplink cap (ECHO-2, Figure 4).

    python -m tests.bench.broadcast

Real publisher, relay, forwarders and copies, the workers as threads of two processes. Every answer of the relay passes
a link of the learner's rate that all share; each worker's connections are paced to its own rate, in and out. Rates are
a tenth of the paper's (workers 100 Mbit/s, learner 300 or 600 Mbit/s), chunks are small in proportion. Times count from
the moment in which the workers are told, as in a job, until the last one has checked and applied all of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.bench import results
from tests.unit.tcp_proxy import Bucket, TcpProxy, pace
from vllm_coserve.policy.broadcast import Link, Task, make_plan
from vllm_coserve.weights.codec import encode
from vllm_coserve.weights.peering.messages import Broadcast
from vllm_coserve.weights.peering.reader import Peer, PeerClient
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica

_WORKER_RATE = 1.25e6  # bytes/s
_CHUNK_BYTES = 32 << 10
_SHAPES = [(64, 1024)] * 20  # of int16: 2.6 MB
_VERSIONS = 3  # of chains; with the first one the rates of the workers become known
_PROCESSES = 2
_QUANTILE = 0.9  # of the workers, as in the paper
_KEY = "k"


# ---- workers


class _Fleet:
    """Workers of one process."""

    def __init__(self, url: str, count: int, forward: bool) -> None:
        self._url = url
        self._peers = [Peer(url, _KEY) if forward else None for _ in range(count)]
        self._replicas = [Replica() for _ in range(count)]
        for peer in filter(None, self._peers):
            listener = peer.serve(1 << 26)._server.socket
            pace(listener, _WORKER_RATE)

    def advance(self, version: int, begin_s: float) -> tuple[list[float], int]:
        """(seconds from `begin_s` until each worker had it, sum of all bits)."""
        done = [float("inf")] * len(self._replicas)

        def run(at: int) -> None:
            peer, replica = self._peers[at], self._replicas[at]
            client = PeerClient(peer) if peer else RelayClient(self._url, _KEY)
            time.sleep(max(0.0, begin_s - time.monotonic()))
            replica.advance(client, version, lambda shapes: None)
            done[at] = time.monotonic() - begin_s
            client.close()

        threads = [threading.Thread(target=run, args=(at,)) for at in range(len(done))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums = {_checksum(list(replica.tensors.items())) for replica in self._replicas}
        return done, sums.pop() if len(sums) == 1 else -1

    def close(self) -> None:
        """Serve no more."""
        for peer in filter(None, self._peers):
            peer.close()


def _checksum(tensors: list[tuple[str, torch.Tensor]]) -> int:
    weights = torch.arange(1, 1 + _SHAPES[0][0] * _SHAPES[0][1])
    return sum((i + 1) * int((t.reshape(-1).long() * weights).sum()) for i, (_, t) in enumerate(sorted(tensors)))


def _work(pipe: Connection) -> None:
    """A process of workers: does what it is told until it is told nothing."""
    torch.set_num_threads(1)
    fleet: _Fleet | None = None
    while (told := pipe.recv()) is not None:
        what, *args = told
        if what == "fleet":
            if fleet:
                fleet.close()
            fleet = _Fleet(*args)
            pipe.send(_cpu_s())
        else:
            pipe.send((*fleet.advance(*args), _cpu_s()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Workers:
    """All processes of workers."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._spent_s = 0.0  # CPU time of the workers' processes
        pairs = [context.Pipe() for _ in range(_PROCESSES)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=_work, args=(theirs,), daemon=True) for _, theirs in pairs]
        for process in self._processes:
            process.start()

    def fleet(self, url: str, count: int, forward: bool) -> None:
        """Begin anew with so many workers."""
        for i, pipe in enumerate(self._pipes):
            pipe.send(("fleet", url, len(range(i, count, _PROCESSES)), forward))
        self._spent_s = sum(pipe.recv() for pipe in self._pipes)

    def advance(self, version: int, checksum: int) -> dict[str, float]:
        """Have all take a version; raises RuntimeError where one has not got it."""
        before_s, begun_s = _cpu_s() + self._spent_s, time.monotonic() + 0.2
        for pipe in self._pipes:
            pipe.send(("advance", version, begun_s))
        answers = [pipe.recv() for pipe in self._pipes]
        wall_s = time.monotonic() - begun_s
        done = sorted(s for times, _, _ in answers for s in times)
        if any(times and total != checksum for times, total, _ in answers) or done[-1] == float("inf"):
            raise RuntimeError("what arrived is not what was sent")
        self._spent_s = sum(spent_s for _, _, spent_s in answers)
        busy_s = _cpu_s() + self._spent_s - before_s
        return {
            "last_s": done[-1],
            "quantile_s": done[max(0, -(-int(_QUANTILE * 100) * len(done) // 100) - 1)],
            "mean_s": statistics.fmean(done),
            "cpu_share": busy_s / wall_s / (os.cpu_count() or 1),
        }

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


# ---- broadcasts


def _dense(old: torch.Tensor | None, new: torch.Tensor) -> list[Any]:
    return encode(None, new, compress=False)


def broadcast(workers: Workers, count: int, uplink: float, forward: bool, versions: int) -> list[dict[str, Any]]:
    """Figures of versions one after the other, each of all bits."""
    offer = Broadcast(uplink, _CHUNK_BYTES, 1 << 26) if forward else None
    generator = torch.Generator().manual_seed(count)
    rows = []
    with Relay(key=_KEY, broadcast=offer) as relay:
        front = TcpProxy(relay.url, Bucket(uplink), _WORKER_RATE)
        trainer = RelayClient(relay.url, _KEY)
        publisher = Publisher(trainer, 1 << 30, encoder=_dense)
        workers.fleet(front.url, count, forward)
        for version in range(1, versions + 1):
            tensors = [
                (f"w{i:02d}", torch.randint(-(2**15), 2**15, s, dtype=torch.int16, generator=generator))
                for i, s in enumerate(_SHAPES)
            ]
            (release,) = publisher.publish(version, tensors)
            nbytes = sum(bucket.nbytes for bucket in trainer.manifest(release).buckets)
            before = front.sent_bytes
            row: dict[str, Any] = dict(workers.advance(version, _checksum(tensors)))
            row |= {"nbytes": nbytes, "copies_sent": (front.sent_bytes - before) / nbytes}
            row["chains"] = len(relay.tracker.chains(str(release))) if relay.tracker else count
            rows.append(row)
        trainer.close()
        front.close()
    return rows


def predicted(count: int, uplink: float, nbytes: int) -> dict[str, Any]:
    """What the policy expects where it knows the rates."""
    links = [Link(f"w{i:03d}", True, 0.0, _WORKER_RATE, _WORKER_RATE) for i in range(count)]
    plan = make_plan(Task(nbytes, _CHUNK_BYTES, uplink), links)
    return {"star_s": plan.star_last_s, "chains_s": plan.last_s, "chains": len(plan.chains)}


def measure(uplinks: list[float], counts: list[int], beyond: list[int]) -> dict[str, Any]:
    """Star and chains by uplink and number of workers."""
    workers = Workers()
    rows: list[dict[str, Any]] = []
    nbytes = 0
    try:
        for uplink in uplinks:
            for count in counts:
                (star,) = broadcast(workers, count, uplink, False, 1)
                first, *later = broadcast(workers, count, uplink, True, _VERSIONS)
                nbytes = star["nbytes"]
                row = {"uplink": uplink, "workers": count, "star": star, "first": first, "later": later}
                rows.append(row | {"predicted": predicted(count, uplink, nbytes)})
                print(_line(rows[-1]), flush=True)
            rows += [
                {"uplink": uplink, "workers": count, "predicted": predicted(count, uplink, nbytes)} for count in beyond
            ]
    finally:
        workers.close()
    return {"nbytes": nbytes, "worker_bytes_per_s": _WORKER_RATE, "chunk_bytes": _CHUNK_BYTES, "rows": rows}


def _line(row: dict[str, Any]) -> list[str]:
    head = [f"{row['uplink'] * 8 / 1e6:g}", str(row["workers"])]
    expected = row["predicted"]
    tail = [f"{expected['star_s']:.1f}", f"{expected['chains_s']:.1f}", str(expected["chains"])]
    if "star" not in row:
        return [*head, "", "", "", "", "", "", *tail]
    last, quantile, copies = (
        statistics.fmean(r[k] for r in row["later"]) for k in ("last_s", "quantile_s", "copies_sent")
    )
    busy = max(r["cpu_share"] for r in row["later"])
    return [
        *head,
        f"{row['star']['last_s']:.1f}",
        f"{row['first']['last_s']:.1f}",
        f"{last:.1f}",
        f"{quantile:.1f}",
        f"{copies:.1f} of {row['star']['copies_sent']:.0f}",
        f"{busy:.0%}",
        *tail,
    ]


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    text = (
        f"Seconds until all workers have {result['nbytes'] / 1e6:.1f} MB, each at most "
        f"{result['worker_bytes_per_s'] * 8 / 1e6:g} Mbit/s in and out; rates are a tenth of ECHO-2's Figure 4, chunks "
        f"{result['chunk_bytes'] >> 10} KiB. No uplink cap at all: "
        f"{result['nbytes'] / result['worker_bytes_per_s']:.1f} s. What is empty was not run, only predicted.\n\n"
    )
    head = ["uplink Mbit/s", "workers", "star", "chains, first version", "chains, later", "of these 90 %"]
    head += ["copies the relay sent", "CPU", "predicted: star", "predicted: chains", "of so many"]
    return text + results.table(head, [_line(row) for row in result["rows"]])


def main() -> None:
    """Run and write broadcast.json and broadcast.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--uplinks", default="30,60", help="Mbit/s of the learner (%(default)s)")
    p.add_argument("--workers", default="2,4,8,16,32,64", help="numbers that are run (%(default)s)")
    p.add_argument("--beyond", default="128,256,512", help="numbers that are only predicted (%(default)s)")
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    counts, beyond = ([int(n) for n in text.split(",") if n] for text in (o.workers, o.beyond))
    result = measure([float(u) * 1e6 / 8 for u in o.uplinks.split(",")], counts, beyond)
    results.write("broadcast", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
