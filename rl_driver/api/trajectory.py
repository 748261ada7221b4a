"""What a rollout has produced: a trajectory of turns, each with its tokens, logprobs and the weights that made them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

State = Literal["running", "done", "failed"]


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Output tokens [start, end) of a turn came from the weights `version`."""

    version: str
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the policy.

    Its prompt is the first `kept` tokens of the text before it (None: all of it; else the caller edits the context) and
    then `input_token_ids` (the first prompt, or what the environment said). `output_token_ids` are the policy's own,
    with one logprob each; spans cover them without gaps.
    """

    index: int
    input_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str = "stop"
    kept: int | None = None

    def check(self) -> None:
        """Raises ValueError where tokens, logprobs and spans do not line up."""
        n = len(self.output_token_ids)
        if self.index < 0 or (self.kept or 0) < 0 or len(self.logprobs) != n:
            raise ValueError(f"turn {self.index} has {n} output tokens and {len(self.logprobs)} logprobs")
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise ValueError(f"turn {self.index}: version spans must follow each other from 0: {self.spans}")
            at = span.end
        if at != n:
            raise ValueError(f"turn {self.index}: version spans cover {at} of {n} output tokens")


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout. `group` are those of one task that are compared with each other (GRPO)."""

    trajectory_id: str
    group: str
    task: dict[str, Any] = {}
    state: State = "running"
    reward: float | None = None
    turns: tuple[Turn, ...] = ()

    def prompt(self, index: int) -> list[int]:
        """The prompt of a turn."""
        turn = self.turns[index]
        return [*self.token_ids(index)[: turn.kept], *turn.input_token_ids]

    def token_ids(self, turns: int | None = None) -> list[int]:
        """The text, input and output, after the first `turns` turns (all of them)."""
        out: list[int] = []
        for turn in self.turns[:turns]:
            out[len(out) if turn.kept is None else turn.kept :] = [*turn.input_token_ids, *turn.output_token_ids]
        return out
