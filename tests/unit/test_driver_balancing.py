"""RLBoost's load balancer, and who may be used at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_driver.policy.balancing import BatchProfile, EngineLoad, Migration, rebalance, select_engine
from rl_driver.policy.health import Breaker, BreakerConfig, Heartbeats

_loads = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=12)


def _engines(loads):
    return [EngineLoad(f"w{i:02d}", p, e) for i, (p, e) in enumerate(loads)]


@given(_loads, st.integers(1, 6))
def test_the_shortest_queue_is_joined_or_none(loads, most):
    engines = _engines(loads)
    chosen = select_engine(engines, most)
    if chosen is None:
        assert all(e.pending >= most for e in engines)
    else:
        pending = {e.worker_id: e.pending for e in engines}
        assert pending[chosen] == min(pending.values()) < most
    assert select_engine(list(reversed(engines)), most) == chosen


@given(_loads, st.integers(1, 40))
def test_migrations_end_and_never_invent_a_request(loads, plateau):
    engines = {e.worker_id: e for e in _engines(loads)}
    total = sum(p + e for p, e in loads)
    for _ in range(400):
        move = rebalance(list(engines.values()), plateau)
        if move is None:
            break
        source, target = engines[move.source], engines[move.target]
        assert move.count >= 1 and move.source != move.target
        if move.what == "pending":
            assert source.pending >= move.count and target.pending == 0
            # The target had none waiting, so it begins with it at once.
            engines[move.source] = EngineLoad(source.worker_id, source.pending - 1, source.executing)
            engines[move.target] = EngineLoad(target.worker_id, 0, target.executing + 1)
        else:
            assert source.executing - move.count >= 1 and target.executing == 0
            engines[move.source] = EngineLoad(source.worker_id, source.pending, source.executing - move.count)
            engines[move.target] = EngineLoad(target.worker_id, target.pending, move.count)
    else:
        pytest.fail("migrations do not come to an end")
    assert sum(e.pending + e.executing for e in engines.values()) == total


def test_executing_requests_move_only_to_the_idle_and_only_above_the_plateau():
    assert rebalance(_engines([(0, 40), (0, 0)]), 16) == Migration("w00", "w01", 24, "executing")
    assert rebalance(_engines([(0, 16), (0, 0)]), 16) is None
    assert rebalance(_engines([(0, 40), (0, 1)]), 16) is None
    assert rebalance(_engines([(0, 40), (0, 0)]), None) is None
    assert rebalance(_engines([(5, 5)]), 4) is None


def test_the_plateau_is_where_throughput_becomes_flat():
    profile = BatchProfile(min_samples=1)
    assert profile.end_step() is None
    for batch, rate in ((1, 100), (2, 195), (4, 370), (8, 640), (16, 650), (32, 655)):
        profile.observe(batch, rate)
    assert profile.plateau is None, "the step is not over"
    assert profile.end_step() == 8
    assert profile.end_step() == 8, "a step that taught nothing keeps it"
    for batch, rate in ((1, 100), (16, 1600), (0, 5), (4, float("inf"))):
        profile.observe(batch, rate)
    assert profile.end_step() == 16


def test_a_breaker_opens_tries_and_closes():
    breaker = Breaker(BreakerConfig(failures=2, window_s=10, cool_s=1, cool_max_s=3))
    breaker.failed(0.0)
    breaker.failed(11.0)
    assert breaker.allows(11.0), "the first one is too long ago"
    breaker.failed(12.0)
    assert breaker.state(12.5) == "open" and not breaker.allows(12.5)
    assert breaker.allows(13.0)
    breaker.started(13.0)
    assert not breaker.allows(13.0), "one call at a time may try"
    breaker.failed(13.1)
    assert not breaker.allows(15.0) and breaker.allows(15.1), "a relapse cools for twice as long"
    breaker.started(15.1)
    breaker.succeeded(15.2)
    assert breaker.state(15.2) == "closed" and breaker.allows(15.2)


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(["start", "ok", "fail"])), max_size=60))
def test_a_breaker_always_lets_someone_try_again(moves):
    config = BreakerConfig()
    breaker, now = Breaker(config), 0.0
    for dt, what in moves:
        now += dt
        {"start": breaker.started, "ok": breaker.succeeded, "fail": breaker.failed}[what](now)
    breaker.succeeded(now + config.cool_max_s)
    assert breaker.allows(now + config.cool_max_s)


def test_heartbeats():
    beats = Heartbeats(3.0)
    beats.seen("b", 10.0)
    beats.seen("a", 10.0)
    beats.seen("a", 9.0)
    assert beats.lost(13.0) == []
    assert beats.lost(13.1) == ["a", "b"]
    beats.seen("a", 13.1)
    beats.forget("b")
    assert beats.lost(14.0) == []
    with pytest.raises(ValueError):
        Heartbeats(0)
