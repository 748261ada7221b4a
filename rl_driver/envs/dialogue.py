"""A trajectory's text as tokens: token-in, token-out. What the policy has said is never tokenised anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer


def load_tokenizer(model: str) -> Tokenizer:
    """That of a model's folder, or of its Hugging Face name.

    Raises:
        ValueError: there is no tokenizer.json.
    """
    file = Path(model) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if Path(model).is_dir() else Tokenizer.from_pretrained(model)
    except Exception as exc:  # recovery: the library raises bare Exception; the caller says what to do
        raise ValueError(f"{model} has no tokenizer.json that can be read: {exc}") from None


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around an observation; the defaults are ChatML, as Qwen's models have it."""

    before: str = "<|im_start|>user\n"
    after: str = "<|im_end|>\n<|im_start|>assistant\n"
    between: str = "\n"  # behind an answer, before the next observation
    stop: str = "<|im_end|>"  # the token that ends an answer

    def stop_id(self, tokenizer: Tokenizer) -> int:
        """Its token.

        Raises:
            ValueError: it is no single token of this tokenizer.
        """
        token_id = tokenizer.token_to_id(self.stop)
        if token_id is None:
            raise ValueError(f"{self.stop!r} is no token of the model's tokenizer")
        return token_id


@dataclass(slots=True)
class Dialogue:
    """The tokens of one trajectory, and which of them the policy made."""

    tokenizer: Tokenizer
    frame: Frame
    token_ids: list[int] = field(default_factory=list)

    def observe(self, text: str) -> list[int]:
        """The environment says something; returns the tokens that this adds."""
        frame = self.frame
        text = (frame.between if self.token_ids else "") + frame.before + text + frame.after
        added = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.token_ids += added
        return added

    def answered(self, token_ids: Sequence[int]) -> str:
        """The policy has answered; returns the text without the token that ends it."""
        self.token_ids += token_ids
        stop = self.frame.stop_id(self.tokenizer)
        return self.tokenizer.decode([t for t in token_ids if t != stop], skip_special_tokens=False)
