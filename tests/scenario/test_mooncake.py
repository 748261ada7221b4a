"""Weights through a real Mooncake Store: mooncake_master and segment owners as processes of their own."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.damage import Damage, Weights, any_shapes, check_damaged_read, same
from vllm_coserve.demo.servers import free_port
from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.mooncake import MooncakeStore
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.store import RelayError, Release

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(120)]

_STAGING_BYTES = 8 << 20
_START_BOUND_S = 30
_OWNER_GONE_S = 4  # until the master forgets what an owner had that does not answer; Mooncake's own is 10
_ANSWER_BOUND_S = 30  # of anything that is asked of a store that is broken
_RECOVERY_BOUND_S = 40


class _Cluster:
    """A master and owners of 256 MiB; each can be killed, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self._metrics_port = folder, free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{self._port}"

    def start_master(self) -> None:
        found = importlib.util.find_spec("mooncake")
        inside = Path(found.origin).parent / "mooncake_master" if found and found.origin else Path("/nowhere")
        program = str(inside) if inside.exists() else shutil.which("mooncake_master")
        assert program is not None
        flags = [f"--rpc_port={self._port}", "--rpc_address=127.0.0.1", f"--metrics_port={self._metrics_port}"]
        self._start("master", [program, *flags, f"--client_ttl={_OWNER_GONE_S}"])
        deadline = time.monotonic() + _START_BOUND_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def start_owner(self, name: str) -> None:
        command = [sys.executable, "-m", "vllm_coserve.weights.mooncake_owner"]
        log = self._start(name, [*command, f"--master={self.address}", "--gib=0.25"])
        deadline = time.monotonic() + _START_BOUND_S
        while "lending" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> int:
        """As an operator would; returns the exit code."""
        process = self._processes.pop(name)
        process.terminate()
        return process.wait(_START_BOUND_S)

    def kill_all(self) -> None:
        for name in tuple(self._processes):
            self.kill(name)

    def _start(self, name: str, command: list[str]) -> Path:
        log = self._folder / f"{name}-{len(list(self._folder.iterdir()))}.log"
        with log.open("wb") as out:
            self._processes[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        return log


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_Cluster]:
    """A master with one owner."""
    # Not imported here: what the store sets in the environment must come first.
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"Mooncake cannot be used: {tried.stderr.strip().splitlines()[-1]}")
    cluster = _Cluster(tmp_path)
    try:
        cluster.start_master()
        cluster.start_owner("owner")
        yield cluster
    finally:
        cluster.kill_all()


@pytest.fixture
def stores(cluster: _Cluster) -> Iterator[tuple[MooncakeStore, MooncakeStore]]:
    """A trainer's and a worker's, of one job."""
    pair = tuple(MooncakeStore(f"mooncake://{cluster.address}/job-1", _STAGING_BYTES) for _ in range(2))
    yield pair
    for store in pair:
        store.close()


def _weights(elements: int = 210_000) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {str(i): torch.randn(elements, generator=generator).to(torch.bfloat16) for i in range(5)}


def _trained(weights: Weights, seed: int, density: float = 0.01, far: int = 1) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        out[name] = tensor.clone()
        bits = bits_of(out[name])
        steps = torch.randint(1, far + 1, bits.shape, generator=generator, dtype=bits.dtype)
        bits += torch.where(torch.rand(bits.shape, generator=generator) < density, steps, 0)
    return out


def test_versions_pass_through_a_store(cluster: _Cluster, stores: tuple[MooncakeStore, MooncakeStore]) -> None:
    (store, reader), weights = stores, _weights()
    publisher, replica, late = Publisher(store, 3, 1 << 20), Replica(), Replica()
    for version in range(1, 7):
        made = publisher.publish(version, weights.items())
        publisher.retire(2)
        assert replica.advance(reader, version, any_shapes) == made[:1]
        assert same(replica, weights)
        weights = _trained(weights, version)
    assert late.advance(reader, 6, any_shapes) == [Release(4), Release(5, 4), Release(6, 5)]
    assert reader.releases(1) == [] and reader.releases(9) == []
    with pytest.raises(RelayError, match="404"):
        reader.manifest(Release(1))
    with pytest.raises(RelayError, match="other content"):
        store.put_bucket(Release(6, 5), "manifest", [b"{}"])
    other = MooncakeStore(f"mooncake://{cluster.address}/job-2", _STAGING_BYTES)
    assert other.releases(6) == []
    other.close()
    store.delete(Release(4))
    assert reader.releases(4) == [Release(4, 3)] and not store.holds([Release(4)]) and store.holds([Release(6, 5)])
    assert cluster.stop("owner") == 0


@pytest.mark.parametrize("url", ["mooncake://127.0.0.1/job", "mooncake://127.0.0.1:1", "http://127.0.0.1:1/job"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(RelayError, match="no store's address"):
        MooncakeStore(url)


class _Damaged(MooncakeStore):
    def __init__(self, address: str) -> None:
        super().__init__(address, _STAGING_BYTES)
        self.damage = Damage()

    def _get(self, key: str, nbytes_max: int) -> memoryview:
        return self.damage.of(super()._get(key, nbytes_max))

    def get_range(self, release: Release, name: str, start: int, end: int) -> memoryview:
        return self.damage.of(memoryview(super().get_range(release, name, start, end)))


def test_no_bit_that_flips_makes_a_wrong_version(
    cluster: _Cluster, stores: tuple[MooncakeStore, MooncakeStore]
) -> None:
    publisher, weights = Publisher(stores[0], 3, 500), _weights(300)
    reader, kept = _Damaged(f"mooncake://{cluster.address}/job-1"), {}
    replica = Replica()
    for version in range(1, 5):
        publisher.publish(version, weights.items())
        replica.advance(reader, version, any_shapes)
        kept[version] = copy.deepcopy(replica), weights
        weights = _trained(weights, version)

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([1, 2, 3]), st.sampled_from([2, 3, 4]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
    def check(have: int, wanted: int, place: float, bit: int) -> None:
        check_damaged_read(reader, reader.damage, kept, have, wanted, place, bit)

    check()
    reader.close()


# ---- what dies, stops or is full


class _World:
    """A trainer that goes on publishing, and a worker that goes on following, as their loops do."""

    def __init__(self, stores: tuple[MooncakeStore, MooncakeStore], elements: int = 2 << 20) -> None:
        self.publisher, self.replica = Publisher(stores[0], 100, _STAGING_BYTES), Replica()
        self.stores, self.weights, self.version = stores, _weights(elements), 0
        self.used: Weights = {}

    def publish(self) -> list[Release]:
        """The next version."""
        self.weights, self.version = _trained(self.weights, self.version, 0.9, 9999), self.version + 1
        return self.publisher.publish(self.version, self.weights.items())

    def follow(self) -> None:
        self.replica.advance(self.stores[1], self.version, any_shapes)
        assert self.replica.version == self.version and same(self.replica, self.weights)
        self.used = self.weights

    def fails(self, do: Callable[[], object], match: str) -> None:
        """It does so in time, and the worker's copy is not another version than before."""
        before, start = self.replica.version, time.monotonic()
        with pytest.raises(RelayError, match=match):
            do()
        assert time.monotonic() - start < _ANSWER_BOUND_S
        assert self.replica.version is None or (self.replica.version == before and same(self.replica, self.used))

    def recovers(self, whole: bool = True) -> None:
        """Versions go on to be published, and the worker follows: by a whole one, then by changes again."""
        first, made = [], []
        deadline = time.monotonic() + _RECOVERY_BOUND_S
        while made != [Release(self.version, self.version - 1)]:
            try:
                made = self.publish()
            except RelayError as exc:
                assert time.monotonic() < deadline, exc
                time.sleep(0.2)
                continue
            self._catches_up(deadline)
            first = first or made
        assert first[0].base is None or not whole

    def _catches_up(self, deadline: float) -> None:
        while True:
            try:
                self.follow()
                return
            except RelayError as exc:
                assert time.monotonic() < deadline, exc
                time.sleep(0.2)


@pytest.fixture
def world(stores: tuple[MooncakeStore, MooncakeStore]) -> _World:
    """Two versions are there, and the worker has them."""
    world = _World(stores)
    for _ in range(2):
        world.publish()
        world.follow()
    return world


def test_a_master_that_was_started_anew_gets_a_whole_version(cluster: _Cluster, world: _World) -> None:
    cluster.kill("master")
    world.fails(lambda: world.replica.advance(world.stores[1], world.version, any_shapes), "does not answer")
    world.fails(world.publish, "does not answer")
    cluster.start_master()
    world.fails(lambda: Replica().advance(world.stores[1], 2, any_shapes), "404|master does not")
    world.recovers()


def test_a_master_that_was_started_anew_between_two_versions(cluster: _Cluster, world: _World) -> None:
    cluster.kill("master")
    cluster.start_master()
    world.fails(lambda: Replica().advance(world.stores[1], 2, any_shapes), "404|master does not")
    world.recovers()


def test_a_master_that_stands_still(cluster: _Cluster, world: _World) -> None:
    cluster.send("master", signal.SIGSTOP)
    world.fails(lambda: world.replica.advance(world.stores[1], world.version, any_shapes), "does not answer")
    cluster.send("master", signal.SIGCONT)
    world.recovers(whole=False)


def test_a_master_that_is_not_there() -> None:
    start = time.monotonic()
    with pytest.raises(RelayError, match="does not answer"):
        MooncakeStore(f"mooncake://127.0.0.1:{free_port()}/job-1", _STAGING_BYTES)
    assert time.monotonic() - start < _ANSWER_BOUND_S


@pytest.mark.parametrize("doing", ["put", "get"])
def test_an_owner_that_is_killed_in_the_middle(cluster: _Cluster, world: _World, doing: str) -> None:
    _in_the_middle(cluster, world, doing, lambda: cluster.kill("owner"))
    cluster.start_owner("another")
    world.recovers()


@pytest.mark.parametrize("doing", ["put", "get"])
def test_an_owner_that_stands_still_in_the_middle(cluster: _Cluster, world: _World, doing: str) -> None:
    _in_the_middle(cluster, world, doing, lambda: cluster.send("owner", signal.SIGSTOP))
    cluster.send("owner", signal.SIGCONT)
    world.recovers(whole=doing == "put")  # it may have everything yet


def _in_the_middle(cluster: _Cluster, world: _World, doing: str, do: Callable[[], None]) -> None:
    """Have something happen to the owner while a version is put or got, which fails then."""
    store = world.stores[doing == "get"]
    name = "put_bucket" if doing == "put" else "get_range"
    real, calls = getattr(store, name), []

    def call(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            threading.Timer(0.001, do).start()
        return real(*args)

    setattr(store, name, call)
    if doing == "put":
        world.fails(world.publish, "does not answer|404")
    else:
        world.publish()
        world.fails(lambda: world.replica.advance(store, world.version, any_shapes), "does not answer|404")
    delattr(store, name)


def test_a_full_store_refuses_a_version_and_takes_a_later_one(cluster: _Cluster, world: _World) -> None:
    other = MooncakeStore(f"mooncake://{cluster.address}/job-2", _STAGING_BYTES)
    with pytest.raises(RelayError, match="full"):
        for i in range(60):
            other.put_bucket(Release(7), f"b{i}", [bytes(_STAGING_BYTES)])
    world.fails(world.publish, "full")
    world.fails(lambda: world.replica.advance(world.stores[1], world.version, any_shapes), "404")
    other.delete(Release(7))
    other.close()
    world.recovers()
