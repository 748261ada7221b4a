"""Text of tokens: the same whoever made them, whole characters only, and ended where vLLM would end it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl_driver.proxy.text import StopStrings, TextTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes as tokens: every character beyond ASCII is several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return TextTokenizer(bytes_only)


@settings(deadline=None)
@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_a_stream_gives_the_text_character_by_character(tokenizer, prompt, text):
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(tokenizer.encode(prompt), True)
    assert "".join(stream.step(t) for t in ids) == tokenizer.decode(ids) == text


def test_half_a_character_is_held_back(tokenizer):
    stream = tokenizer.stream([], True)
    assert [stream.step(t) for t in tokenizer.encode("é!")] == ["", "é", "!"]


def test_a_token_that_is_none_does_not_break_a_stream(tokenizer):
    stream = tokenizer.stream([], True)
    stream.step(1 << 30)
    assert "".join(stream.step(t) for t in tokenizer.encode("ok")) == "ok"


def test_no_tokenizer_is_said_so(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        TextTokenizer.load(str(tmp_path))


def _whole(text, stops, include):
    """The rule: the string that is complete first ends the text; of several the one that stands first in the list."""
    best = None
    for order, stop in enumerate(stops):
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), order) < best[:2]):
            best = at + len(stop), order, at, stop
    if best is None:
        return text, None
    return text[: best[0] if include else best[2]], best[3]


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_end_a_text_wherever_it_is_cut(pieces, stops, include):
    watch, out, ended = StopStrings(stops, include), "", None
    fed = ""
    for piece in pieces:
        fed += piece
        more, ended = watch.add(piece)
        out += more
        if ended:
            break
    else:
        out += watch.rest()
    # A piece may complete several strings; the rule looks at what was fed up to its end.
    want, by = _whole(fed, stops, include)
    assert (out, ended) == (want, by)
