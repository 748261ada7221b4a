"""The embedded relay over real sockets: releases are whole or not there, damage is seen, interrupted reads go on."""

import http.client
import socket
import threading

import pytest

from vllm_coserve.weights.relay import Relay
from vllm_coserve.weights.relay_client import RelayClient
from vllm_coserve.weights.sharding import Region
from vllm_coserve.weights.store import Arrived, BucketEntry, Contents, Manifest, PieceEntry, RelayError, Release


@pytest.fixture
def relay():
    with Relay(key="k") as running:
        yield running


@pytest.fixture
def client(relay):
    client = RelayClient(relay.url, "k")
    client.url = relay.url
    yield client
    client.close()


def _put(client, release, **buckets):
    for name, data in buckets.items():
        client.put_bucket(release, name, [data[:2], data[2:]])
    entries = tuple(BucketEntry(name, len(data)) for name, data in buckets.items())
    client.put_manifest(release, Manifest(str(release), "l", (), entries))


def test_releases_are_listed_read_and_forgotten(client):
    _put(client, Release(3), a=b"abcd")
    _put(client, Release(4, 3), a=b"xy", b=b"")
    _put(client, Release(4), a=b"abxy")
    assert client.releases(3) == [Release(3)] and client.releases(4) == [Release(4), Release(4, 3)]
    assert client.get_range(Release(4, 3), "a", 0, 2) == b"xy" and client.get_range(Release(4), "a", 1, 3) == b"bx"
    assert client.manifest(Release(4, 3)).release == "4-from-3"
    client.delete(Release(4, 3))
    client.delete(Release(4, 3))
    assert client.releases(4) == [Release(4)]
    with pytest.raises(RelayError, match="404"):
        client.manifest(Release(4, 3))


def test_a_release_is_there_only_with_all_its_buckets(client):
    data, release = b"abcd", Release(1)
    manifest = Manifest("1", "l", (), (BucketEntry("00000", 4),))
    with pytest.raises(RelayError, match="409"):
        client.put_manifest(release, manifest)
    client.put_bucket(release, "00000", [b"abc"])
    with pytest.raises(RelayError, match="409"):
        client.put_manifest(release, manifest)
    with pytest.raises(RelayError, match="409"):
        client.put_bucket(release, "00000", [data])  # immutable
    with pytest.raises(RelayError, match="416"):
        client.get_range(release, "00000", 0, 4)
    with pytest.raises(RelayError, match="404"):
        client.manifest(release)
    with pytest.raises(RelayError, match="409"):
        client.put_manifest(Release(2), manifest)
    assert client.releases(1) == []


def test_what_has_come_of_a_release_is_told_as_it_comes(client):
    release = Release(1)
    piece = PieceEntry("w", "int8", (4,), Region(0, 4, 0, 1), "b0", 0, 4)
    with pytest.raises(RelayError, match="404"):
        client.arrived(release, 0, 0)
    client.put_bucket(release, "b0", [b"abcd"], Contents("l", (piece,)))
    assert client.releases(1) == [] and client.releases(1, begun=True) == [release]
    assert client.arrived(release, 0, 5) == Arrived("l", False, 1, (piece,))
    assert client.get_range(release, piece.bucket, 0, 4) == b"abcd"
    assert client.arrived(release, 1, 0) == Arrived("l", False, 1, ())
    reader, told = RelayClient(client.url, "k"), []
    waiting = threading.Thread(target=lambda: told.append(reader.arrived(release, 1, 20)))
    waiting.start()
    client.put_manifest(release, Manifest("1", "l", (piece,), (BucketEntry("b0", 4),)))
    waiting.join(10)
    assert told == [Arrived("l", True)] and client.releases(1) == [release]
    reader.close()


def test_the_key_is_needed(relay):
    for key in ("", "wrong"):
        with pytest.raises(RelayError, match="401"):
            RelayClient(relay.url, key).releases(1)


def test_a_full_relay_says_so():
    with Relay(memory_bytes=100) as relay:
        client = RelayClient(relay.url)
        client.put_bucket(Release(1), "a", [b"x" * 90])
        with pytest.raises(RelayError, match=r"507.*delete old versions"):
            client.put_bucket(Release(1), "b", [b"x" * 20])
        with pytest.raises(RelayError, match="507"):  # more than sockets hold
            client.put_bucket(Release(1), "c", [bytes(64 << 20)])
        client.delete(Release(1))
        client.put_bucket(Release(2), "b", [b"x" * 20])


def test_bytes_that_are_no_text_are_refused(client):
    """msgspec says so by an error of its own kind for text, another for structure."""
    for data in (b"\xff" * 40, b'"\xb8"'):
        with pytest.raises(RelayError, match="400"):
            client._call("PUT", "/v1/releases/1/manifest", [data])
        client._call = lambda *args, answer=data, **options: bytearray(answer)
        for ask in (client.releases, lambda version: client.arrived(Release(version), 0, 0)):
            with pytest.raises(RelayError, match="cannot be read"):
                ask(1)
        with pytest.raises(RelayError, match="damaged"):
            client.manifest(Release(1))
        del client._call


@pytest.mark.parametrize("url", ["ftp://x", "http://", "127.0.0.1:80", "http://a/b"])
def test_an_address_that_is_none_is_named(url):
    with pytest.raises(RelayError, match="no relay's address"):
        RelayClient(url)


def test_nobody_there_is_an_error_within_bounds():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(RelayError, match="does not answer"):
        RelayClient(f"http://127.0.0.1:{port}").releases(1)


def test_an_interrupted_read_goes_on_where_it_was(relay):
    """Through a relay of connections that breaks each one after some bytes."""
    direct = RelayClient(relay.url, "k")
    data = bytes(range(256)) * 4096
    _put(direct, Release(1), a=data)
    listener, passed = socket.create_server(("127.0.0.1", 0)), []

    def pump():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", direct._port))
            upstream.sendall(client.recv(65536))
            left = 300_000
            while left > 0 and (part := upstream.recv(min(65536, left))):
                left -= len(part)
                client.sendall(part)
            passed.append(left)
            client.close()
            upstream.close()

    threading.Thread(target=pump, daemon=True).start()
    broken = RelayClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "k")
    assert broken.get_range(Release(1), "a", 0, len(data)) == data
    assert len(passed) >= 3
    listener.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/releases/x", 404),
        ("GET", "/v1/releases/3-from-/manifest", 404),
        ("GET", "/v1/releases/1/buckets/../../x", 404),
        ("PUT", "/v1/releases/1", 400),
        ("DELETE", "/v1/releases", 400),
        ("PUT", "/v1/releases/1/manifest", 400),
    ],
)
def test_nonsense_is_answered(relay, method, path, status):
    connection = http.client.HTTPConnection("127.0.0.1", int(relay.url.rpartition(":")[2]), timeout=5)
    connection.request(method, path, b"{}" if method == "PUT" else None, {"Authorization": "Bearer k"})
    assert connection.getresponse().status == status
    connection.close()
