"""Selection of borrowed engines, weight versions, and the other ways to place turns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_driver.policy.baselines import POLICIES, Balanced, LeastLoaded, Pinned, RoundRobin
from rl_driver.policy.routing import Placement, Turn, Worker
from rl_driver.policy.selection import Candidate, select_borrowed
from rl_driver.policy.versions import version_number


@pytest.mark.parametrize(
    ("name", "number"),
    [("", 0), ("default", 0), ("7", 7), ("step-12", 12), ("run3/step-9-final", 9), ("v" + "9" * 30, int("9" * 15))],
)
def test_the_last_number_of_a_version_orders_it(name, number):
    assert version_number(name) == number


def test_the_emptiest_engines_are_borrowed_and_kept_while_they_are_about_as_good():
    free = [Candidate("a", 0.5), Candidate("b", 0.1), Candidate("c", 0.1), Candidate("d", 0.3)]
    assert select_borrowed(free, 2) == ["b", "c"]
    held = [Candidate("a", 0.5), Candidate("b", 0.1), Candidate("c", 0.1), Candidate("d", 0.2, held=True)]
    assert select_borrowed(held, 1) == ["d"]
    held[3] = Candidate("d", 0.3, held=True)
    assert select_borrowed(held, 1) == ["b"]
    assert select_borrowed([], 3) == []


def _fill(router, count, trajectory=lambda i: f"t{i}"):
    placed = []
    for i in range(count):
        got = router.submit(Turn(f"turn-{i}", trajectory(i)))
        placed.append(got.worker_id if isinstance(got, Placement) else None)
    return placed


def _with(router, *workers):
    for worker in workers:
        router.put_worker(worker)
    return router


def test_round_robin_and_least_loaded():
    a, b, c = Worker("a", "dedicated", 9), Worker("b", "borrowed", 1), Worker("c", "borrowed", 9)
    assert _fill(_with(RoundRobin(), a, b, c), 6) == ["a", "b", "c", "a", "c", "a"]
    assert _fill(_with(LeastLoaded(), a, b, c), 5) == ["a", "b", "c", "a", "c"]


def test_a_pinned_trajectory_waits_for_its_worker():
    router = _with(Pinned(), Worker("a", "dedicated", 1), Worker("b", "dedicated", 1))
    assert _fill(router, 2, lambda i: "x") == ["a", None]
    router.finish("turn-0")
    assert [p.worker_id for p in router.place_queued()] == ["a"]
    assert router.remove_worker("a") and router.submit(Turn("later", "x")).worker_id == "b", "it is gone"


def test_dispatch_is_delayed_and_turns_move_to_who_has_nothing():
    router = _with(Balanced(max_pending=2), Worker("a", "dedicated", 99))
    assert _fill(router, 3) == ["a", "a", None]
    assert router.migrations() == []
    router.put_worker(Worker("b", "borrowed", 99))
    assert [p.worker_id for p in router.place_queued()] == ["b"]
    router.put_worker(Worker("c", "borrowed", 99))
    assert router.migrations() == ["turn-1"], "a pending turn of the longest queue"
    for i in range(3):
        router.begun(f"turn-{i}")
    assert router.migrations() == [], "the plateau is not known yet"
    for _ in range(8):
        router.profile.observe(1, 100.0)
        router.profile.observe(2, 101.0)
    router.profile.end_step()
    assert router.migrations() == ["turn-1"], "executing turns beyond the plateau"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_turn_goes_back_to_who_failed_it_only_when_there_is_nobody_else(name):
    router = _with(POLICIES[name](), Worker("a", "dedicated", 4), Worker("b", "dedicated", 4))
    assert router.submit(Turn("one", "x", 0, frozenset({"a"}))).worker_id == "b"
    assert router.submit(Turn("two", "y", 0, frozenset({"a", "b"}))).worker_id in ("a", "b")
    router.put_worker(Worker("b", "dedicated", 4, eligible=False))
    assert router.submit(Turn("three", "z", 0, frozenset({"a"}))).worker_id == "a"


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(POLICIES)))
def test_no_policy_exceeds_a_bound_or_loses_a_turn(data, name):
    router = POLICIES[name]()
    caps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    for i, cap in enumerate(caps):
        router.put_worker(Worker(f"w{i}", "dedicated" if i % 2 else "borrowed", cap))
    placed, waiting = {}, set()
    for i in range(data.draw(st.integers(1, 30))):
        if placed and data.draw(st.booleans()):
            done = data.draw(st.sampled_from(sorted(placed)))
            router.finish(done)
            del placed[done]
            for p in router.place_queued():
                waiting.remove(p.turn.turn_id)
                placed[p.turn.turn_id] = p.worker_id
        got = router.submit(Turn(f"turn-{i}", f"t{i % 3}"))
        if isinstance(got, Placement):
            placed[f"turn-{i}"] = got.worker_id
        else:
            waiting.add(f"turn-{i}")
        for j, cap in enumerate(caps):
            assert router.load_of(f"w{j}") == sum(w == f"w{j}" for w in placed.values()) <= cap
        assert router.queued == len(waiting)
    while placed:
        done = min(placed)
        router.finish(done)
        del placed[done]
        for p in router.place_queued():
            waiting.remove(p.turn.turn_id)
            placed[p.turn.turn_id] = p.worker_id
    assert not waiting
