"""When serving lends the device, with a scripted scheduler and the real gate, policies and control block."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from vllm_coserve.api.config import CoserveConfig
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.gate import RolloutGate
from vllm_coserve.control.handover import RolloutDevice, ServingDevice
from vllm_coserve.control.words import Word
from vllm_coserve.engine.serving_compute import ServingCompute
from vllm_coserve.engine.steps import StepClock
from vllm_coserve.policy.latency import Coefficients, LatencyModel

STEP_S, TOKEN_S = 0.004, 1e-5


def a_request(name, prompt, computed):
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_tokens=prompt,
        arrival_time=time.time(),
    )


class World:
    """A serving engine whose scheduler holds what the test says, and the core of a rollout engine."""

    def __init__(self, **config):
        self.block, self._fd = ControlBlock.create(16, 4096)
        options = {"policy": "dual", "ttft_slo_ms": 300.0, "tpot_slo_ms": 40.0} | config
        coefficients = Coefficients(STEP_S, TOKEN_S, 0.0, 0.0, 0.0)
        self.clock = StepClock(LatencyModel(coefficients))
        self.compute = ServingCompute(self.block, CoserveConfig(rollout="m", **options), self.clock)
        self.scheduler = SimpleNamespace(running=[], waiting=[], requests={}, max_num_scheduled_tokens=512)
        self.compute.scheduler = self.scheduler
        self.worker = ServingDevice(self.block)
        self.rollout, self.rollout_worker = RolloutGate(self.block), RolloutDevice(self.block)
        self.block.set(Word.GENERATION, 1)
        self.block.set(Word.ROLLOUT_READY, 1)
        self.offers(decodes=8, step_s=0.005)

    def close(self):
        os.close(self._fd)

    def offers(self, decodes, step_s):
        self.block.set(Word.ROLLOUT_RUNNING, decodes)
        self.block.set(Word.OFFER_DECODES, decodes)
        self.block.set(Word.OFFER_DECODE_NS, int(step_s * 1e9))
        self.block.add(Word.ROLLOUT_HEARTBEAT_NS)

    def runs(self, *requests):
        self.scheduler.running = list(requests)
        self.scheduler.requests = {r.request_id: r for r in requests}

    def sends(self):
        """A step of all running requests goes to the worker, one token each; returns it."""
        for request in self.scheduler.running:
            request.num_computed_tokens += 1
        tokens = {r.request_id: 1 for r in self.scheduler.running}
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=len(tokens), finished_req_ids=set()
        )
        self.compute.after_schedule(output)
        self.compute.after_send()
        return output

    def answers(self, output):
        self.worker.acquire()
        self.worker.release()
        self.compute.after_device(output)

    def granted(self):
        return self.block.get(Word.GRANT) > self.block.get(Word.ROLLOUT_TURN)


@pytest.fixture
def world(request):
    world = World(**getattr(request, "param", {}))
    yield world
    world.close()


def test_the_turn_after_a_step_is_granted_while_it_computes(world):
    world.runs(a_request("a", 10, 10))
    output = world.sends()
    assert world.granted() and world.block.get(Word.GRANT_AFTER) == world.block.get(Word.SERVING_SENT)
    assert world.rollout.enter(0.005, 0.1)
    world.answers(output)
    world.rollout_worker.acquire()
    world.rollout_worker.release()
    assert world.compute.before_step()  # it took time: messages first
    assert world.block.get(Word.GRANTS) == 1


@pytest.mark.parametrize("world", [{"tpot_slo_ms": 6.0}], indirect=True)
def test_no_turn_that_would_make_the_next_token_late(world):
    world.runs(a_request("a", 10, 10))
    output = world.sends()
    world.answers(output)
    assert not world.granted() and not world.compute.before_step()
    assert world.block.get(Word.DENIALS) == 1  # asked once a step


@pytest.mark.parametrize("world", [{"ttft_slo_ms": None, "tpot_slo_ms": None}], indirect=True)
def test_without_a_promise_only_idle_time_is_lent(world):
    world.runs(a_request("a", 10, 10))
    world.answers(world.sends())
    assert not world.compute.before_step() and not world.granted()
    world.runs()
    world.compute.on_idle(world.block.get(Word.SERVING_WANTS))
    assert world.rollout.enter(0.005, 0.1).free


def test_what_the_step_that_computes_will_have_given_counts(world):
    """A turn of 25 ms fits between two tokens that may be 26 ms apart, but not on top of what is late already."""
    world.offers(decodes=8, step_s=0.015)
    world.runs(a_request("a", 10, 10))
    for late in (False, True):
        output = world.sends()
        assert world.granted() is not late
        world.compute.before_step()  # nobody took it up
        world.answers(output)
        world.block.add(Word.ROLLOUT_HEARTBEAT_NS)
        time.sleep(0.1)  # the next token is late


def test_a_turn_that_nobody_took_up_is_over_when_serving_goes_idle(world):
    world.runs(a_request("a", 10, 10))
    output = world.sends()
    assert world.granted()
    world.answers(output)
    world.runs()
    world.compute.on_idle(world.block.get(Word.SERVING_WANTS))
    world.compute.on_busy()
    assert world.rollout.enter(0.005, 0.0) is None


def test_a_rollout_engine_that_does_not_react_is_asked_again_after_a_sign_of_life(world):
    world.runs(a_request("a", 10, 10))
    for sign, granted in ((False, True), (False, False), (True, True)):
        if sign:
            world.block.add(Word.ROLLOUT_HEARTBEAT_NS)
        output = world.sends()
        assert world.granted() is granted
        world.answers(output)
        world.compute.before_step()


def test_serving_comes_after_a_free_step_in_flight_and_counts_its_own_time_only(world):
    world.compute.on_idle(world.block.get(Word.SERVING_WANTS))
    assert world.rollout.enter(1.0, 0.1).free
    world.rollout.expect(0.001)
    world.rollout_worker.acquire()
    world.compute.on_arrival()
    world.compute.on_busy()
    world.runs(a_request("a", 10, 10))
    world.compute.before_step()
    output = world.sends()
    end_of_turn = threading.Timer(0.2, world.rollout_worker.release)
    end_of_turn.start()
    start = time.monotonic()
    world.answers(output)
    assert time.monotonic() - start > 0.15
    world.compute.after_send()
    assert 0 < world.block.get(Word.SERVING_BUSY_NS) < 0.1e9
    end_of_turn.join()


def test_a_step_beside_a_stuck_rollout_teaches_nothing(world):
    world.compute.on_idle(world.block.get(Word.SERVING_WANTS))
    assert world.rollout.enter(0.001, 0.1).free
    world.compute.on_busy()
    world.runs(a_request("a", 10, 10))
    before = world.clock.model.to_json()
    for _ in range(20):
        world.answers(world.sends())
    assert world.block.get(Word.OVERRUNS) == 1 and not world.granted()
    assert world.clock.model.to_json() == before
