"""The checks for GPU machines, on a machine without one: they say why they do not run, at once, and never pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import activation, memcheck, nvml, pages, reclaim
from tests.gpu.machine import commit, report, why_not
from tests.gpu.models import MODELS, kv_bytes_per_token, parameters, write_model

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "tests" / "gpu" / "run.sh"
_STAGES = ["driver", "kernels", "memcheck", "pages", "engines", "bench", "activation", "reclaim", "kills"]

without_gpu = pytest.mark.skipif(not why_not(), reason="there is a CUDA device here: tests/gpu/run.sh is for it")


def _run(*args):
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    return subprocess.run(args, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


@without_gpu
def test_the_script_says_in_one_line_for_each_stage_why_it_does_not_run():
    run = _run("bash", str(_SCRIPT), "--python", sys.executable)
    assert run.returncode == 1, run.stderr
    lines = run.stdout.splitlines()
    assert [line.partition(": not run: ")[0] for line in lines] == _STAGES
    assert all(line.endswith(why_not()) for line in lines)


@without_gpu
@pytest.mark.parametrize("stage", _STAGES)
def test_a_stage_by_itself_does_not_pass_either(stage):
    run = _run(sys.executable, "-m", f"tests.gpu.{stage}")
    assert run.returncode == 1 and run.stdout == f"{stage}: not run: {why_not()}\n", run.stderr


@without_gpu
def test_the_device_tests_are_collected_and_skipped_with_the_reason():
    run = _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    assert run.returncode == 0 and re.search(r"\d+ skipped", run.stdout), run.stdout
    assert why_not() in run.stdout and "passed" not in run.stdout and "failed" not in run.stdout


_REFUSED = [["--bundle"], ["--stages", "nonsense"], ["--nonsense"], ["--stages", "bench,kills", "--", "--kills=1"]]


@without_gpu
def test_the_stages_that_are_asked_for_are_named():
    run = _run("bash", str(_SCRIPT), "--python", sys.executable, "--stages", "kills,memcheck")
    assert [line.partition(":")[0] for line in run.stdout.splitlines()] == ["kills", "memcheck"]


@pytest.mark.parametrize("args", _REFUSED)
def test_wrong_arguments_are_refused(args):
    run = _run("bash", str(_SCRIPT), "--python", sys.executable, *args)
    assert run.returncode != 0 and run.stderr.startswith("run.sh: "), run.stdout


_STUB = """#!/bin/bash
# In place of a Python on a machine with a device: notes what it is asked for, {fails} fails.
echo "$*" >> {log}
case "$*" in {fails}) exit 3 ;; *) exit 0 ;; esac
"""


def _run_with_stub(tmp_path, fails, *args):
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(_STUB.format(log=log, fails=fails))
    stub.chmod(0o755)
    run = _run("bash", str(_SCRIPT), "--python", str(stub), "--out", str(tmp_path / "results"), *args)
    prefix = "-m tests.gpu."
    asked = [line.removeprefix(prefix) for line in log.read_text().splitlines() if line.startswith(prefix)]
    return run, dict(line.partition(" ")[::2] for line in asked if line != "machine")


@without_gpu
def test_on_a_device_each_stage_runs_whatever_became_of_those_before(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.touch()
    run, asked = _run_with_stub(tmp_path, "*gpu.kernels*", "--trace", str(trace))
    assert list(asked) == _STAGES, run.stderr
    assert all(f"--out {tmp_path}/results" in args for args in asked.values())
    assert [stage for stage, args in asked.items() if f"--trace {trace}" in args] == ["bench", "kills"]
    summary = run.stdout.partition("== summary\n")[2].splitlines()
    assert summary == [f"{s}: failed (3)" if s == "kernels" else f"{s}: passed" for s in _STAGES]
    assert run.returncode == 1


@without_gpu
def test_one_stage_gets_the_arguments_after_the_dashes_and_its_passing_is_the_scripts(tmp_path):
    run, asked = _run_with_stub(
        tmp_path, "nothing", "--stages", "bench", "--bound", "60", "--", "--rows", "dual,static"
    )
    assert asked["bench"].endswith("--rows dual,static") and list(asked) == ["bench"]
    assert run.returncode == 0 and run.stdout.endswith("== summary\nbench: passed\n"), run.stdout


@without_gpu
def test_without_vllm_the_stages_that_need_it_say_so(tmp_path):
    run, asked = _run_with_stub(tmp_path, "*find_spec*")
    assert list(asked) == _STAGES[:4] and run.returncode == 1
    said = [line.partition(":")[0] for line in run.stdout.splitlines() if ": not run: vLLM is not installed" in line]
    assert said == _STAGES[4:]
    assert [line for line in run.stdout.splitlines() if line.endswith(": not run")] == [f"{s}: not run" for s in said]


def test_the_models_have_the_published_numbers_of_parameters(tmp_path):
    for name, billions in (("qwen2.5-7b", 7.6), ("qwen3-8b", 8.2)):
        assert abs(parameters(MODELS[name]) / 1e9 - billions) < 0.1
        assert (write_model(name, tmp_path) / "config.json").is_file()


def test_kv_memory_of_a_token_is_as_published():
    sizes = {name: kv_bytes_per_token(config) for name, config in MODELS.items()}
    assert sizes == {"qwen2.5-7b": 57_344, "qwen3-8b": 147_456}
    prompts = reclaim.prompts_for(10 << 30, sizes["qwen2.5-7b"], 8192)
    assert max(prompts) == 8192 and 0 <= sum(prompts) * 57_344 - (10 << 30) < 57_344


def test_the_footprint_and_the_activation_are_held_against_their_bars():
    cycle = {"activate_s": 0.5, "same_tokens": True, "lent_bytes": 900}
    in_time = cycle | {"activate_s": 0.4}
    cycles = [cycle, in_time, cycle | {"same_tokens": False}, in_time | {"lent_bytes": 899}]
    found = {"bound_s": 0.45, "weight_bytes": 1000, "cycles": cycles}
    found["footprint"] = {"back_when_killed_bytes": 2_100_000_000}
    assert [line.partition(":")[0] for line in activation.missed(found)] == [
        "cycle 1",
        "cycle 3",
        "cycle 3",
        "cycle 4",
        "a deactivated engine holds 2.10 GB of the device",
    ]
    assert activation.missed({"weight_bytes": 1000, "cycles": [cycle]}) == []


def test_memcheck_passes_only_with_a_summary_without_errors(monkeypatch, tmp_path):
    monkeypatch.setattr(memcheck.beds, "WORK", tmp_path)

    def outcome(script):
        monkeypatch.setitem(memcheck._PARTS, "driver", [script])
        monkeypatch.setattr(memcheck, "_CHECK", ["-c"])
        monkeypatch.setattr(memcheck.sys, "executable", script)
        return memcheck.check("bash", "driver")

    assert outcome("echo ========= ERROR SUMMARY: 0 errors")["passed"]
    assert not outcome("true")["passed"]
    assert not outcome("echo ========= ERROR SUMMARY: 0 errors; exit 1")["passed"]
    found = outcome("echo ERROR SUMMARY: 0 errors; echo ERROR SUMMARY: 2 errors; exit 86")
    assert (found["passed"], found["errors"], found["exit"]) == (False, 2, "86")
    monkeypatch.setattr(memcheck, "_BOUND_S", 0.2)
    assert outcome("sleep 60 & echo ERROR SUMMARY: 0 errors; wait")["exit"] == "no end after 0.2 s"


def test_memcheck_without_the_tool_is_no_pass(monkeypatch, capsys):
    monkeypatch.setattr(memcheck, "why_not", lambda: "")
    monkeypatch.setattr(memcheck, "tool", lambda: "")
    monkeypatch.setattr(sys, "argv", ["memcheck"])
    assert memcheck.main() == 1
    assert capsys.readouterr().out == "memcheck: not run: no compute-sanitizer\n"


def test_one_part_of_the_pages_that_fails_leaves_the_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pages, "why_not", lambda: "")
    monkeypatch.setattr(sys, "argv", ["pages", "--out", str(tmp_path)])
    monkeypatch.setattr(pages, "costs", lambda: {}["none"])
    monkeypatch.setattr(pages, "reclaim", lambda gib: {"gib": gib})
    assert pages.main() == 1
    assert "pages, costs: failed: KeyError: 'none'" in capsys.readouterr().out
    assert (tmp_path / "gpu_reclaim.json").is_file()


def test_the_commit_is_said_where_there_is_no_history(monkeypatch):
    monkeypatch.setenv("COSERVE_COMMIT", "abc1234")
    assert commit() == "abc1234"


def test_nvml_is_missed_quietly():
    if not why_not():
        pytest.skip("there is a CUDA device here")
    with nvml.Lowest().watching() as watch:
        assert nvml.used_bytes() is None and nvml.process_bytes() == {} and watch.lowest[0] is None


def test_a_report_is_a_table_and_json(tmp_path, capsys):
    report("name", ("a", "b"), [(1, 0.12345), ("x", None)], {"found": 1}, tmp_path)
    assert capsys.readouterr().out.startswith("| a | b |\n| --- | --- |\n| 1 | 0.123 |\n| x | – |\n")
    assert '"found": 1' in (tmp_path / "name.json").read_text() and (tmp_path / "name.md").is_file()
