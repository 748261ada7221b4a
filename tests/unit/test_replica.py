"""A worker's copy follows the publisher bit for bit, over real sockets, whatever it has missed and whatever breaks."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_coserve.weights.codec import Kind, bits_of, encode
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import Region, whole
from vllm_coserve.weights.store import Contents, CorruptError, Manifest, RelayError, Release

Weights = dict[str, torch.Tensor]


@pytest.fixture
def client() -> Iterator[RelayClient]:
    with Relay() as relay:
        client = RelayClient(relay.url)
        client.host = relay.url
        yield client
        client.close()


def _weights(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(70, 50).to(torch.bfloat16),
        "norm": torch.randn(30),
        "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-40]).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(3, dtype=torch.int64),
        "bytes": torch.arange(33, dtype=torch.uint8),
        "columns": torch.randn(40, 20).t(),
    }


def _trained(weights: Weights, seed: int, density: float = 0.02) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        new = tensor.contiguous().clone()
        bits = bits_of(new)
        bits += (torch.rand(bits.shape, generator=generator) < density).to(bits.dtype)
        out[name] = new
    return out


def _same(replica: Replica, weights: Weights) -> bool:
    return replica.tensors.keys() == weights.keys() and all(
        have.dtype == want.dtype and have.shape == want.shape and torch.equal(bits_of(have), bits_of(want.contiguous()))
        for have, want in ((replica.tensors[n], weights[n]) for n in weights)
    )


def _any(shapes: Mapping[str, list[int]]) -> None:
    """Accept all."""


@pytest.mark.parametrize("bucket_bytes", [1, 300, 64 << 20])
def test_whole_and_changed_versions_come_bit_for_bit(client: RelayClient, bucket_bytes: int) -> None:
    publisher, replica, weights = Publisher(client, 3, bucket_bytes), Replica(), _weights()
    for version in range(1, 8):
        made = publisher.publish(version, weights.items())
        assert [str(r) for r in made] == {
            1: ["1"],
            4: ["4-from-3", "4"],
            7: ["7-from-6", "7"],
        }.get(version, [f"{version}-from-{version - 1}"])
        taken = replica.advance(client, version, _any)
        assert taken == made[:1] and replica.version == version and _same(replica, weights)
        weights = _trained(weights, version)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_copy_that_missed_any_versions_gets_there(data: st.DataObject) -> None:
    with Relay() as relay:
        client = RelayClient(relay.url)
        publisher, history = Publisher(client, data.draw(st.integers(1, 4))), {}
        weights, replicas, keep = _weights(), [Replica() for _ in range(3)], data.draw(st.integers(1, 3))
        for version in range(1, data.draw(st.integers(2, 9))):
            publisher.publish(version, weights.items())
            history[version], weights = weights, _trained(weights, version)
            publisher.retire(keep)
            for replica in replicas:
                if data.draw(st.booleans()):
                    wanted = max(1, version - data.draw(st.integers(0, keep - 1)))
                    replica.advance(client, wanted, _any)
                    assert _same(replica, history[wanted])
        client.close()


def test_what_nobody_needs_is_retired(client: RelayClient) -> None:
    publisher, weights = Publisher(client, 3), _weights()
    for version in range(1, 9):
        publisher.publish(version, weights.items())
        publisher.retire(2)
    there = [[str(r) for r in client.releases(version)] for version in (6, 7, 8)]
    assert there == [[], ["7", "7-from-6"], ["8-from-7"]]


def test_a_job_that_is_over_leaves_nothing(client: RelayClient) -> None:
    publisher, weights = Publisher(client, 3), _weights()
    for version in range(1, 5):
        publisher.publish(version, weights.items())
    publisher.withdraw()
    assert [client.releases(version, begun=True) for version in range(1, 5)] == [[]] * 4
    assert publisher.publish(5, weights.items()) == [Release(5)]


def test_changes_of_another_run_are_not_mixed_in(client: RelayClient) -> None:
    replica, weights = Replica(), _weights()
    Publisher(client).publish(1, weights.items())
    replica.advance(client, 1, _any)
    with Relay() as relay:
        other = RelayClient(relay.url)
        publisher, theirs = Publisher(other, 1), _weights(1)
        publisher.publish(1, theirs.items())
        publisher.publish(2, _trained(theirs, 5).items())
        assert replica.advance(other, 2, _any) == [Release(2)]
        assert _same(replica, _trained(theirs, 5))
        other.close()


def test_the_same_number_of_another_run_is_another_version(client: RelayClient) -> None:
    replica = Replica()
    Publisher(client).publish(1, _weights().items())
    replica.advance(client, 1, _any)
    with Relay() as relay:
        other = RelayClient(relay.url)
        Publisher(other).publish(1, _weights(1).items())
        assert replica.advance(other, 1, _any) == [Release(1)] and _same(replica, _weights(1))
        other.close()


def test_a_copy_that_is_damaged_is_made_anew(client: RelayClient) -> None:
    publisher, replica, weights = Publisher(client, 2), Replica(), _weights()
    publisher.publish(1, weights.items())
    replica.advance(client, 1, _any)
    bits_of(replica.tensors["a"])[7] ^= 1
    weights = _trained(weights, 1)
    publisher.publish(2, weights.items())
    publisher.publish(3, weights.items())
    assert replica.advance(client, 3, _any) == [Release(3)]
    assert _same(replica, weights)


class _Breaking:
    """A relay whose bytes are damaged, or whose connection breaks, at random."""

    def __init__(self, client: RelayClient, seed: int) -> None:
        self._client, self._random = client, random.Random(seed)

    def __getattr__(self, name: str):
        return getattr(self._client, name)

    def get_range(self, release: Release, name: str, start: int, end: int) -> bytes:
        data = self._client.get_range(release, name, start, end)
        kind = self._random.randrange(4)
        if kind == 0:
            raise RelayError("gone")
        if kind == 1 and data:
            at = self._random.randrange(len(data))
            return bytes(data[:at]) + bytes([data[at] ^ 4]) + bytes(data[at + 1 :])
        return data[: len(data) // 2] if kind == 2 else data


def test_breaks_and_damage_never_make_a_wrong_version(client: RelayClient) -> None:
    publisher, weights, replicas = Publisher(client, 3, 2000), _weights(), [Replica() for _ in range(20)]
    done = 0
    for version in range(1, 6):
        publisher.publish(version, weights.items())
        for seed, replica in enumerate(replicas):
            before, at = replica.version, replica.tensors
            try:
                replica.advance(_Breaking(client, 100 * version + seed), version, _any)
            except RelayError:
                assert replica.version in (before, None) or replica.version < version
                assert replica.version != before or at is replica.tensors or replica.version is None
                continue
            done += 1
            assert replica.version == version and _same(replica, weights)
        weights = _trained(weights, version)
    assert done
    for replica in replicas:
        replica.advance(client, 5, _any)
        assert replica.version == 5


def test_a_refused_version_leaves_the_copy(client: RelayClient) -> None:
    publisher, replica, weights = Publisher(client), Replica(), _weights()
    publisher.publish(1, weights.items())
    replica.advance(client, 1, _any)
    publisher.publish(2, _trained(weights, 1).items())

    def refuse(shapes: Mapping[str, list[int]]) -> None:
        assert shapes["a"] == [70, 50]
        raise ValueError("another model")

    with pytest.raises(ValueError, match="another model"):
        replica.advance(client, 2, refuse)
    assert replica.version == 1 and _same(replica, weights)
    with pytest.raises(RelayError, match="404"):
        replica.advance(client, 9, _any)
    assert replica.version == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "nonsense"},
        {"dtype": "float32"},
        {"shape": (70, 49)},
        {"shape": (71, 50)},
        {"region": Region(0, 69, 0, 50)},
        {"region": Region(1, 70, 0, 50)},
        {"region": Region(-1, 69, 0, 50)},
        {"region": Region(0, 70, 0, 51)},
        {"bucket": "x-0-00009"},
        {"offset": 16},
        {"nbytes": 3},
    ],
)
def test_manifests_that_make_no_sense_are_refused(client: RelayClient, change: dict[str, object]) -> None:
    Publisher(client).publish(1, _weights().items())
    good = client.manifest(Release(1))
    first = replace(good.pieces[0], **change)
    (bucket,) = good.buckets
    client.put_bucket(Release(2), bucket.name, [client.get_range(Release(1), bucket.name, 0, bucket.nbytes)])
    client.put_manifest(Release(2), Manifest("2", good.lineage, (first, *good.pieces[1:]), good.buckets))
    replica = Replica()
    with pytest.raises(CorruptError):
        replica.advance(client, 2, _any)
    assert replica.version is None


def test_changes_are_read_before_their_version_is_complete(client: RelayClient) -> None:
    """Buckets are read as they come; an incomplete version is never taken, whatever is there of it."""
    publisher, replica = Publisher(client, 9, 2000), Replica()
    weights = {str(i): torch.randn(1000) for i in range(12)}
    publisher.publish(1, weights.items())
    replica.advance(client, 1, _any)
    reader = _Watched(client.host)
    done: list[object] = []

    def follow() -> None:
        done.append(replica.advance(reader, 2, _any, 30))

    new = _trained(weights, 1, 0.5)
    thread = threading.Thread(target=follow)

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:9]
        thread.start()
        deadline = time.monotonic() + 20
        while not reader.read:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not done and replica.version == 1 and _same(replica, weights)
        yield from list(new.items())[9:]

    publisher._encode = lambda old, new: encode(old, new, Kind.DENSE)
    publisher.publish(2, slowly())
    thread.join(30)
    assert done == [[Release(2, 1)]] and _same(replica, new)
    assert len(reader.read) == len(set(reader.read))  # nothing twice
    reader.close()


def test_a_version_that_never_becomes_complete_is_given_up(client: RelayClient) -> None:
    publisher, replica, weights = Publisher(client), Replica(), _weights()
    publisher.publish(1, weights.items())
    replica.advance(client, 1, _any)
    client.put_bucket(Release(2, 1), "b", [b"x" * 99], Contents(publisher._lineage, ()))
    for version in (2, 3):
        with pytest.raises(RelayError, match=r"in time|404"):
            replica.advance(client, version, _any, 0.2)
    assert replica.version == 1 and _same(replica, weights)


class _Watched(RelayClient):
    """Notes what is read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read: list[tuple[str, int]] = []

    def get_range(self, release: Release, name: str, start: int, end: int) -> bytearray:
        self.read.append((name, start))
        return super().get_range(release, name, start, end)


def test_a_publisher_goes_on_whole_after_a_failure(client: RelayClient) -> None:
    class Full:
        def __getattr__(self, name: str):
            return getattr(client, name)

        def put_manifest(self, *args: object) -> None:
            raise RelayError("full")

    publisher, weights, replica = Publisher(client), _weights(), Replica()
    publisher.publish(1, weights.items())
    replica.advance(client, 1, _any)
    publisher._store = Full()
    with pytest.raises(RelayError, match="full"):
        publisher.publish(2, _trained(weights, 1).items())
    publisher._store = client
    assert client.releases(2) == []
    weights = _trained(weights, 2)
    assert publisher.publish(3, weights.items()) == [Release(3)]
    assert replica.advance(client, 3, _any) == [Release(3)] and _same(replica, weights)


def test_other_tensors_than_before_are_refused(client: RelayClient) -> None:
    publisher, weights = Publisher(client), _weights()
    wrong = ({"a": weights["a"]}, {**weights, "new": weights["a"]}, {**weights, "a": weights["a"][1:]})
    for number, tensors in enumerate(wrong):
        assert publisher.publish(10 * number, weights.items()) == [Release(10 * number)]
        with pytest.raises(ValueError, match="version before"):
            publisher.publish(10 * number + 1, tensors.items())
    with pytest.raises(ValueError, match="after 40"):
        publisher.publish(40, weights.items())
        publisher.publish(40, weights.items())


class _Forgetful(RelayClient):
    """Is told that the relay has nothing of what it asks for."""

    def holds(self, releases: Sequence[Release]) -> bool:
        return False


@pytest.mark.parametrize("forgetful", [0, 1])
def test_what_one_rank_finds_missing_all_ranks_put_whole(client: RelayClient, forgetful: int) -> None:
    weights, version, wait = _weights(), 1, threading.Barrier(2)
    parts: list[Any] = [None] * 2
    well = [True] * 2
    clients = [RelayClient(client.host), RelayClient(client.host)]

    def publisher_of(rank: int) -> Publisher:
        def gather(part: Any) -> Any:
            parts[rank] = part
            wait.wait(20)
            return list(parts) if rank == 0 else None

        def agree(so: bool) -> bool:
            well[rank] = so
            wait.wait(20)
            both = all(well)
            wait.wait(20)
            return both

        def cut(name: str, shape: tuple[int, ...]) -> list[Region]:
            return [whole(shape)] if sorted(weights).index(name) % 2 == rank else []

        return Publisher(clients[rank], 50, 4000, cut, gather=gather, agree=agree, lineage="ranks")

    publishers, replica = [publisher_of(0), publisher_of(1)], Replica()
    for version, made in ((1, [Release(1)]), (2, [Release(2, 1)]), (3, [Release(3)])):
        if version == 3:
            publishers[forgetful]._store = _Forgetful(client.host)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            done = [threads.submit(p.publish, version, weights.items()) for p in publishers]
            assert [d.result(30) for d in done] == [made, made]
        replica.advance(client, version, _any)
        assert replica.version == version and _same(replica, weights)
        weights = _trained(weights, version)
    for rank in range(2):
        clients[rank].close()
        publishers[rank]._store.close()
