"""The control block in words: what `GET /coserve/v1/status` and `turns` answer."""

from __future__ import annotations

import numpy as np

from vllm_coserve import __version__
from vllm_coserve.api.context import Context
from vllm_coserve.api.messages import (
    Aborts,
    Gate,
    Holder,
    Pages,
    Reclaims,
    RolloutEngine,
    State,
    Status,
    TurnRecord,
    Turns,
    Weights,
)
from vllm_coserve.control.block import WHO_ROLLOUT, WHO_SERVING, ControlBlock
from vllm_coserve.control.registration import Registration
from vllm_coserve.control.words import Note, Word
from vllm_coserve.memory.ledger import Owner
from vllm_coserve.policy.memory import MemoryConfig, headroom_pages


def read_status(context: Context, block: ControlBlock) -> Status:
    """The control block in words."""
    get, config = block.get, context.config
    holder = Registration(block, -1).holder()
    owned = np.bincount(block.owners, minlength=len(Owner)).tolist()
    from_weights = block.weight_pages - owned[Owner.WEIGHTS]
    return Status(
        version=__version__,
        state=sidecar_state(block),
        model=config.rollout,
        generation=get(Word.GENERATION),
        step=get(Word.RL_STEP),
        pages=Pages(
            pool=block.pool_pages + from_weights,
            from_weights=from_weights,
            free=owned[Owner.FREE_DIRTY] + owned[Owner.FREE_CLEAN],
            serving=owned[Owner.SERVING],
            serving_cached=get(Word.SERVING_CACHED_PAGES),
            rollout=owned[Owner.ROLLOUT],
            rollout_max=get(Word.ROLLOUT_PAGES_MAX),
            budget=get(Word.BUDGET_PAGES),
            headroom=headroom_pages(block.pool_pages, MemoryConfig(headroom_fraction=config.headroom)),
            page_bytes=block.page_bytes,
        ),
        reclaims=_reclaims(block),
        gate=Gate(
            policy=config.policy,
            open=bool(get(Word.GATE_OPEN)),
            grants=get(Word.GRANTS),
            denials=get(Word.DENIALS),
            overruns=get(Word.OVERRUNS),
            slack_ms=get(Word.SLACK_US) / 1000,
            handover_ms=get(Word.HANDOVER_US) / 1000,
            serving_steps=get(Word.SERVING_STEPS),
            serving_busy_s=get(Word.SERVING_BUSY_NS) / 1e9,
            rollout_busy_s=get(Word.ROLLOUT_BUSY_NS) / 1e9,
            faults=get(Word.SERVING_GATE_FAULTS) + get(Word.ROLLOUT_GATE_FAULTS),
        ),
        rollout=RolloutEngine(
            running=get(Word.ROLLOUT_RUNNING),
            waiting=get(Word.ROLLOUT_WAITING),
            tokens=get(Word.ROLLOUT_TOKENS),
            steps=get(Word.ROLLOUT_STEPS),
            stalled_requests=get(Word.STALL_ABORTS),
            prefix_query_tokens=get(Word.PREFIX_QUERY_TOKENS),
            prefix_hit_tokens=get(Word.PREFIX_HIT_TOKENS),
        ),
        aborts=Aborts(
            reclaimed=get(Word.RECLAIM_ABORTS),
            stalled=get(Word.STALL_ABORTS),
            deactivated=get(Word.DEACTIVATE_ABORTS),
            too_large=get(Word.TOO_LARGE_ABORTS),
        ),
        weights=Weights(
            version=block.note(Note.WEIGHT_VERSION),
            number=get(Word.WEIGHT_VERSION),
            loaded=bool(get(Word.WEIGHTS_LOADED)),
            load_ms=get(Word.LOAD_NS) / 1e6,
            parked_bytes=get(Word.PARKED_BYTES),
            park_ms=get(Word.PARK_NS) / 1e6,
        ),
        registration=holder and Holder(job=holder.job, since_s=holder.since_s, expires_in_s=holder.expires_in_s),
    )


def sidecar_state(block: ControlBlock) -> State:
    """What the rollout engine is at."""
    if not block.get(Word.ROLLOUT_READY):
        return "starting"
    deactivated = bool(block.get(Word.ROLLOUT_DEACTIVATED))
    if block.get(Word.ACTIVE_WANTED):
        return "starting" if deactivated else "active"
    return "deactivated" if deactivated else "deactivating"


def _reclaims(block: ControlBlock) -> Reclaims:
    ms = sorted(block.reclaim_latencies_ms())
    return Reclaims(
        count=block.get(Word.RECLAIMS),
        pages=block.get(Word.RECLAIMED_PAGES),
        cuts=block.get(Word.CUTS),
        ms_p50=ms[len(ms) // 2] if ms else None,
        ms_p99=ms[min(len(ms) - 1, int(len(ms) * 0.99))] if ms else None,
        aborted_requests=block.get(Word.RECLAIM_ABORTS),
    )


def read_turns(block: ControlBlock, after: int) -> Turns:
    """Steps of both engines; the cursor packs the two rings' positions, 26 bits for serving's above the rollout's."""
    serving_after, rollout_after = after >> 26, after & ((1 << 26) - 1)
    serving_last, serving = block.turns(WHO_SERVING, serving_after)
    rollout_last, rollout = block.turns(WHO_ROLLOUT, rollout_after)
    records = [
        TurnRecord(seq=t.seq, who=t.who, start_s=t.start_s, end_s=t.end_s, tokens=t.tokens)  # type: ignore[arg-type]
        for t in sorted([*serving, *rollout], key=lambda t: t.start_s)
    ]
    return Turns(next=(serving_last << 26) | rollout_last, turns=records)
