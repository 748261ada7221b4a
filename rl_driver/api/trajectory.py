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

    `input_token_ids` are those added since the turn before (prompt, or what the environment said), `output_token_ids`
    the policy's own, with one logprob each; spans cover the output without gaps.
    """

    index: int
    input_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str = "stop"

    def check(self) -> None:
        """Raises ValueError where tokens, logprobs and spans do not line up."""
        n = len(self.output_token_ids)
        if self.index < 0 or len(self.logprobs) != n:
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

    def token_ids(self) -> list[int]:
        """The whole text so far, input and output."""
        out: list[int] = []
        for turn in self.turns:
            out += [*turn.input_token_ids, *turn.output_token_ids]
        return out
