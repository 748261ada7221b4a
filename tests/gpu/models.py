"""Models of real size without weights: a config.json, for `--load-format dummy`, token ids in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
# The sizes that Qwen2.5-7B and Qwen3-8B publish in their config.json.
MODELS = {
    "qwen2.5-7b": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen3-8b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "vocab_size": 151936,
    },
}


def write_model(name: str, root: Path) -> Path:
    """A folder with the config.json of a model; there are no weights and no tokenizer in it."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=2) + "\n")
    return folder


def parameters(config: dict[str, Any]) -> int:
    """How many parameters a model with this configuration has, but for norms and biases."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    layer = 2 * hidden * head_dim * heads + 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """KV bytes of one token over all layers (keys and values in two bytes each)."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2 * 2
