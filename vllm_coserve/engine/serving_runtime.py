"""The serving engine core's part: arbiter of compute and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_coserve.api.context import Context
from vllm_coserve.control.block import WHO_SERVING, ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import KIND_WORKER, SIDE_ROLLOUT, SIDE_SERVING, CoreRuntime, logger
from vllm_coserve.engine.device import device_index, has_ended
from vllm_coserve.engine.serving_compute import ServingCompute
from vllm_coserve.memory.devices import make_eraser
from vllm_coserve.memory.ledger import Owner, ServingLedger, has_weight_pages, nobody_holds
from vllm_coserve.policy.memory import (
    MemoryConfig,
    MemoryFacts,
    MemoryPolicy,
    can_spare_weight_pages,
    headroom_pages,
    serving_limit_pages,
    urgent_reclaim_to,
)

if TYPE_CHECKING:
    from vllm_coserve.engine.block_pool import ElasticBlockPool

_RECLAIM_WAIT_S = 0.1  # a serving allocation waits for pages at most so long, then vLLM's scheduler does without
# A rollout engine that owes pages for so long is killed: pages that serving waits for, and others. They follow within
# milliseconds.
_DEBT_KILL_S, _PATIENT_DEBT_KILL_S = 1.0, 5.0
_TICK_S, _IDLE_TICK_S = 0.02, 0.1
_CLEAN_S = 0.001  # of a tick, for zeroing free pages
_MAKE_S = 0.005  # the same for getting the memory of weight pages ahead of need
_VACATE_S = 0.002  # between two steps, for closing slots that are to come free


class ServingRuntime(CoreRuntime):
    """See `CoreRuntime`."""

    side, who = SIDE_SERVING, WHO_SERVING
    _table_version, _table_applied = Word.SERVING_TABLE_VERSION, Word.SERVING_TABLE_APPLIED
    _mapper_bell, _mapped_bell = Bell.SERVING_MAPPER, Bell.SERVING_MAPPED
    _faults = Word.SERVING_GATE_FAULTS

    def __init__(self, context: Context, block: ControlBlock) -> None:
        super().__init__(context, block)
        self._eraser = make_eraser(
            context, block.pool_pages, block.page_bytes, device_index(context), weight_pages=block.weight_pages
        )
        self._members_fd = context.open(context.members_fd)
        self.ledger = ServingLedger(
            block.owners, self._eraser.zero, weight_pages=block.weight_pages, discard=self._eraser.discard
        )
        self.compute = ServingCompute(block, self.config, self.clock)
        self._memory_config = MemoryConfig(headroom_fraction=self.config.headroom, mode=self.config.memory)
        self._memory = MemoryPolicy(self._memory_config, block.pool_pages)
        self._withholding = True  # weight pages: they are the rollout's weights', or on their way there
        self._weight_pages_left = 0  # that serving has still to give back
        self._release_wanted = 0  # cached pages that the policy wants back from serving
        self._reclaim_since_ns = 0  # when the reclaim that is under way was asked for
        self._reclaim_from = 0  # pages the rollout held then
        self._reclaim_lock = threading.Lock()

    def attach(self, core: Any) -> None:
        self.compute.scheduler = core.scheduler
        super().attach(core)

    def profile_step(self) -> Callable[[], Any]:
        return self.core.step_fn

    # ---- compute

    def on_idle(self) -> None:
        """Nothing to do: open the gate, unless something has come in meanwhile."""
        wants = self.block.get(Word.SERVING_WANTS)
        self.between_steps()
        if self.core.input_queue.empty():
            self.compute.on_idle(wants)

    def after_message(self, woken: bool) -> None:
        if self.core is None:
            return
        if not self.core.has_work():
            self.on_idle()  # whatever came in, it left nothing to compute: the gate must not stay shut
        elif woken:
            self.between_steps()

    def after_schedule(self, scheduler_output: Any) -> None:
        self.compute.after_schedule(scheduler_output)

    def after_send(self) -> None:
        self.compute.after_send()

    def after_device(self, scheduler_output: Any) -> None:
        self.compute.after_device(scheduler_output)

    # ---- memory, main thread

    def between_steps(self) -> None:
        """Work on the block pool that must not run beside the scheduler."""
        self.finish_releases()
        wanted, self._release_wanted = self._release_wanted, 0
        pool = self.pool
        if wanted > 0 and pool is not None:
            spare = pool.take_spare_pages()
            if spare:
                self.ledger.put(spare)
            self._release_later(pool.drop_slots(pool.slots_to_give(wanted - len(spare))))
        if pool is not None:
            self._leave_weight_pages(pool)
        self._publish_usage()

    def _leave_weight_pages(self, pool: ElasticBlockPool) -> None:
        """See to it that serving's pages in place of the rollout's weights come free, while they are wanted back."""
        if not self._withholding:
            pool.reopen()
        elif self._weight_pages_left:
            if spare := pool.take_spare_pages():
                self._give_back(spare)
            slots = np.flatnonzero(self._table >= self.block.pool_pages).tolist()
            self._release_later(pool.vacate(slots, _VACATE_S))

    def _publish_usage(self) -> None:
        if self.pool is not None:
            slots = self.pool.slots
            self.block.set(Word.SERVING_USED_PAGES, slots.num_used_slots)
            self.block.set(Word.SERVING_CACHED_PAGES, slots.num_mapped - slots.num_used_slots)

    def acquire_pages(self, wanted: int, needed: int) -> list[int]:
        """See `block_pool.Pager`: free pages at once; for what is needed beyond, the rollout must give."""
        limit = serving_limit_pages(self.block.pool_pages, self._memory_config, self.block.weight_pages)
        room = limit - self.ledger.count(Owner.SERVING)
        wanted, needed = min(wanted, room), min(needed, room)
        pages = self.ledger.take(max(wanted, needed), Owner.SERVING)
        preemptive = self._memory_config.mode == "preemptive"
        if len(pages) < needed and preemptive and self.ledger.count(Owner.ROLLOUT):
            # Guarded, so that the pages taken above reach the pool whatever happens here.
            self.guarded("taking pages back", lambda: self._reclaim_now(needed - len(pages)))
            pages += self.ledger.take(needed - len(pages), Owner.SERVING)
        if len(pages) < needed and self.ledger.reserve_pages:
            self.guarded("making weight pages", lambda: self.ledger.make_weight_pages(needed - len(pages)))
            pages += self.ledger.take(needed - len(pages), Owner.SERVING)
        if len(pages) < needed and self._pending:
            self.finish_releases(0.02)
            pages += self.ledger.take(needed - len(pages), Owner.SERVING)
        self.block.ring(Bell.ARBITER)  # the headroom shrank: the policy looks at once, not at its next tick
        return pages

    def _reclaim_now(self, needed: int) -> None:
        facts = self._memory_facts()
        self._ask_back(urgent_reclaim_to(facts, needed, self._memory_config), urgent=True)
        deadline = time.monotonic() + _RECLAIM_WAIT_S
        while self.ledger.free_pages < needed:
            seen = self.block.bell(Bell.SERVING_CORE)
            left = deadline - time.monotonic()
            if left <= 0 or self.ledger.free_pages >= needed:
                break
            self.block.wait(Bell.SERVING_CORE, seen, left)
        self._note_reclaim_met()

    def _give_back(self, pages: list[int]) -> None:
        self.ledger.put(pages)
        if self._weight_pages_left:
            self.block.ring(Bell.ARBITER)

    # ---- memory, arbiter thread

    def _background(self) -> None:
        self.block.set(Word.SERVING_READY, 1)
        while not self.stopping.is_set():
            seen = self.block.bell(Bell.ARBITER)
            self.guarded("memory arbiter", self._tick)
            # Whoever changes something rings; without a rollout request there is little that could be late.
            self.block.wait(Bell.ARBITER, seen, _TICK_S if self.compute.rollout_has_requests() else _IDLE_TICK_S)

    def _memory_facts(self) -> MemoryFacts:
        get = self.block.get
        alive = get(Word.GENERATION) > get(Word.GENERATION_DEAD)
        return MemoryFacts(
            now_s=time.monotonic(),
            pool_pages=self.block.pool_pages,
            free_pages=self.ledger.free_pages + self.ledger.reserve_pages,
            serving_used_pages=get(Word.SERVING_USED_PAGES),
            serving_cached_pages=get(Word.SERVING_CACHED_PAGES),
            rollout_pages=self.ledger.count(Owner.ROLLOUT),
            rollout_wanted_pages=get(Word.ROLLOUT_WANTED_PAGES),
            rl_step=get(Word.RL_STEP),
            rollout_alive=alive,
            rollout_active=bool(get(Word.ACTIVE_WANTED)),
        )

    def _tick(self) -> None:
        block = self.block
        block.set(Word.SERVING_HEARTBEAT_NS, time.monotonic_ns())
        self._clear_dead_generation()
        self.guarded("sharing weight pages", self._share_weight_pages)
        facts = self._memory_facts()
        decision = self._memory.decide(facts)
        block.set(Word.BUDGET_PAGES, decision.budget_pages)
        if decision.cut:
            block.add(Word.CUTS)
            block.events.put(Writer.SERVING, EventKind.CUT, decision.budget_pages)
            logger.info("coserve: emergency cut, rollout budget is now %d pages", decision.budget_pages)
        if decision.reclaim_to_pages < facts.rollout_pages and facts.rollout_alive:
            self._ask_back(decision.reclaim_to_pages, urgent=False)
        elif decision.grant_pages > 0:
            self._lend(decision.grant_pages)
        self._note_reclaim_met()
        self._check_debt()
        if decision.serving_release_pages > 0 and not self._release_wanted:
            self._release_wanted = decision.serving_release_pages
            self.wake_main()
        elif self._pending:
            self.wake_main()
        self.ledger.clean_some(self.block.pool_pages, _CLEAN_S)
        # Memory in place of weights is made ahead of need, and no more of it: all must go before they come back.
        lacking = headroom_pages(block.pool_pages, self._memory_config) - self.ledger.free_pages
        self.ledger.make_weight_pages(lacking, _MAKE_S)

    def _share_weight_pages(self) -> None:
        """Use the memory of a deactivated rollout's weights, and give it back when they are to come back.

        A rollout engine that has died gets it back too: its successor starts by loading weights.
        """
        block, get = self.block, self.block.get
        alive = get(Word.GENERATION) > get(Word.GENERATION_DEAD)
        lent = alive and get(Word.ROLLOUT_DEACTIVATED) and not get(Word.ACTIVE_WANTED)
        # Read here and now: what is published is as old as serving's last idle moment.
        used, config = self.pool.slots.num_used_slots if self.pool is not None else 0, self._memory_config
        before = self._withholding
        self._withholding = not lent and can_spare_weight_pages(used, block.pool_pages, config, before)
        were_back = has_weight_pages(block.owners, block.pool_pages)
        self._weight_pages_left = self.ledger.withhold(self._withholding)
        if self._weight_pages_left or (before and not self._withholding):
            self.wake_main()
        elif self._withholding and not were_back:
            block.ring(Bell.ROLLOUT_CORE)
            block.ring(Bell.SUPERVISOR)

    def _lend(self, count: int) -> None:
        static = self._memory_config.mode == "static"
        keep_free = 0 if static else headroom_pages(self.block.pool_pages, self._memory_config)
        if self.ledger.take(count, Owner.ROLLOUT, keep_free):  # serving may have taken pages since the decision
            held = self.ledger.count(Owner.ROLLOUT)
            self.block.set(Word.ROLLOUT_CAP_PAGES, max(held, self.block.get(Word.BUDGET_PAGES)))
            if held > self.block.get(Word.ROLLOUT_PAGES_MAX):
                self.block.set(Word.ROLLOUT_PAGES_MAX, held)
            self.block.add(Word.GRANTED_SEQ)
            self.block.ring(Bell.ROLLOUT_CORE)

    def _ask_back(self, to_pages: int, urgent: bool) -> None:
        block = self.block
        under_way = block.get(Word.RECLAIM_SEQ) != block.get(Word.RECLAIM_DONE_SEQ)
        if under_way and to_pages >= block.get(Word.ROLLOUT_CAP_PAGES):  # asked already
            if urgent:
                block.set(Word.RECLAIM_URGENT, 1)
            return
        if not under_way:
            self._reclaim_since_ns = time.monotonic_ns()
            self._reclaim_from = self.ledger.count(Owner.ROLLOUT)
        block.set(Word.ROLLOUT_CAP_PAGES, to_pages)
        block.set(Word.RECLAIM_URGENT, int(urgent))
        block.add(Word.RECLAIM_SEQ)
        block.ring(Bell.ROLLOUT_CORE)

    def _note_reclaim_met(self) -> None:
        block = self.block
        with self._reclaim_lock:  # main and arbiter thread
            since_ns = self._reclaim_since_ns
            met = since_ns and block.get(Word.RECLAIM_SEQ) == block.get(Word.RECLAIM_DONE_SEQ)
            if met:
                self._reclaim_since_ns = 0
        if met:
            pages = max(0, self._reclaim_from - self.ledger.count(Owner.ROLLOUT))
            block.add(Word.RECLAIMS)
            block.add(Word.RECLAIMED_PAGES, pages)
            block.events.put(Writer.SERVING, EventKind.RECLAIM, pages)
            block.record_reclaim(time.monotonic_ns() - since_ns)

    def _check_debt(self) -> None:
        """A rollout engine that does not give pages back (stopped, hung) is killed by the supervisor."""
        since_ns = self._reclaim_since_ns
        bound_s = _DEBT_KILL_S if self.block.get(Word.RECLAIM_URGENT) else _PATIENT_DEBT_KILL_S
        if since_ns and time.monotonic_ns() - since_ns > bound_s * 1e9:
            generation = self.block.get(Word.GENERATION)
            if self.block.get(Word.KILL_GENERATION) != generation:
                logger.warning("coserve: the rollout engine owes pages for %.1f s, killing it", bound_s)
                self.block.set(Word.KILL_GENERATION, generation)
                self.block.ring(Bell.SUPERVISOR)

    def _clear_dead_generation(self) -> None:
        """Take the pages of a dead rollout engine back once it is certain that no process maps them."""
        block = self.block
        dead = block.get(Word.GENERATION_DEAD)
        if dead <= block.get(Word.GENERATION_CLEARED) or not nobody_holds(self._members_fd):
            return
        # On a GPU the lock may go before the process's last kernels do; both have gone once its last thread has.
        if self.context.device == "cuda" and not has_ended(block.member_pid(SIDE_ROLLOUT, KIND_WORKER)):
            return
        pages = self.ledger.put_all_of_rollout()
        block.rollout_table[:] = -1
        for word in (Word.ROLLOUT_READY, Word.ROLLOUT_WANTED_PAGES, Word.OFFER_DECODES):
            block.set(word, 0)  # their writer is gone
        for word in (Word.OFFER_PREFILL_TOKENS, Word.ROLLOUT_RUNNING, Word.ROLLOUT_WAITING):
            block.set(word, 0)
        block.set(Word.ROLLOUT_LEFT, block.get(Word.ROLLOUT_ENTERED))
        block.set(Word.RECLAIM_DONE_SEQ, block.get(Word.RECLAIM_SEQ))
        block.clear_members(SIDE_ROLLOUT)
        block.set(Word.GENERATION_CLEARED, dead)
        block.ring(Bell.SUPERVISOR)
        block.ring(Bell.SERVING_CORE)
        logger.info("coserve: took %d pages back from rollout engine %d, which is gone", pages, dead)
