"""Passing handles to physical pages from one process to another, as file descriptors over a Unix socket.

The owner of the pool answers whoever connects and is of its own user (SO_PEERCRED). It first says what the pool is.
For pages that can be shared it then sends a descriptor of each, in messages that the other side confirms one by one, so
that neither has many open at a time. Every wait of either side is bounded, but for the owner's wait for a caller.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_coserve.api.errors import ConfigurationError, ContractError

logger = logging.getLogger("vllm.coserve")

Handle = TypeVar("Handle")

# The kernel passes at most 253 descriptors with a message. Fewer are well under the 1,024 files that a process may have
# open on many systems, of which vLLM has a few hundred.
BATCH = 128
_MESSAGE_BOUND_S = 5.0
_RETRY_S = 0.05
_HELLO = struct.Struct("=8sIIQ")  # magic, whether pages are shared, pages, bytes of a page
_MAGIC = b"vcopages"
_RUN = struct.Struct("=II")  # first page, how many; as many descriptors come with it
_FAILED = 0xFFFFFFFF
_CONFIRMED = b"+"
_FD_BYTES = array.array("i").itemsize
_PEER = struct.Struct("=3i")  # pid, uid, gid
_PATH_MAX_BYTES = 107


@dataclass(frozen=True, slots=True)
class Offer:
    """What the owner of a pool says of it: whether its pages can be shared, how many there are, and their size."""

    shared: bool
    num_pages: int
    page_bytes: int


class HandleServer:
    """Answers on a thread of its own until it is closed. One caller at a time."""

    def __init__(self, path: Path, offer: Offer, export: Callable[[int], int]) -> None:
        """Listen at `path`, which only this user can open.

        Args:
            path: where the socket is; a file that is there is replaced.
            offer: what the pool is.
            export: gives a descriptor of a page, which is closed here. Called by the thread, if pages are shared.

        Raises:
            ConfigurationError: the path is too long for a socket.
        """
        check_path(path)
        self._path, self._offer, self._export = path, offer, export
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="coserve-handles", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Handles that were given stay valid."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept
        self._thread.join(2 * _MESSAGE_BOUND_S)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _run(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError as exc:
                if self._closing:
                    return
                logger.warning("coserve: nobody can be given pages for a moment: %s", exc)  # too many open files
                time.sleep(_RETRY_S)
                continue
            with peer:
                try:
                    peer.settimeout(_MESSAGE_BOUND_S)
                    self._answer(peer)
                except OSError as exc:  # recovery: the other side asks again, or ends
                    logger.warning("coserve: a process that asked for the pool's pages did not get them: %s", exc)
                    with contextlib.suppress(OSError):
                        peer.send(_RUN.pack(_FAILED, 0))

    def _answer(self, peer: socket.socket) -> None:
        uid = peer_uid(peer)
        if uid != os.geteuid():
            raise PermissionError(f"it belongs to user {uid}, this one to user {os.geteuid()}")
        offer = self._offer
        peer.send(_HELLO.pack(_MAGIC, offer.shared, offer.num_pages, offer.page_bytes))
        if not offer.shared:
            return
        for first in range(0, offer.num_pages, BATCH):
            count = min(BATCH, offer.num_pages - first)
            fds: list[int] = []
            try:
                for page in range(first, first + count):
                    fds.append(self._export(page))
                socket.send_fds(peer, [_RUN.pack(first, count)], fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if peer.recv(1) != _CONFIRMED:
                raise ConnectionError("it went away")


def fetch(
    path: Path, take: Callable[[int], Handle], drop: Callable[[Handle], Any], wait_s: float
) -> tuple[Offer, list[Handle]]:
    """Get what the owner of a pool offers at `path`.

    Args:
        path: the owner's socket; it may come to be there only later.
        take: makes a handle of a descriptor, which is closed here.
        drop: gives a handle back, if not all can be had.
        wait_s: how long to wait for the owner to be there. Each of its messages may take some seconds more.

    Returns:
        the offer, and a handle for each page, none if they are not shared.

    Raises:
        ContractError: nobody answered in time, the owner is another user's, or what it says makes no sense.
        OSError: a descriptor could not be passed or taken; nothing is kept.
    """
    check_path(path)
    with _connected(path, wait_s) as peer:
        if (uid := peer_uid(peer)) != os.geteuid():
            raise ContractError(f"the process that offers pages at {path} is user {uid}'s, not ours")
        offer = _read_offer(peer)
        handles: list[Handle] = []
        try:
            while offer.shared and len(handles) < offer.num_pages:
                _take_run(peer, len(handles), handles, take)
                peer.send(_CONFIRMED)
        except BaseException:
            for handle in handles:
                with contextlib.suppress(OSError):
                    drop(handle)
            raise
    return offer, handles


def _connected(path: Path, wait_s: float) -> socket.socket:
    deadline = time.monotonic() + wait_s
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_MESSAGE_BOUND_S)
        try:
            peer.connect(str(path))
            return peer
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as exc:
            peer.close()
            if time.monotonic() >= deadline:
                raise ContractError(f"nobody offered the pool's pages at {path} within {wait_s:.0f} s") from exc
        except BaseException:
            peer.close()
            raise
        time.sleep(_RETRY_S)


def _read_offer(peer: socket.socket) -> Offer:
    hello = peer.recv(_HELLO.size)
    if len(hello) != _HELLO.size or not hello.startswith(_MAGIC):
        raise ContractError("the owner of the pool is not of this version of vllm-coserve, or refused us: see its log")
    _, shared, num_pages, page_bytes = _HELLO.unpack(hello)
    return Offer(bool(shared), num_pages, page_bytes)


def _take_run(peer: socket.socket, first: int, handles: list[Handle], take: Callable[[int], Handle]) -> None:
    data, ancillary, flags, _ = peer.recvmsg(_RUN.size, socket.CMSG_SPACE(BATCH * _FD_BYTES), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError("not all pages could be passed: this process has too many open files, raise `ulimit -n`")
        if len(data) != _RUN.size or _RUN.unpack(data)[0] == _FAILED:
            raise ConnectionError("the owner of the pool could not pass its pages: see its log")
        if _RUN.unpack(data) != (first, len(fds)) or not fds:
            raise ContractError(f"the owner of the pool sent pages {_RUN.unpack(data)} in place of those from {first}")
        for fd in fds:
            handles.append(take(fd))
    finally:
        for fd in fds:
            os.close(fd)


def peer_uid(peer: socket.socket) -> int:
    """The user of the process at the other end, as it was when it connected or listened."""
    return _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]


def check_path(path: Path) -> None:
    """Raises ConfigurationError when a socket cannot have this path."""
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise ConfigurationError(f"{path} is too long for a socket: set TMPDIR to a shorter folder")
