"""A worker's forwarder and the relay's tracker by themselves: what is waited for, what is kept, who reads from whom."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import msgspec
import pytest

from vllm_coserve.weights.peering.forwarder import Forwarder, Frame
from vllm_coserve.weights.peering.messages import (
    RELAY,
    Broadcast,
    DigestAnswer,
    DigestQuery,
    Grid,
    Heard,
    PeerAdvice,
    PeerReport,
    digests,
)
from vllm_coserve.weights.peering.tracker import SILENT_S, Tracker
from vllm_coserve.weights.store import Release

_KEY = "relay-key"
_CHUNK = 4096

# ---- a worker's forwarder


def _grid(data: bytes, release: str = "7", name: str = "b0") -> Grid:
    return Grid(release, name, _CHUNK, digests(data, _CHUNK))


def _put(forwarder: Forwarder, grid: Grid, data: bytes, *indices: int) -> None:
    for index in indices:
        forwarder.put(grid, index, data[grid.start(index) : grid.start(index + 1)])


@pytest.fixture
def forwarder() -> Iterator[Forwarder]:
    running = Forwarder(key=_KEY, memory_bytes=5 * _CHUNK)
    yield running
    running.close()


def test_what_is_on_its_way_is_waited_for_and_what_is_not_is_not(forwarder: Forwarder) -> None:
    data = bytes(3 * _CHUNK)
    grid = _grid(data)
    assert forwarder.find("7", "b0", grid.tag, 0, 0) is Frame.GONE
    forwarder.begin("7")
    assert forwarder.find("7", "b0", grid.tag, 0, 0) is Frame.WAIT
    forwarder.aim(grid, 1)
    _put(forwarder, grid, data, 1)
    found = [forwarder.find("7", "b0", grid.tag, i * _CHUNK, 0) for i in range(4)]
    assert found == [Frame.GONE, data[:_CHUNK], Frame.WAIT, Frame.GONE]
    assert forwarder.find("7", "b0", grid.tag, _CHUNK + 9, 0) == data[: _CHUNK - 9]
    assert forwarder.find("7", "b0", "0" * 32, _CHUNK, 0) is Frame.GONE  # another content under that name
    assert forwarder.find("7", "a", grid.tag, 0, 0) is Frame.GONE and forwarder.find("7", "c", "", 0, 0) is Frame.WAIT
    forwarder.end("7")
    assert forwarder.find("7", "b0", grid.tag, 2 * _CHUNK, 5) is Frame.GONE


def test_memory_is_bounded_by_bytes_and_by_releases(forwarder: Forwarder) -> None:
    data = bytes(8 * _CHUNK)
    forwarder.begin("1")
    _put(forwarder, _grid(data, "1"), data, *range(8))
    assert forwarder.held_bytes == 5 * _CHUNK
    held = [forwarder.have(_grid(data, "1"), i) is not None for i in range(8)]
    assert held == [False] * 3 + [True] * 5
    for release in "2345":
        forwarder.begin(release)
    assert forwarder.held_bytes == 0
    _put(forwarder, _grid(data, "1"), data, 0)
    assert forwarder.held_bytes == 0


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/chunks/7/b0/{tag}/0-10", "", 401),
        ("/v1/chunks/7/b0/{tag}/0-10", "wrong", 401),
        ("/v1/chunks/7/b0/{tag}/10-10", _KEY, 404),
        ("/v1/chunks/7/b0/0-10", _KEY, 404),
        ("/", _KEY, 404),
        ("/v1/chunks/7/b0/{tag}/0-10", _KEY, 200),
    ],
)
def test_the_key_is_needed_and_nonsense_is_refused(forwarder: Forwarder, path: str, key: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(forwarder.url.rpartition(":")[2]), timeout=5)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request("GET", path.format(tag="0" * 32), headers=headers)
    answer = connection.getresponse()
    assert answer.status == status
    answer.read()
    connection.close()


# ---- the relay's part


def _report(worker: str, **more: object) -> PeerReport:
    address = more.pop("address", f"http://127.0.0.1:{9000 + ord(worker[0])}")
    return PeerReport(worker, "7", address, total_bytes=10**6, **more)


def _tracker(uplink: float = 1e6) -> tuple[Tracker, list[float]]:
    now = [0.0]
    return Tracker(Broadcast(uplink), lambda release, name: None, lambda: now[0]), now


def _url(worker: str) -> str:
    return f"http://127.0.0.1:{9000 + ord(worker[0])}"


def test_places_are_given_as_workers_come_and_kept_once_they_read() -> None:
    tracker, _ = _tracker()
    for worker in "cab":
        tracker.report(_report(worker), "127.0.0.1")
    assert tracker.chains("7") == (("a", "b", "c"),)
    advice = tracker.report(_report("c", have_bytes=9), "127.0.0.1")
    assert advice.sources == (_url("b"), _url("a"), RELAY) and advice.floor_bytes_per_s > 0
    tracker.report(_report("A"), "127.0.0.1")
    assert tracker.chains("7") == (("a", "b", "c", "A"),)


def test_who_is_dead_silent_or_corrupt_is_no_source() -> None:
    tracker, now = _tracker()
    for worker in "abcd":
        tracker.report(_report(worker), "127.0.0.1")
    dead = (Heard(_url("b"), "dead"),)
    assert tracker.report(_report("c", have_bytes=9, heard=dead), "127.0.0.1").sources == (_url("a"), RELAY)
    assert tracker.chains("7") == (("a", "c", "d"),)
    tracker.report(_report("b"), "127.0.0.1")  # it lives
    assert tracker.chains("7") == (("a", "c", "d", "b"),)
    tracker.report(_report("c", heard=(Heard(_url("a"), "corrupt"),)), "127.0.0.1")
    tracker.report(_report("a", have_bytes=99), "127.0.0.1")
    assert tracker.chains("7") == (("c", "d", "b", "a"),)
    tracker.report(_report("e"), "127.0.0.1")
    assert tracker.chains("7") == (("c", "d", "b", "a"), ("e",))  # nobody reads from the corrupt one
    now[0] += SILENT_S
    assert tracker.report(_report("d"), "127.0.0.1").sources == (RELAY,)
    assert tracker.chains("7") == (("d",),)


def test_one_that_finds_everybody_corrupt_is_not_believed() -> None:
    tracker, _ = _tracker()
    for worker in "abcd":
        tracker.report(_report(worker), "127.0.0.1")
    for accused in "abc":
        tracker.report(_report("d", heard=(Heard(_url(accused), "corrupt"),)), "127.0.0.1")
    assert [tracker._workers[w].corrupt for w in "abc"] == [True, False, False]


def test_a_slow_forwarder_goes_to_the_end_and_later_stands_there_from_the_start() -> None:
    tracker, _ = _tracker(100e6)
    for worker in "abcd":
        tracker.report(_report(worker), "127.0.0.1")
    tracker.report(_report("b", heard=(Heard(_url("a"), "ok", 40 << 20, 1.0),)), "127.0.0.1")
    for have in (1, 2):
        slow = (Heard(_url("b"), "ok", 4 << 20, 4.0),)
        tracker.report(_report("c", have_bytes=have, heard=slow), "127.0.0.1")
    assert tracker.chains("7") == (("a", "c", "d", "b"),)
    for worker in "abcd":
        tracker.report(msgspec.structs.replace(_report(worker), release="8"), "127.0.0.1")
    assert tracker.chains("8")[0][-1] == "b" or ("b",) in tracker.chains("8")


def test_an_address_is_that_of_who_told_it_last() -> None:
    tracker, _ = _tracker()
    for worker in "abc":
        tracker.report(_report(worker, have_bytes=1), "127.0.0.1")
    tracker.report(_report("d", address=_url("a")), "127.0.0.1")
    assert [tracker._workers[w].address for w in "ad"] == ["", _url("a")]


def test_a_loopback_address_of_another_machine_is_nobodys_source() -> None:
    tracker, _ = _tracker()
    tracker.report(_report("a"), "10.0.0.7")
    tracker.report(_report("b", address="http://10.0.0.8:1"), "10.0.0.8")
    assert tracker.chains("7") == (("b", "a"),)


def test_nonsense_is_answered_and_state_is_bounded() -> None:
    tracker, now = _tracker()
    for body in (b"", b"{}", b'{"worker":"../x","release":"7"}', b'{"worker":"a","release":"7","address":"ftp://x"}'):
        assert tracker.answer("/v1/peers/report", body, "127.0.0.1")[0] == 400
    assert tracker.answer("/v1/peers/x", b"{}", "127.0.0.1")[0] == 404
    for release in range(200):
        tracker.report(PeerReport("a", str(release)), "127.0.0.1")
    assert len(tracker._casts) <= 65
    tracker.forget(Release(199))
    assert tracker.chains("199") == ()
    now[0] += 1e5
    tracker.report(PeerReport("b", "1"), "127.0.0.1")
    assert set(tracker._workers) == {"b"} and len(tracker._casts) == 1


def test_digests_are_of_what_the_relay_has_now() -> None:
    content = {"b0": b"x" * 10_000}
    tracker = Tracker(Broadcast(1e6, _CHUNK), lambda release, name: content.get(name))
    query = DigestQuery("7", ("b0", "b1"))
    answer = tracker.digests_of(query)
    assert isinstance(answer, DigestAnswer) and set(answer.buckets) == {"b0"}
    grid = Grid("7", "b0", answer.chunk_bytes, answer.buckets["b0"])
    assert grid.count == 3 and grid.holds(2, b"x" * 1808) and not grid.holds(2, b"x" * 1807)
    content["b0"] = b"y" * 10_000
    assert Grid("7", "b0", _CHUNK, tracker.digests_of(query).buckets["b0"]).holds(0, b"y" * _CHUNK)


def test_advice_is_only_followed_where_it_makes_sense() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"sources":["file:///etc/passwd"]}', type=PeerAdvice)
