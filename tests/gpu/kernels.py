"""The Triton kernels on the device: right on bits of all kinds, and how fast beside a copy of the same tensor.

    python -m tests.gpu.kernels [--out DIR] [--density 0.01] [--no-speeds]

Speeds are over the shapes of an 8B model's tensors in bf16. `compact` and `digest` must read all of it, `scatter` only
what changed. GB/s are bytes that have to be read or written at least, over the median time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.machine import report, why_not

if TYPE_CHECKING:
    from torch import Tensor

# Qwen3-8B: hidden 4096, intermediate 12288, 32 heads and 8 KV heads of 128, vocabulary 151936.
_SHAPES = {
    "norm": (4096,),
    "k_proj": (1024, 4096),
    "q_proj": (4096, 4096),
    "gate_up_proj": (24576, 4096),
    "down_proj": (4096, 12288),
    "embed_tokens": (151936, 4096),
}
_SIZES = (0, 1, 3, 4095, 4096, 4097, 1_000_003)
_DENSITIES = (0.0, 0.01, 0.3, 1.0)
_REPEATS = 15


def _random(size: int, dtype: Any, seed: int) -> Tensor:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator, device="cuda")
    return raw.view(dtype)


def _changed(old: Tensor, density: float, seed: int) -> Tensor:
    """`old` with other bits at about `density` of its elements, in place of a training step's change."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    chosen = torch.rand(old.numel(), device="cuda", generator=generator) < density
    return torch.where(chosen, old ^ 1, old)


def check() -> list[str]:
    """Compare with the reference, on the device and on the CPU; returns what is wrong."""
    import torch

    from vllm_coserve import kernels
    from vllm_coserve.kernels import cpu, reference

    wrong = []
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        for size in _SIZES:
            old = _random(size, dtype, 1)
            if kernels.digest(old) != cpu.digest(old.cpu()) or kernels.digest(old) != reference.digest(old):
                wrong.append(f"digest of {size} {dtype}")
            for seed, density in enumerate(_DENSITIES):
                new = _changed(old, density, seed)
                positions, steps = kernels.compact(old, new)
                expected = reference.compact(old, new)
                if not (torch.equal(positions, expected[0]) and torch.equal(steps, expected[1])):
                    wrong.append(f"compact of {size} {dtype} at density {density}")
                bits = old.clone()
                kernels.scatter(bits, *expected)
                if not torch.equal(bits, new):
                    wrong.append(f"scatter into {size} {dtype} at density {density}")
    return wrong


def _median_ms(call: Callable[[], Any]) -> float:
    import torch

    times = []
    for i in range(_REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def speeds(density: float) -> dict[str, dict[str, float]]:
    """Per shape: milliseconds and GB/s of each kernel and of a device copy."""
    import torch

    from vllm_coserve import kernels

    out = {}
    for name, shape in _SHAPES.items():
        size = 1
        for n in shape:
            size *= n
        old = _random(size, torch.int16, 1)
        new = _changed(old, density, 2)
        target = torch.empty_like(old)
        positions, steps = kernels.compact(old, new)
        nbytes, change_bytes = 2 * size, positions.numel() * (4 + 2)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "copy": (lambda a=old, b=target: b.copy_(a), 2 * nbytes),
            "compact": (lambda a=old, b=new: kernels.compact(a, b), 2 * nbytes + change_bytes),
            "scatter": (
                lambda b=target, p=positions, s=steps: kernels.scatter(b, p, s),
                change_bytes + 2 * len(steps) * 2,
            ),
            "digest": (lambda a=old: kernels.digest(a), nbytes),
        }
        row: dict[str, float] = {"elements": size, "changed": positions.numel()}
        for kernel, (call, moved) in calls.items():
            ms = _median_ms(call)
            row |= {f"{kernel}_ms": ms, f"{kernel}_gb_per_s": moved / ms / 1e6}
        for kernel in ("compact", "scatter", "digest"):
            row[f"{kernel}_over_copy"] = row[f"{kernel}_ms"] / row["copy_ms"]
        out[name] = row
        del old, new, target, positions, steps
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--no-speeds", action="store_true", help="check only, and write nothing")
    args = parser.parse_args()
    if reason := why_not():
        print(f"kernels: not run: {reason}")
        return 1
    wrong = check()
    for line in wrong:
        print(f"wrong: {line}")
    if args.no_speeds:
        return int(bool(wrong))
    found = speeds(args.density)
    header = ("tensor", "elements", "copy ms", "copy GB/s")
    header += tuple(f"{k} {what}" for k in ("compact", "scatter", "digest") for what in ("ms", "GB/s", "over copy"))
    rows = []
    for name, row in found.items():
        cells = [name, row["elements"], row["copy_ms"], row["copy_gb_per_s"]]
        for kernel in ("compact", "scatter", "digest"):
            cells += [row[f"{kernel}_{what}"] for what in ("ms", "gb_per_s", "over_copy")]
        rows.append(cells)
    report("gpu_kernels", header, rows, {"density": args.density, "wrong": wrong, "speeds": found}, args.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
