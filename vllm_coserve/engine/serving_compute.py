"""The serving engine core's arbiter of compute: when the rollout gets the device, and for how much (ROSE 4.1)."""

from __future__ import annotations

import math
import time
from typing import Any

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.control.block import WHO_SERVING, ControlBlock
from vllm_coserve.control.gate import ServingGate
from vllm_coserve.control.handover import ServingDevice
from vllm_coserve.control.words import Word
from vllm_coserve.engine.steps import StepClock, step_shape
from vllm_coserve.policy.admission import Grant, RolloutOffer, admit, idle_chunk_tokens
from vllm_coserve.policy.feedback import SpendController
from vllm_coserve.policy.slack import Decoding, PendingPrefill, ServingFacts, Slack, Slo, serving_slack

_LEAD_S = 0.0015  # scheduling a step and sending it to the worker takes about so long
_MAX_PREFILLS_SEEN = 64
_TPOT_SPEND = 0.2, 0.62, 0.8  # lowest, at the start, highest
_INTERRUPTION_WEIGHT = 0.05
_TPOT_MET_SHARE = 0.95  # of the SLO, seen here: users also wait for detokenising and HTTP
_NS = 1_000_000_000


class ServingCompute:
    """Grants turns and keeps account of serving's steps; on the engine core's main thread unless it says otherwise.

    A turn may be granted while serving's own step computes: the rollout's is scheduled meanwhile and begins when
    serving's worker is done. Likewise serving's next step is sent just before the rollout's should end.

    Attributes:
        scheduler: vLLM's, set before the first step.
    """

    def __init__(self, block: ControlBlock, config: CoserveConfig, clock: StepClock) -> None:
        self._block, self._config, self._clock = block, config, clock
        self._gate, self._device = ServingGate(block), ServingDevice(block)
        self._slo = Slo(*(None if v is None else v / 1000 for v in (config.ttft_slo_ms, config.tpot_slo_ms)))
        self.scheduler: Any = None
        self._decoding: dict[str, Decoding] = {}
        self._interruption_s = 0.0  # moving average of what prefills add to a step
        self._tpot_spend = SpendController(*_TPOT_SPEND)
        self._granted = False  # a turn of which it is not known yet whether it is taken up
        self._turn_since_step = False
        self._denied_ahead = False  # no turn after the step in flight
        self._overlapped = False
        self._unheeded_ns = -1  # the rollout's heartbeat when it left a grant unused
        self._grant_heartbeat_ns = -1
        self._scheduled: Any = None  # the step that is being sent, until it is read
        self._ended: tuple[int, int, bool] | None = None  # the step before (start, end, to learn), until it is noted

    def on_arrival(self) -> None:
        """A request is being decoded from the socket. Input thread."""
        self._gate.raise_flag()

    def on_idle(self, wants_seen: int) -> None:
        """Nothing to do: open the gate. `wants_seen`: SERVING_WANTS, read before the caller found that."""
        self.after_send()
        if self._config.gated and not self._gate.is_open:
            if self._granted:
                self._note_grant(self._gate.end_grant())
            chunk = idle_chunk_tokens(self._offer(), self._slo, max_chunk_tokens=self._config.chunk_tokens)
            self._gate.open(wants_seen, chunk)

    def on_busy(self) -> None:
        """There is work: take the device back."""
        if self._gate.is_open:
            self._gate.close()

    # ---- turns

    def before_step(self) -> bool:
        """Lend the device for another step if slack allows, and wait until it is nearly back.

        Returns:
            True when that took time: requests may have come in meanwhile, so look after them and come again.
        """
        if not self._config.gated:
            return False
        if self._granted:
            used = self._gate.await_taken()
            self._gate.await_nearly_free(_LEAD_S)
            self._note_grant(used)
            return True
        return self._gate.await_nearly_free(_LEAD_S) or (
            not self._denied_ahead and self._grant(self._free_at_s(), self._decoding)
        )

    def _free_at_s(self) -> float:
        return max(time.monotonic(), self._gate.free_at_ns() / _NS)

    def _grant(self, from_s: float, decoding: dict[str, Decoding]) -> bool:
        """Grant a turn that begins at `from_s`, if slack allows it then; `decoding`: each request's tokens by then."""
        if not (self.scheduler.running or self.scheduler.waiting):
            return False
        offer = self._offer()
        heartbeat_ns = self._block.get(Word.ROLLOUT_HEARTBEAT_NS)
        if not (offer.decode_requests or offer.prefill_tokens) or heartbeat_ns == self._unheeded_ns:
            return False
        slack = self._slack(from_s, decoding)
        if slack.seconds == math.inf and self._turn_since_step:
            return False  # no SLO bounds this wait, but serving's users still get every other step
        seconds = max(-3600.0, min(3600.0, slack.seconds))
        self._block.set(Word.SLACK_US, int(seconds * 1e6))
        margin = max(1.0, self._block.get(Word.OFFER_MARGIN_PPM) / 1e6)
        handover_s = self._block.get(Word.HANDOVER_US) / 1e6
        decision = admit(
            slack.seconds, offer, margin=margin, handover_s=handover_s, max_chunk_tokens=self._config.chunk_tokens
        )
        if not isinstance(decision, Grant) or self._gate.rollout_is_stuck():
            self._block.add(Word.DENIALS)
            return False
        self._gate.grant(decision.chunk_tokens, from_s)
        self._granted, self._grant_heartbeat_ns = True, heartbeat_ns
        return True

    def _note_grant(self, used: bool) -> None:
        block = self._block
        self._granted, self._turn_since_step = False, used
        # A rollout engine that did not react (stopped, hung) is asked again only after a sign of life.
        self._unheeded_ns = -1 if used else self._grant_heartbeat_ns
        block.add(Word.GRANTS if used else Word.DENIALS)
        since_ns = block.get(Word.ROLLOUT_STEP_SINCE_NS)
        if used and since_ns:
            idle_ns = max(0, since_ns - max(block.get(Word.GRANT_SINCE_NS), block.get(Word.SERVING_DONE_NS)))
            block.handover_latency.observe(idle_ns)
            block.set(Word.HANDOVER_US, (block.get(Word.HANDOVER_US) * 7 + idle_ns // 1000) // 8)

    def _offer(self) -> RolloutOffer:
        get = self._block.get
        if not get(Word.ROLLOUT_READY) or get(Word.GENERATION_DEAD) == get(Word.GENERATION):
            return RolloutOffer(0.0, 0.0, 0, 0)
        return RolloutOffer(
            decode_step_s=get(Word.OFFER_DECODE_NS) / 1e9,
            per_prefill_token_s=get(Word.OFFER_TOKEN_NS) / 1e9,
            prefill_tokens=get(Word.OFFER_PREFILL_TOKENS),
            decode_requests=get(Word.OFFER_DECODES),
        )

    def _slack(self, now_s: float, decoding: dict[str, Decoding]) -> Slack:
        return serving_slack(
            self._facts(now_s, decoding),
            self._slo,
            self._clock.model,
            policy=self._config.policy,
            role=self._config.role,
            chunk_tokens=self.scheduler.max_num_scheduled_tokens,
            tpot_spend=self._tpot_spend.spend,
        )

    def _facts(self, now_s: float, decoding: dict[str, Decoding]) -> ServingFacts:
        to_monotonic = time.monotonic() - time.time()
        prefills: list[PendingPrefill] = []
        decodes: list[Decoding] = []
        context = 0
        for request in self.scheduler.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                prefills.append(PendingPrefill(request.arrival_time + to_monotonic, left, request.num_computed_tokens))
                continue
            context += request.num_computed_tokens
            decodes.append(decoding.get(request.request_id) or Decoding(now_s, now_s, 1))
        for request in self.scheduler.waiting:
            if len(prefills) >= _MAX_PREFILLS_SEEN:
                break
            left = request.num_tokens - request.num_computed_tokens
            prefills.append(PendingPrefill(request.arrival_time + to_monotonic, left, request.num_computed_tokens))
        return ServingFacts(now_s, tuple(prefills), tuple(decodes), len(decodes), context, self._interruption_s)

    # ---- serving's own steps

    def after_schedule(self, scheduler_output: Any) -> None:
        """The step goes to the worker: whatever can wait until it is there, does."""
        self.after_send()  # where nobody has called it
        if self._config.gated:
            self._gate.sending()
        self._clock.start()
        self._scheduled = scheduler_output
        self._granted = self._turn_since_step = self._denied_ahead = False
        self._overlapped = self._gate.rollout_is_stuck()

    def after_send(self) -> None:
        """The worker computes: note the step before and what this one is, and look ahead to the turn after it."""
        ended, self._ended = self._ended, None
        if ended is not None:
            start_ns, end_ns, learn = ended
            if learn:
                self._clock.learn(start_ns, end_ns)
            self._block.record_turn(WHO_SERVING, start_ns, end_ns, self._clock.tokens)
            self._block.add(Word.SERVING_STEPS)
            self._block.add(Word.SERVING_BUSY_NS, end_ns - start_ns)
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        clock = self._clock
        clock.shape, clock.tokens = step_shape(self.scheduler, scheduled), scheduled.total_num_scheduled_tokens
        if clock.shape.prefill_tokens:
            prefill_s = clock.model.prefill_work_s(clock.shape.prefill_tokens, clock.shape.prefill_context_tokens)
            self._interruption_s += _INTERRUPTION_WEIGHT * (prefill_s - self._interruption_s)
        if self._config.gated and clock.tokens and self.rollout_has_requests():
            self._grant_ahead(scheduled)

    def _grant_ahead(self, scheduled: Any) -> None:
        """Grant the turn after the step that computes now, whose tokens count as given at its expected end."""
        if not self.scheduler.running:
            return
        assert self._clock.shape is not None
        end_s = self._free_at_s() + self._clock.model.predict_s(self._clock.shape)
        decoding = dict(self._decoding)
        self._follow(decoding, scheduled, end_s)
        self._denied_ahead = not self._grant(end_s, decoding)

    def after_device(self, scheduler_output: Any) -> None:
        """The worker has answered; the step's tokens go out next."""
        self.after_send()
        self._device.release()
        start_ns, end_ns = self._clock.end(self._block.get(Word.SERVING_WAITED_UNTIL_NS))
        if self._clock.tokens:
            overlapped = self._overlapped or self._gate.rollout_is_stuck()
            self._ended = start_ns, end_ns, self._config.gated and not overlapped
        if self.rollout_has_requests():
            self._follow(self._decoding, scheduler_output, end_ns / 1e9)
            self._learn_from_finished(scheduler_output)
        elif self._decoding:
            self._decoding.clear()  # what is not followed is thought to begin anew

    def rollout_has_requests(self) -> bool:
        """Running or waiting ones. Any thread."""
        return bool(self._block.get(Word.ROLLOUT_RUNNING) or self._block.get(Word.ROLLOUT_WAITING))

    def _follow(self, decoding: dict[str, Decoding], scheduler_output: Any, now_s: float) -> None:
        """Note in `decoding` when requests got their tokens; only a rollout that wants the device makes anybody ask."""
        requests = self.scheduler.requests
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(req_id)
            if request is not None and request.num_computed_tokens >= request.num_prompt_tokens:
                before = decoding.get(req_id)
                decoding[req_id] = (
                    Decoding(before.first_s, now_s, before.tokens + 1) if before else Decoding(now_s, now_s, 1)
                )

    def _learn_from_finished(self, scheduler_output: Any) -> None:
        for req_id in scheduler_output.finished_req_ids:
            done = self._decoding.pop(req_id, None)
            if done is not None and done.tokens > 1 and self._slo.tpot_s is not None:
                tpot_s = (done.last_s - done.first_s) / (done.tokens - 1)
                self._tpot_spend.observe(tpot_s <= _TPOT_MET_SHARE * self._slo.tpot_s)
