"""Budget, cut, freeze and headroom, over random walks of a simulated pool."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.policy.memory import (
    MemoryConfig,
    MemoryFacts,
    MemoryPolicy,
    headroom_pages,
    serving_limit_pages,
    urgent_reclaim_to,
)
from vllm_coserve.policy.victims import Candidate, choose_victims

_CONFIG = MemoryConfig()
_POOL = 100


def _facts(now=0.0, used=0, cached=0, rollout=0, wanted=0, step=0, alive=True, active=True):
    free = _POOL - used - cached - rollout
    return MemoryFacts(now, _POOL, free, used, cached, rollout, wanted, step, alive, active)


_moves = st.tuples(
    st.floats(0.01, 4.0),  # seconds that pass
    st.integers(0, 60),  # pages that serving wants in use
    st.integers(0, 100),  # pages that the rollout wants
    st.booleans(),  # a new RL step
    st.sampled_from([True, True, True, True, False]),  # active
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_moves, max_size=60))
def test_invariants_over_random_walks(moves):
    policy, now, used, cached, rollout, step = MemoryPolicy(_CONFIG, _POOL), 0.0, 0, 0, 0, 0
    headroom = headroom_pages(_POOL, _CONFIG)
    last_cut, last_budget, frozen_step = None, None, None
    for dt, serving, wanted, new_step, active in moves:
        now, step = now + dt, step + new_step
        target = min(serving, _POOL - rollout)  # serving grows into what is free
        cached = max(0, min(cached + max(0, used - target), _POOL - rollout - target))
        used = target
        facts = _facts(now, used, cached, rollout, wanted, step, active=active)
        d = policy.decide(facts)
        assert 0 <= d.budget_pages <= _POOL
        assert 0 <= d.reclaim_to_pages <= rollout
        assert 0 <= d.serving_release_pages <= cached
        if d.grant_pages:
            assert facts.free_pages - d.grant_pages >= headroom
            assert rollout + d.grant_pages <= d.budget_pages
            assert active
        if not active:
            assert d.reclaim_to_pages == 0
        if d.cut:
            assert last_cut is None or now - last_cut >= _CONFIG.freeze_s or step != frozen_step
            last_cut, frozen_step = now, step
        elif last_cut is not None and now - last_cut < _CONFIG.freeze_s and step == frozen_step:
            assert d.budget_pages <= last_budget
        last_budget = d.budget_pages
        rollout = d.reclaim_to_pages + d.grant_pages
        cached -= d.serving_release_pages


def test_budget_is_pool_minus_recent_peak_minus_headroom():
    policy = MemoryPolicy(_CONFIG, _POOL)
    assert policy.decide(_facts(0.0, used=30)).budget_pages == 50
    assert policy.decide(_facts(1.0, used=5, step=1)).budget_pages == 50
    assert policy.decide(_facts(40.0, used=5, step=2)).budget_pages == 75


def test_a_burst_cuts_once_and_freezes():
    policy = MemoryPolicy(_CONFIG, _POOL)
    policy.decide(_facts(0.0, used=10, rollout=60))
    first = policy.decide(_facts(1.0, used=35, rollout=60))
    assert first.cut and first.pressure and first.budget_pages == 30 and first.reclaim_to_pages <= 30
    again = policy.decide(_facts(1.1, used=65, rollout=30))
    assert again.pressure and not again.cut and again.budget_pages == 30
    assert policy.decide(_facts(2.0, used=5, rollout=20, wanted=50)).budget_pages == 30
    assert policy.decide(_facts(2.1, used=5, rollout=20, wanted=50, step=1)).budget_pages > 0


def test_idle_serving_cache_is_given_back_when_the_rollout_wants_pages():
    policy = MemoryPolicy(_CONFIG, _POOL)
    d = policy.decide(_facts(0.0, used=0, cached=95, wanted=40))
    assert d.grant_pages == 0 and d.serving_release_pages >= 40
    assert policy.decide(_facts(1.0, used=0, cached=20, wanted=0)).serving_release_pages == 0


def test_urgent_reclaim_takes_the_need_and_a_batch():
    facts = _facts(used=50, rollout=48)
    assert urgent_reclaim_to(facts, 2, _CONFIG) == 48
    assert urgent_reclaim_to(facts, 12, _CONFIG) == 48 - 10 - _CONFIG.reclaim_batch_pages
    assert urgent_reclaim_to(facts, 1000, _CONFIG) == 0


def test_victims_free_most_for_least():
    cheap = Candidate("cheap", {0: 4}, computed_tokens=10)
    dear = Candidate("dear", {1: 4}, computed_tokens=1000)
    spread = Candidate("spread", {2: 1, 3: 1}, computed_tokens=10)
    others = Candidate("others", {2: 3, 3: 3}, computed_tokens=500)
    used = [4, 4, 4, 4]
    assert choose_victims([dear, spread, cheap, others], used, 1) == ["cheap"]
    assert set(choose_victims([dear, spread, cheap, others], used, 4)) == {"cheap", "dear", "spread", "others"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 7), st.integers(1, 4), min_size=1), max_size=8), st.integers(0, 9))
def test_victims_free_enough_where_that_is_possible(maps, need):
    candidates = [Candidate(str(i), m, i * 10) for i, m in enumerate(maps)]
    used = [sum(m.get(s, 0) for m in maps) for s in range(8)]
    chosen = choose_victims(candidates, used, need)
    left = [used[s] - sum(maps[int(c)].get(s, 0) for c in chosen) for s in range(8)]
    freed = sum(1 for s in range(8) if used[s] and not left[s])
    assert freed >= min(need, sum(1 for u in used if u))
    assert len(set(chosen)) == len(chosen)
    assert chosen == _chosen_one_by_one(candidates, used, need)


def _chosen_one_by_one(candidates, used, need):
    """What `choose_victims` is to choose."""
    left, remaining, chosen, freed = dict(enumerate(used)), list(candidates), [], set()
    while remaining and len(freed) < need:

        def score(c):
            here = {s: n for s, n in c.blocks_on_slot.items() if left[s] > 0}
            exclusive = sum(n >= left[s] for s, n in here.items())
            work = c.computed_tokens + 1
            return min(exclusive, need - len(freed)) / work, round(sum(n / left[s] for s, n in here.items()) / work, 9)

        best = max(remaining, key=score)
        remaining.remove(best)
        chosen.append(best.request_id)
        for slot, n in best.blocks_on_slot.items():
            left[slot] -= n
            if left[slot] <= 0:
                freed.add(slot)
    return chosen


_mode_moves = st.tuples(
    st.floats(0.001, 3.0),
    st.integers(0, 80),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(["on", "on", "on", "off", "dead"]),
)


@given(st.sampled_from(["grow_only", "static"]), st.lists(_mode_moves, max_size=40))
def test_modes_for_comparison_never_take_pages_back(mode, moves):
    config = MemoryConfig(mode=mode)
    policy, now, rollout, step = MemoryPolicy(config, _POOL), 0.0, 0, 0
    for dt, serving, wanted, new_step, state in moves:
        now, step = now + dt, step + new_step
        used = min(serving, _POOL - rollout, serving_limit_pages(_POOL, config))
        facts = _facts(now, used, 0, rollout, wanted, step, state != "dead", state == "on")
        d = policy.decide(facts)
        if state != "on":
            assert d.reclaim_to_pages == 0, "deactivation gives everything back in every mode"
            rollout = 0
            continue
        assert d.reclaim_to_pages == rollout and not d.cut
        assert 0 <= d.grant_pages <= min(wanted, facts.free_pages)
        rollout += d.grant_pages
        if mode == "static":
            assert rollout <= _POOL // 2 == d.budget_pages


def test_static_halves_leave_nothing_over():
    config = MemoryConfig(mode="static")
    for pool in (4, 7, 100):
        assert serving_limit_pages(pool, config) + pool // 2 == pool
        assert serving_limit_pages(pool, config, weight_pages=20) == serving_limit_pages(pool, config)
    assert serving_limit_pages(100, MemoryConfig()) == 100
    assert serving_limit_pages(100, MemoryConfig(), weight_pages=20) == 120
