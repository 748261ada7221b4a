"""A job's figures, step by step: on the terminal, for TensorBoard, for Prometheus, and as JSON lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rl_driver.roles.proxy_process import ProxyHandle
from rl_driver.training.groups import Group


class Figures:
    """Collects what happens in a step and tells it at the step's end."""

    def __init__(self, out: Path, metrics_port: int | None, proxy: ProxyHandle) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._proxy = proxy
        self._lines = out / "steps.jsonl"
        self._board = SummaryWriter(str(out / "tensorboard"))
        registry = CollectorRegistry()
        self._gauge = Gauge("coserve_train", "Figures of the latest step", ["figure"], registry=registry)
        if metrics_port is not None:
            start_http_server(metrics_port, "127.0.0.1", registry)

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self._step, self._start_s, self._tokens = step, time.monotonic(), self._worker_tokens()
        self._rewards: list[float] = []
        self._staleness: list[int] = []
        self._useful = 0
        self._updates: list[dict[str, float]] = []

    def add_group(self, group: Group, staleness: int, useful: bool) -> None:
        """A group is finished."""
        self._rewards += group.rewards
        self._staleness.append(staleness)
        self._useful += useful

    def add_update(self, figures: dict[str, float]) -> None:
        """An optimiser step is done."""
        self._updates.append(figures)

    def end_step(self) -> str:
        """Tell everybody; returns a line for people."""
        seconds = time.monotonic() - self._start_s
        groups = len(self._staleness)
        tokens = {k: v - self._tokens.get(k, 0) for k, v in self._worker_tokens().items()}
        figures = {
            "reward_mean": sum(self._rewards) / len(self._rewards),
            "success": sum(r >= 1 for r in self._rewards) / len(self._rewards),
            "step_s": seconds,
            "groups": groups,
            "sampled_per_useful_group": groups / max(1, self._useful),
            "staleness_mean": sum(self._staleness) / groups,
            "staleness_max": max(self._staleness),
            "tokens_per_s_dedicated": tokens.get("dedicated", 0) / seconds,
            "tokens_per_s_borrowed": tokens.get("borrowed", 0) / seconds,
        }
        for key in sorted({key for update in self._updates for key in update}):
            values = [u[key] for u in self._updates if key in u]
            figures[key] = sum(values) / len(values)
        with self._lines.open("a") as out:
            out.write(json.dumps({"step": self._step, "time_s": time.time(), **figures}) + "\n")
        for key, value in figures.items():
            self._board.add_scalar(key, value, self._step)
            self._gauge.labels(key).set(value)
        self._board.flush()
        apart = figures.get("sampler_log_ratio_abs_mean", float("nan"))
        return (
            f"step {self._step}: reward {figures['reward_mean']:.3f}, {seconds:.1f} s, tokens/s "
            f"{figures['tokens_per_s_dedicated']:.0f} dedicated and {figures['tokens_per_s_borrowed']:.0f} borrowed, "
            f"staleness {figures['staleness_mean']:.1f}, |log ratio| {apart:.4f}"
        )

    def _worker_tokens(self) -> dict[str, int]:
        """Tokens that came from workers so far, by kind."""
        out: dict[str, int] = {}
        for worker in self._proxy.workers():
            out[worker["kind"]] = out.get(worker["kind"], 0) + worker["tokens"]
        return out


def read_steps(out: Path) -> list[dict[str, Any]]:
    """The figures of all steps of a job so far."""
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
