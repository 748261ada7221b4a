"""The pair's event rings, the register of RL jobs, notes and latency histograms, all in shared memory."""

import asyncio
import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_coserve.control import registration as registration_module
from vllm_coserve.control.block import LATENCY_BOUNDS_S, ControlBlock
from vllm_coserve.control.events import EVENT_BYTES, EventKind, EventRings, Writer
from vllm_coserve.control.registration import HeldByAnotherError, Registration
from vllm_coserve.control.words import Note
from vllm_coserve.engine.event_stream import EVENT_ID, parse_cursor, stream


@pytest.fixture
def block():
    made, fd = ControlBlock.create(8, 4096)
    made.control_fd = fd
    yield made
    os.close(fd)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

        def time(self):
            return self.now_s

    fake = Clock()
    monkeypatch.setattr(registration_module.time, "time", fake.time)
    return fake


def test_events_come_in_order_and_once(block):
    block.events.put(Writer.SERVING, EventKind.CUT, 7)
    block.events.put(Writer.ROLLOUT, EventKind.ABORT, 3, "coserve:reclaimed cmpl-1")
    first = block.events.after((0, 0, 0, 0))
    assert [(e.kind, e.value, e.text) for e in first] == [
        (EventKind.CUT, 7, ""),
        (EventKind.ABORT, 3, "coserve:reclaimed cmpl-1"),
    ]
    assert block.events.after(block.events.last()) == []
    block.events.put(Writer.ROLLOUT, EventKind.STALL)
    assert [e.kind for e in block.events.after((1, 1, 0, 0))] == [EventKind.STALL]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Writer), st.text(max_size=120)), max_size=40), st.integers(0, 1200))
def test_a_reader_sees_the_latest_events_whatever_was_overwritten(events, lead):
    rings = EventRings(memoryview(bytearray(EVENT_BYTES)))
    for i in range(lead):
        rings.put(Writer.API, EventKind.REGISTER, i)
    for i, (writer, text) in enumerate(events):
        rings.put(writer, EventKind.ABORT, i, text)
    seen = [e for e in rings.after((0, 0, 0, 0)) if e.kind == EventKind.ABORT]
    assert {e.value for e in seen} == set(range(len(events)))
    for e in seen:
        assert events[e.value][1].encode()[:90].decode(errors="ignore") in e.text or len(e.text) <= 96
    registered = [e.value for e in rings.after((0, 0, 0, 0)) if e.kind == EventKind.REGISTER]
    assert registered == sorted(registered) and (not lead or registered[-1] == lead - 1)


def test_an_event_whose_writer_died_within_it_is_not_shown():
    buffer = memoryview(bytearray(EVENT_BYTES))
    rings = EventRings(buffer)
    rings.put(Writer.SERVING, EventKind.CUT, 1)
    rings.put(Writer.SERVING, EventKind.CUT, 2)
    buffer[8 + 128 : 8 + 136] = (99).to_bytes(8, "little")  # the second record holds another number
    assert [e.value for e in rings.after((0, 0, 0, 0))] == [1]


@pytest.mark.parametrize("text", ["1.2.3", "1.2.3.4.5", "a.0.0.0", "1.-2.0.0", "1.2.3.99999999999999999999", "²." * 4])
def test_bad_event_ids_are_refused(text):
    assert not re.search(EVENT_ID, text)


def test_a_client_that_was_cut_off_goes_on_behind_its_last_event(block):
    async def read(cursor, count):
        out = []
        async for chunk in stream(block, cursor):
            if chunk.startswith("id:"):
                out.append(json.loads(chunk.split("data: ", 1)[1]))
            if len(out) == count:
                return out

    for i in range(5):
        block.events.put(Writer.ROLLOUT if i % 2 else Writer.SERVING, EventKind.RECLAIM, i)
    first = asyncio.run(read((0, 0, 0, 0), 2))
    assert re.search(EVENT_ID, first[-1]["id"])
    rest = asyncio.run(read(parse_cursor(first[-1]["id"]), 3))
    assert [e["value"] for e in first + rest] == [0, 1, 2, 3, 4]


def test_one_job_at_a_time(block, clock):
    register = Registration(block, block.control_fd)
    assert register.holder() is None
    assert register.take("a", 10).expires_in_s == 10
    clock.now_s += 9
    since = register.take("a", 10).since_s
    assert since == 1000.0, "a renewal keeps the time of the registration"
    clock.now_s += 9
    with pytest.raises(HeldByAnotherError, match=r"'a' holds this rollout engine for another 1\.0 s"):
        register.take("b", 10)
    with pytest.raises(HeldByAnotherError):
        register.release("b")
    assert register.release("a") and not register.release("a")
    assert register.take("b", 1).job == "b"


def test_a_job_without_heartbeats_loses_its_registration(block, clock):
    register = Registration(block, block.control_fd)
    register.take("a", 2)
    clock.now_s += 2.1
    assert register.holder() is None
    register.expire()
    register.expire()
    assert register.take("b", 2).job == "b"
    kinds = [(e.kind, e.text) for e in block.events.after((0, 0, 0, 0))]
    assert kinds == [(EventKind.REGISTER, "a"), (EventKind.RELEASE, "a"), (EventKind.REGISTER, "b")]


def test_a_half_written_registration_counts_as_none(block):
    block.set_note(Note.REGISTRATION, '["a", 1.0')
    assert Registration(block, block.control_fd).take("b", 5).job == "b"


def test_notes_keep_what_fits(block):
    block.set_note(Note.WEIGHT_VERSION, "ü" * 400)
    assert block.note(Note.WEIGHT_VERSION).startswith("ü" * 255)
    assert block.note(Note.REGISTRATION) == ""


def test_histograms_count_by_bucket(block):
    for seconds in (0.00005, 0.0001, 0.3, 7.0):
        block.reclaim_latency.observe(int(seconds * 1e9))
    counts, total_s = block.reclaim_latency.read()
    assert len(counts) == len(LATENCY_BOUNDS_S) + 1
    assert counts[0] == 2 and counts[LATENCY_BOUNDS_S.index(0.5)] == 1 and counts[-1] == 1
    assert total_s == pytest.approx(7.30015)
