"""Placement of turns over dedicated and borrowed workers, against a naive model of the rules."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_driver.policy.routing import Placement, Queued, Router, Turn, Worker


def _turn(n, trajectory="t", version=0):
    return Turn(f"turn-{n}", trajectory, version)


def _router(*workers, **kw):
    router = Router(**kw)
    for worker in workers:
        router.put_worker(worker)
    return router


def test_dedicated_first_then_overflow_then_the_queue():
    router = _router(Worker("d", "dedicated", 2), Worker("b", "borrowed", 1))
    got = [router.submit(_turn(i, f"t{i}")) for i in range(4)]
    assert [(p.worker_id, p.reason) for p in got[:3]] == [
        ("d", "least_loaded"),
        ("d", "least_loaded"),
        ("b", "overflow"),
    ]
    assert got[3] == Queued(_turn(3, "t3"), "full", 0)
    router.finish("turn-0")
    assert [(p.worker_id, p.turn.turn_id) for p in router.place_queued()] == [("d", "turn-3")]


def test_a_trajectory_goes_back_to_who_has_its_prefix():
    router = _router(Worker("d1", "dedicated"), Worker("d2", "dedicated"), Worker("b", "borrowed"))
    assert router.submit(_turn(0, "x")).worker_id == "d1"
    assert router.submit(_turn(1, "y")).worker_id == "d2"
    router.finish("turn-1")
    again = router.submit(_turn(2, "y"))
    assert (again.worker_id, again.reason) == ("d2", "affinity")
    router.finish("turn-2")
    router.forget_trajectory("y")
    router.finish("turn-0")
    assert router.submit(_turn(3, "y")).worker_id == "d1"


def test_without_affinity_only_load_counts():
    router = _router(Worker("a", "dedicated"), Worker("b", "dedicated"), affinity=False)
    first = router.submit(_turn(0, "x"))
    router.submit(_turn(1, "y"))
    router.finish("turn-1")
    router.finish("turn-0")
    router.submit(_turn(2, "z"))
    assert first.worker_id == "a" and router.submit(_turn(3, "x")).worker_id == "b"


def test_a_spilled_trajectory_comes_back_when_its_borrowed_worker_is_full():
    router = _router(Worker("d", "dedicated", 1), Worker("b", "borrowed", 1))
    router.submit(_turn(0, "x"))
    assert router.submit(_turn(1, "y")).worker_id == "b"
    router.finish("turn-1")
    router.submit(_turn(2, "z"))  # takes b
    router.finish("turn-0")
    assert router.submit(_turn(3, "y")).worker_id == "d"


def test_only_new_enough_weights_serve_a_turn():
    router = _router(Worker("old", "dedicated", weight_version=1), Worker("new", "borrowed", 1, weight_version=2))
    assert router.submit(_turn(0, "x", 2)).worker_id == "new"
    assert router.submit(_turn(1, "y", 2)).reason == "full"
    assert router.submit(_turn(2, "z", 3)).reason == "no_worker"
    assert router.submit(_turn(3, "w", 1)).worker_id == "old", "older needs are not held up by newer ones"
    router.put_worker(Worker("old", "dedicated", weight_version=3))
    assert [p.turn.turn_id for p in router.place_queued()] == ["turn-1", "turn-2"]


def test_nobody_overtakes_a_turn_that_waits():
    router = _router(Worker("d", "dedicated", 1))
    router.submit(_turn(0))
    router.submit(_turn(1))
    router.finish("turn-0")
    assert router.submit(_turn(2)).reason == "full"
    assert [p.turn.turn_id for p in router.place_queued()] == ["turn-1"]


def test_room_goes_to_who_has_its_prefix_there_but_the_first_in_the_queue_waits_no_longer_than_that():
    router = Router()
    router.put_worker(Worker("a", "dedicated", 1))
    router.put_worker(Worker("b", "dedicated", 1))
    assert router.submit(Turn("x0", "x")).worker_id == "a"
    assert router.submit(Turn("y0", "y")).worker_id == "b"
    router.finish("x0")
    router.finish("y0")
    assert router.submit(Turn("x1", "x")).worker_id == "a"
    assert router.submit(Turn("y1", "y")).worker_id == "b"
    for turn in (Turn("new", "new"), Turn("y2", "y"), Turn("x2", "x")):
        assert isinstance(router.submit(turn), Queued)
    router.finish("x1")  # room on a: x's prefix is there
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("x2", "a")]
    for n in range(2, 40):  # x comes back again and again
        if isinstance(router.submit(Turn(f"x{n + 1}", "x")), Queued):
            router.finish(f"x{n}")
        first, *_ = router.place_queued()
        assert first.worker_id == "a"
        if first.turn.turn_id == "new":
            break
    assert n < 12
    router.finish("y1")
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("y2", "b")]
    assert router.queued == 1


def test_a_trajectory_that_went_elsewhere_while_a_turn_of_it_waited_has_no_claim_on_its_old_worker():
    router = _router(Worker("a", "dedicated", 1))
    for n, trajectory in enumerate("xxyx"):
        router.submit(_turn(n, trajectory))
    router.put_worker(Worker("b", "dedicated", 1))
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("turn-1", "b")]
    router.finish("turn-0")
    router.finish("turn-1")
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("turn-2", "a"), ("turn-3", "b")]


def test_a_worker_that_goes_hands_its_turns_back():
    router = _router(Worker("a", "dedicated"), Worker("b", "borrowed"))
    turns = [_turn(i, f"t{i}") for i in range(3)]
    for turn in turns:
        router.submit(turn)
    assert router.remove_worker("a") == turns
    assert router.remove_worker("a") == []
    assert all(router.submit(t).worker_id == "b" for t in turns)
    router.put_worker(Worker("b", "borrowed", eligible=False))
    assert router.load_of("b") == 3, "what runs stays where it is"
    assert router.submit(_turn(9)).reason == "no_worker"


def test_a_turn_is_submitted_once():
    router = _router(Worker("a", "dedicated", 1))
    router.submit(_turn(0))
    router.submit(_turn(1))
    for n in (0, 1):
        with pytest.raises(ValueError, match="submitted already"):
            router.submit(_turn(n))
    router.finish("turn-7")  # unknown: its worker may have been removed


class RouterMachine(RuleBasedStateMachine):
    """Random workers and turns; every decision is compared with a naive reading of the rules."""

    def __init__(self):
        super().__init__()
        self.router, self.workers, self.placed, self.waiting = Router(), {}, {}, []
        self.last, self.number, self.overtaken = {}, 0, Counter()

    def room(self, turn):
        loads = {w: sum(p == w for p, _ in self.placed.values()) for w in self.workers}
        return {
            w: loads[w]
            for w, facts in self.workers.items()
            if facts.eligible and facts.weight_version >= turn.min_version and loads[w] < facts.turns_max
        }

    def best(self, turn):
        room = self.room(turn)
        if self.last.get(turn.trajectory_id) in room:
            return self.last[turn.trajectory_id]
        for kind in ("dedicated", "borrowed"):
            mine = [(n, w) for w, n in room.items() if self.workers[w].kind == kind]
            if mine:
                return min(mine)[1]
        return None

    def note(self, placement):
        assert placement.worker_id == self.best(placement.turn)
        self.placed[placement.turn.turn_id] = (placement.worker_id, placement.turn)
        self.last[placement.turn.trajectory_id] = placement.worker_id

    @rule(
        name=st.sampled_from("abcde"),
        kind=st.sampled_from(["dedicated", "borrowed"]),
        most=st.integers(1, 3),
        version=st.integers(0, 2),
        eligible=st.booleans(),
    )
    def put(self, name, kind, most, version, eligible):
        self.workers[name] = Worker(name, kind, most, version, eligible)
        self.router.put_worker(self.workers[name])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[name]
        turns = self.router.remove_worker(name)
        assert {t.turn_id for t in turns} == {i for i, (w, _) in self.placed.items() if w == name}
        for turn in turns:
            del self.placed[turn.turn_id]

    @rule(trajectory=st.integers(0, 4), version=st.integers(0, 2))
    def submit(self, trajectory, version):
        turn = Turn(str(self.number), str(trajectory), version)
        self.number += 1
        overtakes = any(t.min_version <= version for t in self.waiting)
        expected = None if overtakes else self.best(turn)
        got = self.router.submit(turn)
        if expected is None:
            assert isinstance(got, Queued) and got.position == len(self.waiting)
            self.waiting.append(turn)
        else:
            assert isinstance(got, Placement)
            self.note(got)

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def finish(self, data):
        turn_id = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[turn_id]
        self.router.finish(turn_id)

    @rule()
    def place_queued(self):
        before = list(self.waiting)
        for placement in self.router.place_queued():
            at_home = self.last.get(placement.turn.trajectory_id) == placement.worker_id
            self.note(placement)
            self.waiting.remove(placement.turn)
            earlier = before[: before.index(placement.turn)]
            held_up = [t for t in earlier if t in self.waiting and t.min_version == placement.turn.min_version]
            if held_up:  # only by who has its prefix there, and the first in the queue not for ever
                assert at_home and placement.reason == "affinity"
                self.overtaken[held_up[0].turn_id] += 1
                assert self.overtaken[held_up[0].turn_id] <= 8
        assert all(self.best(t) is None for t in self.waiting)

    @invariant()
    def counts_agree(self):
        assert self.router.queued == len(self.waiting)
        for name in self.workers:
            assert self.router.load_of(name) == sum(w == name for w, _ in self.placed.values())


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _avoiding(n, *avoid):
    return Turn(f"turn-{n}", "t", 0, frozenset(avoid))


def test_who_failed_a_turn_is_avoided_while_there_is_another():
    router = _router(Worker("a", "dedicated", 1), Worker("b", "dedicated", 1))
    assert router.submit(_avoiding(0, "a")).worker_id == "b"
    # b is full, but it will have room: the turn waits for it, and others are not held up behind it
    assert router.submit(_avoiding(1, "a")) == Queued(_avoiding(1, "a"), "full", 0)
    assert router.submit(_turn(2)).worker_id == "a"
    router.finish("turn-0")
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("turn-1", "b")]
    router.finish("turn-2")
    assert router.submit(_avoiding(3, "a", "b")).worker_id == "a", "nobody else is there"
    router.put_worker(Worker("b", "dedicated", 1, eligible=False))
    router.finish("turn-3")
    assert router.submit(_avoiding(4, "a")).worker_id == "a", "nobody else is eligible"


def test_a_turn_overtakes_only_those_that_wait_for_what_it_does_not_need():
    router = _router(Worker("a", "dedicated", 1), Worker("b", "dedicated", 1))
    router.submit(_turn(0))
    router.submit(_turn(1))
    router.submit(_turn(2))
    router.submit(_avoiding(3, "a"))
    router.finish("turn-1")
    assert router.submit(_avoiding(4, "a")).position == 2, "turn 2 came first and could take b as well"
    assert [(p.turn.turn_id, p.worker_id) for p in router.place_queued()] == [("turn-2", "b")]
