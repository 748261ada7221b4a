"""Workers that forward weights to each other, over real sockets: bit for bit, whatever dies, stalls, lacks or lies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.unit.tcp_proxy import Bucket, TcpProxy
from vllm_coserve.weights.peering import forwarder as forwarder_module
from vllm_coserve.weights.peering import reader as peer_reader
from vllm_coserve.weights.peering import sources
from vllm_coserve.weights.peering.messages import (
    Broadcast,
    Grid,
    digests,
)
from vllm_coserve.weights.peering.reader import Peer, PeerClient, open_reader
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.store import BucketEntry, CorruptError, Manifest, RelayError, Release

_KEY = "relay-key"
_CHUNK = 4096
_FAST = Broadcast(1e9, _CHUNK, 1 << 24)
_SEVEN = Release(7)


@pytest.fixture(autouse=True)
def _short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder_module, "WAIT_FRAME_S", 0.05)
    monkeypatch.setattr(forwarder_module, "_WAIT_BOUND_S", 3.0)
    monkeypatch.setattr(sources, "SILENCE_BOUND_S", 0.8)
    monkeypatch.setattr(sources, "RELAY_SILENCE_BOUND_S", 2.0)
    monkeypatch.setattr(sources, "_JUDGED_S", 0.3)
    monkeypatch.setattr(peer_reader, "_RETRY_S", 0.02)
    monkeypatch.setattr(peer_reader, "_FIRST_REPORT_S", 0.05)


@dataclass
class World:
    """A relay with one release behind a proxy that counts what it sends."""

    relay: Relay
    front: TcpProxy
    data: dict[str, bytes]
    peers: list[Peer] = field(default_factory=list)

    def worker(self, worker_id: str = "", shard: str = "") -> PeerClient:
        peer = Peer(self.front.url, _KEY)
        peer.worker_id = worker_id or peer.worker_id
        self.peers.append(peer)
        return PeerClient(peer, shard)

    def read(self, client: PeerClient) -> dict[str, bytes]:
        """All of the release, as a copy of the weights reads it."""
        manifest = client.manifest(_SEVEN)
        return {b.name: bytes(client.get_range(_SEVEN, b.name, 0, b.nbytes)) for b in manifest.buckets}

    def chains(self) -> tuple[tuple[str, ...], ...]:
        return self.relay.tracker.chains("7")


def _world(link: Bucket | None = None, broadcast: Broadcast | None = _FAST, nbytes: int = 600_000) -> World:
    relay = Relay(key=_KEY, broadcast=broadcast)
    data = {name: random.Random(name).randbytes(nbytes + 7 * i) for i, name in enumerate(("b0", "b1", "b2"))}
    publisher = RelayClient(relay.url, _KEY)
    for name, content in data.items():
        publisher.put_bucket(_SEVEN, name, [content])
    entries = tuple(BucketEntry(name, len(content)) for name, content in data.items())
    publisher.put_manifest(_SEVEN, Manifest("7", "l", (), entries))
    publisher.close()
    return World(relay, TcpProxy(relay.url, link), data)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def begin(*args: object, **more: object) -> World:
        worlds.append(_world(*args, **more))
        return worlds[-1]

    yield begin
    for world in worlds:
        for peer in world.peers:
            peer.close()
        world.front.close()
        world.relay.close()


class Reading(threading.Thread):
    """A worker that reads all, then leaves but forwards on."""

    def __init__(self, world: World, client: PeerClient) -> None:
        super().__init__(daemon=True)
        self._world, self.client = world, client
        self.result: dict[str, bytes] | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._world.read(self.client)
        except Exception as exc:
            self.result = exc
        finally:
            self.client.close()

    def get(self) -> dict[str, bytes]:
        self.join(30)
        assert not self.is_alive(), "it hangs"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def _through(peer: Peer, **faults: object) -> TcpProxy:
    """Have others reach a worker's forwarder through a proxy."""
    forwarder = peer.serve(_FAST.memory_bytes)
    proxy = TcpProxy(forwarder.url, **faults)
    forwarder.url = proxy.url
    return proxy


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(bucket, first byte) of each read from the relay."""
    calls: list[tuple[str, int]] = []
    plain = sources.Source._plain

    def record(self: sources.Source, grid: Grid, start: int, room: memoryview) -> Iterator[int]:
        calls.append((grid.name, start))
        return plain(self, grid, start, room)

    monkeypatch.setattr(sources.Source, "_plain", record)
    return calls


def _any(shapes: object) -> None:
    """Accept all."""


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- chains


def test_four_workers_get_it_bit_for_bit_while_the_relay_sends_it_about_once(make) -> None:
    world = make(Bucket(2e6))
    readings = [Reading(world, world.worker()) for _ in range(4)]
    assert all(reading.get() == world.data for reading in readings)
    total = sum(map(len, world.data.values()))
    assert total <= world.front.sent_bytes < 1.35 * total
    (chain,) = world.chains()
    assert len(chain) == 4


def test_copies_of_tensors_follow_over_changes_and_whole_versions(make) -> None:
    world = make()
    publisher = Publisher(RelayClient(world.relay.url, _KEY), 3, 50_000)
    replicas = {name: Replica() for name in "abcd"}
    clients = {name: world.worker(name) for name in replicas}
    torch.manual_seed(0)
    weights = {f"layer{i}": torch.randn(80, 60).to(torch.bfloat16) for i in range(12)}
    for version in range(10, 15):
        publisher.publish(version, weights.items())
        jobs = [
            threading.Thread(target=replica.advance, args=(PeerClient(clients[name]._peer), version, _any))
            for name, replica in replicas.items()
            if name != "d" or version == 14  # the last one comes late, by a whole version and changes
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(30)
        for name, replica in replicas.items():
            if replica.version == version:
                assert all(
                    torch.equal(replica.tensors[n].view(torch.int16), weights[n].view(torch.int16)) for n in weights
                )
            else:
                assert name == "d" and version < 14
        weights = {n: torch.where(torch.rand(t.shape) < 0.05, t * 1.01, t) for n, t in weights.items()}


def test_one_that_comes_later_reads_from_who_has_it(make) -> None:
    world = make()
    assert Reading(world, world.worker("a")).get() == world.data
    before = world.front.sent_bytes
    assert Reading(world, world.worker("b")).get() == world.data
    assert world.front.sent_bytes - before < 30_000  # manifest, digests, advice


def test_without_the_offer_all_is_as_before(make) -> None:
    world = make(broadcast=None)
    client = world.worker()
    assert Reading(world, client).get() == world.data
    assert client._peer.forwarder is None and not client._offered


def test_parts_of_tensors_are_read_as_they_are_wanted(make) -> None:
    world = make()
    first, second = world.worker("a", "tp0"), world.worker("b", "tp1")
    wanted = [("b0", 5, 9), ("b0", 100, 50_000), ("b1", 8_191, 8_193), ("b1", 599_990, 600_007), ("b2", 0, 600_014)]
    for client in (first, second):
        client.manifest(_SEVEN)
        for name, start, end in wanted:
            assert bytes(client.get_range(_SEVEN, name, start, end)) == world.data[name][start:end]
        assert bytes(client.get_range(_SEVEN, "b0", 3, 3)) == b""
        with pytest.raises(RelayError, match="416"):
            client.get_range(_SEVEN, "b0", 0, 600_001)
    # Who reads other parts stands in another chain.
    assert world.relay.tracker.chains("7", "tp0") == (("a",),) and world.relay.tracker.chains("7", "tp1") == (("b",),)
    first.close()
    second.close()


def test_a_peer_that_lacks_a_part_says_so_at_once(make) -> None:
    world = make()
    first, second = world.worker("a"), world.worker("b")
    first.manifest(_SEVEN)
    first.get_range(_SEVEN, "b1", 0, 300_000)
    second.manifest(_SEVEN)
    begun = time.monotonic()
    assert second.get_range(_SEVEN, "b0", 0, 600_000) == world.data["b0"]  # the first one has read beyond
    assert second.get_range(_SEVEN, "b1", 0, 600_007) == world.data["b1"]
    assert time.monotonic() - begun < 1.0
    first.close()
    second.close()


# ---- faults


def test_successors_of_one_that_dies_in_the_middle_go_on_by_themselves(make) -> None:
    world = make(Bucket(3e6), Broadcast(3e6, _CHUNK, 1 << 24))
    clients = [world.worker(name) for name in "abcd"]
    dying = _through(clients[1]._peer)
    readings = [Reading(world, client) for client in clients]
    _until(lambda: dying.sent_bytes > 200_000)
    dying.close()
    clients[1]._peer.forwarder.close()
    for reading in (readings[0], *readings[2:]):
        assert reading.get() == world.data
    total = sum(map(len, world.data.values()))
    assert world.front.sent_bytes < 2.2 * total
    assert "b" not in world.chains()[0][:-1]  # it still reads itself, at the end


def test_a_corrupt_peer_is_seen_reported_and_not_used_again(make) -> None:
    world = make(Bucket(3e6))
    clients = [world.worker(name) for name in "abc"]
    _through(clients[0]._peer).flip_at = 150_000
    readings = [Reading(world, client) for client in clients]
    assert all(reading.get() == world.data for reading in readings)
    url = clients[0]._peer.forwarder.url
    finders = [client._peer for client in clients[1:] if url in client._peer.corrupt]
    assert len(finders) == 1
    late = world.worker("d")
    assert Reading(world, late).get() == world.data
    assert url not in {s for s in late._sources if s} and url not in late._sources


def test_a_stalled_peer_is_left_and_reading_goes_on_at_the_byte_where_it_was(make, asked) -> None:
    world = make()
    assert Reading(world, world.worker("a")).get() == world.data
    stalling = _through(world.peers[0])
    client = world.worker("b")
    stalled_at = 260_123
    count = stalling._count

    def stall(part: bytes) -> bytes:
        stalling.stalled = stalling.stalled or stalling.sent_bytes + len(part) > stalled_at
        return count(part)

    stalling._count = stall
    world.relay.tracker._workers["a"].address = stalling.url
    asked.clear()
    assert Reading(world, client).get() == world.data
    name, start = asked[0]
    assert name == "b0" and stalled_at - 20_000 < start < stalled_at
    stalling.close()


def test_a_slow_peer_is_left_for_the_relay(make) -> None:
    world = make(broadcast=Broadcast(2e6, _CHUNK, 1 << 24))
    assert Reading(world, world.worker("a")).get() == world.data
    slow = TcpProxy(world.peers[0].forwarder.url, Bucket(50e3))
    world.relay.tracker._workers["a"].address = slow.url
    begun = time.monotonic()
    assert Reading(world, world.worker("b")).get() == world.data
    assert time.monotonic() - begun < 5  # 36 s at its rate
    assert world.relay.tracker._workers["a"].record.failures == 1
    slow.close()


def test_a_relay_that_dies_when_one_has_all_leaves_the_others_to_their_peers(make) -> None:
    world = make()
    clients = [world.worker(name) for name in "abcd"]
    for client in clients[1:]:  # they have begun
        client.manifest(_SEVEN)
        client.get_range(_SEVEN, "b0", 0, 5_000)
    assert Reading(world, clients[0]).get() == world.data
    for client in clients[1:]:
        client._report(client._pull)
    world.front.close()
    world.relay.close()
    for client in clients[1:]:
        for name, content in world.data.items():
            assert client.get_range(_SEVEN, name, 0, len(content)) == content
        client.close()


def test_an_interrupted_pull_goes_on_with_what_it_has(make, asked) -> None:
    world = make()
    world.front.die_at = 900_000
    first = world.worker("a")
    with pytest.raises(RelayError):
        Reading(world, first).get()
    held = first._peer.forwarder.held_bytes
    assert 600_000 < held < 900_000
    asked.clear()
    again = TcpProxy(world.relay.url)
    first._peer.url = again.url
    assert Reading(world, PeerClient(first._peer)).get() == world.data
    assert asked[0] == ("b1", held - 600_000)
    again.close()


def test_damage_on_the_way_from_the_relay_is_read_again(make) -> None:
    world = make()
    world.front.flip_at = 300_000
    assert Reading(world, world.worker()).get() == world.data


def test_a_relay_whose_every_byte_is_damaged_is_an_error(make) -> None:
    world = make()
    held = world.relay._held[_SEVEN].buckets
    for name, content in world.data.items():
        wrong = held[name] = bytes(len(content))
        world.relay.tracker._digests[_SEVEN, name] = wrong, digests(content, _CHUNK)
    with pytest.raises(CorruptError, match="not published"):
        Reading(world, world.worker()).get()


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_never_make_a_wrong_version(make, seed: int) -> None:
    world, chance = make(Bucket(4e6)), random.Random(seed)
    clients = [world.worker(f"w{i}") for i in range(6)]
    fronts = [_through(client._peer) for client in clients]
    total = sum(map(len, world.data.values()))
    for front in chance.sample(fronts, 3):
        what = chance.choice(["flip_at", "die_at", "stalled"])
        setattr(front, what, True if what == "stalled" else chance.randrange(total))
    readings = [Reading(world, client) for client in clients]
    assert all(reading.get() == world.data for reading in readings)
    for front in fronts:
        front.close()


def test_a_process_follows_one_relay_at_a_time(make) -> None:
    first, second = make(), make()
    reader = open_reader(first.front.url, _KEY)
    assert first.read(reader) == first.data
    reader.close()
    forwarder = peer_reader._HERE[0].forwarder
    again = open_reader(first.front.url, _KEY)
    assert again._peer.forwarder is forwarder
    other = open_reader(second.front.url, _KEY)
    assert forwarder._closed and other._peer.forwarder is None
    peer_reader._HERE.clear()
