"""The gate over a real control block, with both ends on threads of this process or in two processes."""

import os
import queue
import subprocess
import sys
import threading
import time

import pytest

from vllm_coserve.control import gate
from vllm_coserve.control.block import RING_TURNS, WHO_ROLLOUT, ControlBlock
from vllm_coserve.control.gate import START_BOUND_S, RolloutGate, ServingGate
from vllm_coserve.control.handover import RolloutDevice, ServingDevice
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.policy.admission import turn_wait_bound_s


@pytest.fixture
def block():
    block, fd = ControlBlock.create(16, 4096)
    yield block
    os.close(fd)


LEAD_S = 0.0005


class Serving:
    """The serving engine: its core on the caller's thread, its worker on another."""

    def __init__(self, block, compute):
        self.gate, self.steps, self._compute = ServingGate(block), queue.SimpleQueue(), compute
        self._device, self._answers = ServingDevice(block), queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while self.steps.get():
            self._device.acquire()
            self._compute("serving")
            self._device.release()
            self._answers.put(True)

    def step(self, meanwhile=lambda: None):
        self.gate.sending()
        self.steps.put(True)
        meanwhile()
        assert self._answers.get(timeout=20)


class Rollout:
    """The rollout engine: core and worker on a thread each, until `done`."""

    def __init__(self, block, compute):
        self.gate, self.done, self._compute = RolloutGate(block), threading.Event(), compute
        self._device, self._steps, self._answers = RolloutDevice(block), queue.SimpleQueue(), queue.SimpleQueue()
        self.threads = [threading.Thread(target=t, daemon=True) for t in (self._core, self._work)]
        for thread in self.threads:
            thread.start()

    def _core(self):
        while not self.done.is_set():
            if self.gate.enter(0.5, 0.002):
                self.gate.expect(2e-5)
                self._steps.put(True)
                assert self._answers.get(timeout=20)
                self.gate.leave()
        self._steps.put(False)

    def _work(self):
        while self._steps.get():
            self._device.acquire()
            self._compute("rollout")
            self._device.release()
            self._answers.put(True)

    def end(self):
        self.done.set()
        for thread in self.threads:
            thread.join(5)


def test_the_two_never_compute_at_the_same_time(block):
    computing, overlaps, steps = set(), [], {"serving": 0, "rollout": 0}
    taken = 0

    def compute(who):
        computing.add(who)
        if len(computing) > 1:
            overlaps.append(who)
        time.sleep(2e-5)
        if len(computing) > 1:
            overlaps.append(who)
        computing.discard(who)
        steps[who] += 1

    serving, rollout = Serving(block, compute), Rollout(block, compute)
    lends = serving.gate
    for i in range(600):
        if i % 3 == 0:
            lends.open(block.get(Word.SERVING_WANTS), 64)
            time.sleep(2e-4)
            lends.raise_flag()
            lends.close()
        elif i % 3 == 1:
            lends.grant(32)
            taken += lends.await_taken()
        else:  # while its own step computes
            serving.step(meanwhile=lambda: lends.grant(32))
            taken += lends.await_taken()
        if i % 2:
            lends.await_nearly_free(LEAD_S)
        serving.step()
    rollout.end()
    serving.steps.put(False)
    assert not overlaps
    assert block.get(Word.OVERRUNS) == 0
    assert steps["serving"] == 800 and steps["rollout"] > 100 and taken > 100


def test_a_turn_granted_ahead_begins_when_the_step_before_it_is_done(block):
    order, may_end = [], threading.Event()

    def compute(who):
        order.append(who)
        if who == "serving":
            assert may_end.wait(20)
        order.append(who)

    serving, rollout = Serving(block, compute), Rollout(block, compute)

    def grant():
        serving.gate.grant(32)
        assert serving.gate.await_taken()
        time.sleep(0.05)
        assert order == ["serving"] and serving.gate.rollout_is_active()
        may_end.set()

    serving.step(meanwhile=grant)
    serving.step()  # after the turn, whoever is faster
    rollout.end()
    serving.steps.put(False)
    assert order == ["serving"] * 2 + ["rollout"] * 2 + ["serving"] * 2


def test_a_turn_carries_its_chunk(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    serving.grant(77)
    turn = rollout.enter(0.01, 2.0)
    assert serving.await_taken()
    assert turn.chunk_tokens == 77 and not turn.free


def test_a_grant_that_nobody_takes_is_revoked(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    start = time.monotonic()
    serving.grant(10)
    assert not serving.await_taken()
    assert time.monotonic() - start < START_BOUND_S + 0.5
    assert rollout.enter(0.01, 0.0) is None


def test_a_step_that_is_sent_ends_a_grant_that_nobody_took(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    serving.grant(10)
    serving.sending()
    assert rollout.enter(0.01, 0.0) is None and block.get(Word.SERVING_SENT_AFTER) == 0


def test_a_rollout_that_never_returns_costs_its_bound_once(block):
    serving, rollout, device = ServingGate(block), RolloutGate(block), ServingDevice(block)
    serving.open(block.get(Word.SERVING_WANTS), 64)
    assert rollout.enter(0.02, 0.1).free
    RolloutDevice(block).acquire()
    serving.close()
    start = time.monotonic()
    assert serving.await_nearly_free(0.0)
    serving.sending()
    device.acquire()
    assert 0.02 <= time.monotonic() - start <= turn_wait_bound_s(0.02) + 0.5
    device.release()
    assert block.get(Word.OVERRUNS) == 1 and serving.rollout_is_stuck()
    start = time.monotonic()
    assert not serving.await_nearly_free(0.0)
    serving.sending()
    device.acquire()
    assert time.monotonic() - start < 0.02
    rollout.leave()
    assert not serving.rollout_is_stuck()


def test_a_rollout_that_died_before_it_had_the_device_costs_a_bound(block):
    serving, rollout, device = ServingGate(block), RolloutGate(block), ServingDevice(block)
    serving.grant(10)
    assert rollout.enter(0.02, 0.1) and serving.await_taken()
    start = time.monotonic()
    serving.await_nearly_free(0.001)
    serving.sending()
    device.acquire()
    assert time.monotonic() - start <= 0.02 + turn_wait_bound_s(0.02) + 0.5
    RolloutGate(block)  # its successor
    assert not serving.rollout_is_active()


def test_serving_stopped_in_its_step_does_not_hold_the_rollout_for_ever(block, monkeypatch):
    monkeypatch.setattr(gate, "SERVING_STOPPED_S", 0.05)
    serving, rollout = ServingGate(block), RolloutGate(block)
    serving.sending()
    start = time.monotonic()
    serving.grant(10, start + 0.1)
    assert rollout.enter(0.02, 0.1)
    RolloutDevice(block).acquire()
    assert 0.2 <= time.monotonic() - start < 1.2


def test_an_arrival_stops_free_steps_before_the_core_is_awake(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    serving.open(block.get(Word.SERVING_WANTS), 64)
    assert rollout.enter(0.01, 0.0) is not None
    rollout.leave()
    serving.raise_flag()
    assert rollout.enter(0.01, 0.0) is None


def test_bells_wake_another_process():
    block, fd = ControlBlock.create(16, 4096)
    code = (
        "import os\n"
        "from vllm_coserve.control.block import ControlBlock\n"
        "from vllm_coserve.control.words import Bell, Word\n"
        f"block = ControlBlock.attach(os.open('/proc/{os.getpid()}/fd/{fd}', os.O_RDWR))\n"
        "seen = block.bell(Bell.ROLLOUT_CORE); block.set(Word.ROLLOUT_READY, 1)\n"
        "print(block.wait(Bell.ROLLOUT_CORE, seen, 20.0) != seen, block.get(Word.GRANT))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not block.get(Word.ROLLOUT_READY) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    block.set(Word.GRANT, 41)
    block.ring(Bell.ROLLOUT_CORE)
    out, _ = child.communicate(timeout=20)
    os.close(fd)
    assert out.split() == ["True", "41"]


def test_a_wait_ends_at_its_bound(block):
    start = time.monotonic()
    block.wait(Bell.SUPERVISOR, block.bell(Bell.SUPERVISOR), 0.05)
    assert 0.04 <= time.monotonic() - start < 1.0


def test_the_ring_of_turns_wraps(block):
    for i in range(RING_TURNS + 500):
        block.record_turn(WHO_ROLLOUT, i * 1000, i * 1000 + 10, i)
    last, turns = block.turns(WHO_ROLLOUT, 0)
    assert last == RING_TURNS + 500
    assert [t.tokens for t in turns[-3:]] == [last - 3, last - 2, last - 1]
    assert block.turns(WHO_ROLLOUT, last - 2)[1][0].seq == last - 1
