"""A network namespace with links to here that can be cut: a partition as the kernel makes it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_BOUND_S = 10.0


class Link:
    """A pair of network devices; cut, packets of both directions are lost and nobody is told."""

    def __init__(self, number: int, holder_pid: int) -> None:
        self.here, self.there = f"10.77.{number}.1", f"10.77.{number}.2"
        self._device, far = f"cs{holder_pid}h{number}", f"cs{holder_pid}t{number}"
        inside = _inside(holder_pid)
        _ip([], "link", "add", self._device, "type", "veth", "peer", "name", far, "netns", str(holder_pid))
        _ip([], "addr", "add", f"{self.here}/30", "dev", self._device)
        _ip([], "link", "set", self._device, "up")
        _ip(inside, "addr", "add", f"{self.there}/30", "dev", far)
        _ip(inside, "link", "set", far, "up")
        self._cut = False

    @property
    def cut(self) -> bool:
        """Whether nothing gets through."""
        return self._cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        _ip([], "link", "set", self._device, "down" if cut else "up")
        self._cut = cut


class Namespace:
    """What runs by `enter` sees only the links."""

    def __init__(self, holder_pid: int, links: int) -> None:
        self.enter = _inside(holder_pid)
        _ip(self.enter, "link", "set", "lo", "up")
        self.links = [Link(n, holder_pid) for n in range(links)]


@contextlib.contextmanager
def namespace(links: int) -> Iterator[Namespace]:
    """A namespace that is gone when the block, or this process, has ended.

    Raises:
        OSError: this user may not make one, or iproute2 and util-linux are not installed.
    """
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        try:
            deadline = time.monotonic() + _BOUND_S
            while _namespace_of(holder.pid) == _namespace_of(os.getpid()):
                if holder.poll() is not None or time.monotonic() > deadline:
                    raise PermissionError("no network namespace can be made here: that needs root")
                time.sleep(0.01)
            yield Namespace(holder.pid, links)
        finally:
            holder.stdin.close()  # its last process gone, the namespace goes with its links


def _inside(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net"]


def _namespace_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""


def _ip(inside: Sequence[str], *words: str) -> None:
    run = subprocess.run([*inside, "ip", *words], capture_output=True, text=True, timeout=_BOUND_S, check=False)
    if run.returncode:
        raise OSError(f"ip {' '.join(words)}: {run.stderr.strip()}")
