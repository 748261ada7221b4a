"""Trajectories survive the driver: nothing that was stored is lost, repeated or mixed up."""

import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_driver.api.trajectory import Turn, VersionSpan
from rl_driver.store.base import ConflictError
from rl_driver.store.sqlite import SqliteStore


def _turn(index, output=(5, 6), **more):
    spans = (VersionSpan("v1", 0, len(output)),) if output else ()
    values = {"index": index, "input_token_ids": (1, 2), "output_token_ids": tuple(output)}
    return Turn(**{**values, "logprobs": (-0.5,) * len(output), "spans": spans, **more})


@pytest.fixture
def store(tmp_path):
    made = SqliteStore(tmp_path / "t.db")
    yield made
    made.close()


def test_a_trajectory_comes_back_as_it_was(store):
    store.begin("a", "g", {"question": "2+2", "n": 3})
    turns = [_turn(0), _turn(1, (7,), finish_reason="length"), _turn(2, ())]
    for turn in turns:
        store.add_turn("a", turn)
    store.end("a", "done", 1.0)
    got = store.get("a")
    assert got.turns == tuple(turns) and (got.state, got.reward, got.group) == ("done", 1.0, "g")
    assert got.task == {"question": "2+2", "n": 3}
    assert got.token_ids() == [1, 2, 5, 6, 1, 2, 7, 1, 2]


def test_repeating_a_call_changes_nothing_and_a_contradiction_is_refused(store):
    store.begin("a", "g", {"x": 1})
    store.begin("a", "g", {"x": 1})
    store.add_turn("a", _turn(0))
    store.add_turn("a", _turn(0))
    assert len(store.get("a").turns) == 1
    for wrong in (lambda: store.begin("a", "h", {"x": 1}), lambda: store.add_turn("a", _turn(0, (9,)))):
        with pytest.raises(ConflictError):
            wrong()
    with pytest.raises(ConflictError, match="has 1 turns"):
        store.add_turn("a", _turn(2))
    store.end("a", "done", 0.5)
    store.end("a", "done", 0.5)
    store.add_turn("a", _turn(0))
    for wrong in (lambda: store.end("a", "failed", None), lambda: store.add_turn("a", _turn(1))):
        with pytest.raises(ConflictError):
            wrong()
    for unknown in (lambda: store.get("b"), lambda: store.add_turn("b", _turn(0)), lambda: store.end("b", "done", 1.0)):
        with pytest.raises(KeyError):
            unknown()


@pytest.mark.parametrize(
    "turn",
    [
        _turn(0, logprobs=(-1.0,)),
        _turn(0, spans=()),
        _turn(0, spans=(VersionSpan("v", 0, 1),)),
        _turn(0, spans=(VersionSpan("v", 0, 1), VersionSpan("w", 2, 3))),
        _turn(0, spans=(VersionSpan("v", 0, 2), VersionSpan("w", 2, 2))),
        _turn(-1),
    ],
)
def test_turns_whose_parts_do_not_line_up_are_refused(store, turn):
    store.begin("a", "g", {})
    with pytest.raises(ValueError):
        store.add_turn("a", turn)
    assert store.get("a").turns == ()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["turn", "end", "reopen"])), max_size=25))
def test_what_is_unfinished_goes_on_after_a_restart(tmp_path_factory, moves):
    path = tmp_path_factory.mktemp("store") / "t.db"
    store, turns, ended = SqliteStore(path), {}, set()
    for name, what in moves:
        if what == "reopen":
            store.close()
            store = SqliteStore(path)
        elif name not in ended:
            store.begin(name, "g", {"of": name})
            index = turns.setdefault(name, 0)
            if what == "turn":
                store.add_turn(name, _turn(index, (index,)))
                turns[name] += 1
            else:
                store.end(name, "done", 0.0)
                ended.add(name)
    going = list(store.unfinished())
    assert [t.trajectory_id for t in going] == [n for n in turns if n not in ended]
    assert {t.trajectory_id: len(t.turns) for t in going} == {n: c for n, c in turns.items() if n not in ended}
    store.close()


def test_every_turn_that_was_reported_stored_survives_a_kill(tmp_path):
    path = tmp_path / "t.db"
    code = (
        "import sys; from pathlib import Path\n"
        "from rl_driver.store.sqlite import SqliteStore\n"
        "from rl_driver.api.trajectory import Turn, VersionSpan\n"
        "s = SqliteStore(Path(sys.argv[1])); s.begin('a', 'g', {})\n"
        "i = len(s.get('a').turns)\n"
        "while True:\n"
        "    s.add_turn('a', Turn(i, (1,), (i,), (-1.0,), (VersionSpan('v', 0, 1),)))\n"
        "    i += 1; print(i, flush=True)\n"
    )
    stored = 0
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(20):
            line = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        stored = max([int(line), *map(int, rest)])
        store = SqliteStore(path)
        outputs = [t.output_token_ids for t in store.get("a").turns]
        store.close()
        assert len(outputs) in (stored, stored + 1), "a turn may be stored that nobody was told of"
        assert outputs == [(i,) for i in range(len(outputs))]


def test_files_that_are_no_store_are_refused(tmp_path):
    (tmp_path / "text").write_text("hello, this is no database at all" * 40)
    with pytest.raises(sqlite3.DatabaseError):
        SqliteStore(tmp_path / "text")
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConflictError, match="format 99"):
        SqliteStore(tmp_path / "newer")
