"""compute-sanitizer's memcheck over the driver's tests and the kernels' checks.

    python -m tests.gpu.memcheck [--out DIR] [--parts driver,kernels]

Without the tool nothing is checked, and that is no pass. Tests that touch what is not theirs, to see what CUDA says,
are left out, and so are errors that an API call returns: the tests provoke and look at them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.results import earlier
from tests.gpu import beds
from tests.gpu.machine import commit, report, why_not

_PROVOKES = "access_to_a_page_that_was_taken"
_FOUND = 86  # the tool's exit code when it found errors
_CHECK = [
    *("--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no"),
    *("--error-exitcode", str(_FOUND)),
]
_PARTS = {
    "driver": ["-m", "tests.gpu.driver", "--only", f"not {_PROVOKES}"],
    "kernels": ["-m", "tests.gpu.kernels", "--no-speeds"],
}
_BOUND_S = 540
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def tool() -> str:
    """Where compute-sanitizer is; empty when it is nowhere."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or ""


def check(sanitizer: str, part: str) -> dict[str, Any]:
    """Run one part under the tool: errors by its summaries (one a process), None where it made none."""
    start = time.monotonic()
    env = dict(os.environ)
    if part == "kernels":  # torch takes large blocks of the device, in which nobody sees what runs out of a tensor
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [sanitizer, *_CHECK, sys.executable, *_PARTS[part]]
    log = beds.WORK / f"memcheck-{part}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = str(process.wait(_BOUND_S))
        except subprocess.TimeoutExpired:
            code = f"no end after {_BOUND_S} s"
        finally:  # also what it checks, which is a process of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    errors = [int(n) for n in _SUMMARY.findall(said)]
    return {
        "passed": code == "0" and bool(errors) and not sum(errors),
        "exit": code,
        "errors": sum(errors) if errors else None,
        "seconds": time.monotonic() - start,
        "end": said.splitlines()[-40:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=",".join(_PARTS))
    o = parser.parse_args()
    if reason := why_not() or ("" if (sanitizer := tool()) else "no compute-sanitizer"):
        print(f"memcheck: not run: {reason}")
        return 1
    found: dict[str, Any] = earlier("gpu_memcheck", o.out, commit(), {}).get("parts", {})
    parts = o.parts.split(",")
    for part in parts:
        found[part] = check(sanitizer, part)
        rows = [
            (p, "passed" if f["passed"] else "failed", f["errors"], f["exit"], f["seconds"]) for p, f in found.items()
        ]
        header = ("part", "outcome", "errors", "exit code", "s")
        report("gpu_memcheck", header, rows, {"options": {}, "parts": found}, o.out)
    for part in parts:
        if not found[part]["passed"]:
            print(f"{part}:", *found[part]["end"], sep="\n")
    return int(not all(found[part]["passed"] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
