"""Weights through a real Mooncake Store: mooncake_master and segment owners as processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_coserve.demo.servers import free_port
from vllm_coserve.weights.codec import bits_of
from vllm_coserve.weights.mooncake import MooncakeStore
from vllm_coserve.weights.publisher import Publisher
from vllm_coserve.weights.replica import Replica
from vllm_coserve.weights.store import RelayError, Release

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(120)]


def _master_program() -> str | None:
    found = importlib.util.find_spec("mooncake")
    inside = Path(found.origin).parent / "mooncake_master" if found and found.origin else Path("/nowhere")
    return str(inside) if inside.exists() else shutil.which("mooncake_master")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a master with one owner of 256 MiB."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as exc:
        pytest.skip(f"Mooncake cannot be used: {exc}")
    program = _master_program()
    assert program is not None
    port, metrics = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        _start(stack, [program, f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"], tmp_path)
        address = f"127.0.0.1:{port}"
        time.sleep(1)
        owner = [sys.executable, "-m", "vllm_coserve.weights.mooncake_owner", f"--master={address}", "--gib=0.25"]
        log = _start(stack, owner, tmp_path)
        deadline = time.monotonic() + 30
        while "lending" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address


def _start(stack: contextlib.ExitStack, command: list[str], folder: Path) -> Path:
    log = folder / f"{Path(command[0]).name}-{len(list(folder.iterdir()))}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return log


def _trained(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        out[name] = tensor.clone()
        bits = bits_of(out[name])
        bits += (torch.rand(bits.shape, generator=generator) < 0.01).to(bits.dtype)
    return out


def test_versions_pass_through_a_store(master: str) -> None:
    store, reader = (MooncakeStore(f"mooncake://{master}/job-1", 8 << 20) for _ in range(2))
    torch.manual_seed(0)
    weights = {str(i): torch.randn(300, 700).to(torch.bfloat16) for i in range(5)}
    publisher, replica, late = Publisher(store, 3, 1 << 20), Replica(), Replica()
    for version in range(1, 7):
        made = publisher.publish(version, weights.items())
        publisher.retire(2)
        assert replica.advance(reader, version, lambda shapes: None) == made[:1]
        assert all(torch.equal(bits_of(replica.tensors[n]), bits_of(weights[n])) for n in weights)
        weights = _trained(weights, version)
    assert late.advance(reader, 6, lambda shapes: None) == [Release(4), Release(5, 4), Release(6, 5)]
    assert reader.releases(1) == [] and reader.releases(9) == []
    with pytest.raises(RelayError, match="404"):
        reader.manifest(Release(1))
    with pytest.raises(RelayError, match="other content"):
        store.put_bucket(Release(6, 5), "manifest", [b"{}"])
    with pytest.raises(RelayError, match="full"):
        for i in range(60):
            store.put_bucket(Release(7), f"b{i}", [bytes(8 << 20)])
    other = MooncakeStore(f"mooncake://{master}/job-2", 8 << 20)
    assert other.releases(6) == []
    for s in (store, reader, other):
        s.close()


@pytest.mark.parametrize("url", ["mooncake://127.0.0.1/job", "mooncake://127.0.0.1:1", "http://127.0.0.1:1/job"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(RelayError, match="no store's address"):
        MooncakeStore(url)
