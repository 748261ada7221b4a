"""Plans of who reads weights from whom, their making anew, and scores of workers as sources."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_coserve.policy.broadcast import Link, Task, join, make_plan, predict, rebuild, upstream
from vllm_coserve.policy.peer_scores import Record, forwards, observed, score

_MB = 1e6
_rates = st.one_of(st.just(math.inf), st.floats(0.1, 100).map(lambda x: x * _MB))
_link = st.tuples(st.booleans(), st.floats(0, 100), _rates, _rates)
_fleets = st.lists(_link, min_size=1, max_size=20).map(
    lambda rows: [Link(f"w{i:02d}", *row) for i, row in enumerate(rows)]
)
_tasks = st.builds(
    Task, st.integers(1, 10**10), st.integers(1, 1 << 22), st.floats(0.1, 1000).map(lambda x: x * _MB), st.just(0.001)
)


def _fleet(count: int, rate: float, **more: object) -> list[Link]:
    return [Link(f"w{i:02d}", down_bytes_per_s=rate, up_bytes_per_s=rate, **more) for i in range(count)]


@given(_tasks, _fleets)
def test_everyone_has_one_place_and_only_forwarders_have_successors(task: Task, fleet: list[Link]) -> None:
    plan = make_plan(task, fleet)
    assert sorted(itertools.chain(*plan.chains)) == sorted(link.worker_id for link in fleet)
    serves = {link.worker_id for link in fleet if link.serves}
    for chain in plan.chains:
        assert chain and set(chain[:-1]) <= serves
        for place, worker in enumerate(chain):  # no cycle: whoever is read from stands before
            assert set(upstream(plan.chains, worker)) <= set(chain[:place])


@given(_tasks, _fleets)
def test_a_plan_is_never_worse_than_a_star(task: Task, fleet: list[Link]) -> None:
    plan = make_plan(task, fleet)
    assert plan.last_s <= plan.star_last_s and plan.mean_s <= plan.star_mean_s
    star = predict(task, tuple((link.worker_id,) for link in fleet), {link.worker_id: link for link in fleet})
    assert max(a.done_s for a in star.values()) == pytest.approx(plan.star_last_s)
    assert sum(a.bytes_per_s for a in star.values()) <= task.uplink_bytes_per_s * (1 + 1e-9)


@given(_tasks, _fleets)
def test_nobody_is_expected_to_beat_its_links(task: Task, fleet: list[Link]) -> None:
    known = {link.worker_id: link for link in fleet}
    plan = make_plan(task, fleet)
    arrivals = predict(task, plan.chains, known)
    for chain in plan.chains:
        for before, worker in zip((None, *chain), chain, strict=False):
            assert arrivals[worker].bytes_per_s <= known[worker].down_bytes_per_s
            assert arrivals[worker].done_s >= task.nbytes / arrivals[worker].bytes_per_s
            if before is not None:
                assert arrivals[worker].bytes_per_s <= min(known[before].up_bytes_per_s, arrivals[before].bytes_per_s)
                assert arrivals[worker].done_s >= arrivals[before].done_s


@given(_tasks, _fleets, st.data())
def test_after_any_failures_the_living_reach_the_relay(task: Task, fleet: list[Link], data: st.DataObject) -> None:
    chains = make_plan(task, fleet).chains
    everyone = [link.worker_id for link in fleet]
    gone = set(data.draw(st.lists(st.sampled_from(everyone))))
    slow = set(data.draw(st.lists(st.sampled_from(everyone))))
    made = rebuild(chains, gone, slow)
    assert sorted(itertools.chain(*made)) == sorted(set(everyone) - gone)
    for chain in made:
        before = next(c for c in chains if chain[0] in c)
        assert set(chain) <= set(before)  # nobody changes its chain
        assert sorted(chain, key=lambda w: (w in slow, before.index(w))) == list(chain)


def test_successors_of_one_that_is_gone_read_from_the_nearest_predecessor() -> None:
    chains = (("a", "b", "c", "d"), ("e",))
    assert upstream(chains, "d") == ("c", "b", "a") and upstream(chains, "e") == ()
    assert upstream(rebuild(chains, {"b", "c"}), "d") == ("a",)
    assert rebuild(chains, {"a", "e"}) == (("b", "c", "d"),)
    assert rebuild(chains, (), {"b"}) == (("a", "c", "d", "b"), ("e",))
    with pytest.raises(KeyError):
        upstream(chains, "x")


def test_as_many_chains_as_the_uplink_feeds() -> None:
    """ECHO-2's rule, where all workers are alike."""
    task = Task(8_000 * 10**6, 1 << 20, 75 * _MB)
    plan = make_plan(task, _fleet(32, 12.5 * _MB))
    assert len(plan.chains) == 6 and plan.reason == "uplink is the bound"
    assert plan.star_last_s == pytest.approx(32 * 8_000 / 75) and plan.last_s < 1.01 * 8_000 / 12.5
    assert make_plan(task, _fleet(6, 12.5 * _MB)).reason == "uplink suffices"
    assert make_plan(task, _fleet(9, 12.5 * _MB, serves=False)).reason == "no forwarder"
    # Nothing is known of the workers: one copy leaves the relay.
    assert len(make_plan(task, [Link(f"w{i}") for i in range(9)]).chains) == 1


def test_good_sources_stand_near_the_relay_and_slow_links_hold_up_nobody() -> None:
    task = Task(10**9, 1 << 18, 50 * _MB)
    fleet = [Link(f"w{i}", score=i, down_bytes_per_s=25 * _MB, up_bytes_per_s=25 * _MB) for i in range(8)]
    assert [chain[0] for chain in make_plan(task, fleet).chains] == ["w7", "w6"]
    slow = Link("slow", score=99, down_bytes_per_s=1 * _MB, up_bytes_per_s=1 * _MB)
    plan = make_plan(task, [*fleet, slow])
    assert ("slow",) in plan.chains and plan.mean_s < plan.star_mean_s
    arrivals = predict(task, plan.chains, {link.worker_id: link for link in [*fleet, slow]})
    assert max(a.done_s for w, a in arrivals.items() if w != "slow") < 45


@given(_fleets, st.integers(1, 6), st.data())
def test_who_joins_stands_last_and_moves_nobody(fleet: list[Link], count: int, data: st.DataObject) -> None:
    serves = {link.worker_id for link in fleet if link.serves}
    chains: tuple[tuple[str, ...], ...] = ()
    for link in fleet:
        after = join(chains, link.worker_id, serves, count)
        assert [chain[: len(old)] for chain, old in zip(after, chains, strict=False)] == list(chains)
        (mine,) = [chain for chain in after if link.worker_id in chain]
        assert mine[-1] == link.worker_id and set(mine[:-1]) <= serves
        chains = after
    if serves == {link.worker_id for link in fleet}:
        assert len(chains) == min(count, len(fleet)) and max(map(len, chains)) - min(map(len, chains)) <= 1


# ---- scores


def test_scores_are_those_of_the_paper() -> None:
    fast = Record(12.5e6, 10, 0, 0, 0.0)
    assert score(fast, 0.0) == pytest.approx(100)
    assert score(fast, 120.0) == pytest.approx(80) and score(fast, 1e6) == pytest.approx(70)
    half = Record(12.5e6 / 10, 5, 5, 4, 0.0)
    assert score(half, 0.0) == pytest.approx(0.5 * 80 + 0.35 * 50)
    assert score(fast, 0.0, top_bytes_per_s=12.5e8) == pytest.approx(100 - 0.5 * (100 - 500 / 7))


def test_newcomers_stand_between_the_proven_and_the_failing() -> None:
    proven = failing = Record()
    for i in range(10):
        proven = observed(proven, True, 10e6, i)
        failing = observed(failing, False, 0.0, i)
    assert score(proven, 900) > score(Record(), 900) > score(failing, 900)


def test_one_that_fails_again_and_again_forwards_no_longer_for_ten_minutes() -> None:
    record = Record()
    for i in range(4):
        assert forwards(record, i)
        record = observed(record, False, 0.0, i)
    assert not forwards(record, 5) and forwards(record, 700)
    record = observed(record, True, 5e6, 700)
    assert forwards(record, 700) and record.failures_in_row == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(allow_nan=False)), max_size=200), st.floats(0, 1e5))
def test_scores_stay_in_their_range(events: list[tuple[bool, float]], now_s: float) -> None:
    record = Record()
    for i, (ok, rate) in enumerate(events):
        record = observed(record, ok, rate, float(i))
        assert record.bytes_per_s > 0 and record.successes + record.failures <= 65
    assert 0 <= score(record, now_s, 1e9) <= 100


def test_a_rate_rises_at_once_and_falls_slowly() -> None:
    record = observed(observed(Record(), True, 5e6, 0), True, 10e6, 1)
    assert record.bytes_per_s == 10e6
    assert observed(record, True, 1e6, 2).bytes_per_s == pytest.approx(7.3e6)
    assert observed(record, True, 0.0, 2).bytes_per_s == 10e6
