"""The weight-transfer engine: how many bytes an update takes, and how fast it is made and used.

    python -m tests.bench.weights [--parts bytes,speed,stages,links,pause,exactness]

`bytes`: consecutive bfloat16 versions of a Qwen3 of 108 million parameters, trained by the driver's learner at two
learning rates, in this project's encoding and in those of others. `speed`: dense to sparse and back beside a copy of
the same tensor, all on one thread, in turns. `stages`, `links`: updates from trainers over a relay to workers, see
`transfer`. `pause`: what they cost engines that generate, see `pause`. `exactness`: a thousand versions as changes,
between trainers and engines that are sharded in several ways.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from rl_driver.training.learner import Learner, LearnerConfig
from rl_driver.training.samples import Sample
from tests.bench import pause, results, transfer
from tests.unit import sharded_world
from vllm_coserve import kernels
from vllm_coserve.weights.codec import Kind, apply, bits_of, encode

_RATES = (1e-6, 1e-5)
_WARM_UP_STEPS = 8  # until Adam's averages are no longer those of the first gradients
_SAMPLES, _TOKENS = 4, 96
_SPEED_ELEMENTS = 32 << 20
_DENSITIES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4)


# ---- real changes


def trained_versions(rate: float, versions: int) -> Iterator[dict[str, torch.Tensor]]:
    """Bits of consecutive versions of a model, one optimiser step apart."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "vocab_size": 32_768}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, initializer_range=0.03, tie_word_embeddings=True))
    learner = Learner(model, LearnerConfig(learning_rate=rate))
    rng = random.Random(0)
    for step in range(_WARM_UP_STEPS + versions):
        if step >= _WARM_UP_STEPS:
            yield {name: bits_of(tensor).clone() for name, tensor in learner.weights()}
        texts = [[rng.randrange(shape["vocab_size"]) for _ in range(_TOKENS)] for _ in range(_SAMPLES)]
        outputs = list(range(_TOKENS // 2, _TOKENS))
        blank = [Sample(text, outputs, [0.0] * len(outputs), (0, 0)) for text in texts]
        scored = zip(texts, learner.score(blank), strict=True)
        learner.add([Sample(t, outputs, lp, (0, 0), rng.choice([-1.0, 1.0])) for t, lp in scored])
        learner.step()


def measure_bytes(versions: int) -> dict[str, Any]:
    """Bits per changed element, by encoding."""
    out: dict[str, Any] = {}
    for rate in _RATES:
        sums: dict[str, float] = {}
        elements = changed = 0
        before: dict[str, torch.Tensor] | None = None
        for now in trained_versions(rate, versions):
            for name, new in now.items() if before else ():
                positions, steps = kernels.compact(before[name], new)
                elements, changed = elements + new.numel(), changed + positions.numel()
                if positions.numel():
                    for encoding, nbytes in sizes_of(before[name], new, positions.numpy(), steps.numpy()).items():
                        sums[encoding] = sums.get(encoding, 0.0) + nbytes
            before = now
        bits = {encoding: 8 * nbytes / changed for encoding, nbytes in sums.items()}
        ours = bits["this project"]
        out[f"{rate:g}"] = {
            "elements": elements,
            "density": changed / elements,
            "bits_per_change": bits,
            "of_coo_zstd": ours / bits["COO, zstd-1"],
            "of_gap_value_zstd": ours / bits["gap varint + value, zstd-1"],
            "of_entropy": ours / bits["order-0 entropy"],
        }
        print(rate, out[f"{rate:g}"], flush=True)
    return out


def sizes_of(old: torch.Tensor, new: torch.Tensor, positions: np.ndarray, steps: np.ndarray) -> dict[str, float]:
    """Bytes of one tensor's change in each encoding."""
    values = new.numpy()[positions]
    gaps = np.diff(positions, prepend=-1) - 1
    zigzag = ((steps.astype(np.int64) << 1) ^ (steps.astype(np.int64) >> 63)).astype(np.uint64)
    mask = np.zeros(new.numel(), np.bool_)
    mask[positions] = True
    rival = {
        "COO": positions.astype(np.int32).tobytes() + values.tobytes(),
        "gap varint + value": varints(gaps) + values.tobytes(),
        "gap varint + step varint": varints(gaps) + varints(zigzag),
        "bitmask + step varint": np.packbits(mask).tobytes() + varints(zigzag),
    }
    out: dict[str, float] = {name: float(len(data)) for name, data in rival.items()}
    for name, data in rival.items():
        out[f"{name}, zstd-1"] = float(len(zstandard.ZstdCompressor(level=1).compress(data)))
    out["this project"] = float(sum(map(len, encode(old, new))))
    out["order-0 entropy"] = (entropy(gaps) + entropy(zigzag)) * positions.size / 8
    return out


def varints(numbers: np.ndarray) -> bytes:
    """LEB128, as protocol buffers have it."""
    rest, out = numbers.astype(np.uint64), []
    places = []
    alive = np.arange(rest.size)
    while alive.size:
        more = rest > 0x7F
        out.append(((rest & np.uint64(0x7F)) | (more.astype(np.uint64) << np.uint64(7))).astype(np.uint8))
        places.append(alive)
        alive, rest = alive[more], rest[more] >> np.uint64(7)
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(out)[order].tobytes()


def entropy(symbols: np.ndarray) -> float:
    """Bits a symbol."""
    _, counts = np.unique(symbols, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


# ---- speed


def measure_speed(rounds: int) -> dict[str, Any]:
    """Seconds of each operation as a multiple of a copy's, medians over rounds that go through all of them."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (_SPEED_ELEMENTS,), dtype=torch.int16, generator=generator)
    copy = torch.empty_like(old)
    out: dict[str, Any] = {"elements": _SPEED_ELEMENTS, "densities": {}}
    for density in _DENSITIES:
        chosen = torch.rand(old.shape, generator=generator) < density
        sign = torch.randint(0, 2, old.shape, dtype=torch.int16, generator=generator) * 2 - 1
        new = torch.where(chosen, old + sign, old)
        del chosen, sign
        seconds = _median_s(_ways(old, new, copy), rounds)
        out["densities"][f"{density:g}"] = {
            "copy_gb_per_s": old.nbytes / seconds["copy"] / 1e9,
            "of_copy_speed": {way: seconds["copy"] / s for way, s in seconds.items() if way != "copy"},
            "encoded_bytes": sum(map(len, encode(old, new))),
        }
        print(density, out["densities"][f"{density:g}"], flush=True)
    return out


def _ways(old: torch.Tensor, new: torch.Tensor, copy: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """What is timed: (how often it is done, it)."""
    positions, steps = kernels.compact(old, new)
    bits, back = old.clone(), -steps
    forth, undo = (b"".join(encode(*pair)) for pair in ((old, new), (new, old)))
    dense = bytearray(b"".join(encode(None, new, compress=False)))
    return {
        "copy": (1, lambda: copy.copy_(old)),
        "extract": (1, lambda: kernels.compact(old, new)),
        "encode": (1, lambda: encode(old, new)),
        "scatter": (2, lambda: (kernels.scatter(bits, positions, steps), kernels.scatter(bits, positions, back))),
        "apply": (2, lambda: (apply(bits, forth), apply(bits, undo))),
        "digest": (1, lambda: kernels.digest(old)),
        "encode dense": (1, lambda: encode(None, new, Kind.DENSE, compress=False)),
        "apply dense": (1, lambda: apply(copy, dense)),
    }


def _median_s(ways: dict[str, tuple[int, Callable[[], object]]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first one warms up
        for way, (count, run) in ways.items():
            begun = time.perf_counter()
            run()
            times[way].append((time.perf_counter() - begun) / count)
    return {way: statistics.median(t[1:]) for way, t in times.items()}


# ---- a thousand versions


def measure_exactness(steps: int) -> dict[str, Any]:
    """Versions as changes, one after the other, between layouts of trainers and engines; every bit is compared."""
    for layout, (trainer, serving) in sharded_world.LAYOUTS.items():
        begun = time.perf_counter()
        sharded_world.follow(trainer, serving, steps, every=10)  # raises where a bit is wrong
        print(layout, f"{time.perf_counter() - begun:.0f} s", flush=True)
    return {"steps": steps, "layouts": list(sharded_world.LAYOUTS), "different": 0}


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    text = ""
    if found := result.get("bytes"):
        encodings = list(next(iter(found.values()))["bits_per_change"])
        rows = [[e, *(f"{r['bits_per_change'][e]:.1f}" for r in found.values())] for e in encodings]
        rows.append(["share of elements that changed", *(f"{r['density']:.2%}" for r in found.values())])
        rows.append(["this project, of COO after zstd-1", *(f"{r['of_coo_zstd']:.2f}" for r in found.values())])
        rows.append(["of gap varint + value after zstd-1", *(f"{r['of_gap_value_zstd']:.2f}" for r in found.values())])
        rows.append(["of the order-0 entropy", *(f"{r['of_entropy']:.2f}" for r in found.values())])
        text += "Bits per changed element of consecutive versions (Qwen3, 108 M parameters), by learning rate:\n\n"
        text += results.table(["", *found], rows) + "\n"
    if found := result.get("speed"):
        ways = list(next(iter(found["densities"].values()))["of_copy_speed"])
        rows = [[w, *(f"{r['of_copy_speed'][w]:.2f}" for r in found["densities"].values())] for w in ways]
        rows.append(["copy, GB/s", *(f"{r['copy_gb_per_s']:.1f}" for r in found["densities"].values())])
        text += "Speed as a share of a copy's of the same tensor, one thread, by share of elements that changed:\n\n"
        text += results.table(["", *found["densities"]], rows) + "\n"
    if found := result.get("links"):
        rows = []
        for r in found["rows"]:
            seconds = [f"{r[way]:.2f}" for way in ("dense", "automatic", "of_dense")]
            rows.append([f"{r['gbit_per_s']:g}", f"{r['density']:.1%}", *seconds])
        text += f"Seconds of an update of {found['nbytes'] / 1e6:.0f} MB, put to a relay and read as it comes, sockets "
        text += "paced:\n\n"
        text += results.table(["Gbit/s", "changed", "dense", "automatic", "of dense"], rows) + "\n"
    if found := result.get("stages"):
        text += (
            f"Seconds of an update of {found['nbytes'] / 1e6:.0f} MB from {found['trainers']} trainers to an engine of "
        )
        text += (
            f"{found['workers']} workers, each with a link of its own to the relay (and how many times as fast):\n\n"
        )
        text += results.table(["Gbit/s", *transfer.STAGES], list(transfer.rows_of(found))) + "\n"
    if found := result.get("pause"):
        text += "What an update costs engines that generate, by size of the model (in brackets: without one):\n\n"
        text += results.table(pause.HEADER, pause.rows_of(found)) + "\n"
    if found := result.get("exactness"):
        text += f"{found['steps']} versions one after the other, each rank reading only its parts, every bit compared: "
        text += f"{', '.join(found['layouts'])}: {found['different']} bits wrong.\n\n"
    return text


def main() -> None:
    """Run and write weights.json and weights.md."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default="bytes,speed,stages,links,pause,exactness", help="comma-separated (%(default)s)")
    p.add_argument("--versions", type=int, default=4, help="of each learning rate (%(default)s)")
    p.add_argument("--steps", type=int, default=1000, help="of exactness (%(default)s)")
    p.add_argument("--rounds", type=int, default=7, help="of the timings (%(default)s)")
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    parts = o.parts.split(",")
    result: dict[str, Any] = {}
    if "bytes" in parts:
        result["bytes"] = measure_bytes(o.versions)
    if "speed" in parts:
        result["speed"] = measure_speed(o.rounds)
    if "stages" in parts:
        result["stages"] = transfer.measure_stages(o.rounds)
    if "links" in parts:
        result["links"] = transfer.measure_links(o.rounds)
    if "pause" in parts:
        result["pause"] = pause.measure_pauses(o.rounds)
    if "exactness" in parts:
        result["exactness"] = measure_exactness(o.steps)
    results.write("weights", result, markdown(result), o.out)


if __name__ == "__main__":
    main()
