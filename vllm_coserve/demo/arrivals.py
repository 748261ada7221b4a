"""When serving requests arrive and how large they are: a bursty generator, or a trace in the Azure CSV format."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vllm_coserve.api.errors import ConfigurationError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One serving request: seconds after the start of the phase, prompt and output tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made to fit a tiny model; stated in the report."""

    prompt: float = 0.12
    output: float = 0.10
    prompt_max: int = 384
    output_max: int = 48
    output_min: int = 4


def bursty(seconds: float, rate_per_s: float, seed: int = 0) -> list[Arrival]:
    """Markov-modulated Poisson arrivals: calm periods and bursts of 3.5 times their rate, lognormal lengths.

    Args:
        seconds: length of the phase.
        rate_per_s: mean rate over calm and burst.
    """
    rng = random.Random(seed)
    calm_s, burst_s, factor = 6.0, 1.5, 3.5
    calm_rate = rate_per_s * (calm_s + burst_s) / (calm_s + factor * burst_s)
    out: list[Arrival] = []
    at, burst, until = 0.0, False, rng.expovariate(1 / calm_s)
    while at < seconds:
        at += rng.expovariate(calm_rate * (factor if burst else 1.0))
        while at > until:
            burst = not burst
            until += rng.expovariate(1 / (burst_s if burst else calm_s))
        prompt = int(min(384, max(16, rng.lognormvariate(4.5, 0.7))))
        output = int(min(48, max(4, rng.lognormvariate(2.9, 0.6))))
        if at < seconds:
            out.append(Arrival(at, prompt, output))
    return out


def from_azure_csv(path: Path, seconds: float, rate_per_s: float, scale: Scale) -> tuple[list[Arrival], float]:
    """Requests of a trace file from its start, in its own rhythm, stretched in time to the mean rate asked for.

    Returns:
        (arrivals, factor by which time was stretched).

    Raises:
        ConfigurationError: the file is missing or not in that format.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        with path.open(newline="") as f:
            reader = csv.DictReader(f)
            if reader.fieldnames is None or not set(_COLUMNS) <= set(reader.fieldnames):
                raise ConfigurationError(f"{path}: the first line must name the columns {', '.join(_COLUMNS)}")
            for number, row in enumerate(reader, 2):
                try:
                    stamp = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                    rows.append((stamp, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
                except (ValueError, TypeError, KeyError) as exc:
                    raise ConfigurationError(f"{path}, line {number}: {exc}; expected {','.join(_COLUMNS)}") from exc
                if len(rows) >= rate_per_s * seconds * 2 + 16:
                    break
    except OSError as exc:
        raise ConfigurationError(f"cannot read the trace {path}: {exc.strerror}; give an existing file") from exc
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        raise ConfigurationError(f"{path}: a trace needs at least two requests at different times")
    first = rows[0][0]
    natural = (len(rows) - 1) / (rows[-1][0] - first)
    stretch = natural / rate_per_s
    out = [
        Arrival(
            (stamp - first) * stretch,
            min(scale.prompt_max, max(1, round(prompt * scale.prompt))),
            min(scale.output_max, max(scale.output_min, round(output * scale.output))),
        )
        for stamp, prompt, output in rows
    ]
    return [a for a in out if a.at_s < seconds], stretch
