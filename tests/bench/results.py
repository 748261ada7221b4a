"""How benchmarks write what they found: JSON for tools and a Markdown table for people, with what it depends on."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
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


def plain(options: Namespace, *without: str) -> dict[str, Any]:
    """Options as JSON has them, files by their names: where they lie says nothing about a result."""
    return {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items() if k not in without}


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


def write(
    name: str,
    result: dict[str, Any],
    markdown: str,
    out: Path | None,
    facts: Mapping[str, Any] | None = None,
    say: bool = True,
) -> None:
    """Write NAME.json and NAME.md into `out` (default: tests/bench/results), whole or not at all; print the Markdown.

    `facts`: machine, versions, commit and command, where they are not those of `environment`.
    """
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    result = _finite(result | dict(facts or environment()))
    foot = f"\nCommit {result['commit']}, `{result['command']}`, {result['machine']}, {result['versions']}.\n"
    _replace(folder / f"{name}.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    _replace(folder / f"{name}.md", markdown + foot)
    if say:
        print(markdown + foot, flush=True)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def earlier(name: str, out: Path | None, commit: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run wrote as NAME.json, of the same commit and with the same of these options; {} where none did.

    A result that does not fit is kept as NAME.before.json, since another is about to take its place.
    """
    path = (out or RESULTS) / f"{name}.json"
    try:
        found = json.loads(path.read_text())
        theirs = {"commit": found["commit"], **found["options"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as exc:
        theirs = {"commit": f"unknown: {exc}"}
    ours = {"commit": commit, **options}
    other = [f"{k} was {theirs.get(k)}, is {v}" for k, v in ours.items() if theirs.get(k) != v]
    if not other:
        return found
    aside = path.with_name(f"{name}.before.json")
    path.replace(aside)
    print(f"{name}: begun anew, the earlier result is in {aside.name}: {'; '.join(other)}", flush=True)
    return {}
