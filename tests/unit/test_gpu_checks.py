"""The checks for GPU machines, on a machine without one: they say why they do not run, at once, and never pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.engines import MODELS, write_model
from tests.gpu.machine import report, why_not

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "tests" / "gpu" / "run.sh"
_STAGES = ["driver", "kernels", "pages", "engines", "bench"]

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


@pytest.mark.parametrize("args", [["--bundle"], ["--stages", "nonsense"], ["--nonsense"]])
def test_wrong_arguments_are_refused(args):
    run = _run("bash", str(_SCRIPT), "--python", sys.executable, *args)
    assert run.returncode != 0 and run.stderr.startswith("run.sh: "), run.stdout


def test_the_models_have_the_published_numbers_of_parameters(tmp_path):
    for name, billions in (("qwen2.5-7b", 7.6), ("qwen3-8b", 8.2)):
        config = MODELS[name]
        hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
        head = config.get("head_dim", hidden // config["num_attention_heads"])
        attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
        total = layers * (attention + 3 * hidden * inner) + 2 * config["vocab_size"] * hidden
        assert abs(total / 1e9 - billions) < 0.1
        assert (write_model(name, tmp_path) / "config.json").is_file()


def test_a_report_is_a_table_and_json(tmp_path, capsys):
    report("name", ("a", "b"), [(1, 0.12345), ("x", None)], {"found": 1}, tmp_path)
    assert capsys.readouterr().out.startswith("| a | b |\n| --- | --- |\n| 1 | 0.123 |\n| x | – |\n")
    assert '"found": 1' in (tmp_path / "name.json").read_text() and (tmp_path / "name.md").is_file()
