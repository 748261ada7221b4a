"""What is asked of vLLM and transformers about models that are not loaded."""

import json

import pytest

from tests.gpu.models import MODELS
from vllm_coserve.api.config import parse_config
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.engine.model_size import engine_facts, rollout_args
from vllm_coserve.engine.preflight import weight_pages_of

pytestmark = pytest.mark.contract


def _arguments(text=""):
    return rollout_args(parse_config({"rollout": "m", "rollout_args": text}))


def _folder(path, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("name", "parameters"), [("qwen2.5-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360)])
def test_a_folder_without_weights_is_sized_by_its_architecture(tmp_path, name, parameters):
    config = MODELS[name]
    facts = engine_facts(_folder(tmp_path / name, **config), _arguments("--load-format dummy --enforce-eager"))
    assert facts.weight_bytes == 2 * parameters
    assert (facts.hidden_size, facts.intermediate_size) == (config["hidden_size"], config["intermediate_size"])
    assert (facts.vocab_size, facts.dtype_bytes, facts.graphs) == (config["vocab_size"], 2, False)
    assert facts.max_num_batched_tokens >= 2048 and facts.max_num_seqs >= 128, "vLLM's defaults"


def test_the_rollouts_own_arguments_count():
    args = _arguments("--max_num_seqs 16 --max-num-batched-tokens=4096 --dtype float32 --uvicorn-log-level error")
    assert (args.max_num_seqs, args.max_num_batched_tokens, args.dtype) == (16, 4096, "float32")
    assert 0.5 < args.gpu_memory_utilization < 1


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen2", "architectures": ["NobodysModel"]}, {"model_type": "nobodys"}]
)
def test_a_model_that_nobody_knows_needs_the_flag(tmp_path, config):
    with pytest.raises(ConfigurationError, match="--coserve-pool-gib"):
        engine_facts(_folder(tmp_path / "m", **config), _arguments())


def test_weight_pages_are_those_that_the_weights_would_fill(tmp_path):
    folder = _folder(tmp_path / "m", **MODELS["qwen3-8b"])
    assert weight_pages_of(parse_config({"rollout": folder})) == 2 * 8_190_735_360 // (2 << 20)
    unknown = _folder(tmp_path / "n", model_type="nobodys")
    assert weight_pages_of(parse_config({"rollout": unknown})) == 0
