"""The embedded relay over real sockets: versions are whole or not there, damage is seen, interrupted reads go on."""

import hashlib
import http.client
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.weights.relay import Relay, RelayClient
from vllm_coserve.weights.snapshot import publish, pull
from vllm_coserve.weights.store import BucketEntry, CorruptError, Manifest, RelayError, TensorEntry


@pytest.fixture
def relay():
    with Relay(key="k") as running:
        yield running


@pytest.fixture
def client(relay):
    client = RelayClient(relay.url, "k")
    yield client
    client.close()


def _tensors(seed=0):
    torch.manual_seed(seed)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40]).to(torch.bfloat16)
    return {
        "a": torch.randn(7, 5).to(torch.bfloat16),
        "b": torch.randn(3),
        "odd": odd,
        "empty": torch.empty(0, 4),
        "one": torch.tensor(3, dtype=torch.int64),
        "bytes": torch.arange(33, dtype=torch.uint8),
    }


def _same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes(_bits(a)) == bytes(_bits(b))


def _bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_a_version_comes_as_it_was_bit_for_bit(client, bucket_bytes):
    tensors = _tensors()
    publish(client, 3, tensors.items(), bucket_bytes)
    got = dict(pull(client, 3))
    assert got.keys() == tensors.keys() and all(_same(got[n], tensors[n]) for n in tensors)
    assert client.versions() == [3]
    client.delete(3)
    client.delete(3)
    assert client.versions() == []
    with pytest.raises(RelayError, match="404"):
        client.manifest(3)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=0, max_size=8), st.integers(1, 100))
def test_any_sizes_and_buckets(sizes, bucket_bytes):
    with Relay() as relay:
        client = RelayClient(relay.url)
        tensors = {str(i): torch.arange(n, dtype=torch.float32) for i, n in enumerate(sizes)}
        publish(client, 0, tensors.items(), bucket_bytes)
        got = dict(pull(client, 0))
        assert got.keys() == tensors.keys() and all(torch.equal(got[n], tensors[n]) for n in tensors)
        client.close()


def test_a_version_is_there_only_with_all_its_buckets(client):
    data = b"abcd"
    entry = BucketEntry("00000", 4, hashlib.sha256(data).hexdigest())
    manifest = Manifest(1, (TensorEntry("x", "uint8", (4,), "00000", 0, 4),), (entry,))
    with pytest.raises(RelayError, match="409"):
        client.put_manifest(manifest)
    client.put_bucket(1, "00000", b"abcX")
    with pytest.raises(RelayError, match="409"):
        client.put_manifest(manifest)
    with pytest.raises(RelayError, match="409"):
        client.put_bucket(1, "00000", data)  # immutable
    with pytest.raises(RelayError, match="404"):
        client.get_range(1, "00000", 0, 4)
    assert client.versions() == []


def test_what_does_not_fit_its_manifest_is_refused(client):
    class Lying(RelayClient):
        change = None

        def get_range(self, version, name, start, end):
            data = super().get_range(version, name, start, end)
            return bytes([data[0] ^ 1]) + data[1:]

    publish(client, 5, _tensors().items())
    liar = Lying(f"http://127.0.0.1:{client._port}", "k")
    with pytest.raises(CorruptError, match="damaged"):
        dict(pull(liar, 5))
    liar.close()


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("x", "uint8", (5,), "00000", 0, 5),
        TensorEntry("x", "uint8", (2,), "00000", 0, 4),
        TensorEntry("x", "nonsense", (4,), "00000", 0, 4),
        TensorEntry("x", "uint8", (4,), "00000", 16, 4),
        TensorEntry("x", "uint8", (4,), "00007", 0, 4),
    ],
)
def test_manifests_that_make_no_sense_are_refused(client, entry):
    data = b"abcd"
    client.put_bucket(2, "00000", data)
    client.put_manifest(Manifest(2, (entry,), (BucketEntry("00000", 4, hashlib.sha256(data).hexdigest()),)))
    with pytest.raises(CorruptError):
        dict(pull(client, 2))


def test_the_key_is_needed(relay):
    for key in ("", "wrong"):
        with pytest.raises(RelayError, match="401"):
            RelayClient(relay.url, key).versions()


def test_a_full_relay_says_so():
    with Relay(memory_bytes=100) as relay:
        client = RelayClient(relay.url)
        client.put_bucket(1, "a", b"x" * 90)
        with pytest.raises(RelayError, match=r"507.*delete old versions"):
            client.put_bucket(1, "b", b"x" * 20)
        client.delete(1)
        client.put_bucket(2, "b", b"x" * 20)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "127.0.0.1:80", "http://a/b"])
def test_an_address_that_is_none_is_named(url):
    with pytest.raises(RelayError, match="no relay's address"):
        RelayClient(url)


def test_nobody_there_is_an_error_within_bounds():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(RelayError, match="does not answer"):
        RelayClient(f"http://127.0.0.1:{port}").versions()


def test_an_interrupted_read_goes_on_where_it_was(relay):
    """Through a relay of connections that breaks each one after some bytes."""
    direct = RelayClient(relay.url, "k")
    data = bytes(range(256)) * 4096
    publish(direct, 1, [("x", torch.frombuffer(bytearray(data), dtype=torch.uint8))])
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
    assert broken.get_range(1, "00000", 0, len(data)) == data
    assert len(passed) >= 3
    listener.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/versions/x", 404),
        ("GET", "/v1/versions/1/buckets/../../x", 404),
        ("PUT", "/v1/versions/1", 400),
        ("DELETE", "/v1/versions", 400),
        ("PUT", "/v1/versions/1/manifest", 400),
    ],
)
def test_nonsense_is_answered(relay, method, path, status):
    connection = http.client.HTTPConnection("127.0.0.1", int(relay.url.rpartition(":")[2]), timeout=5)
    connection.request(method, path, b"{}" if method == "PUT" else None, {"Authorization": "Bearer k"})
    assert connection.getresponse().status == status
    connection.close()
