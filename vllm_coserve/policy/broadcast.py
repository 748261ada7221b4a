"""Who reads a version of the weights from whom: everyone from the relay, or along forwarding chains (ECHO-2 4.2, C.3).

From the relay alone (a star) a version takes longer with every worker, once the learner's uplink is full. In a chain a
worker hands on each chunk that it gets, so that the uplink carries one copy a chain, and a chain runs at the rate of
its links. The paper makes `uplink / worker's rate` chains; here each number of chains is tried with the rates that were
seen, and the best one is taken, which comes to the same where all rates are alike and is better where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Chains = tuple[tuple[str, ...], ...]  # worker ids; the first of a chain reads from the relay

_TRIED_MAX = 64  # numbers of chains that are all tried; of more, powers of two
_UPSTREAM_MAX = 3  # predecessors that a worker is told of


@dataclass(frozen=True, slots=True)
class Link:
    """A worker as a place to send to and from. Rates that nobody has seen yet are infinite."""

    worker_id: str
    serves: bool = True  # it can forward
    score: float = 0.0
    down_bytes_per_s: float = math.inf
    up_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be sent, and from where. `hop_s`: what a hop costs beside the time on the wire."""

    nbytes: int
    chunk_bytes: int
    uplink_bytes_per_s: float
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a worker is expected to have all, and at which rate it gets it."""

    done_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Chains, and when the last worker and the average one are expected to have all, beside the same of a star.

    `reason`: "uplink suffices" or "no forwarder" (a star then), or "uplink is the bound".
    """

    chains: Chains
    last_s: float
    mean_s: float
    star_last_s: float
    star_mean_s: float
    reason: str


def make_plan(task: Task, links: Sequence[Link]) -> Plan:
    """The plan by which workers have all soonest on average, of those by which none is later than the last of a star.

    Best scores stand near the relay. A worker that cannot forward ends a chain. Workers whose own link is slower than
    their share of a star may read from the relay themselves, for in a chain they would hold up others.
    """
    ranked = sorted(links, key=lambda link: (-link.score, link.worker_id))
    known = {link.worker_id: link for link in links}
    star = tuple((link.worker_id,) for link in ranked)
    star_last_s, star_mean_s = _times(task, star, known)
    best, last_s, mean_s = star, star_last_s, star_mean_s
    servers = sum(link.serves for link in ranked)
    share = task.uplink_bytes_per_s / max(1, len(ranked))
    stragglers = {link.worker_id for link in ranked if link.down_bytes_per_s <= share}
    for count in _counts(task, ranked, servers):
        for aside in [set(), stragglers] if stragglers else [set()]:
            chains = _assemble([link for link in ranked if link.worker_id not in aside], count)
            chains += tuple((link.worker_id,) for link in ranked if link.worker_id in aside)
            last, mean = _times(task, chains, known)
            if last <= star_last_s and mean < mean_s * (1 - 1e-9):
                best, last_s, mean_s = chains, last, mean
    reason = "uplink is the bound" if best is not star else "uplink suffices" if servers else "no forwarder"
    return Plan(best, last_s, mean_s, star_last_s, star_mean_s, reason)


def predict(task: Task, chains: Chains, links: Mapping[str, Link]) -> dict[str, Arrival]:
    """When each worker is to have all: its chain's share of the uplink, the slowest link so far, a chunk a hop."""
    arrivals: dict[str, Arrival] = {}
    chunk_bytes = min(task.chunk_bytes, task.nbytes)
    heads = [links[chain[0]].down_bytes_per_s for chain in chains]
    for chain, rate in zip(chains, _fair_shares(task.uplink_bytes_per_s, heads), strict=True):
        begun_s = 0.0
        for worker_id in chain:
            link = links[worker_id]
            rate = min(rate, link.down_bytes_per_s)
            begun_s += task.hop_s + chunk_bytes / rate
            arrivals[worker_id] = Arrival(begun_s + (task.nbytes - chunk_bytes) / rate, rate)
            rate = min(rate, link.up_bytes_per_s)
    return arrivals


def rebuild(chains: Chains, gone: Collection[str], slow: Collection[str] = ()) -> Chains:
    """Chains without those that are gone, and with slow ones last.

    Their successors thereby read from the nearest predecessor that is left, or from the relay.
    """
    rest = [[w for w in chain if w not in gone] for chain in chains]
    return tuple(tuple(sorted(chain, key=lambda w: w in slow)) for chain in rest if chain)


def join(chains: Chains, worker_id: str, serves: Collection[str], count: int) -> Chains:
    """Chains with one more worker at the end of the shortest one; nobody who is under way gets another source.

    Args:
        serves: who can forward. Where no chain's end can, the worker reads from the relay.
        count: with fewer chains than that, a new one is begun.
    """
    open_ = [chain for chain in chains if chain[-1] in serves]
    if len(chains) < count or not open_:
        return (*chains, (worker_id,))
    shortest = min(open_, key=len)
    return tuple((*chain, worker_id) if chain is shortest else chain for chain in chains)


def upstream(chains: Chains, worker_id: str) -> tuple[str, ...]:
    """Whom a worker may read from before the relay, nearest first. Raises KeyError where it is in no chain."""
    for chain in chains:
        if worker_id in chain:
            at = chain.index(worker_id)
            return tuple(reversed(chain[max(0, at - _UPSTREAM_MAX) : at]))
    raise KeyError(worker_id)


def _counts(task: Task, ranked: Sequence[Link], servers: int) -> list[int]:
    """Numbers of chains worth trying, the paper's among them."""
    if servers <= _TRIED_MAX:
        return list(range(1, servers + 1))
    rates = sorted(min(link.up_bytes_per_s, link.down_bytes_per_s) for link in ranked)
    typical = rates[len(rates) // 2]
    paper = int(min(servers, max(1, task.uplink_bytes_per_s / typical)))
    return sorted({paper, *(1 << i for i in range(servers.bit_length()))})


def _assemble(ranked: Sequence[Link], count: int) -> Chains:
    """`count` chains filled in turn; those that cannot forward end one each, and read from the relay where none is."""
    servers = [link.worker_id for link in ranked if link.serves]
    leaves = [link.worker_id for link in ranked if not link.serves]
    chains = [servers[i::count] for i in range(min(count, len(servers)))]
    for chain, leaf in zip(sorted(chains, key=len), leaves, strict=False):
        chain.append(leaf)
    return tuple(tuple(c) for c in [*chains, *([leaf] for leaf in leaves[len(chains) :])])


def _times(task: Task, chains: Chains, links: Mapping[str, Link]) -> tuple[float, float]:
    """(last, mean)"""
    done = [arrival.done_s for arrival in predict(task, chains, links).values()]
    return max(done, default=0.0), math.fsum(done) / max(1, len(done))


def _fair_shares(total: float, caps: Sequence[float]) -> list[float]:
    """An uplink as TCP flows share it: none gets more than its cap, and what that leaves goes to the others."""
    shares, left = [0.0] * len(caps), total
    order = sorted(range(len(caps)), key=lambda i: caps[i])
    for place, i in enumerate(order):
        shares[i] = min(caps[i], left / (len(order) - place))
        left -= shares[i]
    return shares
