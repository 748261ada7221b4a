"""Step costs of a model on a device: profiled at the first start, kept on disk, corrected online."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_coserve import __version__
from vllm_coserve.engine.device import device_type
from vllm_coserve.policy.latency import LatencyModel

logger = logging.getLogger("vllm.coserve")

_PREFILL_TOKENS = (16, 64, 128, 256, 512, 256, 64)
_DECODES = (1, 4, 8, 16)
_DECODE_STEPS = 6
_PROFILE_BOUND_S = 120.0


def cache_dir() -> Path:
    """Where latency models are kept: $XDG_CACHE_HOME/vllm-coserve, by default ~/.cache/vllm-coserve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-coserve"


class LatencyCache:
    """The latency model of one engine, on disk by model, device and versions."""

    def __init__(self, side: str, vllm_config: Any) -> None:
        import torch
        import vllm

        hf = vllm_config.model_config.hf_text_config
        facts = {
            "model": vllm_config.model_config.model,
            "architecture": {
                k: getattr(hf, k, None)
                for k in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            },
            "dtype": str(vllm_config.model_config.dtype),
            "device": _device_name(),
            "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
            "versions": [vllm.__version__, torch.__version__, __version__],
        }
        self._facts = facts
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        self._path = cache_dir() / f"latency-{key}.json"

    def load_or_profile(self, core: Any, clock: Any, step: Callable[[], Any] | None) -> None:
        """Fill `clock.model`, from disk or by running steps; an unusable file is profiled anew.

        `step` runs one engine step when this engine has the device; None: no profile, online correction only.
        """
        try:
            clock.model = LatencyModel.from_json(json.loads(self._path.read_text())["model"])
            logger.info("coserve: step costs read from %s", self._path)
            return
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, OSError) as exc:
            logger.warning("coserve: step costs in %s are not usable (%s), profiling again", self._path, exc)
        if step is None:
            return
        start = time.monotonic()
        steps = profile(core, step)
        logger.info("coserve: profiled step costs in %d steps, %.1f s", steps, time.monotonic() - start)
        self.save(clock.model)

    def save(self, model: LatencyModel) -> None:
        """Write the model, all or nothing; a full or read-only disk costs a new profile next time, no more."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as f:
                json.dump({"facts": self._facts, "model": model.to_json()}, f)
            os.replace(f.name, self._path)
        except OSError as exc:
            logger.warning("coserve: cannot keep step costs in %s: %s", self._path, exc)


def profile(core: Any, step: Callable[[], Any]) -> int:
    """Run prefills and decode batches of several sizes through the engine core; returns the number of steps.

    The step hooks observe them as they observe traffic. Nothing is left in the scheduler or the prefix cache.
    """
    steps = 0
    limit = core.vllm_config.model_config.max_model_len - _DECODE_STEPS - 2
    for i, tokens in enumerate(_PREFILL_TOKENS):
        steps += _run(core, step, [min(tokens, limit)], 1, i)
    max_seqs = core.vllm_config.scheduler_config.max_num_seqs
    for i, batch in enumerate(_DECODES):
        if batch <= max_seqs:
            steps += _run(core, step, [min(24, limit)] * batch, _DECODE_STEPS, 100 + i)
    core.scheduler.reset_prefix_cache()
    return steps


def _run(core: Any, step: Callable[[], Any], prompt_lens: list[int], max_tokens: int, salt: int) -> int:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    vocab = core.vllm_config.model_config.get_vocab_size()
    for i, n in enumerate(prompt_lens):
        request = Request(
            request_id=f"coserve-profile-{salt}-{i}",
            prompt_token_ids=[(salt * 7919 + i * 104729 + j * 31) % (vocab - 1) for j in range(n)],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, detokenize=False),
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
        core.scheduler.add_request(request)
    steps, deadline = 0, time.monotonic() + _PROFILE_BOUND_S
    while core.scheduler.has_requests() and steps < 200:
        if time.monotonic() > deadline:
            raise TimeoutError(f"profiling step costs took longer than {_PROFILE_BOUND_S:.0f} s")
        step()
        steps += 1
    return steps


def _device_name() -> str:
    if device_type() == "cuda":
        from vllm.platforms import current_platform

        return current_platform.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
