"""Handles between processes: real descriptors over a real socket, batches, bounds, and faults of either side."""

import array
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.fake_cuda import FakeCuda
from tests.unit.page_kits import CudaKit
from vllm_coserve.api.errors import ConfigurationError, ContractError
from vllm_coserve.memory import handles
from vllm_coserve.memory.cuda import CudaDriver
from vllm_coserve.memory.cuda_calls import CudaCallError, Device
from vllm_coserve.memory.cuda_pages import SharedPages, import_page, make_pool
from vllm_coserve.memory.handles import BATCH, HandleServer, Offer, fetch

_PAGE = CudaKit.page
_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the server's thread may be closing its end
    assert len(os.listdir("/proc/self/fd")) == before


class Files:
    """A pool whose pages are files with their number in them. The export with number `fail_at` fails."""

    def __init__(self, fail_at=0):
        self.exported, self.fail_at, self.open_most = 0, fail_at, 0

    def export(self, page):
        self.exported += 1
        if self.exported == self.fail_at:
            raise CudaCallError("cuMemExportToShareableHandle", "CUDA_ERROR_UNKNOWN", "scripted")
        fd = os.memfd_create("page")
        os.write(fd, struct.pack("I", page))
        self.open_most = max(self.open_most, len(os.listdir("/proc/self/fd")))
        return fd


def number(fd):
    return struct.unpack("I", os.pread(fd, 4, 0))[0]


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(pages, num_pages, shared=True):
        servers.append(HandleServer(tmp_path / "pages", Offer(shared, num_pages, _PAGE), pages.export))
        return tmp_path / "pages"

    yield start
    for server in servers:
        server.close()
        assert not server._thread.is_alive()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_pages", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH + 5])
def test_all_pages_arrive_in_order_and_few_are_open_at_a_time(serve, num_pages):
    files = Files()
    before = len(os.listdir("/proc/self/fd"))
    path = serve(files, num_pages)
    offer, got = fetch(path, number, pytest.fail, 1)
    assert offer == Offer(True, num_pages, _PAGE) and got == list(range(num_pages))
    assert files.open_most <= before + 2 * BATCH + 10


def test_a_message_holds_no_more_than_the_kernel_passes():
    assert BATCH <= 253


def test_pages_that_cannot_be_shared_are_offered_as_budgets(serve):
    assert fetch(serve(Files(), 9, shared=False), pytest.fail, pytest.fail, 1) == (Offer(False, 9, _PAGE), [])


def test_the_socket_is_for_this_user_only(serve):
    assert serve(Files(), 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("side", ["owner", "caller"])
def test_another_user_is_refused(serve, monkeypatch, side, caplog):
    path, me, real = serve(Files(), 1), threading.current_thread(), handles.peer_uid

    def uid(peer):
        is_caller = threading.current_thread() is me
        return real(peer) + (is_caller == (side == "caller"))

    monkeypatch.setattr(handles, "peer_uid", uid)
    with caplog.at_level(logging.WARNING, "vllm.coserve"), pytest.raises(ContractError):
        fetch(path, pytest.fail, pytest.fail, 1)
    assert side == "caller" or "belongs to user" in caplog.text


def test_nobody_there_ends_after_the_bound(tmp_path):
    start = time.monotonic()
    with pytest.raises(ContractError, match=r"within 0 s"):
        fetch(tmp_path / "pages", pytest.fail, pytest.fail, 0.2)
    assert time.monotonic() - start < 2


def test_the_owner_may_come_later(serve, tmp_path):
    late = threading.Timer(0.2, lambda: serve(Files(), 3))
    late.start()
    assert fetch(tmp_path / "pages", number, pytest.fail, 10)[1] == [0, 1, 2]
    late.join()


def test_a_socket_that_was_left_behind_is_replaced(serve, tmp_path):
    (tmp_path / "pages").touch()
    assert fetch(serve(Files(), 2), number, pytest.fail, 1)[1] == [0, 1]


def test_a_path_that_is_too_long_says_what_to_set(tmp_path):
    path = tmp_path / ("x" * 107)
    for call in (
        lambda: HandleServer(path, Offer(True, 1, _PAGE), pytest.fail),
        lambda: fetch(path, pytest.fail, pytest.fail, 0),
    ):
        with pytest.raises(ConfigurationError, match="TMPDIR"):
            call()


@pytest.mark.parametrize("fail_at", [1, BATCH, BATCH + 1, BATCH + 7])
def test_a_failed_export_drops_what_was_taken_and_the_next_call_gets_all(serve, fail_at):
    path, dropped = serve(Files(fail_at), BATCH + 7), []
    with pytest.raises(ConnectionError, match="see its log"):
        fetch(path, number, dropped.append, 1)
    assert dropped == list(range(BATCH if fail_at > BATCH else 0))
    assert fetch(path, number, pytest.fail, 1)[1] == list(range(BATCH + 7))


@pytest.mark.parametrize("fail_at", [0, 1, BATCH - 1, BATCH, BATCH + 6])
def test_a_failed_import_drops_what_was_taken_and_the_next_call_gets_all(serve, fail_at):
    path, taken, dropped = serve(Files(), BATCH + 7), [], []

    def take(fd):
        if len(taken) == fail_at:
            raise CudaCallError("cuMemImportFromShareableHandle", "CUDA_ERROR_UNKNOWN", "scripted")
        taken.append(number(fd))
        return taken[-1]

    with pytest.raises(CudaCallError, match="scripted"):
        fetch(path, take, dropped.append, 1)
    assert dropped == taken == list(range(fail_at))
    assert fetch(path, number, pytest.fail, 1)[1] == list(range(BATCH + 7))


def test_a_caller_that_dies_does_not_stop_the_server(serve):
    path = serve(Files(), 3 * BATCH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(path))
    assert len(fetch(path, number, pytest.fail, 1)[1]) == 3 * BATCH


def test_a_caller_that_hangs_is_left_after_the_bound(serve, monkeypatch):
    monkeypatch.setattr(handles, "_MESSAGE_BOUND_S", 0.2)
    path = serve(Files(), 3 * BATCH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(path))
        assert peer.recv(100)
        monkeypatch.setattr(handles, "_MESSAGE_BOUND_S", 5.0)
        assert len(fetch(path, number, pytest.fail, 1)[1]) == 3 * BATCH


def test_an_owner_that_hangs_is_left_after_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(handles, "_MESSAGE_BOUND_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
        owner.bind(str(tmp_path / "pages"))
        owner.listen()
        with pytest.raises(TimeoutError):
            fetch(tmp_path / "pages", pytest.fail, pytest.fail, 1)


def _owner_that_says(path, *messages):
    """Accepts one caller and sends it (bytes, how many descriptors)."""
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.bind(str(path))
    owner.listen()

    def run():
        peer, _ = owner.accept()
        with owner, peer:
            for data, count in messages:
                fds = [os.memfd_create("page") for _ in range(count)]
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                peer.sendmsg([data], ancillary)
                for fd in fds:
                    os.close(fd)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


_HELLO = handles._HELLO.pack(b"vcopages", 1, 4, _PAGE)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([(b"nonsense", 0)], ContractError),
        ([(b"vcopageX" + _HELLO[8:], 0)], ContractError),
        ([(_HELLO, 0)], ConnectionError),
        ([(_HELLO, 0), (b"?", 1)], ConnectionError),
        ([(_HELLO, 0), (struct.pack("=II", 0, 3), 2)], ContractError),
        ([(_HELLO, 0), (struct.pack("=II", 0, 0), 0)], ContractError),
        ([(_HELLO, 0), (struct.pack("=II", 2, 2), 2)], ContractError),
        ([(_HELLO, 0), (struct.pack("=II", 0, BATCH + 9), BATCH + 9)], OSError),
    ],
)
def test_an_owner_that_talks_nonsense_is_refused_and_nothing_is_kept(tmp_path, messages, error):
    thread, kept = _owner_that_says(tmp_path / "pages", *messages), []
    with pytest.raises(error):
        fetch(tmp_path / "pages", lambda fd: kept.append(number(fd)), lambda handle: kept.pop(), 1)
    thread.join()
    assert not kept


# ---- with the driver, in two real processes


_CALLER = """
import sys, time
from pathlib import Path
from tests.unit.fake_cuda import FakeCuda
from vllm_coserve.memory.cuda import CudaDriver
from vllm_coserve.memory.cuda_calls import Device
from vllm_coserve.memory.cuda_pages import SharedPages, import_page
from vllm_coserve.memory.handles import fetch
api = FakeCuda()
device = Device(api=api)
offer, got = fetch(Path(sys.argv[1]), lambda fd: import_page(device, fd), device.release, 20)
pages = SharedPages(device, got, offer.page_bytes)
driver = CudaDriver(device, pages, offer.num_pages)
driver.map_run(0, 0, offer.num_pages)
size = offer.page_bytes
found = [api.read(driver.address + page * size, 1)[0] for page in range(offer.num_pages)]
api.write(driver.address + 3 * size, bytes([0x5A]) * size)
print(found, flush=True)
time.sleep(60)
"""


def test_two_processes_see_one_memory_and_death_of_one_leaves_the_other_all(tmp_path):
    num_pages = BATCH + 3
    api = FakeCuda()
    device = Device(api=api)
    pool = make_pool(device, num_pages, _PAGE)
    driver = CudaDriver(device, pool, num_pages)
    driver.map_run(0, 0, num_pages)
    for page in range(num_pages):
        api.write(driver.address + page * _PAGE, bytes([page]) * _PAGE)
    driver.unmap_run(0, num_pages)
    server = HandleServer(tmp_path / "pages", Offer(True, num_pages, _PAGE), pool.export)
    command = [sys.executable, "-c", _CALLER, str(tmp_path / "pages")]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=env)
    try:
        assert caller.stdout.readline().strip() == str(list(range(num_pages)))
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait(20)
        caller.stdout.close()
        server.close()
    driver.map_run(0, 3, 1)
    assert api.read(driver.address, _PAGE) == b"\x5a" * _PAGE
    driver.close()
    pool.close()
    assert api.nothing_left()


@pytest.mark.parametrize("side", ["owner", "caller"])
def test_any_call_that_fails_while_handles_are_passed_leaves_nothing(tmp_path, side):
    num_pages, fail_at = 6, 1
    while True:
        ours, theirs = FakeCuda(), None
        theirs = FakeCuda(ours.board)
        owner, caller = Device(api=ours), Device(api=theirs)
        pool = make_pool(owner, num_pages, _PAGE)
        api = ours if side == "owner" else theirs
        made = len(api.calls)
        api.fail_at = made + fail_at
        server = HandleServer(tmp_path / "pages", Offer(True, num_pages, _PAGE), pool.export)
        got, failed = [], 0
        while not got:
            try:
                _, got = fetch(tmp_path / "pages", lambda fd, d=caller: import_page(d, fd), caller.release, 1)
            except OSError:
                failed += 1
                assert not theirs._handles
        server.close()
        api.fail_at = None
        pages = SharedPages(caller, got, _PAGE)
        pages.close()
        pool.close()
        assert ours.nothing_left() and theirs.nothing_left() and not ours.board.used_bytes
        assert failed <= 1
        if not failed:
            break
        fail_at += 1
    assert fail_at > num_pages
