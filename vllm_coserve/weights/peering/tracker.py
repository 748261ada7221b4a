"""The relay's part of forwarding: who reads which release, how far they are, and where each is to read (ECHO-2 C.3).

Workers say what they read and what they saw of their sources, about once a second; each answer says where to read. All
of it is a hint: a worker that hears nothing more goes on with what it was told.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from vllm_coserve.policy.broadcast import Arrival, Chains, Link, Task, join, make_plan, predict, rebuild, upstream
from vllm_coserve.policy.peer_scores import Record, forwards, observed, score
from vllm_coserve.weights.peering.messages import (
    RELAY,
    Broadcast,
    BucketDigests,
    DigestAnswer,
    DigestQuery,
    Heard,
    PeerAdvice,
    PeerReport,
    digests,
)
from vllm_coserve.weights.store import Release

SILENT_S = 30.0  # a worker that reads and says nothing for so long is gone
_KEPT_S = 4 * 3600.0  # what was seen of a worker, and releases that nobody reads; RL steps may take an hour
_WORKERS_MAX, _CASTS_MAX, _PLANNED_MAX = 4096, 64, 256
_SLOW_SHARE = 0.5  # of the rate that was expected; and of a star's, below which a peer is worth less than the relay
_SPARES_MAX = 2
_JUDGED_CHUNKS = 4
_LATE_MAX = 2  # reports in a row; one may be of the time in which chains were still made
_ACCUSED_MAX = {"corrupt": 1, "dead": 3}  # who finds more peers so than that is itself the likely cause


@dataclass(slots=True)
class _Worker:
    """What is known of a worker beyond one release."""

    address: str = ""
    record: Record = field(default_factory=Record)
    down_bytes_per_s: float = math.inf
    seen_s: float = 0.0
    corrupt: bool = False


@dataclass(slots=True)
class _Member:
    """A worker that reads a release, or has read it."""

    seen_s: float
    have_bytes: int = 0
    done: bool = False
    relay_bytes_per_s: float = 0.0
    late: int = 0  # reports in a row by which it, or its link from the relay, was slower than others
    accused: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class _Cast:
    """One release on its way to workers that read the same parts of it."""

    members: dict[str, _Member] = field(default_factory=dict)
    chains: Chains = ()
    count: int = 1
    begun: bool = False  # somebody has some of it: the order is only added to from then on
    slow: set[str] = field(default_factory=set)
    nbytes: int = 1
    seen_s: float = 0.0
    expected: dict[str, Arrival] = field(default_factory=dict)


class Tracker:
    """Any thread may call its methods."""

    def __init__(
        self,
        broadcast: Broadcast,
        bucket: Callable[[Release, str], bytes | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bucket`: what the relay has."""
        self._broadcast, self._bucket, self._clock = broadcast, bucket, clock
        self._workers: dict[str, _Worker] = {}
        self._casts: dict[tuple[str, str], _Cast] = {}
        self._digests: dict[tuple[Release, str], tuple[bytes, BucketDigests]] = {}
        self._expire_due_s = 0.0
        self._lock = threading.Lock()

    # ---- requests

    def answer(self, path: str, body: bytes, host: str) -> tuple[int, bytes]:
        """(HTTP status, body). `host`: the address that it came from."""
        try:
            if path == "/v1/peers/report":
                report = msgspec.json.decode(body, type=PeerReport)
                return 200, msgspec.json.encode(self.report(report, host))
            if path == "/v1/peers/digests":
                return 200, msgspec.json.encode(self.digests_of(msgspec.json.decode(body, type=DigestQuery)))
        except (msgspec.DecodeError, ValueError) as exc:
            return 400, f"this makes no sense: {exc}".encode()
        return 404, b"no such path"

    def digests_of(self, query: DigestQuery) -> DigestAnswer:
        """Of the buckets that are there."""
        release = Release.parse(query.release)
        found = {name: self.prepare(release, name) for name in query.buckets}
        there = {name: entry for name, entry in found.items() if entry is not None}
        return DigestAnswer(self._broadcast.chunk_bytes, self._broadcast.memory_bytes, there)

    def prepare(self, release: Release, name: str) -> BucketDigests | None:
        """Hash a bucket's chunks, once."""
        data = self._bucket(release, name)
        if data is None:
            return None
        with self._lock:
            known = self._digests.get((release, name))
        if known is None or known[0] is not data:
            known = data, digests(data, self._broadcast.chunk_bytes)
            with self._lock:
                self._digests[release, name] = known
        return known[1]

    def forget(self, release: Release) -> None:
        """The relay has forgotten it."""
        with self._lock:
            self._digests = {key: value for key, value in self._digests.items() if key[0] != release}
            self._casts = {key: cast for key, cast in self._casts.items() if key[0] != str(release)}

    def report(self, report: PeerReport, host: str) -> PeerAdvice:
        """Take a report; says where to read from now on."""
        now_s = self._clock()
        with self._lock:
            self._expire(now_s)
            me = self._workers.get(report.worker)
            if me is None:
                if len(self._workers) >= _WORKERS_MAX:
                    return PeerAdvice((RELAY,))
                me = self._workers[report.worker] = _Worker()
            me.seen_s = now_s
            self._settle(me, report.address if _is_reachable(report.address, host) else "")
            cast = self._casts.setdefault((report.release, report.shard), _Cast())
            cast.seen_s, cast.nbytes = now_s, max(1, report.total_bytes)
            for heard in report.heard:
                self._hear(cast, report.worker, heard, now_s)
            self._place(cast, report, now_s)
            return self._advise(cast, report.worker)

    def chains(self, release: str, shard: str = "") -> Chains:
        """How a release is passed on now, for tests and for people."""
        with self._lock:
            cast = self._casts.get((release, shard))
            return cast.chains if cast else ()

    # ---- with the lock held

    def _expire(self, now_s: float) -> None:
        if now_s < self._expire_due_s and len(self._casts) <= _CASTS_MAX:
            return
        self._expire_due_s = now_s + 1.0
        casts = sorted(self._casts.items(), key=lambda item: item[1].seen_s)[-_CASTS_MAX:]
        self._casts = {key: cast for key, cast in casts if now_s - cast.seen_s < _KEPT_S}
        self._workers = {w: worker for w, worker in self._workers.items() if now_s - worker.seen_s < _KEPT_S}
        for cast in self._casts.values():
            bounds = {w: _KEPT_S if m.done else SILENT_S for w, m in cast.members.items()}
            silent = {w for w, m in cast.members.items() if now_s - m.seen_s >= bounds[w] or w not in self._workers}
            self._excise(cast, silent)

    def _settle(self, me: _Worker, address: str) -> None:
        if address and address != me.address:
            for other in self._workers.values():  # one that has ended had the same port
                other.address = "" if other.address == address else other.address
        me.address = address

    def _excise(self, cast: _Cast, gone: set[str]) -> None:
        for worker_id in gone:
            cast.members.pop(worker_id, None)
        cast.chains = rebuild(cast.chains, gone) if gone else cast.chains

    def _serves(self, worker_id: str, now_s: float) -> bool:
        worker = self._workers[worker_id]
        return bool(worker.address) and not worker.corrupt and forwards(worker.record, now_s)

    def _links(self, cast: _Cast, now_s: float) -> dict[str, Link]:
        workers = {w: self._workers[w] for w in cast.members}
        rates = [w.record.bytes_per_s for w in workers.values() if math.isfinite(w.record.bytes_per_s)]
        top = max(rates, default=0.0)
        return {
            w: Link(
                w,
                self._serves(w, now_s),
                score(worker.record, now_s, top),
                worker.down_bytes_per_s,
                worker.record.bytes_per_s,
            )
            for w, worker in workers.items()
        }

    def _place(self, cast: _Cast, report: PeerReport, now_s: float) -> None:
        """Give a newcomer a place; keep who is under way where it is."""
        member = cast.members.get(report.worker)
        new = member is None
        if member is None:
            member = cast.members[report.worker] = _Member(now_s)
        member.seen_s, member.have_bytes, member.done = now_s, report.have_bytes, report.done
        links = self._links(cast, now_s) if new else {}
        task = self._task(cast)
        if new and not cast.begun and len(cast.members) <= _PLANNED_MAX:
            cast.chains = make_plan(task, list(links.values())).chains
            cast.count = len(cast.chains)
        elif new:
            serves = {w for w, link in links.items() if link.serves and w not in cast.slow}
            cast.chains = join(cast.chains, report.worker, serves, cast.count)
        if links:
            cast.expected = predict(task, cast.chains, links)
        cast.begun = cast.begun or report.have_bytes > 0

    def _task(self, cast: _Cast) -> Task:
        """Groups that read other parts of a release at the same time share the uplink."""
        groups = sum(any(not m.done for m in other.members.values()) for other in self._casts.values())
        uplink = self._broadcast.uplink_bytes_per_s / max(1, groups)
        return Task(cast.nbytes, self._broadcast.chunk_bytes, uplink)

    def _hear(self, cast: _Cast, by: str, heard: Heard, now_s: float) -> None:
        rate = heard.nbytes / heard.busy_s if heard.busy_s > 0 else 0.0
        judged = heard.nbytes >= _JUDGED_CHUNKS * self._broadcast.chunk_bytes and rate > 0
        if heard.source == RELAY:
            if judged and by in cast.members:
                cast.members[by].relay_bytes_per_s = rate
                self._judge(cast, by, rate, self._others_from_relay(cast, by))
            return
        source = next((w for w, worker in self._workers.items() if worker.address == heard.source), None)
        if source is None or source == by or not self._believed(cast, by, source, heard.outcome):
            return
        me, worker = self._workers[by], self._workers[source]
        if heard.outcome == "ok":
            if judged:
                worker.record = observed(worker.record, True, rate, now_s)
                me.down_bytes_per_s = rate if math.isinf(me.down_bytes_per_s) else max(rate, me.down_bytes_per_s)
                arrival = cast.expected.get(by)
                others = self._others_forward(cast, source)
                self._judge(cast, source, rate, min(others, arrival.bytes_per_s) if arrival else 0.0)
            return
        if heard.outcome != "lacks":
            worker.record = observed(worker.record, False, 0.0, now_s)
        worker.corrupt = worker.corrupt or heard.outcome == "corrupt"
        if heard.outcome in ("dead", "corrupt"):
            self._excise(cast, {source})  # it joins again with its next report, if there is one
        else:
            self._put_last(cast, source)

    def _believed(self, cast: _Cast, by: str, source: str, outcome: str) -> bool:
        member = cast.members.get(by)
        if member is None or outcome not in _ACCUSED_MAX:
            return True
        member.accused.add((outcome, source))
        return sum(what == outcome for what, _ in member.accused) <= _ACCUSED_MAX[outcome]

    def _others_from_relay(self, cast: _Cast, by: str) -> float:
        """The best rate of others that read from the relay: all are slow where the uplink is not what it should be."""
        heads = {chain[0] for chain in cast.chains} - {by}
        return max((cast.members[w].relay_bytes_per_s for w in heads), default=0.0)

    def _others_forward(self, cast: _Cast, source: str) -> float:
        """The usual rate of other workers as sources; 0: not known."""
        rates = [self._workers[w].record.bytes_per_s for w in cast.members if w != source]
        known = sorted(filter(math.isfinite, rates))
        return known[len(known) // 2] if known else 0.0

    def _judge(self, cast: _Cast, whom: str, rate: float, expected: float) -> None:
        """Who is far slower than others goes to its chain's end, but never most of them."""
        member = cast.members.get(whom)
        if member is None:
            return
        member.late = member.late + 1 if rate < _SLOW_SHARE * expected else 0
        if member.late >= _LATE_MAX and 2 * len(cast.slow) < len(cast.members):
            self._put_last(cast, whom)

    def _put_last(self, cast: _Cast, worker_id: str) -> None:
        if worker_id not in cast.slow:
            cast.slow.add(worker_id)
            cast.chains = rebuild(cast.chains, (), cast.slow)

    def _advise(self, cast: _Cast, worker_id: str) -> PeerAdvice:
        now_s = self._clock()
        serving = {w for w in cast.members if self._serves(w, now_s)}
        before = [w for w in upstream(cast.chains, worker_id) if w in serving]
        mine = next(chain for chain in cast.chains if worker_id in chain)
        # Where even the relay does not answer: whoever has more, but for those that read from this worker.
        have = cast.members[worker_id].have_bytes
        ahead = [w for w in serving if w not in mine and cast.members[w].have_bytes > have]
        ahead.sort(key=lambda w: (-cast.members[w].have_bytes, w))
        reading = sum(not member.done for member in cast.members.values())
        star = self._broadcast.uplink_bytes_per_s / max(1, reading)
        expected = cast.expected[worker_id].bytes_per_s if worker_id in cast.expected else star
        sources = [*before, None, *ahead[:_SPARES_MAX]]
        addresses = tuple(RELAY if w is None else self._workers[w].address for w in sources)
        return PeerAdvice(addresses, _SLOW_SHARE * min(star, expected))


def _is_reachable(address: str, host: str) -> bool:
    """A worker on another machine that forwards on its loopback can be reached by nobody."""
    name = urlsplit(address).hostname or ""
    loopback = name == "localhost" or name.startswith("127.") or name == "::1"
    return bool(name) and (not loopback or host.startswith(("127.", "::1", "::ffff:127.")))
