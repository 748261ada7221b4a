"""How benchmarks write what they found: JSON for tools and a Markdown table for people, with what it depends on."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_coserve.demo.run import cpu_name, versions

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this run."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    module = Path(sys.argv[0]).resolve().relative_to(Path(__file__).parents[2]).with_suffix("")
    return {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {cpu_name()}",
        "versions": versions(),
        "commit": git.stdout.strip() or "unknown",
        "command": " ".join(["python -m", ".".join(module.parts), *sys.argv[1:]]),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(name: str, result: dict[str, Any], markdown: str, out: Path | None) -> None:
    """Write NAME.json and NAME.md into `out` (default: tests/bench/results) and print the Markdown."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    result = _finite(result | environment())
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    foot = f"\nCommit {result['commit']}, `{result['command']}`, {result['machine']}, {result['versions']}.\n"
    (folder / f"{name}.md").write_text(markdown + foot)
    print(markdown + foot, flush=True)
