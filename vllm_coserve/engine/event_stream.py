"""`GET /coserve/v1/events`: the pair's events as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from vllm_coserve.api.messages import EventRecord
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.events import Writer

EVENT_ID = rf"^([0-9]{{1,18}}(\.[0-9]{{1,18}}){{{len(Writer) - 1}}})?$"  # or empty
_POLL_S = 0.05
_KEEP_ALIVE_S = 10.0


def parse_cursor(event_id: str) -> tuple[int, ...]:
    """The cursor in an event id such as "12.3.0.1": how many events of each writer were seen."""
    return tuple(map(int, event_id.split(".")))


async def stream(block: ControlBlock, cursor: tuple[int, ...], follow: bool = True) -> AsyncIterator[str]:
    """Events behind `cursor`, then each new one as it comes; a comment now and then shows that the stream lives.

    Without `follow` it ends after the events that there are.
    """
    position, quiet_s = list(cursor), 0.0
    yield f": coserve events behind {'.'.join(map(str, cursor))}\n\n"
    while True:
        events = block.events.after(tuple(position))
        for event in events:
            position[event.writer] = event.number
            record = EventRecord(
                id=".".join(map(str, position)),
                time_s=event.time_s,
                kind=event.kind.name.lower(),
                value=event.value,
                text=event.text,
            )
            yield f"id: {record.id}\nevent: {record.kind}\ndata: {record.model_dump_json()}\n\n"
        if not follow:
            return
        quiet_s = 0.0 if events else quiet_s + _POLL_S
        if quiet_s >= _KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(_POLL_S)
