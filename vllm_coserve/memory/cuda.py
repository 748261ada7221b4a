"""Page driver for CUDA devices: a reserved range of device addresses, and physical pages that are mapped into it.

What is done for a run of neighbouring pages: cuMemMap once for each page, because a page has a handle of its own (it
changes hands alone); cuMemSetAccess, cuMemUnmap and the zeroing once for the run.

CUDA maps only where nothing is mapped and unmaps only what is, so the driver keeps account of each slot. After a call
that failed it does not know: the slot is looked up (cuMemRetainAllocationHandle) before it is next used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from vllm_coserve.memory.cuda_calls import NOT_MAPPED, CudaCallError, Device
from vllm_coserve.memory.cuda_pages import BudgetPages, Pages, SharedPages, WithWeightPages


class _Slot(IntEnum):
    EMPTY = 0
    MAPPED = 1
    UNKNOWN = 2  # a call on it failed


class CudaDriver:
    """See `PageDriver`. One instance per worker process and engine side; any thread, one at a time."""

    def __init__(
        self,
        device: Device,
        pages: Pages,
        num_slots: int,
        kept_slots: int = 0,
        fence: Callable[[], None] | None = None,
    ) -> None:
        """Reserve a range of `num_slots` pages.

        Args:
            device: the device of all pages.
            pages: where their memory comes from; not closed with the driver.
            num_slots: pages of the range.
            kept_slots: so many first slots have memory of this engine's own for ever, none of the pool's. vLLM's
                kernels touch the placeholder block at any moment, so what is under it must not change.
            fence: waits until no kernel that was given to the device before may touch a page that is taken out now;
                by default until the device has done all that this process gave it.

        Raises:
            CudaCallError: the range or the memory of the kept slots cannot be had; nothing is kept.
        """
        self.page_bytes, self.num_slots, self.kept_slots = pages.page_bytes, num_slots, kept_slots
        self._device, self._pages = device, pages
        self._fence = device.wait_idle if fence is None else fence
        self._access = device.read_write()
        self._slots = bytearray(num_slots)
        self._stream: Any = None
        device.activate()
        self._address = int(device.call("cuMemAddressReserve", num_slots * self.page_bytes, 0, 0, 0))
        if kept_slots:
            try:
                own = BudgetPages(device, kept_slots, self.page_bytes)
                self._map(own, 0, range(kept_slots))
            except BaseException:
                with contextlib.suppress(CudaCallError):
                    self.close()
                raise

    @property
    def address(self) -> int:
        return self._address

    def map_run(self, slot: int, page: int, count: int) -> None:
        self._check(slot, count)
        if page < 0 or page + count > self._pages.num_pages:
            raise ValueError(f"pages {page}..{page + count - 1} are outside the pool of {self._pages.num_pages}")
        self._device.activate()
        self._clear(slot, count)
        self._map(self._pages, slot, range(page, page + count))

    def unmap_run(self, slot: int, count: int) -> None:
        self._check(slot, count)
        self._device.activate()
        self._clear(slot, count)

    def maps(self, slot: int) -> bool:
        """Whether a page is known to be mapped at a slot."""
        return self._slots[slot] == _Slot.MAPPED

    def cover(self) -> None:
        """Put one page of memory under all slots that are not kept, so that an access anywhere is harmless.

        For vLLM's warm-up, which computes on blocks that nobody has given it, before the first page comes.
        """
        self._device.activate()
        self._clear(self.kept_slots, self.num_slots - self.kept_slots)
        call = self._device.call
        handle = call("cuMemCreate", self.page_bytes, self._device.allocation(shareable=False), 0)
        try:
            for slot in range(self.kept_slots, self.num_slots):
                self._map_one(slot, handle)
        finally:
            self._device.release(handle)
        self._allow(self.kept_slots, self.num_slots - self.kept_slots)

    def uncover(self) -> None:
        """Take out what `cover` put there; to be called before the first page is mapped."""
        self._device.activate()
        self._clear(self.kept_slots, self.num_slots - self.kept_slots)

    def close(self) -> None:
        """Give the range back. After a CudaCallError it can be called again."""
        if not self._address:
            return
        self._device.activate()
        self._clear(0, self.num_slots)
        if self._stream is not None:
            self._device.call("cuStreamDestroy", self._stream)
            self._stream = None
        self._device.call("cuMemAddressFree", self._address, self.num_slots * self.page_bytes)
        self._address = 0

    def _check(self, slot: int, count: int) -> None:
        if slot < self.kept_slots or count < 1 or slot + count > self.num_slots:
            raise ValueError(
                f"slots {slot}..{slot + count - 1} are outside the range of {self.num_slots} slots, of which the first "
                f"{self.kept_slots} are kept"
            )
        if not self._address:
            raise ValueError("the range was given back")

    def _at(self, slot: int) -> int:
        return self._address + slot * self.page_bytes

    def _map(self, pages: Pages, slot: int, wanted: range) -> None:
        for at, page in enumerate(wanted, slot):
            handle = pages.take(page)
            try:
                self._map_one(at, handle)
            finally:
                pages.mapped(page, handle)
        self._allow(slot, len(wanted))
        fresh = range(max(wanted.start, pages.fresh.start), min(wanted.stop, pages.fresh.stop))
        if fresh:
            if self._stream is None:
                self._stream = self._device.low_priority_stream()
            at = self._at(slot + fresh.start - wanted.start)
            self._device.zero(at, len(fresh) * self.page_bytes, self._stream)

    def _map_one(self, slot: int, handle: Any) -> None:
        self._slots[slot] = _Slot.UNKNOWN
        self._device.call("cuMemMap", self._at(slot), self.page_bytes, 0, handle, 0)
        self._slots[slot] = _Slot.MAPPED

    def _allow(self, slot: int, count: int) -> None:
        self._device.call("cuMemSetAccess", self._at(slot), count * self.page_bytes, self._access, len(self._access))

    def _clear(self, slot: int, count: int) -> None:
        """Take out what is mapped at these slots, when no kernel can touch it any more."""
        for at in range(slot, slot + count):
            if self._slots[at] == _Slot.UNKNOWN:
                self._slots[at] = self._look_up(at)
        mapped = list(self._mapped_runs(slot, count))
        if mapped:
            self._fence()
        for first, length in mapped:
            self._slots[first : first + length] = bytes([_Slot.UNKNOWN]) * length
            self._device.call("cuMemUnmap", self._at(first), length * self.page_bytes)
            self._slots[first : first + length] = bytes([_Slot.EMPTY]) * length

    def _look_up(self, slot: int) -> _Slot:
        try:
            handle = self._device.call("cuMemRetainAllocationHandle", self._at(slot))
        except CudaCallError as exc:
            if exc.code != NOT_MAPPED:
                raise
            return _Slot.EMPTY
        self._device.release(handle)
        return _Slot.MAPPED

    def _mapped_runs(self, slot: int, count: int) -> Iterator[tuple[int, int]]:
        end = slot + count
        while True:
            slot = self._slots.find(_Slot.MAPPED, slot, end)
            if slot < 0:
                return
            first = slot
            while slot < end and self._slots[slot] == _Slot.MAPPED:
                slot += 1
            yield first, slot - first


class CudaEraser:
    """Zeroes free pages in place, through a mapping of the whole pool that no engine computes on.

    It works on a stream of the lowest priority and lets the GIL go while it waits, so a thread of the engine core can
    zero while the core works. Budgets need none: their memory is zeroed when it is made. Weight pages get their memory
    here, and lose it here.
    """

    def __init__(self, device: Device, pages: SharedPages | WithWeightPages) -> None:
        """Raises CudaCallError when the pool cannot be mapped; nothing is kept then."""
        self._device, self._stream = device, None
        self._weights = pages if isinstance(pages, WithWeightPages) else None
        pool = pages.pool if isinstance(pages, WithWeightPages) else pages
        self._pool_pages, self._first = pool.num_pages, pool.fresh.stop  # from the first one on pages are zeroed here
        # What it has given to the device is done when it comes back, so nothing need be waited for.
        self._range: CudaDriver | None = CudaDriver(device, pages, pages.num_pages, fence=lambda: None)
        try:
            self._stream = device.low_priority_stream()
            if not pool.fresh:
                self._range.map_run(0, 0, self._pool_pages)
        except BaseException:
            with contextlib.suppress(CudaCallError):
                self.close()
            raise

    def zero(self, page: int, count: int = 1) -> None:
        """Zero `count` consecutive pages; the caller knows that no engine maps them.

        Raises:
            CudaCallError: the memory of a weight page cannot be had, among others.
        """
        assert self._range is not None, "the eraser is closed"
        end = page + count
        for weight_page in range(max(page, self._pool_pages), end):
            assert self._weights is not None
            self._weights.make(weight_page)
            if not self._range.maps(weight_page):
                try:
                    self._range.map_run(weight_page, weight_page, 1)
                except CudaCallError:  # it may be mapped, but without access
                    with contextlib.suppress(CudaCallError):
                        self._range.unmap_run(weight_page, 1)
                    raise
        page = max(page, self._first)
        if page < end:
            at = self._range.address + page * self._range.page_bytes
            self._device.zero(at, (end - page) * self._range.page_bytes, self._stream)

    def discard(self, page: int, count: int) -> None:
        """Give the memory under weight pages back, which nobody maps."""
        assert self._range is not None and self._weights is not None, "the eraser is closed, or there are none"
        self._range.unmap_run(page, count)
        for weight_page in range(page, page + count):
            self._weights.discard(weight_page)

    def close(self) -> None:
        """Give the mapping back. After a CudaCallError it can be called again."""
        if self._stream is not None:
            self._device.call("cuStreamDestroy", self._stream)
            self._stream = None
        if self._range is not None:
            self._range.close()
            self._range = None


class NoEraser:
    """For pages whose memory is new and zeroed each time they are mapped."""

    def zero(self, page: int, count: int = 1) -> None:
        """Nothing is to be done."""

    def discard(self, page: int, count: int) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        """Nothing is held."""
