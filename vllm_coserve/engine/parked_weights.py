"""Weights that can leave the device and come back: kept in pinned host memory meanwhile, bit by bit.

They lie on a range of addresses of their own, under which memory comes and goes. So their addresses never change, which
CUDA graphs that were captured with them rely on, and what is copied is pages of the range, whatever lies on them: large
copies, however small the tensors, and as many of them as the model has bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_coserve.memory.driver import PageDriver
from vllm_coserve.memory.host_memory import spare_host_bytes
from vllm_coserve.memory.tensors import int8_over

# A copy of so much takes 0.6 ms at 55 GB/s, some hundred times its fixed cost; a copy of serving's waits no longer.
PARK_PAGE_BYTES = 32 << 20
_ALIGNMENT_BYTES = 512  # as torch's own allocator aligns
_HOST_RESERVE_BYTES = 2 << 30  # of the host's memory stays with others
_TRIM_BYTES = 1 << 30
_GIB = 1 << 30


class ParkedWeights:
    """A model's weights on a range of their own. Any thread, between two steps.

    An error of a driver call or a copy leaves weights that nobody can vouch for: the engine must end.

    Attributes:
        nbytes: device memory under the range while they are on the device.
        parked: they are in host memory, and not on the device.
        took_s: how long the latest `park` or `restore` took.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        make_range: Callable[[int], PageDriver],
        pin_memory: bool,
        trim: Callable[[], None] = lambda: None,
        spare_bytes: Callable[[], int] = spare_host_bytes,
    ) -> None:
        """Move tensors to a new range, before anybody has kept their addresses.

        Args:
            tensors: parameters, all on one device. Those that share a storage share it afterwards.
            make_range: makes a range of so many bytes or more; memory under it comes and goes by whole pages.
            pin_memory: whether host memory is pinned, as asynchronous copies need it.
            trim: gives the memory of tensors that have moved back to the device.
            spare_bytes: host memory that can be had.

        Raises:
            OSError: the range or its memory cannot be had. What has moved by then has moved whole.
        """
        groups = _by_storage(tensors)
        self._device = groups[0][0].device if groups else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._pin_memory, self._spare_bytes = pin_memory, spare_bytes
        self._range = make_range(sum(_aligned(g[0].untyped_storage().nbytes()) for g in groups))
        self._pages: list[torch.Tensor] = []  # int8[page_bytes] each, on the device
        self._host: list[torch.Tensor] = []  # the same in host memory; kept for the next time
        self.parked = False
        self.took_s = 0.0
        self._adopt(groups, trim)

    @property
    def nbytes(self) -> int:
        return len(self._pages) * self._range.page_bytes

    def park(self) -> str:
        """Copy the weights to host memory and free theirs on the device.

        Returns "" or why the host cannot hold them; then nothing has happened.
        """
        start_s = time.monotonic()
        if not self._host and (wrong := self._get_host_memory()):
            return wrong
        self._copy(zip(self._pages, self._host, strict=True))
        self.drop()
        self.parked = True
        self.took_s = time.monotonic() - start_s
        return ""

    def drop(self) -> None:
        """Free their memory on the device without a copy anywhere."""
        if self._pages:
            self._range.unmap_run(0, len(self._pages))

    def restore(self) -> None:
        """Give the range memory again, with the weights in it if they were parked, else with whatever is there."""
        start_s = time.monotonic()
        if self.parked:
            self._copy(self._coming_back())
        elif self._pages:
            self._range.map_run(0, 0, len(self._pages))
        self.parked = False
        self.took_s = time.monotonic() - start_s

    def _adopt(self, groups: list[list[torch.Tensor]], trim: Callable[[], None]) -> None:
        at = untrimmed = 0
        for group in groups:
            nbytes = group[0].untyped_storage().nbytes()
            self._map_up_to(at + nbytes)
            if self._move(group, at):
                at += _aligned(nbytes)
                untrimmed += nbytes
            if untrimmed >= _TRIM_BYTES:  # so that the device never has to hold all of them twice
                trim()
                untrimmed = 0
        trim()

    def _map_up_to(self, nbytes: int) -> None:
        page_bytes = self._range.page_bytes
        first, end = len(self._pages), -(-nbytes // page_bytes)
        if end > first:
            self._range.map_run(first, first, end - first)
            self._pages += [self._at(page * page_bytes, page_bytes) for page in range(first, end)]

    def _at(self, offset: int, nbytes: int) -> torch.Tensor:
        return int8_over(self._range.address + offset, nbytes, self._device.type, self._device.index or 0)

    def _move(self, group: list[torch.Tensor], offset: int) -> bool:
        """Move a storage and all tensors on it; False: it stays, for others have views of it that cannot be moved."""
        storage = group[0].untyped_storage()
        place = self._at(offset, storage.nbytes())
        place.copy_(torch.empty(0, dtype=torch.int8, device=self._device).set_(storage))
        before = StorageWeakRef(storage)
        del storage
        _point(group, place.untyped_storage())
        still_used = torch.UntypedStorage._new_with_weak_ptr(before.cdata)
        if still_used is not None:
            _point(group, still_used)
        return still_used is None

    def _get_host_memory(self) -> str:
        spare_bytes = self._spare_bytes() - _HOST_RESERVE_BYTES
        if self.nbytes > spare_bytes:
            return (
                f"weights of {self.nbytes / _GIB:.1f} GiB do not fit the host's memory, of which "
                f"{max(0, spare_bytes) / _GIB:.1f} GiB can be had"
            )
        try:
            # Page by page: torch rounds pinned memory up to a power of two, which a page is.
            self._host = [
                torch.empty(self._range.page_bytes, dtype=torch.int8, pin_memory=self._pin_memory) for _ in self._pages
            ]
        except RuntimeError as exc:
            return f"{self.nbytes / _GIB:.1f} GiB of host memory could not be had: {exc}"
        return ""

    def _coming_back(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copies to be made; memory for the next one is had while the device makes one."""
        for number, (host, page) in enumerate(zip(self._host, self._pages, strict=True)):
            self._range.map_run(number, number, 1)
            yield host, page

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each first tensor to the second, and wait for all."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # steps and loads may have been given to other streams
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups of the tensors that share a storage, each tensor once; empty storages are left out."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            groups.setdefault(storage._cdata, {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]


def _point(group: Iterable[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Have tensors be what they were, on another storage with the same bytes."""
    with torch.no_grad():
        for t in group:
            empty = torch.empty(0, dtype=t.dtype, device=t.device)
            t.data = empty.set_(storage, t.storage_offset(), t.size(), t.stride())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
