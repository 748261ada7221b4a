"""Real pairs of engines for scenario tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenario.harness import RunningPair, start_pair
from tests.scenario.proxy_harness import dedicated_engine
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model

_MODELS = Path(__file__).parents[2] / "out" / "models"


@pytest.fixture(scope="session")
def models() -> tuple[Path, Path]:
    """(serving model, rollout model), made once and kept in the checkout."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("scenario tests need two CPU cores: one stands for the device")
    return ensure_model(SERVING_SPEC, _MODELS), ensure_model(ROLLOUT_SPEC, _MODELS)


@pytest.fixture(scope="session")
def pair(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    """A pair with a small pool (32 pages), so that bursts run out of free pages."""
    log = tmp_path_factory.mktemp("pair") / "pair.log"
    flags = ["--coserve-pool-gib=0.0625", "--coserve-ttft-slo-ms=1500", "--coserve-tpot-slo-ms=200"]
    with start_pair(models, log, [*flags, "--coserve-stall-timeout-s=60", "--api-key=sesame"]) as running:
        yield running


@pytest.fixture(scope="module")
def dedicated(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a dedicated engine with the rollout model, one for each module."""
    with dedicated_engine(models[1], tmp_path_factory.mktemp("dedicated") / "dedicated.log") as (url, _):
        yield url
