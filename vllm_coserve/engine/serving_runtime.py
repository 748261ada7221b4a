"""The serving engine core's part: arbiter of compute and memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_coserve.api.context import Context
from vllm_coserve.control.block import WHO_SERVING, ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.gate import ServingGate
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import KIND_WORKER, SIDE_ROLLOUT, SIDE_SERVING, CoreRuntime, logger
from vllm_coserve.engine.device import device_index, has_ended
from vllm_coserve.memory.devices import make_eraser
from vllm_coserve.memory.ledger import Owner, ServingLedger, nobody_holds
from vllm_coserve.policy.admission import Grant, RolloutOffer, admit, idle_chunk_tokens
from vllm_coserve.policy.feedback import SpendController
from vllm_coserve.policy.latency import StepShape
from vllm_coserve.policy.memory import (
    MemoryConfig,
    MemoryFacts,
    MemoryPolicy,
    headroom_pages,
    serving_limit_pages,
    urgent_reclaim_to,
)
from vllm_coserve.policy.slack import Decoding, PendingPrefill, ServingFacts, Slo, serving_slack

_RECLAIM_WAIT_S = 0.1  # a serving allocation waits for pages at most so long, then vLLM's scheduler does without
# A rollout engine that owes pages for so long is killed: pages that serving waits for, and others. They follow within
# milliseconds.
_DEBT_KILL_S, _PATIENT_DEBT_KILL_S = 1.0, 5.0
_TICK_S, _IDLE_TICK_S = 0.02, 0.1
_CLEAN_S = 0.001  # of a tick, for zeroing free pages
_MAX_PREFILLS_SEEN = 64
_TPOT_SPEND = 0.2, 0.62, 0.8  # lowest, at the start, highest
_INTERRUPTION_WEIGHT = 0.05
_TPOT_MET_SHARE = 0.95  # of the SLO, seen here: users also wait for detokenising and HTTP


class ServingRuntime(CoreRuntime):
    """See `CoreRuntime`."""

    side, who = SIDE_SERVING, WHO_SERVING
    _table_version, _table_applied = Word.SERVING_TABLE_VERSION, Word.SERVING_TABLE_APPLIED
    _mapper_bell, _mapped_bell = Bell.SERVING_MAPPER, Bell.SERVING_MAPPED
    _faults = Word.SERVING_GATE_FAULTS

    def __init__(self, context: Context, block: ControlBlock) -> None:
        super().__init__(context, block)
        self._eraser = make_eraser(context, block.pool_pages, block.page_bytes, device_index(context))
        self._members_fd = context.open(context.members_fd)
        self.ledger = ServingLedger(block.owners, self._eraser.zero)
        self.gate = ServingGate(block)
        ms = self.config.ttft_slo_ms, self.config.tpot_slo_ms
        self.slo = Slo(*(None if v is None else v / 1000 for v in ms))
        self._memory_config = MemoryConfig(headroom_fraction=self.config.headroom, mode=self.config.memory)
        self._memory = MemoryPolicy(self._memory_config, block.pool_pages)
        self._decoding: dict[str, Decoding] = {}
        self._interruption_s = 0.0  # moving average of what prefills add to a step
        self._tpot_spend = SpendController(*_TPOT_SPEND)
        self._release_wanted = 0  # cached pages that the policy wants back from serving
        self._reclaim_since_ns = 0  # when the reclaim that is under way was asked for
        self._reclaim_from = 0  # pages the rollout held then
        self._reclaim_lock = threading.Lock()
        self._turn_since_step = False
        self._overlapped = False
        self._unheeded_ns = -1  # the rollout's heartbeat when it left a grant unused
        self._scheduled: Any = None  # the step that is being sent, until it is read
        self._ended: tuple[StepShape, int, int, int, bool] | None = None  # the step before, until it is noted

    def profile_step(self) -> Callable[[], Any]:
        return self.core.step_fn

    # ---- compute

    @property
    def gated(self) -> bool:
        """False with `--coserve-policy none`: both engines compute whenever they like."""
        return self.config.policy != "none"

    def on_arrival(self) -> None:
        """A request is being decoded from the socket. Input thread."""
        self.gate.raise_flag()

    def on_idle(self) -> None:
        """Nothing to do: open the gate, unless something has come in meanwhile."""
        wants = self.block.get(Word.SERVING_WANTS)
        self.after_send()
        self.between_steps()
        if self.gated and not self.gate.is_open and self.core.input_queue.empty():
            offer = self._offer()
            chunk = idle_chunk_tokens(offer, self.slo, max_chunk_tokens=self.config.chunk_tokens)
            self.gate.open(wants, chunk)

    def after_message(self, woken: bool) -> None:
        if self.core is None:
            return
        if not self.core.has_work():
            self.on_idle()  # whatever came in, it left nothing to compute: the gate must not stay shut
        elif woken:
            self.between_steps()

    def on_busy(self) -> None:
        """There is work: take the device back."""
        if self.gate.is_open:
            self.gate.close()

    def grant_turn(self) -> bool:
        """Before a serving step: lend the device for one rollout step if slack allows; True when a turn was used."""
        if not self.gated or not (self.scheduler.running or self.scheduler.waiting):
            return False
        offer = self._offer()
        heartbeat_ns = self.block.get(Word.ROLLOUT_HEARTBEAT_NS)
        if not (offer.decode_requests or offer.prefill_tokens) or heartbeat_ns == self._unheeded_ns:
            return False
        facts = self._serving_facts()
        slack = serving_slack(
            facts,
            self.slo,
            self.clock.model,
            policy=self.config.policy,
            role=self.config.role,
            chunk_tokens=self.scheduler.max_num_scheduled_tokens,
            tpot_spend=self._tpot_spend.spend,
        )
        if slack.seconds == math.inf and self._turn_since_step:
            return False  # no SLO bounds this wait, but serving's users still get every other step
        seconds = max(-3600.0, min(3600.0, slack.seconds))
        self.block.set(Word.SLACK_US, int(seconds * 1e6))
        margin = max(1.0, self.block.get(Word.OFFER_MARGIN_PPM) / 1e6)
        handover_s = self.block.get(Word.HANDOVER_US) / 1e6
        decision = admit(
            slack.seconds, offer, margin=margin, handover_s=handover_s, max_chunk_tokens=self.config.chunk_tokens
        )
        if not isinstance(decision, Grant) or self.gate.rollout_is_stuck():
            self.block.add(Word.DENIALS)
            return False
        used = self.gate.grant(decision.chunk_tokens)
        # A rollout engine that did not react (stopped, hung) is asked again only after a sign of life.
        self._unheeded_ns = -1 if used else heartbeat_ns
        self._turn_since_step = used
        self.block.add(Word.GRANTS if used else Word.DENIALS)
        return used

    def _offer(self) -> RolloutOffer:
        get = self.block.get
        if not get(Word.ROLLOUT_READY) or get(Word.GENERATION_DEAD) == get(Word.GENERATION):
            return RolloutOffer(0.0, 0.0, 0, 0)
        return RolloutOffer(
            decode_step_s=get(Word.OFFER_DECODE_NS) / 1e9,
            per_prefill_token_s=get(Word.OFFER_TOKEN_NS) / 1e9,
            prefill_tokens=get(Word.OFFER_PREFILL_TOKENS),
            decode_requests=get(Word.OFFER_DECODES),
        )

    def _serving_facts(self) -> ServingFacts:
        now_s, to_monotonic = time.monotonic(), time.monotonic() - time.time()
        prefills: list[PendingPrefill] = []
        decodes: list[Decoding] = []
        context = 0
        for request in self.scheduler.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                prefills.append(PendingPrefill(request.arrival_time + to_monotonic, left, request.num_computed_tokens))
                continue
            context += request.num_computed_tokens
            decodes.append(self._decoding.get(request.request_id) or Decoding(now_s, now_s, 1))
        for request in self.scheduler.waiting:
            if len(prefills) >= _MAX_PREFILLS_SEEN:
                break
            left = request.num_tokens - request.num_computed_tokens
            prefills.append(PendingPrefill(request.arrival_time + to_monotonic, left, request.num_computed_tokens))
        return ServingFacts(now_s, tuple(prefills), tuple(decodes), len(decodes), context, self._interruption_s)

    def after_schedule(self, scheduler_output: Any) -> None:
        """The step goes to the worker: whatever can wait until it is there, does."""
        self.after_send()  # where nobody has called it
        self.clock.start_ns, self._scheduled = time.monotonic_ns(), scheduler_output
        self._turn_since_step = False
        self._overlapped = bool(self.block.get(Word.ROLLOUT_ACTIVE))

    def after_send(self) -> None:
        """The worker computes: note the step before, and what this one is."""
        ended, self._ended = self._ended, None
        if ended is not None:
            shape, tokens, start_ns, end_ns, learn = ended
            if learn:
                self.clock.model.observe(shape, (end_ns - start_ns) / 1e9)
            self.block.record_turn(self.who, start_ns, end_ns, tokens)
            self.block.add(Word.SERVING_STEPS)
            self.block.add(Word.SERVING_BUSY_NS, end_ns - start_ns)
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        shape, self.clock.tokens = self.step_shape(scheduled)
        self.clock.shape = shape
        if shape.prefill_tokens:
            prefill_s = self.clock.model.prefill_work_s(shape.prefill_tokens, shape.prefill_context_tokens)
            self._interruption_s += _INTERRUPTION_WEIGHT * (prefill_s - self._interruption_s)

    def after_device(self, scheduler_output: Any) -> None:
        """The worker has answered; the step's tokens go out next."""
        start_ns, end_ns = self.clock.start_ns, time.monotonic_ns()
        self.after_send()
        if self.clock.shape is not None and self.clock.tokens:
            learn = not (self._overlapped or self.block.get(Word.ROLLOUT_ACTIVE)) and self.gated
            self._ended = self.clock.shape, self.clock.tokens, start_ns, end_ns, learn
        if self._rollout_has_requests():
            self._follow_requests(scheduler_output, end_ns / 1e9)
        elif self._decoding:
            self._decoding.clear()  # what is not followed is thought to begin anew

    def _rollout_has_requests(self) -> bool:
        return bool(self.block.get(Word.ROLLOUT_RUNNING) or self.block.get(Word.ROLLOUT_WAITING))

    def _follow_requests(self, scheduler_output: Any, now_s: float) -> None:
        """Note when each request got its tokens; only a rollout that wants the device makes anybody ask."""
        decoding, requests = self._decoding, self.scheduler.requests
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(req_id)
            if request is not None and request.num_computed_tokens >= request.num_prompt_tokens:
                before = decoding.get(req_id)
                decoding[req_id] = (
                    Decoding(before.first_s, now_s, before.tokens + 1) if before else Decoding(now_s, now_s, 1)
                )
        for req_id in scheduler_output.finished_req_ids:
            done = decoding.pop(req_id, None)
            if done is not None and done.tokens > 1 and self.slo.tpot_s is not None:
                tpot_s = (done.last_s - done.first_s) / (done.tokens - 1)
                self._tpot_spend.observe(tpot_s <= _TPOT_MET_SHARE * self.slo.tpot_s)

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
        self._publish_usage()

    def _publish_usage(self) -> None:
        if self.pool is not None:
            slots = self.pool.slots
            self.block.set(Word.SERVING_USED_PAGES, slots.num_used_slots)
            self.block.set(Word.SERVING_CACHED_PAGES, slots.num_mapped - slots.num_used_slots)

    def acquire_pages(self, wanted: int, needed: int) -> list[int]:
        """See `block_pool.Pager`: free pages at once; for what is needed beyond, the rollout must give."""
        room = serving_limit_pages(self.block.pool_pages, self._memory_config) - self.ledger.count(Owner.SERVING)
        wanted, needed = min(wanted, room), min(needed, room)
        pages = self.ledger.take(max(wanted, needed), Owner.SERVING)
        preemptive = self._memory_config.mode == "preemptive"
        if len(pages) < needed and preemptive and self.ledger.count(Owner.ROLLOUT):
            # Guarded, so that the pages taken above reach the pool whatever happens here.
            self.guarded("taking pages back", lambda: self._reclaim_now(needed - len(pages)))
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

    # ---- memory, arbiter thread

    def _background(self) -> None:
        self.block.set(Word.SERVING_READY, 1)
        while not self.stopping.is_set():
            seen = self.block.bell(Bell.ARBITER)
            self.guarded("memory arbiter", self._tick)
            # Whoever changes something rings; without a rollout request there is little that could be late.
            self.block.wait(Bell.ARBITER, seen, _TICK_S if self._rollout_has_requests() else _IDLE_TICK_S)

    def _memory_facts(self) -> MemoryFacts:
        get = self.block.get
        alive = get(Word.GENERATION) > get(Word.GENERATION_DEAD)
        return MemoryFacts(
            now_s=time.monotonic(),
            pool_pages=self.block.pool_pages,
            free_pages=self.ledger.free_pages,
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
        for word in (Word.ROLLOUT_ACTIVE, Word.ROLLOUT_READY, Word.ROLLOUT_WANTED_PAGES, Word.OFFER_DECODES):
            block.set(word, 0)  # their writer is gone
        for word in (Word.OFFER_PREFILL_TOKENS, Word.ROLLOUT_RUNNING, Word.ROLLOUT_WAITING):
            block.set(word, 0)
        block.set(Word.RECLAIM_DONE_SEQ, block.get(Word.RECLAIM_SEQ))
        block.clear_members(SIDE_ROLLOUT)
        block.set(Word.GENERATION_CLEARED, dead)
        block.ring(Bell.SUPERVISOR)
        block.ring(Bell.SERVING_CORE)
        logger.info("coserve: took %d pages back from rollout engine %d, which is gone", pages, dead)
