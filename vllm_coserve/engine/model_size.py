"""How much device memory a model takes, found without loading it."""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.api.errors import ConfigurationError
from vllm_coserve.policy.pool_size import EngineFacts

_FLOATS = ("F64", "F32", "F16", "BF16")  # loaded in the engine's dtype, whatever the file's is
_LENGTH = struct.Struct("<Q")  # of a safetensors header, before it


def engine_facts(model: str, args: argparse.Namespace) -> EngineFacts:
    """What `policy.pool_size` needs to know of a model and of how `args` (vLLM's) have it run on a GPU.

    Raises:
        ConfigurationError: it cannot be found; says what to give instead.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    whole = _config(model, args)
    config = whole.get_text_config()
    try:
        hidden, intermediate, vocab = config.hidden_size, _intermediate_size(config), config.vocab_size
    except AttributeError as exc:
        raise _unknown(model, exc) from exc
    dtype_bytes = 4 if args.dtype in ("float", "float32") else 2
    tokens, seqs = (default[UsageContext.OPENAI_API_SERVER] for default in EngineArgs.get_batch_defaults(1))
    return EngineFacts(
        weight_bytes=loaded_bytes(model, whole, dtype_bytes),
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        dtype_bytes=dtype_bytes,
        max_num_batched_tokens=args.max_num_batched_tokens or tokens,
        max_num_seqs=args.max_num_seqs or seqs,
        graphs=not args.enforce_eager,
    )


def rollout_args(config: CoserveConfig) -> argparse.Namespace:
    """vLLM's arguments of the rollout engine, as `--coserve-rollout-args` gives them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    return parser.parse_known_args([_dashed(word) for word in config.rollout_argv])[0]


def _dashed(word: str) -> str:
    """vLLM takes --max_num_seqs for --max-num-seqs."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def loaded_bytes(model: str, config: Any, dtype_bytes: int) -> int:
    """Bytes of a model's weights on the device: by its checkpoint where that is here, else by its architecture.

    Args:
        model: a local folder, or a Hugging Face name.
        config: its `transformers` configuration.
        dtype_bytes: of the engine's floating-point type.

    Raises:
        ConfigurationError: it has no files, and is of no architecture that `transformers` has.
    """
    folder = _folder(model)
    quantized = getattr(config, "quantization_config", None) is not None
    if folder is not None and (found := checkpoint_bytes(folder, 0 if quantized else dtype_bytes)):
        return found
    return _architecture_bytes(model, config, dtype_bytes)


def checkpoint_bytes(folder: Path, float_bytes: int) -> int:
    """Bytes that a checkpoint's weights take once loaded, 0 for a folder that lacks some or all of its files.

    From the headers of its safetensors files, else the size of its other weight files.

    Args:
        folder: with the files.
        float_bytes: of an element of a floating-point tensor once it is loaded, 0 when they stay as they are.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # it says which files count: some folders have the weights twice
        files = [folder / name for name in set(json.loads(index.read_text())["weight_map"].values())]
    else:
        files = [f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated")]
    if not all(f.is_file() for f in files):
        return 0
    if not files:
        return sum(f.stat().st_size for f in folder.glob("*.bin"))
    return sum(_tensor_bytes(tensor, float_bytes) for file in files for tensor in _header(file))


def _header(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as f:
        header = json.loads(f.read(*_LENGTH.unpack(f.read(_LENGTH.size))))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def _tensor_bytes(tensor: dict[str, Any], float_bytes: int) -> int:
    if float_bytes and tensor["dtype"] in _FLOATS:
        return math.prod(tensor["shape"]) * float_bytes
    begin, end = tensor["data_offsets"]
    return end - begin


def _folder(model: str) -> Path | None:
    """Where a model's files are: its folder, or the Hugging Face cache; None when nothing is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _config(model: str, args: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    except Exception as exc:  # recovery: whatever was raised, the size can be given by hand
        raise _unknown(model, exc) from exc


def _architecture_bytes(model: str, config: Any, dtype_bytes: int) -> int:
    """Parameters of the model as `transformers` builds it on the meta device, where they take no memory."""
    import torch
    import transformers

    try:
        with torch.device("meta"):
            built = getattr(transformers, config.architectures[0])(config)
    except Exception as exc:  # recovery: whatever was raised, the size can be given by hand
        raise _unknown(model, exc) from exc
    return sum(p.numel() for p in built.parameters()) * dtype_bytes


def _unknown(model: str, exc: Exception) -> ConfigurationError:
    why = str(exc).splitlines()[0] if str(exc) else ""
    return ConfigurationError(
        f"how much memory {model} takes cannot be told before it is loaded ({type(exc).__name__}: {why}): give "
        "--coserve-pool-gib"
    )


def _intermediate_size(config: Any) -> int:
    """Elements that a token takes in the widest feed-forward layer."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 0
    # An expert's input and output are rows of their own for each of a token's experts.
    expert = (getattr(config, "moe_intermediate_size", None) or dense) + config.hidden_size
    return max(dense, experts * expert)
