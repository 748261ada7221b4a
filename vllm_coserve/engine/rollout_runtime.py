"""The rollout engine core's part: asks for the device, gives pages back when told, ends requests that must go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_coserve.api.context import Context
from vllm_coserve.control.block import WHO_ROLLOUT, ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.gate import RolloutGate, Turn
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import SIDE_ROLLOUT, CoreRuntime, logger
from vllm_coserve.engine.endings import (
    REASON_DEACTIVATED,
    REASON_RECLAIMED,
    REASON_STALLED,
    REASON_TOO_LARGE,
    Endings,
)
from vllm_coserve.engine.rollout_weights import WeightsKeeper
from vllm_coserve.engine.steps import step_shape
from vllm_coserve.memory.ledger import Owner, RolloutLedger, has_weight_pages
from vllm_coserve.policy.latency import StepShape
from vllm_coserve.policy.victims import Candidate, choose_victims

_TURN_WAIT_S, _GRANT_WAIT_S, _UNMAP_WAIT_S = 0.005, 0.002, 0.05
_NOTHING_SCHEDULED_BACKOFF_S = 0.005
_SPARE_BLOCKS = 8  # asked for ahead of need, beside one block a running request
_LISTEN_S = 0.05
_UPKEEP_S = 0.5


class RolloutRuntime(CoreRuntime):
    """See `CoreRuntime`."""

    side, who = SIDE_ROLLOUT, WHO_ROLLOUT
    _table_version, _table_applied = Word.ROLLOUT_TABLE_VERSION, Word.ROLLOUT_TABLE_APPLIED
    _mapper_bell, _mapped_bell = Bell.ROLLOUT_MAPPER, Bell.ROLLOUT_MAPPED
    _faults = Word.ROLLOUT_GATE_FAULTS

    def __init__(self, context: Context, block: ControlBlock) -> None:
        super().__init__(context, block)
        self.ledger = RolloutLedger(block.owners)
        self.gate = RolloutGate(block)
        self.in_turn = False
        self._granted_seq = -1
        self._held: set[int] = set()  # pages that are ours and known, mapped or spare
        self._full_chunk = 0  # vLLM's own max_num_scheduled_tokens
        self.weights = WeightsKeeper(block, self._forget_kv)
        self._endings = Endings(block, self.config.stall_timeout_s)
        self._changing_since_s: float | None = None  # when the (de)activation under way began
        self._next_upkeep_s = 0.0
        self._refused_until_s = 0.0
        block.set(Word.ROLLOUT_WANTED_PAGES, 0)
        block.set(Word.ROLLOUT_DEACTIVATED, 0)

    def attach(self, core: Any) -> None:
        self._full_chunk = core.scheduler.max_num_scheduled_tokens
        self.weights.attach(core)
        super().attach(core)
        assert self.geometry is not None
        self.block.set(Word.KV_BLOCK_BYTES, self.geometry.block_bytes)
        self.block.set(Word.KV_BLOCK_TOKENS, core.vllm_config.cache_config.block_size)

    def profile_step(self) -> Callable[[], Any] | None:
        if not self.block.get(Word.ACTIVE_WANTED):
            return None

        def step() -> None:
            self.between_steps()
            if self.enter_turn() is not None:
                self.in_turn = True
                try:
                    self.core.step_fn()
                finally:
                    self.end_turn()

        return step

    def _background(self) -> None:
        """Wakes the main thread while it sleeps without requests, when pages are wanted back or the state changes."""
        block = self.block
        block.set(Word.ROLLOUT_READY, 1)
        block.ring(Bell.ARBITER)
        while not self.stopping.is_set():
            seen = block.bell(Bell.ROLLOUT_CORE)
            block.set(Word.ROLLOUT_ALIVE_NS, time.monotonic_ns())
            if self._has_orders():
                self.wake_main()
            block.wait(Bell.ROLLOUT_CORE, seen, _LISTEN_S)
            time.sleep(0.001)  # bells ring for every turn; orders are looked at no more than that often

    def _has_orders(self) -> bool:
        get = self.block.get
        return (
            self.weights.waits
            or get(Word.RECLAIM_SEQ) != get(Word.RECLAIM_DONE_SEQ)
            or get(Word.ACTIVE_WANTED) == get(Word.ROLLOUT_DEACTIVATED)
            or (not get(Word.ACTIVE_WANTED) and self._lendable_weight_pages() > 0)
        )

    # ---- compute

    def enter_turn(self) -> Turn | None:
        """Wait briefly for leave to step; None: look after messages and come again."""
        if not self.config.gated:
            return Turn(True, self.config.chunk_tokens)
        if not self.block.get(Word.ROLLOUT_READY):  # profiling at start-up: through the gate, with a guess
            return self.gate.enter(0.2, _TURN_WAIT_S)
        now_s = time.monotonic()
        if now_s < self._refused_until_s:
            time.sleep(self._refused_until_s - now_s)
            return None
        expected_s = self._publish_offer()
        return self.gate.enter(expected_s, _TURN_WAIT_S)

    def start_turn(self, turn: Turn) -> None:
        """Bound the step by what was granted: all decodes and `chunk_tokens` prompt tokens."""
        self.in_turn = True
        decodes = self.block.get(Word.OFFER_DECODES)
        self.scheduler.max_num_scheduled_tokens = max(1, min(self._full_chunk, decodes + turn.chunk_tokens))

    def end_turn(self) -> None:
        """Return the device; called as soon as the worker has answered, and again (for nothing) after the step."""
        if self.in_turn:
            self.in_turn = False
            self.gate.leave()
            self.scheduler.max_num_scheduled_tokens = self._full_chunk

    def _publish_offer(self) -> float:
        """Tell serving what the next step would cost; returns the expected length of the largest one, in seconds."""
        decodes = context = prefill = 0
        for request in self.scheduler.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                prefill += left
            else:
                decodes += 1
                context += request.num_computed_tokens
        waiting = self.scheduler.waiting
        for i, request in enumerate(waiting):
            if i >= 16:
                break
            prefill += max(1, request.num_tokens - request.num_computed_tokens)
        model = self.clock.model
        decode_s = model.predict_s(StepShape(0, 0, decodes, context)) if decodes else model.predict_s(_EMPTY)
        token_s = model.per_prefill_token_s()
        set_ = self.block.set
        set_(Word.OFFER_DECODE_NS, int(decode_s * 1e9))
        set_(Word.OFFER_TOKEN_NS, max(1, int(token_s * 1e9)))
        set_(Word.OFFER_PREFILL_TOKENS, prefill)
        set_(Word.OFFER_MARGIN_PPM, int(model.margin() * 1e6))
        set_(Word.OFFER_DECODES, decodes)
        return (decode_s + token_s * min(prefill, self.config.chunk_tokens)) * model.margin()

    def nothing_scheduled(self) -> None:
        """A turn was used for nothing (no pages): ask for none until pages may have come."""
        self._refused_until_s = time.monotonic() + _NOTHING_SCHEDULED_BACKOFF_S
        self.withdraw_offer()

    def withdraw_offer(self) -> None:
        """There is no step that a turn could be used for."""
        self.block.set(Word.OFFER_DECODES, 0)
        self.block.set(Word.OFFER_PREFILL_TOKENS, 0)

    def after_schedule(self, scheduler_output: Any) -> None:
        """The step is known and goes to the worker."""
        shape = step_shape(self.scheduler, scheduler_output)
        self.clock.shape, self.clock.tokens = shape, scheduler_output.total_num_scheduled_tokens
        if self.in_turn:
            self.gate.expect(self.clock.model.predict_s(shape))
        self.clock.start()

    def after_device(self, scheduler_output: Any) -> None:
        """The worker has answered."""
        start_ns, end_ns = self.clock.end(self.block.get(Word.ROLLOUT_STEP_SINCE_NS) if self.in_turn else 0)
        if self.config.gated:
            self.clock.learn(start_ns, end_ns)
        self.end_turn()
        if self.clock.tokens:
            self.block.record_turn(self.who, start_ns, end_ns, self.clock.tokens)
            self.block.add(Word.ROLLOUT_STEPS)
            self.block.add(Word.ROLLOUT_BUSY_NS, end_ns - start_ns)
        for new in scheduler_output.scheduled_new_reqs:
            self.block.add(Word.PREFIX_QUERY_TOKENS, len(new.prompt_token_ids or ()))
            self.block.add(Word.PREFIX_HIT_TOKENS, new.num_computed_tokens)
        sampled = sum(
            1
            for req_id in scheduler_output.num_scheduled_tokens
            if (r := self.scheduler.requests.get(req_id)) is not None and not r.is_prefill_chunk
        )
        self.block.add(Word.ROLLOUT_TOKENS, sampled)

    # ---- between steps: pages, orders, upkeep

    def between_steps(self) -> None:
        """All that changes requests or blocks, on the main thread and with no step in flight."""
        block = self.block
        self.weights.poll()
        if not block.get(Word.ACTIVE_WANTED):
            self._deactivate()
        elif block.get(Word.ROLLOUT_DEACTIVATED):
            self._activate()
        else:
            self._changing_since_s = None
        if block.get(Word.RECLAIM_SEQ) != block.get(Word.RECLAIM_DONE_SEQ):
            self._meet_reclaim()
        self.finish_releases()
        self._look_for_pages()
        now_s = time.monotonic()
        if now_s >= self._next_upkeep_s:
            self._next_upkeep_s = now_s + _UPKEEP_S
            self._upkeep(now_s)
        self._publish_wish()
        if not (self.scheduler.running or self.scheduler.waiting):
            self.withdraw_offer()
        block.set(Word.ROLLOUT_RUNNING, len(self.scheduler.running))
        block.set(Word.ROLLOUT_WAITING, len(self.scheduler.waiting))
        block.set(Word.ROLLOUT_HEARTBEAT_NS, time.monotonic_ns())

    def _look_for_pages(self) -> list[int]:
        """Map pages that were granted since the last look."""
        seq = self.block.get(Word.GRANTED_SEQ)
        if seq == self._granted_seq or self.pool is None:
            return []
        self._granted_seq = seq
        fresh = self.ledger.newly_granted()
        self._held.update(fresh)
        self.pool.add_pages(fresh)
        return fresh

    def acquire_pages(self, wanted: int, needed: int) -> list[int]:
        """See `block_pool.Pager`: the rollout is given pages, so publish the wish and wait a moment for an answer."""
        self._look_for_pages()
        if self.pool is None:
            return []
        if needed <= 0 or not self.block.get(Word.ACTIVE_WANTED):
            return []
        self.block.set(Word.ROLLOUT_WANTED_PAGES, max(wanted, self.block.get(Word.ROLLOUT_WANTED_PAGES)))
        deadline = time.monotonic() + _GRANT_WAIT_S
        self.block.ring(Bell.ARBITER)
        while not self._look_for_pages():
            seen = self.block.bell(Bell.ROLLOUT_CORE)
            left = deadline - time.monotonic()
            if left <= 0 or self.block.get(Word.GRANTED_SEQ) != self._granted_seq:
                break
            self.block.wait(Bell.ROLLOUT_CORE, seen, left)
        self._look_for_pages()
        return []  # they are mapped already

    def _publish_wish(self) -> None:
        """Ask ahead of need: room for the prompts that wait and one more block for each running request."""
        pool = self.pool
        if pool is None:
            return
        block_tokens = self.core.vllm_config.cache_config.block_size
        blocks = len(self.scheduler.running) + _SPARE_BLOCKS if self.scheduler.running else 0
        for i, request in enumerate(self.scheduler.waiting):
            if i >= 8:
                break
            blocks += request.num_tokens // block_tokens + 2
        short = blocks - pool.slots.num_free
        wanted = pool.slots.geometry.pages_for(short) if short > 0 else 0
        before = self.block.get(Word.ROLLOUT_WANTED_PAGES)
        self.block.set(Word.ROLLOUT_WANTED_PAGES, wanted)
        if wanted and not before:
            self.block.ring(Bell.ARBITER)

    def _meet_reclaim(self) -> None:
        """Come down to the cap: spare pages, empty slots, oldest cache, then whole requests (ROSE: emergency cut)."""
        block, pool = self.block, self.pool
        assert pool is not None
        seq, cap = block.get(Word.RECLAIM_SEQ), block.get(Word.ROLLOUT_CAP_PAGES)
        self._granted_seq = -1
        self._look_for_pages()
        need = len(self._held) - cap
        if need > 0:
            spare = pool.take_spare_pages()
            self._give_back(spare)
            need -= len(spare)
        if need > 0:
            need -= self._drop(pool.slots_to_give(need))
        while need > 0 and self.scheduler.running:
            self._endings.end(self.core, self._victims(need), REASON_RECLAIMED)
            need -= self._drop(pool.slots_to_give(need))
        self.finish_releases(_UNMAP_WAIT_S)
        block.set(Word.RECLAIM_DONE_SEQ, seq)
        block.ring(Bell.ARBITER)
        block.ring(Bell.SERVING_CORE)

    def _drop(self, slots: list[int]) -> int:
        assert self.pool is not None
        pages = self.pool.drop_slots(slots)
        self._held.difference_update(pages)
        self._release_later(pages)
        return len(pages)

    def _give_back(self, pages: list[int]) -> None:
        self._held.difference_update(pages)
        self.ledger.put(pages)
        self.block.ring(Bell.ARBITER)

    def _victims(self, need: int) -> list[str]:
        """Running requests to end so that `need` more slots have nothing in use."""
        assert self.pool is not None
        geometry = self.pool.slots.geometry
        candidates = []
        for request in self.scheduler.running:
            blocks = [b for group in self.scheduler.kv_cache_manager.get_block_ids(request.request_id) for b in group]
            candidates.append(
                Candidate(request.request_id, geometry.count_on_slots(blocks), request.num_computed_tokens)
            )
        return choose_victims(candidates, self.pool.slots.used, need)

    def _deactivate(self) -> None:
        """Give everything back, KV and weights, and take no requests until activated again."""
        assert self.pool is not None
        self._endings.end(self.core, self.scheduler.requests, REASON_DEACTIVATED)
        freeable = self.weights.busy or (self.weights.loaded and self.weights.can_free)
        if self.block.get(Word.ROLLOUT_DEACTIVATED) and not self._held and not freeable:
            self._lend_weight_pages()  # an activation may have taken them back, and then been revoked
            self._changing_since_s = None
            return
        if self._changing_since_s is None:
            self._changing_since_s = time.monotonic()
        self._granted_seq = -1
        self._look_for_pages()
        self._give_back(self.pool.take_spare_pages())
        self._drop(self.pool.slots_to_give(self.pool.slots.num_mapped))
        if self.finish_releases(_UNMAP_WAIT_S) or self._held or self.weights.busy:
            return
        if self.weights.loaded and self.weights.can_free:
            self.weights.free()
            return
        self._changed(EventKind.DEACTIVATE, 1)
        self._lend_weight_pages()

    def _lend_weight_pages(self) -> None:
        """Have serving use the memory of freed weights; it sees to that only once it sees the engine deactivated."""
        if count := self._lendable_weight_pages():
            self.ledger.lend_weight_pages(self.block.pool_pages, count)
            self.block.ring(Bell.ARBITER)

    def _lendable_weight_pages(self) -> int:
        """How many first weight pages could be lent, 0 when none of them is the weights' now. Any thread."""
        block = self.block
        if self.weights.loaded or self.weights.busy or not block.get(Word.ROLLOUT_DEACTIVATED):
            return 0
        count = min(block.weight_pages, block.get(Word.FREED_BYTES) // block.page_bytes)
        lent = block.owners[block.pool_pages :][:count] != np.uint8(Owner.WEIGHTS)
        return 0 if lent.all() else count

    def _activate(self) -> None:
        """Bring the weights back, once serving has left their memory, and take requests again."""
        if self._changing_since_s is None:
            self._changing_since_s = time.monotonic()
        if self.weights.busy:
            return
        if not self.weights.loaded:
            if has_weight_pages(self.block.owners, self.block.pool_pages):
                self.weights.restore()
            return
        self._changed(EventKind.ACTIVATE, 0)

    def _changed(self, kind: EventKind, deactivated: int) -> None:
        took_ms = int((time.monotonic() - (self._changing_since_s or time.monotonic())) * 1000)
        self._changing_since_s = None
        logger.info("coserve: rollout engine %sd in %d ms", kind.name.lower(), took_ms)
        self.block.events.put(Writer.ROLLOUT, kind, took_ms)
        self.block.set(Word.ROLLOUT_DEACTIVATED, deactivated)
        self.block.ring(Bell.ARBITER)

    def load_weights(self, path: str, version: str) -> Any:
        """Replace the weights between two steps; vLLM answers the caller when the future is done."""
        future = self.weights.load(path, version)
        self.wake_main()
        return future

    def pull_weights(self, source: dict[str, Any], version: str) -> Any:
        """The same with weights that a relay holds; the engine computes on while they come."""
        future = self.weights.pull(source, version)
        self.wake_main()
        return future

    def _forget_kv(self) -> None:
        """KV of weights that are no longer in use: running requests compute theirs anew, and no other finds any."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _upkeep(self, now_s: float) -> None:
        """Leases, stalls, and requests that outgrew the budget."""
        assert self.pool is not None
        if idle := self.pool.idle_slots(self.config.lease_s):
            spare = _SPARE_BLOCKS if self.scheduler.running else 0
            if self.pool.slots.num_free > spare or not self.scheduler.running:
                self._drop(idle)
        if self.weights.busy:
            self._endings.restart_clocks()
            return
        tokens = self.core.vllm_config.cache_config.block_size
        too_large = self._endings.too_large(self.scheduler, self.pool.slots.geometry, tokens)
        self._endings.end(self.core, too_large, REASON_TOO_LARGE)
        self._endings.end(self.core, self._endings.stalled(self.scheduler), REASON_STALLED)


_EMPTY = StepShape(0, 0, 0, 0)
