"""Arrivals, arithmetic of the report, and the load generator against a scripted server."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.demo.arrivals import Scale, bursty, from_azure_csv
from vllm_coserve.demo.load import RolloutTotals, Served
from vllm_coserve.demo.phases import PhaseResult, percentile
from vllm_coserve.demo.report import (
    ALONE,
    GATED,
    ROLLOUT,
    UNGATED,
    build_report,
    harvest_efficiency,
    serving_summary,
    training_summary,
)
from vllm_coserve.demo.training import JobResult, Learning

_SLO = {"ttft_ms": 100.0, "tpot_ms": 10.0}


def test_bursty_arrivals_are_seeded_and_have_the_rate():
    arrivals = bursty(2000, 3.0, seed=1)
    assert arrivals == bursty(2000, 3.0, seed=1) != bursty(2000, 3.0, seed=2)
    assert len(arrivals) / 2000 == pytest.approx(3.0, rel=0.1)
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    per_second = [sum(int(a.at_s) == s for a in arrivals) for s in range(2000)]
    mean = sum(per_second) / 2000
    assert sum((n - mean) ** 2 for n in per_second) / 2000 > 1.5 * mean, "burstier than Poisson"


def _csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_trace_is_scaled_as_stated(tmp_path):
    rows = "".join(f"2023-11-16 18:15:{46 + i // 2:02d}.{i % 2 * 5}000000,{1000 + i},{200}\n" for i in range(20))
    path = _csv(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    arrivals, stretch = from_azure_csv(path, 100.0, 1.0, Scale(prompt=0.1, output=0.1))
    assert stretch == pytest.approx(2.0, rel=0.1)
    assert arrivals[0].at_s == 0 and arrivals[1].at_s == pytest.approx(1.0, rel=0.1)
    assert (arrivals[0].prompt_tokens, arrivals[0].output_tokens) == (100, 20)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"])
def test_bad_traces_say_the_fix(tmp_path, text):
    with pytest.raises(ConfigurationError):
        from_azure_csv(_csv(tmp_path / "t.csv", text), 10, 1, Scale())
    with pytest.raises(ConfigurationError, match="existing file"):
        from_azure_csv(tmp_path / "none.csv", 10, 1, Scale())


def test_attainment_counts_failed_requests_as_missed():
    ok = Served(0, True, "", 0.05, 0.005, 10)
    slow, failed = Served(0, True, "", 0.2, 0.005, 10), Served(0, False, "HTTP 500")
    s = serving_summary([ok, ok, slow, failed], 0.4, _SLO)
    assert (s["requests"], s["failed"], s["slo_attainment"]) == (4, 1, 0.5)
    assert s["ttft_ms_p50"] == pytest.approx(50)


def test_percentile_and_harvest():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile(list(range(101)), 99) == 99
    assert harvest_efficiency(600, 1000, 0.4) == pytest.approx(1.0)


def test_report_has_the_agreed_keys():
    results = {n: PhaseResult(n, served=[Served(0, True, "", 0.05, 0.005, 9)]) for n in (ALONE, GATED, UNGATED)}
    results[ROLLOUT] = PhaseResult(ROLLOUT, rollout=RolloutTotals(tokens=10), rollout_tokens_per_s=100.0)
    results[GATED].rollout, results[GATED].rollout_tokens_per_s = RolloutTotals(), 80.0
    report = build_report(_SLO, results, {"vllm": "0"}, {})
    assert report["harvest_efficiency"] == pytest.approx(0.8)
    assert set(report) >= {"slo", "serving_alone", "coserve", "no_gate", "rollout_alone", "rollout_coserve", "versions"}
    assert set(report["memory"]) == {
        "pool_pages",
        "max_rollout_pages",
        "reclaims",
        "reclaim_ms_p50",
        "reclaim_ms_p99",
    }
    json.dumps(report)


def _scripted(chunks, status=200):
    """Serve one scripted stream and return what the client made of it."""
    from vllm_coserve.demo.load import serve_schedule

    async def run():
        async def handler(request):
            if status != 200:
                return web.Response(status=status, text="no")
            response = web.StreamResponse()
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
            return response

        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        from vllm_coserve.demo.arrivals import Arrival

        try:
            return await serve_schedule(
                f"http://127.0.0.1:{port}", "m", [Arrival(0.0, 4, 3)], 100, 0, lambda served: None
            )
        finally:
            await runner.cleanup()

    return asyncio.run(run())[0]


def test_stream_outcomes():
    token = b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n'
    done = b"data: [DONE]\n\n"
    good = _scripted([token, token, token, done])
    assert good.ok and good.ttft_s > 0 and good.tokens == 3
    assert not _scripted([token, token]).ok
    assert _scripted([b'data: {"choices":[{"finish_reason":"abort"}]}\n\n', done]).error == "aborted"
    assert _scripted([b'data: {"error": {}}\n\n']).error
    assert "HTTP 503" in _scripted([], status=503).error


def _steps(count, step_s, success, borrowed):
    return [
        {
            "success": success(i),
            "step_s": step_s,
            "tokens_dedicated": 300,
            "tokens_borrowed": borrowed,
            "migrations": 1,
            "turns_lost": 0,
            "tokens_lost": 0,
            "groups_by_staleness": {"0": 10, "1": 6},
        }
        for i in range(count)
    ]


def test_what_the_rl_job_came_to():
    served = [Served(0, True, "", 0.05, 0.005, 9)]
    alone = JobResult(_steps(5, 4.0, lambda i: 0.2, 0), served)
    both = JobResult(_steps(20, 2.0, lambda i: 0.2 if i < 10 else 0.8, 100), served)
    both.steps[0]["step_s"] = 60.0  # everything starts in it
    rl = training_summary(Learning(alone, both), _SLO)
    assert (rl["steps"], rl["success_start"], rl["success_last10"]) == (20, 0.2, pytest.approx(0.8))
    assert rl["step_s_mean"] == 2.0 and rl["step_s_mean_dedicated_only"] == 4.0
    assert rl["borrowed_token_share"] == 0.25 and rl["migrations"] == 20
    assert rl["turns_lost"] == rl["tokens_lost"] == 0 and rl["groups_by_staleness"] == {"0": 200, "1": 120}
    assert rl["serving"]["requests"] == 2 and rl["serving"]["failed"] == 0
    json.dumps(rl)
