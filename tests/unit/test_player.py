"""Episodes over the proxy: turns go on where they were, whoever fails."""

import asyncio
import random

import aiohttp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rl_driver.envs.base import Observation
from rl_driver.envs.dialogue import Frame
from rl_driver.envs.rollout import Limits, Player, RolloutError, Sampling
from tests.unit.fake_worker import MODEL, VOCAB, FakeWorker, undisturbed, workers
from tests.unit.proxy_world import run, running

_FRAME = Frame(before="7 ", after=" 8", between="9 ", stop="<e>")


class Walk:
    """Some turns, whatever the policy says; the last one tells how often it was right."""

    def __init__(self, turns):
        self.left, self.heard = turns, []

    def begin(self):
        return Observation("5 6")

    def answer(self, text):
        self.heard.append(text)
        self.left -= 1
        return Observation("6", self.left == 0, float(len(self.heard)))

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        return "5"


def _tokenizer():
    tokenizer = Tokenizer(models.WordLevel({**{str(i): i for i in range(VOCAB)}, "<e>": VOCAB}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


async def _play(client, name="t", turns=3, sampling=None, **limits):
    limits = Limits(**{"answer_tokens": 4, "turn_s": 10.0, **limits})
    async with aiohttp.ClientSession() as session:
        player = Player(session, client.url, {}, _tokenizer(), _FRAME, limits)
        return await player.play(name, "g", Walk(turns), sampling or Sampling(MODEL))


def _check(trajectory, turns):
    """Token-in, token-out: each prompt is all text before it, and the policy's tokens are as it gave them."""
    text = []
    for i, turn in enumerate(trajectory.turns):
        assert list(turn.input_token_ids) == ([7, 5, 6, 8] if i == 0 else [9, 7, 6, 8])
        text += turn.input_token_ids
        assert list(turn.output_token_ids) == undisturbed(text, 4)
        assert list(turn.logprobs) == [-t / 1000 for t in turn.output_token_ids]
        turn.check()
        text += turn.output_token_ids
    assert len(trajectory.turns) == turns and trajectory.reward == turns and trajectory.state == "done"


def test_an_episode_is_played_to_its_end():
    async def test():
        async with workers(FakeWorker(), FakeWorker(borrowed=True)) as fakes, running(*fakes) as client:
            trajectories = await asyncio.gather(*(_play(client, f"t{i}", 3) for i in range(8)))
            for trajectory in trajectories:
                _check(trajectory, 3)
                assert trajectory.task == {"cut": True}  # by the bound of an answer

    run(test())


def test_nothing_is_lost_or_doubled_when_workers_fail():
    async def test():
        async with workers(FakeWorker(), FakeWorker(borrowed=True)) as fakes, running(*fakes) as client:
            for fake in fakes:
                fake.faults = [(2, "lost"), (1, "coserve:reclaimed"), (3, "error"), (0, "500")]
            for trajectory in await asyncio.gather(*(_play(client, f"t{i}", 4) for i in range(6))):
                _check(trajectory, 4)

    run(test())


def test_turns_that_are_stored_are_not_made_again(tmp_path):
    async def test():
        async with workers(FakeWorker()) as (fake,), running(fake, store=str(tmp_path / "s.sqlite")) as client:
            first = await _play(client, "t", 3)
            made = len(fake.calls)
            assert await _play(client, "t", 3) == first and len(fake.calls) == made
            _check(await _play(client, "t2", 2), 2)
            longer = await _play(client, "t", 4)  # it goes on where it was
            _check(longer, 4)
            assert len(fake.calls) == made + 3

    run(test())


def test_a_full_context_ends_an_episode():
    async def test():
        async with workers(FakeWorker()) as (fake,), running(fake) as client:
            trajectory = await _play(client, "t", 5, context_tokens=14)
            assert [len(t.output_token_ids) for t in trajectory.turns] == [4, 2]
            assert trajectory.task == {"cut": True} and trajectory.reward == 0.0

    run(test())


def test_what_the_proxy_refuses_is_told_at_once_and_silence_within_its_bound():
    async def test():
        async with workers(FakeWorker()) as (fake,), running(fake) as client:
            with pytest.raises(RolloutError, match=r"404.*no model"):
                await _play(client, sampling=Sampling("other"))
            fake.healthy = False
            await fake.die()
            with pytest.raises(RolloutError, match="not answered within 1 s"):
                await _play(client, turn_s=1.0)

    run(test())


def test_only_new_enough_weights_answer():
    async def test():
        async with workers(FakeWorker(version="step-1"), FakeWorker(version="step-2")) as fakes:
            async with running(*fakes) as client:
                await asyncio.gather(*(_play(client, f"t{i}", 2, Sampling(MODEL, 1.0, "step-2")) for i in range(6)))
                assert not fakes[0].calls and len(fakes[1].calls) == 12

    run(test())
