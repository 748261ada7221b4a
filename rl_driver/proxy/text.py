"""Text of token ids: made once, in the proxy, over all tokens of an answer, whoever made them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

logger = logging.getLogger("coserve.proxy")


class TextTokenizer:
    """A model's tokenizer (`tokenizer.json`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token = functools.lru_cache(maxsize=1 << 17)(self._token)

    @classmethod
    def load(cls, name: str) -> TextTokenizer:
        """From a folder, or by its Hugging Face name.

        Raises:
            ValueError: there is none.
        """
        file = Path(name) / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name))
        except Exception as exc:  # recovery: the library raises bare Exception; the caller says what to do
            raise ValueError(f"no tokenizer.json of {name!r} ({exc})") from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)

    def _token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def stream(self, prompt: Sequence[int], skip_special: bool) -> TextStream:
        """The text of an answer to `prompt`, token by token."""
        return TextStream(self._tokenizer, prompt, skip_special)


class TextStream:
    """Text as tokens come; bytes of a character that is not whole yet are held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=skip_special)

    def step(self, token_id: int) -> str:
        """The text that a token completes."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as exc:  # recovery: a tokenizer's invalid UTF-8 breaks the stream's state; begin a new one
            logger.warning("token %d: %s; the text goes on without what was held back", token_id, exc)
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            try:
                return self._stream.step(self._tokenizer, token_id) or ""
            except Exception:  # recovery: a token that no text has
                return ""


class StopStrings:
    """Ends a text at the first of some strings, as vLLM does; holds text back that may be the begin of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the text keeps the string that ended it."""
        self._stops, self._include = [s for s in stops if s], include
        self._hold = max((len(s) for s in self._stops), default=1) - 1
        self._text, self._sent = "", 0

    def add(self, text: str) -> tuple[str, str | None]:
        """More text has come; returns what may be sent now, and the string that ended it, if one did."""
        if not self._stops:
            return text, None
        searched = len(self._text)
        self._text += text
        best: tuple[int, int, str] | None = None  # end, order, string
        for order, stop in enumerate(self._stops):
            at = self._text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), order) < best[:2]):
                best = at + len(stop), order, stop
        if best is not None:
            end = best[0] if self._include else best[0] - len(best[2])
            out, self._sent = self._text[self._sent : max(end, self._sent)], end
            return out, best[2]
        end = max(self._sent, len(self._text) - self._hold)
        out, self._sent = self._text[self._sent : end], end
        return out, None

    def rest(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        out, self._sent = self._text[self._sent :], len(self._text)
        return out
