"""Runs the driver's tests on the device, as a stage of run.sh.

    python -m tests.gpu.driver [--out DIR] [--only EXPRESSION]

A test that is skipped counts as failed: this stage is for a machine that has a device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import report, why_not

_HERE = Path(__file__).parent


class _Outcomes:
    """What became of each test, as pytest tells a plugin."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("::")[2]
        test = self.tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="these tests, as pytest's -k names them, and nothing is written")
    options = parser.parse_args()
    if reason := why_not():
        print(f"driver: not run: {reason}")
        return 1
    outcomes = _Outcomes()
    # Chosen tests run under a tool that slows them down: pytest's bound of each is not for that.
    chosen = ["-k", options.only, "-o", "timeout=0"] if options.only else []
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-rs", *chosen, str(_HERE)], plugins=[outcomes])
    rows = [(name, test["outcome"], test["seconds"]) for name, test in outcomes.tests.items()]
    if not chosen:
        report("gpu_driver", ("test", "outcome", "s"), rows, {"tests": outcomes.tests}, options.out)
    return int(code != 0 or not rows or any(outcome != "passed" for _, outcome, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
