"""The pool's size on a GPU: a default before the engines start, and a check once vLLM has profiled both."""

from __future__ import annotations

import argparse
import logging
import time

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.api.context import Context
from vllm_coserve.api.errors import ConfigurationError, ContractError
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine.device import device_memory_bytes, memory_left
from vllm_coserve.engine.model_size import engine_facts, rollout_args
from vllm_coserve.policy.pool_size import GRAPHS_BYTES, EngineNeed, engine_need, pool_bytes, room_bytes

logger = logging.getLogger("vllm.coserve")

_GIB = 1 << 30
_ROLLOUT_WAIT_S = 1800.0  # the supervisor gives a rollout engine as long to come up
_POLL_S = 0.05


def default_pool_bytes(args: argparse.Namespace, config: CoserveConfig) -> int:
    """What both models are thought to leave of the share of the device that `--gpu-memory-utilization` gives.

    Args:
        args: vLLM's arguments of the serving engine, as they were given.
        config: of the pair.

    Raises:
        ConfigurationError: a model's size cannot be told, or nothing is left.
    """
    serving = engine_need(engine_facts(getattr(args, "model_tag", None) or args.model, args))
    rollout = engine_need(engine_facts(config.rollout, rollout_args(config)))
    device, share = device_memory_bytes(), args.gpu_memory_utilization
    found = pool_bytes(device, share, (serving, rollout))
    counted = (
        f"{share:g} of the device's {device / _GIB:.1f} GiB, without {_in_words(serving)} (serving) and "
        f"{_in_words(rollout)} (rollout)"
    )
    if found <= 0:
        raise ConfigurationError(
            f"there is no room for a page pool: {counted}, is less than nothing. Choose a smaller --coserve-rollout "
            "model, or lower --max-num-batched-tokens or --max-num-seqs; or give --coserve-pool-gib"
        )
    logger.info("coserve: page pool of %.1f GiB: %s", found / _GIB, counted)
    return found


def _in_words(need: EngineNeed) -> str:
    weights, activations, fixed = (n / _GIB for n in (need.weight_bytes, need.activation_bytes, need.fixed_bytes))
    return f"{weights:.1f} GiB of weights, {activations:.1f} of activations, {fixed:.1f} of context and graphs"


def check_pool_fits(context: Context, block: ControlBlock, eager: bool) -> None:
    """See to it that the pool fits beside what vLLM's profile runs of both engines have shown that they need.

    Called by each engine core when its profile run is done, and before it has the pool; on a GPU that is the process
    of the worker too. The rollout's says what it needs. Serving's waits for that, for the pool is made only then.

    Args:
        context: of the engine.
        block: the pair's control block.
        eager: whether no CUDA graphs are captured afterwards.

    Raises:
        ConfigurationError: it does not fit; says the size that does.
        ContractError: the rollout engine did not come so far.
    """
    ours = memory_left().transient_bytes + (0 if eager else GRAPHS_BYTES)
    if context.side == "rollout":
        block.set(Word.ROLLOUT_TRANSIENT_BYTES, max(1, ours))
        return
    theirs = _await_rollout(block)
    free = memory_left().free_bytes  # after the wait: what the rollout holds has been taken from it
    pool, room = block.pool_pages * block.page_bytes, room_bytes(free, (ours, theirs))
    computing = f"both engines need {(ours + theirs) / _GIB:.2f} of the {free / _GIB:.2f} GiB that are free to compute"
    if pool > room:
        raise ConfigurationError(
            f"a page pool of {pool / _GIB:.2f} GiB does not fit beside both models: {computing}. "
            + (f"Give --coserve-pool-gib {_rounded_down(room)}" if room else "Choose a smaller --coserve-rollout model")
        )
    logger.info("coserve: the page pool of %.2f GiB fits beside both models: %s", pool / _GIB, computing)


def _await_rollout(block: ControlBlock) -> int:
    deadline = time.monotonic() + _ROLLOUT_WAIT_S
    while not (theirs := block.get(Word.ROLLOUT_TRANSIENT_BYTES)):
        if block.get(Word.START_REFUSED) or time.monotonic() > deadline:
            raise ContractError("the rollout engine did not say how much memory it needs: see its error in the log")
        time.sleep(_POLL_S)
    return theirs


def _rounded_down(nbytes: int) -> str:
    return f"{nbytes * 100 // _GIB / 100:g}"
