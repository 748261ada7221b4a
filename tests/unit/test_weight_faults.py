"""Whatever happens to a relay or to what it sends, a worker has the old version or the right new one, and goes on by
itself. The relay holds memory only: there is no disk of its own to fill; full memory is tested here."""

from __future__ import annotations

import copy
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.damage import Damage, Weights, any_shapes, check_damaged_read, same
from tests.unit.relay_world import RelayProcess, Wire
from vllm_coserve.weights import relay_client
from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.sharding import whole
from vllm_coserve.weights.store import (
    BucketEntry,
    CorruptError,
    GoneError,
    Manifest,
    PieceEntry,
    RelayError,
    Release,
    pack_manifest,
    unpack_manifest,
)

_BUCKET_BYTES = 4 << 20
_PASSED_BYTES = 1 << 20  # before the relay is killed
_BOUND_S = 20.0


def _weights(elements: int, seed: int = 0) -> Weights:
    """Tensors of one shape: nothing but names and places tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.w": torch.randn(elements, generator=generator).to(torch.bfloat16) for i in range(4)}


def _trained(weights: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        out[name] = tensor.clone()
        bits = bits_of(out[name])
        bits += (torch.rand(bits.shape, generator=generator) < 0.02).to(bits.dtype)
    return out


def _far(weights: Weights, seed: int) -> Weights:
    """Changes that are as large as the weights."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        out[name] = tensor.clone()
        bits = bits_of(out[name])
        bits += torch.randint(-9999, 9999, bits.shape, generator=generator, dtype=bits.dtype)
    return out


# ---- a relay that is killed


@dataclass
class _World:
    """A publisher, a worker and a relay that can be killed; connections pass through a wire."""

    relay: RelayProcess
    wire: Wire
    publisher: Publisher = field(init=False)
    worker: RelayClient = field(init=False)
    replica: Replica = field(default_factory=Replica)
    weights: Weights = field(default_factory=lambda: _weights(1 << 20))

    def __post_init__(self) -> None:
        self.publisher = Publisher(RelayClient(self.wire.url), 3, _BUCKET_BYTES)
        self.worker = RelayClient(self.wire.url)

    def follow(self, version: int) -> list[Release]:
        taken = self.replica.advance(self.worker, version, any_shapes)
        assert self.replica.version == version and same(self.replica, self.weights)
        return taken


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    monkeypatch.setattr(relay_client, "_RETRY_S", 0.02)
    process = RelayProcess()
    wire = Wire(process.port)
    yield _World(process, wire)
    wire.close()
    process.kill()


@pytest.mark.parametrize("first", [True, False])
def test_a_relay_killed_in_the_middle_of_a_push(world: _World, first: bool) -> None:
    version, old = 1, world.weights
    if not first:
        world.publisher.publish(1, old.items())
        world.follow(1)
        version, world.weights = 2, _far(old, 1)
    world.wire.after("up", _PASSED_BYTES, world.relay.kill)
    with pytest.raises(RelayError, match="does not answer"):
        world.publisher.publish(version, world.weights.items())
    world.relay.start()
    with pytest.raises(GoneError, match="404"):
        world.replica.advance(world.worker, version, any_shapes)
    assert first or (world.replica.version == 1 and same(world.replica, old))
    world.weights = _trained(world.weights, 2)
    assert world.publisher.publish(version + 1, world.weights.items()) == [Release(version + 1)]
    assert world.follow(version + 1) == [Release(version + 1)]


@pytest.mark.parametrize("first", [True, False])
def test_a_relay_killed_in_the_middle_of_a_pull(world: _World, first: bool) -> None:
    world.publisher.publish(1, world.weights.items())
    if not first:
        world.follow(1)
    old, world.weights = world.weights, _far(world.weights, 1)
    world.publisher.publish(2, world.weights.items())
    world.wire.after("down", _PASSED_BYTES, world.relay.kill)
    with pytest.raises(RelayError, match="does not answer"):
        world.replica.advance(world.worker, 1 if first else 2, any_shapes)
    assert world.replica.version is None if first else world.replica.version == 1 and same(world.replica, old)
    world.relay.start()
    world.weights = _trained(world.weights, 2)
    assert world.publisher.publish(3, world.weights.items()) == [Release(3)]  # the relay leads to nothing any more
    assert world.follow(3) == [Release(3)]


def test_a_relay_that_was_started_anew_gets_a_whole_version(world: _World) -> None:
    world.publisher.publish(1, world.weights.items())
    world.follow(1)
    world.relay.kill()
    world.relay.start()
    for version, made in ((2, [Release(2)]), (3, [Release(3, 2)])):
        world.weights = _trained(world.weights, version)
        assert world.publisher.publish(version, world.weights.items()) == made
        assert world.follow(version) == made
    assert Replica().advance(world.worker, 3, any_shapes) == [Release(2), Release(3, 2)]


def test_a_relay_that_stands_still_is_waited_for_within_bounds(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publisher.publish(1, world.weights.items())
    world.follow(1)
    monkeypatch.setattr(relay_client, "_SOCKET_BOUND_S", 0.05)
    for client in (world.worker, world.publisher._store):
        client.close()
    world.relay.send(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RelayError, match="does not answer"):
        world.replica.advance(world.worker, 1, any_shapes)
    new = _trained(world.weights, 1)
    with pytest.raises(RelayError, match="does not answer"):
        world.publisher.publish(2, new.items())
    assert time.monotonic() - start < _BOUND_S
    assert world.replica.version == 1 and same(world.replica, world.weights)
    world.relay.send(signal.SIGCONT)
    monkeypatch.setattr(relay_client, "_SOCKET_BOUND_S", 30.0)
    world.weights = _trained(new, 2)
    assert world.publisher.publish(3, world.weights.items()) == [Release(3)]
    world.follow(3)


def test_a_full_relay_refuses_a_version_and_takes_a_later_one() -> None:
    weights, replica = _weights(1 << 20), Replica()
    with Relay(memory_bytes=20 << 20) as relay:
        client, other = RelayClient(relay.url), RelayClient(relay.url)
        publisher = Publisher(client, 3, _BUCKET_BYTES)
        publisher.publish(1, weights.items())
        replica.advance(client, 1, any_shapes)
        other.put_bucket(Release(99), "b", [bytes(11 << 20)])  # of another job
        new = _far(weights, 1)
        with pytest.raises(RelayError, match=r"507.*delete old versions"):
            publisher.publish(2, new.items())
        with pytest.raises(GoneError):
            replica.advance(client, 2, any_shapes)
        assert replica.version == 1 and same(replica, weights)
        other.delete(Release(99))
        new = _trained(new, 2)
        assert publisher.publish(3, new.items()) == [Release(3)]
        replica.advance(client, 3, any_shapes)
        assert replica.version == 3 and same(replica, new)


# ---- damage


class _Damaged(RelayClient):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.damage = Damage()

    def _call(self, *args: object, **options: object) -> bytearray:
        return self.damage.of(super()._call(*args, **options))


_VERSIONS = 6
_WAYS = [(None, 5), (None, 6), (3, 4), (3, 5), (2, 6), (5, 6), (6, 3)]  # (version that the worker has, that it wants)


@pytest.fixture(scope="module")
def history() -> Iterator[tuple[str, dict[int | None, tuple[Replica, Weights]]]]:
    """(address of a relay with versions 1 to 6, of which 1, 4 are whole; replicas at, and the weights of, each)."""
    with Relay() as relay:
        client, weights = RelayClient(relay.url), _weights(300)
        publisher, replica = Publisher(client, 3, 500), Replica()
        kept: dict[int | None, tuple[Replica, Weights]] = {None: (Replica(), {})}
        for version in range(1, _VERSIONS + 1):
            publisher.publish(version, weights.items())
            replica.advance(client, version, any_shapes)
            kept[version] = copy.deepcopy(replica), weights
            weights = _trained(weights, version)
        yield relay.url, kept
        client.close()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(_WAYS), st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_no_damage_makes_a_wrong_version(
    history: tuple[str, dict[int | None, tuple[Replica, Weights]]],
    way: tuple[int | None, int],
    cut: bool,
    place: float,
    bit: int,
) -> None:
    """A bit that flips anywhere in what comes, or an answer that ends early, be it list, manifest or bucket."""
    url, kept = history
    client = _Damaged(url)
    check_damaged_read(client, client.damage, kept, *way, place, bit, cut)
    client.close()


def test_a_manifest_with_any_bit_flipped_is_refused() -> None:
    """Tensors of one shape would be taken for one another where a place changes."""
    pieces = tuple(PieceEntry(f"w{i}", "int8", (64,), whole((64,)), f"b{i}", 64 * i, 64) for i in range(2))
    manifest = Manifest("1", "l", pieces, (BucketEntry("b0", 128), BucketEntry("b1", 128)))
    packed = pack_manifest(manifest)
    assert unpack_manifest(packed) == manifest
    for at in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptError):
            unpack_manifest(damaged)


class _Without(RelayClient):
    """What some releases have is damaged, or gone."""

    def __init__(self, url: str, damaged: set[Release], gone: set[Release]) -> None:
        super().__init__(url)
        self.damaged, self.gone = damaged, gone

    def get_range(self, release: Release, name: str, start: int, end: int) -> bytearray:
        if release in self.gone:
            raise GoneError(f"no such bucket: {name}")
        data = bytearray(super().get_range(release, name, start, end))
        data[-1] ^= release in self.damaged
        return data


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_changes_that_cannot_be_had_are_passed_by_a_whole_version(how: str) -> None:
    weights, replica = _weights(300), Replica()
    with Relay() as relay:
        publisher = Publisher(RelayClient(relay.url), 2)
        client = _Without(relay.url, **{"damaged": set(), "gone": set(), how: {Release(2, 1)}})
        publisher.publish(1, weights.items())
        replica.advance(client, 1, any_shapes)
        publisher.publish(2, _trained(weights, 1).items())
        with pytest.raises(RelayError):
            replica.advance(client, 2, any_shapes)
        assert replica.version in (None, 1)
        weights = _trained(weights, 2)
        assert publisher.publish(3, weights.items()) == [Release(3, 2), Release(3)]
        assert replica.advance(client, 3, any_shapes) == [Release(3)] and same(replica, weights)
        client.close()


# ---- order


def test_versions_in_any_order(history: tuple[str, dict[int | None, tuple[Replica, Weights]]]) -> None:
    url, kept = history
    client = RelayClient(url)
    for order in itertools.permutations(range(2, _VERSIONS)):
        replica = Replica()
        for version in order:
            replica.advance(client, version, any_shapes)
            assert replica.version == version and same(replica, kept[version][1])
    client.close()


def test_a_worker_two_versions_behind() -> None:
    weights, replicas = _weights(300), [Replica(), Replica(), Replica()]
    with Relay() as relay:
        client = RelayClient(relay.url)
        publisher = Publisher(client, 3)
        for version in range(1, 5):
            publisher.publish(version, weights.items())
            if version <= 2:
                for replica in replicas:
                    replica.advance(client, version, any_shapes)
            last, weights = weights, _trained(weights, version)
        assert replicas[0].advance(client, 4, any_shapes) == [Release(3, 2), Release(4, 3)]
        lost = _Without(relay.url, set(), {Release(3, 2)})
        assert replicas[1].advance(lost, 4, any_shapes) == [Release(4)]
        publisher.retire(1)  # 3 is gone, and its number with it
        assert replicas[2].advance(client, 4, any_shapes) == [Release(4)]
        assert all(replica.version == 4 and same(replica, last) for replica in replicas)
        with pytest.raises(GoneError, match="404"):
            replicas[2].advance(client, 3, any_shapes)
        assert replicas[2].version == 4 and same(replicas[2], last)
        for store in (client, lost):
            store.close()
