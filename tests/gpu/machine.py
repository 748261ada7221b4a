"""Whether there is a device to test on, and how the checks here write what they found.

    python -m tests.gpu.machine     # says in one line why there is none; exit code 0 when there is one

Imports nothing that a machine without a package registry could lack.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
_PACKAGES = ("torch", "triton", "cuda-bindings", "vllm", "transformers", "kvcached")


def why_not() -> str:
    """Why nothing here can run on this machine; empty when it can. Quick, and makes no CUDA context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    if code := cuda.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit gives {code})"
    count = ctypes.c_int(0)
    if cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "no CUDA device"
    try:
        found = importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        found = False
    return "" if found else "cuda-python (cuda-bindings) is not installed"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this run."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {_output(query) or 'unknown GPU'}",
        "versions": {"python": platform.python_version(), **{p: v for p in _PACKAGES if (v := _version(p))}},
        "commit": commit(),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
    }


def commit() -> str:
    """The commit of this checkout, or what $COSERVE_COMMIT says where it came without its history.

    Results do not make it dirty: those of an earlier call may lie there.
    """
    if said := os.environ.get("COSERVE_COMMIT"):
        return said
    git = ["git", "-C", str(Path(__file__).parents[2])]
    head = _output([*git, "rev-parse", "--short", "HEAD"])
    changed = head and _output([*git, "status", "--porcelain", "-uno", "--", ".", ":!tests/bench/results"])
    return f"{head}-dirty" if changed else head or "unknown"


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def report(
    name: str, header: Sequence[str], rows: Sequence[Sequence[Any]], result: dict[str, Any], out: Path | None
) -> None:
    """Print a Markdown table, and write it with `result` as NAME.md and NAME.json into `out`."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    lines = [list(header), ["---"] * len(header), *[[_cell(c) for c in row] for row in rows]]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    facts = environment()
    foot = f"\nCommit {facts['commit']}, `{facts['command']}`, {facts['machine']}, {facts['versions']}.\n"
    (folder / f"{name}.json").write_text(json.dumps(result | facts, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table + foot)
    print(table + foot, flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    reason = why_not()
    print(reason or "a CUDA device is here")
    sys.exit(bool(reason))
