"""Names and shapes of a checkpoint's tensors: what other weights must have to be weights of the same model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_SHAPES: dict[str, list[int]] = {}  # tensors of the first checkpoint; later ones must have the same


def known_shapes(model: str) -> dict[str, list[int]]:
    """Tensors of the checkpoint that was loaded first; it is still whole when it is first replaced."""
    if not _SHAPES:
        from huggingface_hub import snapshot_download

        folder = Path(model)
        _SHAPES.update(
            read_shapes(folder if folder.is_dir() else Path(snapshot_download(model, local_files_only=True)))
        )
    return _SHAPES


def difference(known: dict[str, list[int]], path: Path) -> str:
    """What makes the checkpoint at `path` one of another model than one with the tensors `known`; "" when nothing."""
    try:
        found = read_shapes(path)
    except (OSError, ValueError, struct.error) as exc:
        return f"{path} is no folder of whole safetensors files ({exc})"
    if not found:
        return f"{path} has no safetensors files"
    return other_model(known, found, str(path))


def other_model(known: dict[str, list[int]], found: dict[str, list[int]], path: str) -> str:
    """What makes tensors with the shapes `found`, which are at `path`, those of another model; "" when nothing."""
    if missing := sorted(known.keys() - found.keys()):
        return f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}"
    if further := sorted(found.keys() - known.keys()):
        return f"{path} has {len(further)} tensors that the model has not, such as {further[0]}"
    for name, shape in known.items():
        if found[name] != shape:
            return f"{path}: {name} has shape {found[name]}, not {shape}"
    return ""


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the safetensors files of a folder; empty where there are none.

    Raises:
        OSError, ValueError, struct.error: a file cannot be read, is truncated or not in that format.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > 100 << 20:
                raise ValueError(f"{file.name} is not a safetensors file")
            header = json.loads(f.read(length))
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        end = max((v["data_offsets"][1] for v in entries.values()), default=0)
        if file.stat().st_size != 8 + length + end:
            raise ValueError(f"{file.name} is truncated")
        shapes.update({k: v["shape"] for k, v in entries.items()})
    return shapes


def repack_embeddings(model: Any) -> None:
    """After a reload on CPU: have output layers that share their weight with the embedding compute with the new one.

    They compute with a packed copy, which vLLM makes anew only for the layer whose name the checkpoint has.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if "cpu_linear" in vars(module) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
