"""`coserve status`: one terminal view of a running pair."""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.messages import Status

_TIMEOUT_S = 5.0
_STATE_STYLE = {"active": "bold green", "deactivated": "yellow"}


class UnreachableError(Exception):
    """The server does not answer now; it may be on its way back."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server answered, and when (monotonic seconds)."""

    at_s: float
    status: Status


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """GET /coserve/v1/status.

    Raises:
        UnreachableError: no answer, or none of this API for now.
        ConfigurationError: the key is refused, or something else listens there.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/coserve/v1/status", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            got = json.load(answer)
    except urllib.error.HTTPError as exc:
        if exc.code == 401:
            raise ConfigurationError(f"{url} wants an API key: give it with --api-key, or as VLLM_API_KEY") from None
        if exc.code == 404:
            raise ConfigurationError(
                f"{url} has no /coserve/v1/status: give the port of the rollout engine (--coserve-rollout-port)"
            ) from None
        raise UnreachableError(f"{url} answered HTTP {exc.code}") from None
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        raise UnreachableError(
            f"{url} cannot be reached ({reason}): does `vllm serve ... --coserve-rollout` run there?"
        ) from None
    if not isinstance(got, dict):
        raise UnreachableError(f"{url} answered something else than a status")
    return got


def parse(got: dict[str, Any]) -> Status:
    """An answer as a status; fields of newer servers are left aside.

    Raises:
        UnreachableError: it is no status.
    """
    try:
        return Status.model_validate(got)
    except ValidationError as exc:
        error = exc.errors()[0]
        raise UnreachableError(
            f"the answer is not a status of this version ({'.'.join(map(str, error['loc']))}: {error['msg']})"
        ) from None


def show_status(url: str, api_key: str | None, interval_s: float, *, as_json: bool = False) -> int:
    """Show a pair until interrupted, or once when `interval_s` is infinite; returns the exit code."""
    console = Console()
    if math.isinf(interval_s):
        try:
            got = fetch(url, api_key)
            if as_json:
                print(json.dumps(got, indent=2))
            else:
                console.print(render(url, None, Look(time.monotonic(), parse(got)), None))
        except UnreachableError as exc:
            print(f"coserve status: {exc}", file=sys.stderr)
            return 1
        return 0
    _watch(console, url, api_key, interval_s)
    return 0


def _watch(console: Console, url: str, api_key: str | None, interval_s: float) -> None:
    before: Look | None = None
    now: Look | None = None
    with Live(console=console, auto_refresh=False, screen=console.is_terminal, transient=True) as live:
        while True:
            trouble = None
            try:
                look = Look(time.monotonic(), parse(fetch(url, api_key)))
                before, now = now, look
            except UnreachableError as exc:
                trouble = str(exc)
            view = render(url, before, now, trouble)
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                console.print(view)
            time.sleep(interval_s)


def render(url: str, before: Look | None, now: Look | None, trouble: str | None) -> RenderableType:
    """The view; rates come from the difference of two looks."""
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(f"not reachable, retrying: {trouble}", style="bold red"))
    if now is None:
        return Panel(Group(*parts), title="coserve", title_align="left")
    s = now.status
    head = Text.assemble((s.state, _STATE_STYLE.get(s.state, "bold yellow")), f"  {s.model}  ", (f"at {url}", "dim"))
    freed = "" if s.weights.loaded else ", freed"
    head.append(f"\nrestarts {max(0, s.generation - 1)}, RL step {s.step}, ")
    head.append(f"weights {s.weights.version!r} (number {s.weights.number}{freed})")
    if s.registration:
        head.append(f", held by {s.registration.job}")
    parts += [head, Text(), _Pages(s), Text(), _figures(before, now)]
    return Panel(Group(*parts), title=f"coserve {s.version}", title_align="left")


class _Pages:
    """Pages by owner as one bar that fills the line, with a legend below."""

    def __init__(self, status: Status) -> None:
        self._pages = status.pages

    def __rich_console__(self, console: Console, options: Any) -> Any:
        p = self._pages
        parts = [
            ("serving", p.serving - p.serving_cached, "█", "blue"),
            ("serving's cache", p.serving_cached, "▓", "cyan"),
            ("rollout", p.rollout, "█", "green"),
            ("free", p.free, "░", "white"),
        ]
        width = max(10, min(options.max_width, 120))
        bar, drawn, pages = Text(), 0, 0
        for _, count, sign, style in parts:
            pages += max(0, count)
            upto = round(width * min(1.0, pages / max(1, p.pool)))
            bar.append(sign * (upto - drawn), style)
            drawn = max(drawn, upto)
        yield bar
        legend = Text()
        for name, count, sign, style in parts:
            legend.append(sign, style).append(f" {name} {count}  ")
        yield legend
        mib = p.page_bytes >> 20
        yield Text(f"pool {p.pool} pages of {mib} MiB, headroom {p.headroom}, rollout budget {p.budget}", "dim")


def _figures(before: Look | None, now: Look) -> Table:
    s, rates = now.status, _rates(before, now)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    gate, rollout, aborts = s.gate, s.rollout, s.aborts
    hits = f"{rollout.prefix_hit_tokens / rollout.prefix_query_tokens:.0%}" if rollout.prefix_query_tokens else "–"
    slow = "–" if s.reclaims.ms_p99 is None else f"{s.reclaims.ms_p99:.1f} ms"
    rows = [
        ("rollout tokens/s", rates["tokens"], "gate", "open" if gate.open else "by slack"),
        ("running, waiting", f"{rollout.running}, {rollout.waiting}", "slack", f"{gate.slack_ms:.1f} ms"),
        ("rollout on device", rates["rollout_busy"], "grants/s", rates["grants"]),
        ("serving on device", rates["serving_busy"], "denials/s", rates["denials"]),
        ("prefix cache hits", hits, "hand-over", f"{gate.handover_ms:.2f} ms"),
        ("reclaims, cuts", f"{s.reclaims.count}, {s.reclaims.cuts}", "overruns", str(gate.overruns)),
        ("reclaim P99", slow, "faults", str(gate.faults)),
        (
            "ended early", str(aborts.reclaimed + aborts.stalled + aborts.deactivated + aborts.too_large),
            "policy", gate.policy,
        ),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _rates(before: Look | None, now: Look) -> dict[str, str]:
    names = ("tokens", "grants", "denials", "serving_busy", "rollout_busy")
    if before is None or now.at_s <= before.at_s:
        return dict.fromkeys(names, "–")
    a, b, seconds = before.status, now.status, now.at_s - before.at_s

    def rate(x: float, y: float) -> float:
        return max(0.0, y - x) / seconds  # counters start anew with the pair

    return {
        "tokens": f"{rate(a.rollout.tokens, b.rollout.tokens):.0f}",
        "grants": f"{rate(a.gate.grants, b.gate.grants):.0f}",
        "denials": f"{rate(a.gate.denials, b.gate.denials):.0f}",
        "serving_busy": f"{rate(a.gate.serving_busy_s, b.gate.serving_busy_s):.0%}",
        "rollout_busy": f"{rate(a.gate.rollout_busy_s, b.gate.rollout_busy_s):.0%}",
    }
