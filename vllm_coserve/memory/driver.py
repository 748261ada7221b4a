"""What a page driver does; `host` (memfd and mmap) is the one for CPU devices."""

from __future__ import annotations

from typing import Protocol


class PageDriver(Protocol):
    """One engine's virtual range over the shared pool of physical pages on one device.

    Slots are virtual pages, numbered from the start of the range. Used by one worker process, under its mapping lock.
    """

    page_bytes: int
    num_slots: int

    @property
    def address(self) -> int:
        """First byte of the virtual range."""
        ...

    def map_run(self, slot: int, page: int, count: int) -> None:
        """Map `count` consecutive physical pages from `page` at consecutive slots from `slot`.

        Slots may be mapped already, after a call that failed half way: the new pages take the place of the old.
        """
        ...

    def unmap_run(self, slot: int, count: int) -> None:
        """Take `count` consecutive slots out, mapped or not; an access to them faults from now on."""
        ...

    def close(self) -> None:
        """Give the range back."""
        ...
