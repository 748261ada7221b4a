"""The memory policy where the rollout gives pages back slowly or in part, and at its edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.memory import MemoryConfig, MemoryFacts, MemoryPolicy, headroom_pages, urgent_reclaim_to

_CONFIG = MemoryConfig()
_POOL = 100


def _facts(now=0.0, used=0, cached=0, rollout=0, wanted=0, step=0, alive=True, active=True, leaving=0):
    free = _POOL - used - cached - rollout - leaving
    return MemoryFacts(now, _POOL, free, used, cached, rollout, wanted, step, alive, active)


_moves = st.tuples(
    st.floats(0.001, 3.0),  # seconds that pass
    st.integers(0, 80),  # pages that serving wants in use
    st.integers(0, 100),  # pages that the rollout wants
    st.integers(0, 12),  # pages that the rollout gives back of what is asked
    st.sampled_from([False, False, False, True]),  # a new RL step
    st.sampled_from(["on", "on", "on", "on", "off", "dead"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_moves, max_size=50))
def test_invariants_with_a_rollout_that_gives_back_slowly(moves):
    policy, now, used, cached, rollout, step = MemoryPolicy(_CONFIG, _POOL), 0.0, 0, 0, 0, 0
    headroom, cut_at, cut_step, budget = headroom_pages(_POOL, _CONFIG), None, None, 0
    for dt, serving, wanted, returned, new_step, state in moves:
        now, step = now + dt, step + new_step
        serving = min(serving, _POOL - rollout)
        used, cached = serving, max(0, min(cached + max(0, used - serving), _POOL - rollout - serving))
        facts = _facts(now, used, cached, rollout, wanted, step, state != "dead", state == "on")
        d = policy.decide(facts)
        frozen = cut_at is not None and now < cut_at + _CONFIG.freeze_s and step == cut_step
        assert 0 <= d.budget_pages <= _POOL
        assert 0 <= d.reclaim_to_pages <= rollout
        assert 0 <= d.serving_release_pages <= cached
        assert d.grant_pages == 0 or d.reclaim_to_pages == rollout
        if d.grant_pages:
            assert state == "on" and not d.pressure
            assert facts.free_pages - d.grant_pages >= headroom
            assert rollout + d.grant_pages <= d.budget_pages
            assert d.grant_pages <= wanted
        if state != "on":
            assert d.reclaim_to_pages == 0
        if d.pressure:
            assert d.reclaim_to_pages <= min(d.budget_pages, rollout - min(rollout, _CONFIG.reclaim_batch_pages))
        if frozen:
            assert not d.cut and d.budget_pages == budget
        if d.cut:
            assert d.pressure
            cut_at, cut_step = now, step
        budget = d.budget_pages
        rollout = rollout - min(returned, rollout - d.reclaim_to_pages) + d.grant_pages
        cached -= d.serving_release_pages


def test_the_cut_stays_asked_for_until_it_is_met():
    policy = MemoryPolicy(_CONFIG, _POOL)
    policy.decide(_facts(0.0, used=10, rollout=60))
    first = policy.decide(_facts(1.0, used=35, rollout=60))
    assert first.cut
    for i in range(1, 4):  # nothing has come back yet
        later = policy.decide(_facts(1.0 + i / 50, used=35, rollout=60))
        assert not later.cut and later.reclaim_to_pages <= first.reclaim_to_pages


def test_pages_on_their_way_back_do_not_cause_a_second_cut():
    policy = MemoryPolicy(_CONFIG, _POOL)
    policy.decide(_facts(0.0, used=10, rollout=60))
    policy.decide(_facts(1.0, used=35, rollout=60))
    between = policy.decide(_facts(1.1, used=35, rollout=30, leaving=30))
    assert not between.cut and between.budget_pages == 30


@pytest.mark.parametrize(("later_s", "step"), [(10.5, 0), (0.5, 1)])
def test_a_freeze_ends_by_the_timer_or_the_next_step(later_s, step):
    policy = MemoryPolicy(_CONFIG, _POOL)
    policy.decide(_facts(0.0, used=10, rollout=60))
    assert policy.decide(_facts(1.0, used=35, rollout=60)).cut
    assert policy.decide(_facts(1.4, used=5, rollout=20)).budget_pages == 30
    assert policy.decide(_facts(1.0 + later_s, used=5, rollout=20, step=step)).budget_pages == 45


def test_without_steps_the_budget_follows_the_interval():
    policy = MemoryPolicy(_CONFIG, _POOL)
    assert policy.decide(_facts(0.0, used=20)).budget_pages == 60
    assert policy.decide(_facts(4.9, used=50)).budget_pages == 60
    assert policy.decide(_facts(5.0, used=50)).budget_pages == 30


def test_a_full_serving_engine_leaves_no_budget():
    assert MemoryPolicy(_CONFIG, _POOL).decide(_facts(used=100)).budget_pages == 0


def test_idle_serving_cache_is_no_burst():
    """Free pages are few, but it is cache that holds them: serving gives it back, the rollout keeps its pages."""
    policy = MemoryPolicy(_CONFIG, _POOL)
    d = policy.decide(_facts(used=0, cached=75, rollout=20))
    assert not d.pressure and d.reclaim_to_pages == 20 and d.serving_release_pages == 15


def test_a_rollout_without_pages_is_not_cut():
    policy = MemoryPolicy(_CONFIG, _POOL)
    policy.decide(_facts(0.0))
    d = policy.decide(_facts(1.0, used=95))
    assert not d.pressure and not d.cut


def test_over_budget_comes_down_before_it_is_a_burst():
    policy = MemoryPolicy(_CONFIG, _POOL)
    d = policy.decide(_facts(0.0, used=42, rollout=40))
    assert d.budget_pages == 38 and not d.pressure
    assert d.reclaim_to_pages == 40 - _CONFIG.reclaim_batch_pages


def test_the_freed_cache_of_serving_is_granted_next():
    policy = MemoryPolicy(_CONFIG, _POOL)
    d = policy.decide(_facts(0.0, cached=95, wanted=40))
    assert d.grant_pages == 0
    assert policy.decide(_facts(0.1, cached=95 - d.serving_release_pages, wanted=40)).grant_pages == 40


def test_no_headroom_means_no_burst():
    policy = MemoryPolicy(MemoryConfig(headroom_fraction=0.0), _POOL)
    d = policy.decide(_facts(used=40, rollout=60))
    assert not d.pressure and d.reclaim_to_pages == 60


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.integers(0, 40), st.integers(0, 200))
def test_urgent_reclaim_frees_the_need_where_it_can(used, rollout, needed):
    facts = _facts(used=used, rollout=rollout)
    to = urgent_reclaim_to(facts, needed, _CONFIG)
    assert 0 <= to <= rollout
    assert facts.free_pages + rollout - to >= min(needed, facts.free_pages + rollout)
    if needed <= facts.free_pages:
        assert to == rollout


def test_the_same_facts_give_the_same_decisions():
    facts = [_facts(i * 0.7, used=(i * 13) % 50, rollout=(i * 7) % 40, wanted=9, step=i // 9) for i in range(40)]
    runs = []
    for _ in range(2):
        policy = MemoryPolicy(_CONFIG, _POOL)
        runs.append([policy.decide(f) for f in facts])
    assert runs[0] == runs[1]
