"""What a job shows while it runs: one view that is kept up on a terminal, a line a step elsewhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_ROWS = 8  # latest steps that are shown


class Display:
    """Shows steps as they end, and how far the present one is."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=self._console)
        self._steps = self._progress.add_task("steps", total=steps)
        self._groups = self._progress.add_task("groups of this step", total=None)
        self._latest: list[dict[str, Any]] = []
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        """Keep the view up until the block ends."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(self._view(), console=self._console, refresh_per_second=4) as self._live:
            try:
                yield self
            finally:
                self._live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin_step(self, step: int, groups: int) -> None:
        """A step begins that needs so many groups."""
        self._progress.update(self._steps, completed=step)
        self._progress.reset(self._groups, total=groups)

    def group_done(self) -> None:
        """One of the groups is finished."""
        self._progress.advance(self._groups)

    def end_step(self, figures: dict[str, Any]) -> None:
        """A step is over."""
        self._progress.update(self._steps, completed=figures["step"] + 1)
        self._latest = [*self._latest, figures][-_ROWS:]
        if self._live is not None:
            self._live.update(self._view())
        else:
            self.say(line_of(figures))

    def _view(self) -> RenderableType:
        table = Table(
            "step", "reward", "s", "tokens/s dedicated", "borrowed", "staleness", "|log ratio|", "SLO slack ms"
        )
        for f in self._latest:
            cells = [f"{f['reward_mean']:.3f}", f"{f['step_s']:.1f}", f"{f['tokens_per_s_dedicated']:.0f}"]
            cells += [f"{f['tokens_per_s_borrowed']:.0f}", f"{f['staleness_mean']:.1f}", _ratio(f), _slack(f)]
            table.add_row(str(f["step"]), *cells)
        return Group(table, self._progress)


def line_of(figures: dict[str, Any]) -> str:
    """A step in one line."""
    return (
        f"step {figures['step']}: reward {figures['reward_mean']:.3f}, {figures['step_s']:.1f} s, tokens/s "
        f"{figures['tokens_per_s_dedicated']:.0f} dedicated and {figures['tokens_per_s_borrowed']:.0f} borrowed, "
        f"staleness {figures['staleness_mean']:.1f}, |log ratio| {_ratio(figures)}, SLO slack {_slack(figures)} ms"
    )


def _ratio(figures: dict[str, Any]) -> str:
    value = figures.get("sampler_log_ratio_abs_mean", math.nan)
    return "–" if math.isnan(value) else f"{value:.4f}"


def _slack(figures: dict[str, Any]) -> str:
    value = figures.get("serving_slack_ms")
    return "–" if value is None else f"{value:.0f}"
