"""A job's figures, step by step: for TensorBoard, for Prometheus, and as JSON lines."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rl_driver.api.trajectory import Trajectory
from rl_driver.roles.proxy_process import ProxyHandle
from rl_driver.store.base import TrajectoryStore
from rl_driver.training.groups import Group


class Figures:
    """Collects what happens in a step and tells it at the step's end."""

    def __init__(self, out: Path, metrics_port: int | None, proxy: ProxyHandle, store: TrajectoryStore) -> None:
        """`store`: where the proxy keeps the turns, to see that none was lost."""
        from torch.utils.tensorboard import SummaryWriter

        self._proxy, self._store = proxy, store
        self._lines = out / "steps.jsonl"
        self._board = SummaryWriter(str(out / "tensorboard"))
        registry = CollectorRegistry()
        self._gauge = Gauge("coserve_train", "Figures of the latest step", ["figure"], registry=registry)
        if metrics_port is not None:
            start_http_server(metrics_port, "127.0.0.1", registry)

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self._step, self._start_s, self._tokens = step, time.monotonic(), tokens_by_kind(self._proxy.workers())
        self._migrations = self._proxy.migrations()
        self._lost = Counter[str]()
        self._rewards: list[float] = []
        self._staleness: list[int] = []
        self._useful = 0
        self._updates: list[dict[str, float]] = []

    def add_group(self, group: Group, staleness: int, useful: bool) -> None:
        """A group is finished."""
        self._rewards += group.rewards
        self._staleness.append(staleness)
        self._lost.update(lost_of(group.trajectories, self._store))
        self._useful += useful

    def add_update(self, figures: dict[str, float]) -> None:
        """An optimiser step is done."""
        self._updates.append(figures)

    def end_step(self) -> dict[str, Any]:
        """Tell everybody; returns the step's figures."""
        seconds = time.monotonic() - self._start_s
        groups = len(self._staleness)
        workers = self._proxy.workers()
        tokens = {k: v - self._tokens.get(k, 0) for k, v in tokens_by_kind(workers).items()}
        scalars = {
            "reward_mean": sum(self._rewards) / len(self._rewards),
            "success": sum(r >= 1 for r in self._rewards) / len(self._rewards),
            "step_s": seconds,
            "groups": groups,
            "sampled_per_useful_group": groups / max(1, self._useful),
            "staleness_mean": sum(self._staleness) / groups,
            "staleness_max": max(self._staleness),
            "tokens_dedicated": tokens.get("dedicated", 0),
            "tokens_borrowed": tokens.get("borrowed", 0),
            "tokens_per_s_dedicated": tokens.get("dedicated", 0) / seconds,
            "tokens_per_s_borrowed": tokens.get("borrowed", 0) / seconds,
            "migrations": self._proxy.migrations() - self._migrations,
            "turns_lost": self._lost["turns"],
            "tokens_lost": self._lost["tokens"],
        }
        slacks = [w["slack_ms"] for w in workers if w["slack_ms"] is not None]
        if slacks:
            scalars["serving_slack_ms"] = min(slacks)
        for key in sorted({key for update in self._updates for key in update}):
            values = [u[key] for u in self._updates if key in u]
            scalars[key] = sum(values) / len(values)
        by_staleness = {str(k): n for k, n in sorted(Counter(self._staleness).items())}
        figures = {"step": self._step, "time_s": time.time(), **scalars, "groups_by_staleness": by_staleness}
        with self._lines.open("a") as out:
            out.write(json.dumps(figures) + "\n")
        for key, value in scalars.items():
            self._board.add_scalar(key, value, self._step)
            self._gauge.labels(key).set(value)
        self._board.flush()
        return figures


def tokens_by_kind(workers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Tokens that came from workers so far, by their kind."""
    out = Counter[str]()
    for worker in workers:
        out[worker["kind"]] += worker["tokens"]
    return dict(out)


def lost_of(trajectories: Sequence[Trajectory], store: TrajectoryStore) -> dict[str, int]:
    """Turns and tokens of finished trajectories that the store does not have as they are used."""
    turns = tokens = 0
    for trajectory in trajectories:
        try:
            kept = store.get(trajectory.trajectory_id).turns
        except KeyError:
            kept = ()
        for turn in trajectory.turns:
            if turn.index >= len(kept) or kept[turn.index].output_token_ids != turn.output_token_ids:
                turns, tokens = turns + 1, tokens + len(turn.output_token_ids)
    return {"turns": turns, "tokens": tokens}
