"""The co-serving benchmark's rows, harvest arithmetic and merging, on made-up phases in place of engines."""

import argparse
import contextlib
import json
import math
from dataclasses import replace

import pytest

from tests.bench import coserve, machine, results
from tests.bench.coserve_report import markdown
from tests.bench.machine import CPU, arrivals
from tests.bench.rows import ROWS, Row, add_harvest, by_pair, chosen, lease
from tests.gpu import beds, bench, kills
from vllm_coserve.demo.arrivals import Scale
from vllm_coserve.demo.load import Served
from vllm_coserve.demo.servers import DemoError

_FACTS = {"machine": "m", "versions": {}, "commit": "c1", "command": "x"}


# ---- rows


def test_rows_are_chosen_by_name_and_unknown_names_are_refused():
    assert chosen(ROWS, "") == list(ROWS)
    assert [r.name for r in chosen(ROWS, "lease50,dual")] == ["dual", "lease50"]
    with pytest.raises(ValueError, match=r"no row nosuch: there are dual,"):
        chosen(ROWS, "dual,nosuch")
    with pytest.raises(SystemExit):
        coserve.arguments(CPU, ROWS).parse_args(["--rows", "nosuch"])
    assert coserve.arguments(CPU, ROWS).parse_args(["--rows", "references"]).rows == "references"


@pytest.mark.parametrize("rows", [ROWS, beds.ROWS])
def test_names_are_unique_and_only_densities_share_a_pair(rows):
    assert len({r.name for r in rows}) == len(rows)
    shared = [[r.name for r in group] for group in by_pair(rows) if len(group) > 1]
    assert shared == [["dual", "density15", "density2"]]


def test_the_device_has_the_papers_rows():
    names = [r.name for r in beds.ROWS]
    assert {"dual", "density15", "density2", "static", "nogate", "ttft", "tpot"} < set(names)
    leases = [r for r in beds.ROWS if r.name.startswith("lease")]
    assert [r.flags for r in leases] == [(f"--coserve-lease-s={s}",) for s in (10, 20, 50, 100)]
    assert all(r.seconds > 100 for r in leases), "the longest lease has to end within the phase"


# ---- harvest


def _serving(busy):
    serving = {"failed": 0, "requests": 4, "busy_fraction": busy, "slo_attainment": 1.0}
    return serving | {f"{k}_{q}": 1.0 for k in ("ttft_ms", "tpot_ms") for q in ("p50", "p95", "p99")}


def _row(rate, alone, busy=0.0):
    serving = _serving(busy)
    rollout = {"tokens_per_s": rate, "s_per_10k_tokens": 1.0, "aborts": {}}
    more = {"pair": {"prefix_hit_rate": 0.5}, "client_cpu_share": 0.1, "title": "t", "density": 1.0}
    return {"serving": serving, "rollout": rollout, "rollout_alone_tokens_per_s": alone, **more}


def _result(rows, alone=None):
    return {
        "slo": {"ttft_ms": 500.0, "tpot_ms": 150.0},
        "serving_alone": {"1.0": _serving(0.5)} if alone is None else alone,
        "rollout_alone": {"tokens_per_s": 70.0, "busy_fraction": 0.9, "s_per_10k_tokens": 143.0},
        "rows": rows,
    }


def test_harvest_is_over_the_time_that_serving_alone_leaves():
    result = _result({"dual": _row(45.0, [90.0, 110.0]), "static": _row(15.0, [30.0, 30.0])})
    add_harvest(ROWS, result)
    assert result["rows"]["dual"]["harvest_efficiency"] == pytest.approx(45 / (100 * 0.5))
    assert result["rows"]["static"]["harvest_efficiency"] == pytest.approx(15 / (100 * 0.5)), "held against the whole"


def test_harvest_of_a_lesser_engine_alone_is_held_against_the_reference():
    result = _result({"static": _row(15.0, [30.0, 30.0])})
    add_harvest(ROWS, result)
    assert result["rows"]["static"]["harvest_efficiency"] == pytest.approx(15 / (70 * 0.5))


def test_harvest_is_unknown_without_a_reference_of_that_density():
    result = _result({"dual": _row(45.0, [100.0]), "density2": _row(45.0, [100.0])}, alone={})
    add_harvest(ROWS, result)
    assert math.isnan(result["rows"]["dual"]["harvest_efficiency"])
    assert "| – |" in markdown(result)


def test_bars_name_what_was_missed():
    good, bad = _row(45.0, [100.0]), _row(10.0, [100.0])
    bad["serving"] |= {"failed": 1, "tpot_ms_p99": 151.0}
    result = _result({"dual": good, "density2": bad, "static": _row(1.0, [100.0])})
    result["serving_alone"]["2.0"] = _serving(0.5)
    add_harvest(ROWS, result)
    assert bench.bars(result) == {"dual": [], "density2": ["1 of 4 failed", "TPOT P99 151.0 ms", "harvest 0.20"]}
    assert "| met |" in bench.tables(result)
    assert all(bench.bars(_result({"dual": good | {"harvest_efficiency": v}}))["dual"] for v in (None, math.nan))


def test_the_generators_sizes_follow_the_scale():
    usual, large = arrivals(None, 20.0, 2.0), arrivals(None, 20.0, 2.0, scale=Scale(prompt=1.2, output=1.0))
    assert [a.at_s for a in usual] == [a.at_s for a in large]
    assert [a.prompt_tokens * 10 for a in usual] == [a.prompt_tokens for a in large]


# ---- results of several calls


def test_an_earlier_result_of_the_same_commit_and_options_is_gone_on_with(tmp_path):
    assert results.earlier("r", tmp_path, "c1", {"rate": 1.0}) == {}
    results.write("r", {"options": {"rate": 1.0, "rows": "a"}, "rows": {"a": math.nan}}, "", tmp_path, _FACTS)
    assert results.earlier("r", tmp_path, "c1", {"rate": 1.0})["rows"] == {"a": None}


@pytest.mark.parametrize(("commit", "rate"), [("c2", 1.0), ("c1", 2.0)])
def test_another_result_is_put_aside_and_not_overwritten(tmp_path, capsys, commit, rate):
    results.write("r", {"options": {"rate": 1.0}, "rows": {"a": 1}}, "", tmp_path, _FACTS)
    assert results.earlier("r", tmp_path, commit, {"rate": rate}) == {}
    assert json.loads((tmp_path / "r.before.json").read_text())["rows"] == {"a": 1}
    assert "begun anew" in capsys.readouterr().out and not (tmp_path / "r.json").exists()


def test_a_damaged_result_is_put_aside(tmp_path):
    (tmp_path / "r.json").write_text('{"rows": ')
    assert results.earlier("r", tmp_path, "c1", {}) == {}
    assert (tmp_path / "r.before.json").exists()


class _Fake:
    """Engines' place: phases are made up, `broken` names logs of pairs that do not start, or phases that fail."""

    def __init__(self, monkeypatch, broken=()):
        self.started, self.broken, self.phases = [], set(broken), []
        monkeypatch.setattr(machine, "start", self.start)
        monkeypatch.setattr(coserve.Bench, "_phase", self.phase)

    @contextlib.contextmanager
    def start(self, flags, log, pool_gib, rollout_args="", rollout=None, bed=CPU):
        self.started.append(log)
        if log in self.broken:
            raise DemoError("it did not start")
        yield None

    def phase(self, pair, density, rollout, seconds):
        self.phases.append((density, rollout, seconds))
        if (density, rollout) in self.broken:
            raise RuntimeError("no")
        made = {"tokens_per_s": 50.0, "busy_fraction": 0.5, "s_per_10k_tokens": 1.0, "aborts": {}, "refused": 0}
        pages = {"prefix_hit_rate": 0.5, "reclaims": {}}
        served = [] if density is None else [Served(0.0, ok=True, ttft_s=0.1, tpot_s=0.01, tokens=9)]
        more = {"rollout": made, "pair": pages, "client_cpu_share": 0.1, "busy_fraction": 0.4}
        return {"served": served, "alone": [100.0, 100.0], **more}


def _measure(out, rows, bed=CPU, table=ROWS, **more):
    o = argparse.Namespace(trace=None, seconds=9.0, rate=4.0, rollouts=4, pool_gib=0.1, seed=0, slo_factor=3.0, out=out)
    for name, value in ({"rows": rows, "merge": True} | more).items():
        setattr(o, name, value)
    return coserve.measure(o, bed, table, markdown, lambda: dict(_FACTS))


def _written(out, bed=CPU):
    return json.loads((out / f"{bed.name}.json").read_text())


def test_calls_go_on_with_references_and_keep_the_rows_of_earlier_ones(monkeypatch, tmp_path):
    fake = _Fake(monkeypatch)
    _measure(tmp_path, "references")
    assert fake.started == ["references.log"]
    assert sorted(_written(tmp_path)["serving_alone"]) == ["1.0", "1.5", "2.0"]
    _measure(tmp_path, "static")
    _measure(tmp_path, "density2,dual")
    assert fake.started == ["references.log", "static.log", "dual.log"]
    found = _written(tmp_path)
    assert list(found["rows"]) == ["dual", "density2", "static"], "in the table's order"
    assert found["slo"] == pytest.approx({"ttft_ms": 300.0, "tpot_ms": 30.0})
    assert [row["harvest_efficiency"] for row in found["rows"].values()] == pytest.approx([50 / 60] * 3)
    assert found["command"] == "x; x; x"


def test_references_that_are_missing_are_measured_first(monkeypatch, tmp_path):
    fake = _Fake(monkeypatch)
    _measure(tmp_path, "dual")
    _measure(tmp_path, "density2")
    alone = [density for density, rollout, _ in fake.phases if not rollout]
    assert alone == [1.0, 2.0]


def test_without_merge_a_run_is_by_itself(monkeypatch, tmp_path):
    _Fake(monkeypatch)
    _measure(tmp_path, "dual", merge=False)
    _measure(tmp_path, "static", merge=False)
    assert list(_written(tmp_path)["rows"]) == ["static"]


def test_a_row_with_a_length_of_its_own_has_it(monkeypatch, tmp_path):
    fake = _Fake(monkeypatch)
    _measure(tmp_path, "lease20", table=(*ROWS, lease(20, 200.0)))
    assert fake.phases[-1] == (1.0, True, 200.0) and fake.phases[0] == (1.0, False, 9.0)


def test_a_pair_that_does_not_start_fails_its_rows_and_no_others(monkeypatch, tmp_path, capsys):
    _Fake(monkeypatch, broken={"dual.log"})
    _, failed = _measure(tmp_path, "dual,density2,static")
    assert sorted(failed) == ["density2", "dual"]
    assert list(_written(tmp_path)["rows"]) == ["static"]
    assert "dual: failed: DemoError: it did not start" in capsys.readouterr().out


def test_a_row_that_fails_leaves_the_others_a_new_pair(monkeypatch, tmp_path):
    fake = _Fake(monkeypatch, broken={(1.0, True)})
    _, failed = _measure(tmp_path, "dual,density2")
    assert list(failed) == ["dual"] and list(_written(tmp_path)["rows"]) == ["density2"]
    assert fake.started == ["references.log", "dual.log", "density2.log"]


def test_rows_do_without_references_where_the_slo_is_fixed(monkeypatch, tmp_path):
    bed = replace(CPU, name="fixed", slo_ms={"ttft_ms": 500.0, "tpot_ms": 150.0})
    _Fake(monkeypatch, broken={"references.log"})
    _, failed = _measure(tmp_path, "dual", bed)
    assert list(failed) == ["references"]
    assert _written(tmp_path, bed)["rows"]["dual"]["harvest_efficiency"] is None
    _, failed = _measure(tmp_path, "dual")
    assert not (tmp_path / "coserve.json").exists(), "without an SLO there is nothing to measure"


def test_runs_of_kills_are_summed_up():
    serving = {"failed": 1, "requests": 40, "ttft_ms_p99": 300.0, "tpot_ms_p99": 90.0, "slo_attainment": 1.0}
    times = {"p50": 90.0, "max": 120.0}
    kill = {"device_back_bytes": 16_400_000_000}
    run = {"serving": serving, "kills": [kill] * 4, "pages_usable_ms": times, "back_s": times}
    run |= {"pages_leaked": 0, "pages_missing": 0}
    assert kills.table({"runs": [run, run]}).splitlines()[-1].startswith("| all | 8 | 2 of 80 |")
    assert kills.missed(run) == ["1 of 40 serving requests failed"]


def test_a_bed_is_all_that_a_row_needs():
    assert isinstance(ROWS[0], Row)
    for graphs in (False, True):
        bed = beds.h200(graphs)
        assert ("--enforce-eager" in bed.serving_args) is not graphs
        assert bed.slo_ms == {"ttft_ms": 500.0, "tpot_ms": 150.0}
        longest = bed.turns.prompt[1] + bed.turns.turns * (bed.turns.output[1] + bed.turns.observation[1])
        assert longest < 8192, "a trajectory fits the rollout engine's --max-model-len"
        assert bed.scale.prompt_max + bed.scale.output_max <= 16384
