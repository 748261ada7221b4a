"""`coserve status`: one terminal view of a running pair."""

from __future__ import annotations

import http.client
import json
import math
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.api.flags import is_own_machine
from vllm_coserve.api.messages import Pages, Status

_TIMEOUT_S = 5.0
_MAX_BYTES = 1 << 20
_STATE_STYLE = {"active": "bold green", "deactivated": "yellow"}
_NONE = "-"


class UnreachableError(Exception):
    """The server does not answer now; it may be on its way back."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server answered, and when (monotonic seconds)."""

    at_s: float
    status: Status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the API key along to wherever a redirect leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """GET /coserve/v1/status.

    Raises:
        UnreachableError: no answer, or none of this API for now.
        ConfigurationError: the key is refused, or something else listens there.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigurationError("the API key has a line break or another sign that no HTTP header can carry: see "
                                 "--api-key and VLLM_API_KEY")  # fmt: skip
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/coserve/v1/status", headers=headers)
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if is_own_machine(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S) as answer:
            body = answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as exc:
        exc.close()
        if exc.code == 401:
            raise ConfigurationError(f"{url} wants an API key: give it with --api-key, or as VLLM_API_KEY") from None
        if exc.code == 404:
            raise ConfigurationError(
                f"{url} has no /coserve/v1/status: give the port of the rollout engine (--coserve-rollout-port)"
            ) from None
        raise UnreachableError(f"{url} answered HTTP {exc.code}: is it the rollout engine's server?") from None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        raise UnreachableError(
            f"{url} cannot be reached ({reason}): does `vllm serve ... --coserve-rollout` run there?"
        ) from None
    try:
        got = json.loads(body)
    except (ValueError, RecursionError):
        got = None
    if not isinstance(got, dict):
        raise UnreachableError(f"{url} answered something else than a status: is it the rollout engine's server?")
    return got


def parse(got: dict[str, Any]) -> Status:
    """An answer as a status: fields of newer servers are left aside, what an older one lacks is None.

    Raises:
        UnreachableError: it is no status.
    """
    if not any(isinstance(got.get(name), dict) for name in ("pages", "gate", "rollout")):
        raise UnreachableError("the answer is not a status of a rollout engine")
    return _lenient(Status, got)


def _lenient(model: type[BaseModel], got: Any) -> Any:
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        value = got.get(name)
        options = get_args(field.annotation) or (field.annotation,)
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is not None:
            here = isinstance(value, dict)
            values[name] = _lenient(inner, value if here else {}) if here or len(options) == 1 else None
            continue
        try:
            values[name] = TypeAdapter(field.annotation).validate_python(value)
        except ValidationError:  # a string is a state that this version does not know
            values[name] = value if isinstance(value, str) and isinstance(options[0], str) else None
    return model.model_construct(**values)


def show_status(url: str, api_key: str | None, interval_s: float, *, as_json: bool = False) -> int:
    """Show a pair until interrupted, or once when `interval_s` is infinite; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
    console = Console()
    if not math.isinf(interval_s):
        _watch(console, url, api_key, interval_s)
        return 0
    try:
        got = fetch(url, api_key)
        if as_json:
            print(json.dumps(got, indent=2), flush=True)
        else:
            console.print(render(url, None, Look(time.monotonic(), parse(got)), None))
    except UnreachableError as exc:
        message = str(exc) if url in str(exc) else f"{url}: {exc}"
        print(f"coserve status: {message}", file=sys.stderr)
        return 1
    return 0


def _watch(console: Console, url: str, api_key: str | None, interval_s: float) -> None:
    before: Look | None = None
    now: Look | None = None
    start_s = time.monotonic()
    lively = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False, screen=lively, transient=True) as live:
        while True:
            trouble = None
            try:
                look = Look(time.monotonic(), parse(fetch(url, api_key)))
                before, now = now, look
            except UnreachableError as exc:
                trouble = str(exc)
            view = render(url, before, now, trouble, watched_s=time.monotonic() - start_s)
            if lively:
                live.update(view, refresh=True)
            else:
                console.print(view)
            time.sleep(interval_s)


def render(
    url: str, before: Look | None, now: Look | None, trouble: str | None, watched_s: float | None = None
) -> RenderableType:
    """The view; rates come from the difference of two looks.

    Args:
        trouble: why the server cannot be reached now; the last look is shown below it.
        watched_s: for how long this view has been open.
    """
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(f"not reachable, retrying: {trouble}", style="bold red"))
    title = Text("coserve")
    if now is None:
        return Panel(Group(*parts), title=title, title_align="left")
    parts += [_head(url, now.status, bool(trouble), watched_s), Text(), _PageBar(now.status.pages), Text()]
    parts.append(_figures(before, now))
    return Panel(Group(*parts), title=title.append(f" {now.status.version or ''}"), title_align="left")


def _head(url: str, s: Status, stale: bool, watched_s: float | None) -> Text:
    state = f"was {s.state}" if stale else str(s.state)
    style = "dim" if stale else _STATE_STYLE.get(s.state, "bold yellow")
    head = Text.assemble((state, style), f"  {s.model or _NONE}  ", (f"at {url}", "dim"))
    restarts = _NONE if s.generation is None else max(0, s.generation - 1)
    head.append(f"\ngeneration {_text(s.generation)} (restarts {restarts}), RL step {_text(s.step)}, ")
    freed = ", freed" if s.weights.loaded is False else ""
    head.append(f"weights {s.weights.version or _NONE!r} (number {_text(s.weights.number)}{freed})")
    if s.registration:
        head.append(f", held by {s.registration.job}")
    if watched_s is not None:
        minutes, seconds = divmod(int(watched_s), 60)
        head.append(f", watched for {minutes}:{seconds:02d} min")
    return head


class _PageBar:
    """Pages by owner as one bar that fills the line, the mark of the headroom and a legend below."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def __rich_console__(self, console: Console, options: Any) -> Any:
        p = self._pages
        signs = ("#", "=", "%", ".", "^") if options.ascii_only else ("█", "▓", "▒", "░", "▲")
        used = None if p.serving is None else p.serving - (p.serving_cached or 0)
        parts = [
            ("serving", used, signs[0], "blue"),
            ("its cache", p.serving_cached, signs[1], "cyan"),
            ("rollout", p.rollout, signs[2], "green"),
            ("free", p.free, signs[3], "white"),
        ]
        width = max(10, min(options.max_width, 120))
        per_page = width / max(1, p.pool or 0)
        bar, drawn, upto_page = Text(), 0, 0
        for _, count, sign, style in parts:
            upto_page += max(0, count or 0)
            upto = min(width, round(upto_page * per_page))
            bar.append(sign * (upto - drawn), style)
            drawn = max(drawn, upto)
        yield bar
        if p.headroom is not None and p.pool:
            at = min(width - 1, max(0, round((p.pool - p.headroom) * per_page)))
            label = "headroom "
            mark = f"{label:>{at}}{signs[4]}" if at >= len(label) else f"{'':{at}}{signs[4]} {label}"
            yield Text(mark, "dim", no_wrap=True)
        legend = Text()
        for name, count, sign, style in parts:
            legend.append(sign, style).append(f" {name} {_text(count)}  ")
        yield legend
        mib = _NONE if p.page_bytes is None else p.page_bytes >> 20
        numbers = f"headroom {_text(p.headroom)}, rollout budget {_text(p.budget)}, most {_text(p.rollout_max)}"
        lent = f", {p.from_weights} of them in place of the rollout's weights" if p.from_weights else ""
        yield Text(f"pool {_text(p.pool)} pages of {mib} MiB{lent}, {numbers}", "dim")


def _figures(before: Look | None, now: Look) -> Table:
    s, rates = now.status, _rates(before, now)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    gate, rollout, aborts, reclaims = s.gate, s.rollout, s.aborts, s.reclaims
    asked, found = rollout.prefix_query_tokens, rollout.prefix_hit_tokens
    hits = _NONE if not asked or found is None else f"{found / asked:.0%}"
    ended = [n for n in (aborts.reclaimed, aborts.stalled, aborts.deactivated, aborts.too_large) if n is not None]
    is_open = {None: _NONE, True: "open", False: "closed"}[gate.open]
    rows = [
        ("rollout tokens/s", rates["tokens"], "gate", is_open),
        ("rollout on device", rates["rollout_busy"], "slack", _ms(gate.slack_ms, 1)),
        ("serving on device", rates["serving_busy"], "hand-over", _ms(gate.handover_ms, 2)),
        ("running, waiting", f"{_text(rollout.running)}, {_text(rollout.waiting)}", "grants/s", rates["grants"]),
        ("prefix cache hits", hits, "denials/s", rates["denials"]),
        ("reclaims/s", rates["reclaims"], "overruns/s", rates["overruns"]),
        ("reclaims, cuts", f"{_text(reclaims.count)}, {_text(reclaims.cuts)}", "overruns", _text(gate.overruns)),
        ("reclaim P99", _ms(reclaims.ms_p99, 1), "faults", _text(gate.faults)),
        ("ended early", str(sum(ended)) if ended else _NONE, "policy", gate.policy or _NONE),
    ]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _text(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _ms(value: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return _NONE
    return f"{value:.{digits}f} ms" if abs(value) < 1e4 else f"{value / 1e3:.0f} s"


def _rates(before: Look | None, now: Look) -> dict[str, str]:
    fields = {
        "tokens": ("rollout", "tokens", ".0f"),
        "grants": ("gate", "grants", ".0f"),
        "denials": ("gate", "denials", ".0f"),
        "overruns": ("gate", "overruns", ".1f"),
        "reclaims": ("reclaims", "count", ".1f"),
        "serving_busy": ("gate", "serving_busy_s", ".0%"),
        "rollout_busy": ("gate", "rollout_busy_s", ".0%"),
    }
    out = dict.fromkeys(fields, _NONE)
    if before is None or now.at_s <= before.at_s:
        return out
    for name, (part, field, form) in fields.items():
        a, b = (getattr(getattr(look.status, part), field) for look in (before, now))
        if a is not None and b is not None:
            out[name] = format(max(0.0, b - a) / (now.at_s - before.at_s), form)  # counters start anew with the pair
    return out
