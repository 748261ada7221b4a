"""What the demo found: report.json for tools, report.html for people."""

from __future__ import annotations

import base64
import html
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_coserve.demo.load import Served
from vllm_coserve.demo.phases import PhaseResult, percentile
from vllm_coserve.demo.training import Learning

ALONE, ROLLOUT, GATED, UNGATED = "serving alone", "rollout alone", "co-serving, gated", "co-serving, no gate"
_COLORS = {ALONE: "#4c72b0", GATED: "#2a9d5c", UNGATED: "#c44e52", ROLLOUT: "#8172b3"}


def slo_from_alone(alone: PhaseResult, ttft_ms: float | None, tpot_ms: float | None, factor: float) -> dict[str, float]:
    """The SLO: as given, else `factor` times the P99 of serving alone."""
    ok = [s for s in alone.served if s.ok]
    return {
        "ttft_ms": ttft_ms or factor * 1e3 * percentile([s.ttft_s for s in ok], 99),
        "tpot_ms": tpot_ms or factor * 1e3 * percentile([s.tpot_s for s in ok], 99),
    }


def serving_summary(served: Sequence[Served], busy_fraction: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """Latency percentiles in ms; a request attains the SLO when it ended well within both bounds."""
    ok = [s for s in served if s.ok]
    ttft, tpot = [1e3 * s.ttft_s for s in ok], [1e3 * s.tpot_s for s in ok]
    within = sum(a <= slo["ttft_ms"] and b <= slo["tpot_ms"] for a, b in zip(ttft, tpot, strict=True))
    return {
        "requests": len(served),
        "failed": len(served) - len(ok),
        "ttft_ms_p50": percentile(ttft, 50),
        "ttft_ms_p99": percentile(ttft, 99),
        "tpot_ms_p50": percentile(tpot, 50),
        "tpot_ms_p99": percentile(tpot, 99),
        "slo_attainment": within / len(served) if served else float("nan"),
        "busy_fraction": busy_fraction,
    }


def rollout_summary(result: PhaseResult) -> dict[str, Any]:
    """Counts of a phase's rollouts, and their rate while the phase was measured."""
    totals = result.rollout
    if totals is None:
        return {"requests": 0, "finished": 0, "aborted": 0, "tokens": 0, "tokens_per_s": 0.0}
    return {
        "requests": totals.requests,
        "finished": totals.finished,
        "aborted": totals.aborted,
        "tokens": totals.tokens,
        "tokens_per_s": result.rollout_tokens_per_s,
    }


def harvest_efficiency(coserve_tokens_per_s: float, alone_tokens_per_s: float, busy_fraction: float) -> float:
    """Rollout rate beside serving, over what the device time that serving leaves idle would give at the rate alone."""
    idle = alone_tokens_per_s * (1 - busy_fraction)
    return coserve_tokens_per_s / idle if idle > 0 else float("nan")


def build_report(
    slo: Mapping[str, float],
    results: Mapping[str, PhaseResult],
    versions: Mapping[str, str],
    facts: Mapping[str, Any],
    learning: Learning | None = None,
) -> dict[str, Any]:
    """The content of report.json."""
    alone, gated = results[ALONE], results[GATED]
    pages, reclaims = gated.status.get("pages", {}), gated.status.get("reclaims", {})
    return {
        "slo": dict(slo),
        "serving_alone": serving_summary(alone.served, alone.busy_fraction, slo),
        "coserve": serving_summary(gated.served, gated.busy_fraction, slo),
        "no_gate": serving_summary(results[UNGATED].served, results[UNGATED].busy_fraction, slo),
        "rollout_alone": rollout_summary(results[ROLLOUT]),
        "rollout_coserve": rollout_summary(gated),
        "rollout_no_gate": rollout_summary(results[UNGATED]),
        "harvest_efficiency": harvest_efficiency(
            gated.rollout_tokens_per_s, results[ROLLOUT].rollout_tokens_per_s, alone.busy_fraction
        ),
        "memory": {
            "pool_pages": pages.get("pool"),
            "max_rollout_pages": pages.get("rollout_max"),
            "reclaims": reclaims.get("count"),
            "reclaim_ms_p50": reclaims.get("ms_p50"),
            "reclaim_ms_p99": reclaims.get("ms_p99"),
        },
        "gate": gated.status.get("gate", {}),
        **({"rl": training_summary(learning, slo)} if learning else {}),
        "versions": dict(versions),
        **facts,
    }


def training_summary(learning: Learning, slo: Mapping[str, float]) -> dict[str, Any]:
    """The "rl" part of report.json.

    Step times are means over the steps that both jobs did, without the first, in which everything starts.
    """
    alone, both = learning.alone, learning.both
    common = slice(1, min(len(alone.steps), len(both.steps)))
    tokens = {kind: sum(s[f"tokens_{kind}"] for s in both.steps) for kind in ("dedicated", "borrowed")}
    staleness = Counter[str]()
    for step in both.steps:
        staleness.update(step["groups_by_staleness"])
    ratios = [s["sampler_log_ratio_abs_mean"] for s in both.steps if "sampler_log_ratio_abs_mean" in s]
    return {
        "steps": len(both.steps),
        "success_start": both.steps[0]["success"],
        "success_last10": _mean([s["success"] for s in both.steps[-10:]]),
        "borrowed_token_share": tokens["borrowed"] / max(1, sum(tokens.values())),
        "step_s_mean": _mean([s["step_s"] for s in both.steps[common]]),
        "step_s_mean_dedicated_only": _mean([s["step_s"] for s in alone.steps[common]]),
        "migrations": sum(s["migrations"] for s in both.steps),
        "turns_lost": sum(s["turns_lost"] for s in both.steps),
        "tokens_lost": sum(s["tokens_lost"] for s in both.steps),
        "groups_by_staleness": dict(staleness),
        "sampler_log_ratio_abs_mean": _mean(ratios) if ratios else None,
        "success": [s["success"] for s in both.steps],
        "step_s": [s["step_s"] for s in both.steps],
        "step_s_dedicated_only": [s["step_s"] for s in alone.steps],
        "serving": serving_summary([*alone.served, *both.served], float("nan"), slo) | {"busy_fraction": None},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write report.json."""
    path.write_text(json.dumps(report, indent=2) + "\n")


def write_html(
    report: Mapping[str, Any], slo: Mapping[str, float], results: Mapping[str, PhaseResult], path: Path
) -> None:
    """Write report.html: one file, plots inside; `report` is what `build_report` gave."""
    plots = [
        ("Time to first token", _plot(lambda ax: _cdf(ax, results, "ttft_s", slo["ttft_ms"], "TTFT"))),
        ("Time per output token", _plot(lambda ax: _cdf(ax, results, "tpot_s", slo["tpot_ms"], "TPOT"))),
        ("KV pages by owner, co-serving with the gate", _plot(lambda ax: _pages(ax, results[GATED]), wide=True)),
        ("Who computed when (ten seconds of co-serving)", _plot(lambda ax: _turns(ax, results[GATED]), wide=True)),
        ("Rollout tokens per second", _plot(lambda ax: _rate(ax, results), wide=True)),
    ]
    if rl := report.get("rl"):
        plots.append(("Success of the policy that learns on both engines", _plot(lambda ax: _curve(ax, rl))))
        plots.append(("Seconds of a step", _plot(lambda ax: _step_times(ax, rl))))
        plots.append(("Groups by staleness", _plot(lambda ax: _bars(ax, rl["groups_by_staleness"]))))
    body = "".join(f"<figure><figcaption>{html.escape(t)}</figcaption>{img}</figure>" for t, img in plots)
    path.write_text(_PAGE.format(verdicts=_verdicts(report), table=_table(report), plots=body, facts=_facts(report)))


def _verdicts(report: Mapping[str, Any]) -> str:
    c, n, slo = report["coserve"], report["no_gate"], report["slo"]
    checks = [
        ("no serving request failed", c["failed"] == 0, f"{c['failed']} of {c['requests']}"),
        ("P99 TTFT within the SLO", c["ttft_ms_p99"] <= slo["ttft_ms"], f"{c['ttft_ms_p99']:.0f} ms"),
        ("P99 TPOT within the SLO", c["tpot_ms_p99"] <= slo["tpot_ms"], f"{c['tpot_ms_p99']:.1f} ms"),
        ("worse without the gate", n["slo_attainment"] < c["slo_attainment"], f"{n['slo_attainment']:.1%} attained"),
        ("harvest efficiency at least 0.9", report["harvest_efficiency"] >= 0.9, f"{report['harvest_efficiency']:.2f}"),
    ]
    if rl := report.get("rl"):
        gain, share = rl["step_s_mean_dedicated_only"] / rl["step_s_mean"], rl["borrowed_token_share"]
        learnt = rl["success_last10"] >= max(0.65, rl["success_start"] + 0.3)
        lost, s = rl["turns_lost"] + rl["tokens_lost"], rl["serving"]
        within = s["ttft_ms_p99"] <= slo["ttft_ms"] and s["tpot_ms_p99"] <= slo["tpot_ms"] and not s["failed"]
        latest = f"TTFT {s['ttft_ms_p99']:.0f} ms, TPOT {s['tpot_ms_p99']:.1f} ms, {s['failed']} failed"
        checks += [
            ("the policy learns", learnt, f"success {rl['success_start']:.0%}, at the end {rl['success_last10']:.0%}"),
            ("serving's P99 within the SLO while it learns", within, latest),
            ("at least 25 % of the rollout's tokens are borrowed", share >= 0.25, f"{share:.0%}"),
            ("a step at least 1.2 times as fast as without borrowing", gain >= 1.2, f"{gain:.2f} times"),
            ("no turn and no token lost", not lost, f"{rl['migrations']} migrations"),
        ]
    return "".join(
        f'<li class="{"ok" if ok else "bad"}">{"&#10003;" if ok else "&#10007;"} {html.escape(t)}: <b>{v}</b></li>'
        for t, ok, v in checks
    )


def _table(report: Mapping[str, Any]) -> str:
    rows = []
    for title, key, rollout in (
        ("serving alone", "serving_alone", None),
        ("rollout alone", None, "rollout_alone"),
        ("both, gated", "coserve", "rollout_coserve"),
        ("both, no gate", "no_gate", "rollout_no_gate"),
    ):
        s, r = report.get(key or "", {}), report.get(rollout or "", {})
        cells = [title]
        cells += [f"{s['requests']} / {s['failed']}" if s else "–"]
        for name, digits in (("ttft_ms_p50", 0), ("ttft_ms_p99", 0), ("tpot_ms_p50", 1), ("tpot_ms_p99", 1)):
            cells.append(f"{s[name]:.{digits}f}" if s else "–")
        cells.append(f"{s['slo_attainment']:.1%}" if s else "–")
        cells.append(f"{s['busy_fraction']:.0%}" if s else "–")
        cells.append(f"{r['tokens_per_s']:.0f}" if r else "–")
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return "".join(rows)


def _facts(report: Mapping[str, Any]) -> str:
    keys = ("slo", "arrivals", "memory", "gate", "machine", "versions", "command", "serve_flags")
    return html.escape(json.dumps({k: report[k] for k in keys if k in report}, indent=2))


def _plot(draw: Callable[[Any], None], wide: bool = False) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(11, 3.2) if wide else (5.4, 3.4), dpi=110)
    draw(ax)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, format="png")
    plt.close(figure)
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img class="{"wide" if wide else ""}" src="data:image/png;base64,{encoded}" alt="">'


def write_picture(slo: Mapping[str, float], results: Mapping[str, PhaseResult], path: Path) -> None:
    """The four plots that say it all, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplot_mosaic("ab;cc;dd", figsize=(11, 8), dpi=100)
    _cdf(axes["a"], results, "ttft_s", slo["ttft_ms"], "TTFT")
    _cdf(axes["b"], results, "tpot_s", slo["tpot_ms"], "TPOT")
    _pages(axes["c"], results[GATED])
    _turns(axes["d"], results[GATED])
    for ax in axes.values():
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _cdf(ax: Any, results: Mapping[str, PhaseResult], attr: str, slo_ms: float, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for phase in (ALONE, GATED, UNGATED):
        values = sorted(1e3 * getattr(s, attr) for s in results[phase].served if s.ok)
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            ax.step(values, shares, where="post", color=_COLORS[phase], label=phase)
    ax.axvline(slo_ms, color="black", linestyle="--", linewidth=1, label=f"SLO {slo_ms:.0f} ms")
    ax.axhline(0.99, color="grey", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(f"{name} in ms")
    ax.set_ylabel("share of requests")
    ax.legend(fontsize=8, loc="lower right")


def _pages(ax: Any, result: PhaseResult) -> None:
    if result.pages:
        at, serving, rollout, free = zip(*result.pages, strict=True)
        colors = [_COLORS[ALONE], _COLORS[ROLLOUT], "#dddddd"]
        ax.stackplot(at, serving, rollout, free, labels=["serving", "rollout", "free"], colors=colors)
        ax.legend(fontsize=8, loc="upper right", ncols=3)
    ax.set_xlabel("seconds")
    ax.set_ylabel("pages")


def _turns(ax: Any, result: PhaseResult) -> None:
    ends = [t["end_s"] for t in result.turns]
    middle = (ends[len(ends) // 2] if ends else 10.0) - 5.0
    for row, (who, color) in enumerate((("serving", _COLORS[ALONE]), ("rollout", _COLORS[ROLLOUT]))):
        spans = [
            (t["start_s"], t["end_s"] - t["start_s"])
            for t in result.turns
            if t["who"] == who and middle <= t["start_s"] <= middle + 10
        ]
        ax.broken_barh(spans, (row - 0.4, 0.8), color=color)
    ax.set_yticks([0, 1], ["serving", "rollout"])
    ax.set_xlim(middle, middle + 10)
    ax.set_xlabel("seconds")


def _curve(ax: Any, rl: Mapping[str, Any]) -> None:
    ax.plot(rl["success"], color=_COLORS[GATED])
    ax.axhline(rl["success_start"], color="grey", linestyle=":", label="as warm-started")
    ax.set_ylim(0, 1)
    ax.set_xlabel("step")
    ax.set_ylabel("share of walks that arrive")
    ax.legend(fontsize=8, loc="lower right")


def _step_times(ax: Any, rl: Mapping[str, Any]) -> None:
    ax.plot(rl["step_s"], color=_COLORS[GATED], label="dedicated and borrowed")
    ax.plot(rl["step_s_dedicated_only"], color=_COLORS[UNGATED], label="dedicated only")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("step")
    ax.set_ylabel("seconds")
    ax.legend(fontsize=8)


def _bars(ax: Any, counts: Mapping[str, int]) -> None:
    ax.bar(list(counts), list(counts.values()), color=_COLORS[ALONE])
    ax.set_xlabel("steps that the weights were behind")
    ax.set_ylabel("groups")


def _rate(ax: Any, results: Mapping[str, PhaseResult]) -> None:
    for phase in (ROLLOUT, GATED, UNGATED):
        totals = results[phase].rollout
        if totals is None or len(totals.samples) < 6:
            continue
        points = totals.samples[::4]
        rates = [(b[1] - a[1]) / max(1e-9, b[0] - a[0]) for a, b in pairwise(points)]
        ax.plot([b[0] for b in points[1:]], rates, color=_COLORS[phase], label=phase)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds")
    ax.set_ylabel("tokens/s")
    ax.legend(fontsize=8)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>vllm-coserve demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222 }}
h1 {{ font-size: 1.5em }} table {{ border-collapse: collapse; width: 100%; margin: 1em 0 }}
td, th {{ border-bottom: 1px solid #ddd; padding: .35em .6em; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
ul {{ list-style: none; padding: 0 }} .ok {{ color: #1d7d46 }} .bad {{ color: #b3261e }}
figure {{ display: inline-block; margin: .5em 0; vertical-align: top }} figcaption {{ font-weight: 600 }}
img {{ width: 570px; max-width: 100% }} img.wide {{ width: 1160px }}
pre {{ background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px }}
</style>
<h1>One device, two models: serving keeps its promise, a rollout takes the rest</h1>
<ul>{verdicts}</ul>
<table><tr><th>phase</th><th>requests / failed</th><th>TTFT P50 ms</th><th>P99</th><th>TPOT P50 ms</th><th>P99</th>
<th>SLO attained</th><th>device busy with serving</th><th>rollout tokens/s</th></tr>{table}</table>
{plots}
<details><summary>Facts of this run</summary><pre>{facts}</pre></details></html>
"""
