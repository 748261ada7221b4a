"""One seamless answer over workers that fail in every scripted way."""

import asyncio
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_driver.api.trajectory import VersionSpan
from rl_driver.policy.routing import Turn
from rl_driver.proxy.continuation import Answer, GaveUpError, Limits, MovedError, generate
from rl_driver.proxy.upstream import Chunk, GenerateRequest, NoRoomError, RefusedError, WorkerFailedError

_LIMITS = Limits(fruitless=40, chunk_s=0.05, pause_s=0.0)
_TURN = Turn("t", "trajectory")


def _next(tokens):
    """A model of our own: the next token depends on all before it."""
    return int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:2], "little")


def _undisturbed(prompt, count):
    out = []
    while len(out) < count:
        out.append(_next([*prompt, *out]))
    return out


class Upstream:
    """Workers that follow a script: each entry says after how many tokens a call ends, and how."""

    def __init__(self, script, chunk=3, says_versions=True):
        self.says_versions = says_versions
        self.script, self.chunk, self.calls, self.closed = list(script), chunk, [], 0

    def version(self, worker_id):
        return f"v-{worker_id}"

    def _spans(self, worker_id, made):
        return (VersionSpan(f"v-{worker_id}", 0, made),) if self.says_versions else ()

    async def generate(self, worker_id, request):
        self.calls.append((worker_id, request))
        after, how = self.script.pop(0) if self.script else (10**9, "length")
        text, made = list(request.token_ids), 0
        try:
            while made < request.max_tokens and made < after:
                size = min(self.chunk, request.max_tokens - made, after - made)
                new = []
                for _ in range(size):
                    new.append(_next(text))
                    text.append(new[-1])
                made += size
                last = made == request.max_tokens
                ended = "length" if last and how not in ("lost", "quiet") else None
                yield Chunk(tuple(new), tuple(-float(t) for t in new), self._spans(worker_id, made), ended)
                if ended:
                    return
            if how.startswith("coserve:"):
                yield Chunk((), (), (), "abort", how)
            elif how == "refused":
                raise RefusedError(400, "bad temperature")
            elif how == "no_room":
                raise NoRoomError("budget")
            elif how == "hangs":
                await asyncio.sleep(5)
            elif how == "garbage":
                yield Chunk((1,) * (request.max_tokens + 1), (0.0,) * (request.max_tokens + 1))
            elif how == "unmatched":
                yield Chunk((1, 2), (0.0,))
            elif how != "quiet":
                raise WorkerFailedError(how)
        finally:
            self.closed += 1


class Place:
    """A lease of the places below; with `move_at` its turn is called away once that many chunks have come."""

    def __init__(self, places, worker_id, move_at=None):
        self._places, self.worker_id, self._move_at, self._seen = places, worker_id, move_at, 0

    async def next_chunk(self, chunks, bound_s):
        if self._seen == self._move_at:
            raise MovedError("called away")
        self._seen += 1
        async with asyncio.timeout(bound_s):
            return await anext(chunks)

    def release(self, outcome):
        assert self._places.held is self
        self._places.held = None
        self._places.outcomes.append(outcome)


class Places:
    """Round-robin over three workers; every acquire must be released once."""

    def __init__(self, move_at=()):
        self.held, self.outcomes, self.given, self._move_at = None, [], [], list(move_at)

    async def acquire(self, turn):
        assert self.held is None
        candidates = [w for w in ("a", "b", "c") if w not in turn.avoid] or ["a"]
        worker_id = candidates[len(self.given) % len(candidates)]
        self.held = Place(self, worker_id, self._move_at.pop(0) if self._move_at else None)
        self.given.append(worker_id)
        return self.held


async def _collect(upstream, places, prompt, count, limits=_LIMITS):
    answer, out = Answer(GenerateRequest(tuple(prompt), count, logprobs=0)), []
    async for chunk in generate(_TURN, answer, places, upstream, limits):
        out.append(chunk)
    assert answer.tokens == [t for c in out for t in c.token_ids]
    for n in range(len(answer.tokens) + 1):
        spans = answer.spans(n)
        assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])][: len(spans)]
        assert (spans[-1].end if spans else 0) == n
    return out


_ends = [
    "coserve:reclaimed",
    "coserve:stalled",
    "coserve:deactivated",
    "lost",
    "quiet",
    "no_room",
    "garbage",
    "unmatched",
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(_ends)), max_size=12),
    st.integers(1, 40),
    st.integers(1, 5),
    st.lists(st.none() | st.integers(0, 4), max_size=4),
    st.booleans(),
)
def test_whatever_happens_the_answer_is_the_undisturbed_one(script, count, chunk, move_at, says_versions):
    prompt, upstream, places = [1, 2, 3], Upstream(script, chunk, says_versions), Places(move_at)
    chunks = asyncio.run(_collect(upstream, places, prompt, count))
    tokens = [t for c in chunks for t in c.token_ids]
    assert tokens == _undisturbed(prompt, count)
    assert [lp for c in chunks for lp in c.logprobs] == [-float(t) for t in tokens]
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"] and chunks[-1].finish_reason
    assert places.held is None and len(places.outcomes) == len(places.given)
    # A turn that is called away before it has asked for anything makes no call.
    assert upstream.closed == len(upstream.calls)
    for worker, request in upstream.calls:
        assert worker in "abc" and len(request.token_ids) + request.max_tokens == len(prompt) + count


def test_a_worker_that_hangs_is_left_within_its_bound():
    upstream, places = Upstream([(4, "hangs")]), Places()
    chunks = asyncio.run(_collect(upstream, places, [9], 10))
    assert [t for c in chunks for t in c.token_ids] == _undisturbed([9], 10)
    assert places.outcomes == ["failed", "done"] and upstream.closed == 2


def test_the_clients_fault_goes_to_the_client_at_once():
    upstream, places = Upstream([(0, "refused")]), Places()
    with pytest.raises(RefusedError, match="bad temperature") as refused:
        asyncio.run(_collect(upstream, places, [1], 5))
    assert refused.value.status == 400 and places.outcomes == ["refused"] and len(upstream.calls) == 1


def test_it_does_not_give_up_while_tokens_come():
    upstream, places = Upstream([(1, "lost")] * 20), Places()
    chunks = asyncio.run(_collect(upstream, places, [1], 30, Limits(fruitless=1, chunk_s=1, pause_s=0)))
    assert [t for c in chunks for t in c.token_ids] == _undisturbed([1], 30)


def test_it_gives_up_after_so_many_workers_and_says_why():
    upstream, places = Upstream([(0, "lost")] * 9), Places()
    with pytest.raises(GaveUpError, match="5 tries in succession brought no token; the last one: lost"):
        asyncio.run(_collect(upstream, places, [1], 5, Limits(fruitless=4, chunk_s=1, pause_s=0)))
    assert places.outcomes == ["failed"] * 5


def test_a_client_that_leaves_frees_its_worker():
    upstream, places = Upstream([]), Places()

    async def leave_early():
        answer = generate(_TURN, Answer(GenerateRequest((1,), 100, logprobs=0)), places, upstream, _LIMITS)
        async for _ in answer:
            break
        await answer.aclose()

    asyncio.run(leave_early())
    assert places.outcomes == ["cancelled"] and places.held is None and upstream.closed == 1


def test_a_worker_that_gave_its_memory_back_is_avoided_once_and_one_that_failed_for_good():
    class Avoids(Places):
        def __init__(self):
            super().__init__()
            self.seen = []

        async def acquire(self, turn):
            self.seen.append(set(turn.avoid))
            return await super().acquire(turn)

    script = [(1, "coserve:reclaimed"), (1, "coserve:stalled"), (1, "lost"), (1, "no_room")]
    places = Avoids()
    asyncio.run(_collect(Upstream(script), places, [1], 10))
    first, second, third, fourth = places.given[:4]
    assert places.seen == [set(), {first}, {second}, {second, third}, {second, third, fourth}]


def test_what_is_asked_of_the_next_worker_counts_what_is_there():
    request = GenerateRequest((1, 2), 10, min_tokens=4, logprobs=2, sampling={"temperature": 0.5})
    rest = request.after([7, 8, 9])
    assert rest == GenerateRequest((1, 2, 7, 8, 9), 7, 1, 2, {"temperature": 0.5})
    assert request.after([1] * 6).min_tokens == 0
