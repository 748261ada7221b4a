"""The gate over a real control block, with both ends on threads of this process or in two processes."""

import os
import subprocess
import sys
import threading
import time

import pytest

from vllm_coserve.control.block import RING_TURNS, WHO_ROLLOUT, ControlBlock
from vllm_coserve.control.gate import START_BOUND_S, RolloutGate, ServingGate
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.policy.admission import turn_wait_bound_s


@pytest.fixture
def block():
    block, fd = ControlBlock.create(16, 4096)
    yield block
    os.close(fd)


def test_the_two_never_compute_at_the_same_time(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    computing, overlaps, steps = set(), [], {"serving": 0, "rollout": 0}
    done = threading.Event()

    def compute(who):
        computing.add(who)
        if len(computing) > 1:
            overlaps.append(who)
        time.sleep(2e-5)
        if len(computing) > 1:
            overlaps.append(who)
        computing.discard(who)
        steps[who] += 1

    def rollout_engine():
        while not done.is_set():
            if rollout.enter(0.5, 0.002):
                compute("rollout")
                rollout.leave()

    thread = threading.Thread(target=rollout_engine)
    thread.start()
    for i in range(600):
        if i % 3 == 0:
            serving.open(block.get(Word.SERVING_WANTS), 64)
            time.sleep(2e-4)
            serving.raise_flag()
            serving.close()
        elif i % 3 == 1:
            serving.grant(32)
        compute("serving")
    done.set()
    thread.join(5)
    assert not overlaps
    assert block.get(Word.OVERRUNS) == 0
    assert steps["serving"] == 600 and steps["rollout"] > 100


def test_a_turn_carries_its_chunk(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    got = []

    def take():
        turn = rollout.enter(0.01, 2.0)
        got.append(turn)
        rollout.leave()

    thread = threading.Thread(target=take)
    thread.start()
    deadline = time.monotonic() + 5
    while not got and time.monotonic() < deadline:
        serving.grant(77)
    thread.join(5)
    assert got[0].chunk_tokens == 77 and not got[0].free


def test_a_grant_that_nobody_takes_is_revoked(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    start = time.monotonic()
    assert not serving.grant(10)
    assert time.monotonic() - start < START_BOUND_S + 0.5
    assert rollout.enter(0.01, 0.0) is None


def test_a_rollout_that_never_returns_costs_its_bound_once(block):
    serving, rollout = ServingGate(block), RolloutGate(block)
    serving.open(block.get(Word.SERVING_WANTS), 64)
    assert rollout.enter(0.02, 0.1).free
    start = time.monotonic()
    serving.close()
    first = time.monotonic() - start
    assert first <= turn_wait_bound_s(0.02) + 0.5
    assert block.get(Word.OVERRUNS) == 1 and serving.rollout_is_stuck()
    start = time.monotonic()
    serving.close()
    assert not serving.grant(10)
    assert time.monotonic() - start < 0.02
    rollout.leave()
    assert not serving.rollout_is_stuck()


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
