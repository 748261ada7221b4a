"""Waiters of vLLM's queues: they spin only about when the next message is due."""

import pytest

from vllm_coserve.engine.queues import is_due


@pytest.mark.parametrize(
    ("waited_s", "gap_s", "due"),
    [
        (0.0, 0.0, False),  # nothing is known
        (0.004, 0.004, True),
        (0.0037, 0.004, True),
        (0.0035, 0.004, False),
        (0.0043, 0.004, True),
        (0.005, 0.004, False),  # it is late: whatever it waits for may take long
        (0.0995, 0.1, True),
        (0.098, 0.1, False),  # no longer than a millisecond, however long steps are
    ],
)
def test_messages_are_due_in_the_rhythm_of_steps(waited_s: float, gap_s: float, due: bool) -> None:
    assert is_due(waited_s, gap_s) == due
