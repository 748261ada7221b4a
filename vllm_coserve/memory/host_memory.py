"""Memory of the host: what a process has, and what it can have without anything being swapped or killed for it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path


def spare_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine and every limit of this process's control groups (cgroup v2) leave."""
    (available,) = [
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    return min([available, *_left_by_limits(proc, cgroups)])


def _left_by_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    own = [line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")]
    for path in own:
        folder = cgroups / path.strip("/")
        while folder.is_relative_to(cgroups):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit, and "max" is none
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limit - used + sum(int(stat[f"{kind}active_file"]) for kind in ("", "in"))  # the page cache goes
            folder = folder.parent


def resident_bytes() -> int:
    """Memory of this process that is nobody else's too, as far as it is resident."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
