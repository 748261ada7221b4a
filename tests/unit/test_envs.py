"""Tasks: instances repeat, teachers are right, nonsense ends an episode."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_driver.envs.arithmetic import Arithmetic
from rl_driver.envs.dialogue import Dialogue, Frame
from rl_driver.envs.frozen_lake import FrozenLake


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 6), frozen=st.sampled_from([0.6, 0.8, 1.0]))
def test_a_perfect_teacher_reaches_the_goal_of_every_lake(seed, size, frozen):
    task = FrozenLake(size, frozen, turns_max=2 * size)
    episode, again = task.episode(seed), task.episode(seed)
    seen = episode.begin()
    assert seen == again.begin() and not seen.done
    rng = random.Random(0)
    for _ in range(task.turns_max):
        seen = episode.answer(episode.demonstrate(rng, 1.0))
        if seen.done:
            break
    assert seen.done and seen.reward == 1.0


def test_the_lake_is_shown_with_what_lies_around():
    text = FrozenLake(3, 1.0, 6).episode(3).begin().text
    *rows, around = text.split("\n")
    assert len(rows) == 3 and sum(row.count("P") for row in rows) == 1 and sum(row.count("G") for row in rows) == 1
    at = next((r, row.index("P")) for r, row in enumerate(rows) if "P" in row)
    cells = [around[3 * i + 1] for i in range(4)]
    for cell, (r, c) in zip(cells, [(0, -1), (1, 0), (0, 1), (-1, 0)], strict=True):
        inside = 0 <= at[0] + r < 3 and 0 <= at[1] + c < 3
        assert cell == (rows[at[0] + r][at[1] + c] if inside else "#")


@pytest.mark.parametrize("text", ["", "LL", "X", "left", "l"])
def test_nonsense_ends_a_walk(text):
    last = FrozenLake().episode(1).answer(text)
    assert last.done and last.reward == 0.0


def test_a_walk_ends_with_its_turns():
    episode = FrozenLake(4, 1.0, turns_max=3).episode(5)
    episode.begin()
    rng = random.Random(1)
    ends = [episode.answer(episode.demonstrate(rng, 0.0)).done for _ in range(3)]
    assert ends[-1] or any(ends)


def test_lakes_that_cannot_be_crossed_are_refused():
    with pytest.raises(ValueError, match="can be crossed"):
        FrozenLake(1)
    with pytest.raises(ValueError, match="can be crossed"):
        FrozenLake(2, 1e-9, 3).episode(0)


@given(seed=st.integers(0, 10**6), largest=st.integers(1, 500))
def test_sums_have_one_right_answer(seed, largest):
    task = Arithmetic(largest)
    text = task.episode(seed).begin().text
    assert text.endswith("=")
    right = str(eval(text[:-1]))
    assert task.episode(seed).answer(f" {right}\n").reward == 1.0
    assert task.episode(seed).answer(right + "0").reward == 0.0
    assert task.episode(seed).demonstrate(random.Random(0), 1.0) == right


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["<s>", "<e>", "a", "b", "c", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "<e>"])
    return tokenizer


def test_a_dialogue_keeps_the_policys_tokens_as_they_are():
    dialogue = Dialogue(_tokenizer(), Frame(before="<s> ", after=" <s>", between=" <e> ", stop="<e>"))
    first = dialogue.observe("a b")
    assert first == dialogue.token_ids == [0, 2, 3, 0]
    assert dialogue.answered([4, 2, 1]) == "c a"
    assert dialogue.observe("c") == [1, 0, 4, 0]
    assert dialogue.token_ids == [0, 2, 3, 0, 4, 2, 1, 1, 0, 4, 0]


def test_a_stop_that_is_no_token_is_named():
    with pytest.raises(ValueError, match="'nope'"):
        Frame(stop="nope").stop_id(_tokenizer())
