"""vLLM's block pool over pages that come and go."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_coserve.api.errors import ContractError
from vllm_coserve.memory.geometry import Geometry
from vllm_coserve.memory.slots import SlotTable

_REQUESTS_REMEMBERED = 4096


class Pager(Protocol):
    """Where a pool gets its pages and leaves them; the engine core's runtime is one."""

    def acquire_pages(self, wanted: int, needed: int) -> list[int]:
        """Up to `wanted` pages that are this engine's now. May wait (bounded) for `needed`, 0 means not at all."""
        ...

    def set_slots(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Write slots of the table (page -1: unmapped) for the worker."""
        ...


class ElasticBlockPool(BlockPool):
    """Only blocks whose pages are mapped are in the free queue; pages are asked for before vLLM looks for blocks.

    In the free queue, free blocks stand before cached ones, so vLLM's eviction order is kept: pages that can be had
    come first, then least recently used prefix cache.
    """

    def __init__(
        self,
        *args: object,
        geometry: Geometry,
        pager: Pager,
        group_by_request: bool,
        kept_slots: int = 0,
        weight_pages: int = 0,
        **kwargs: object,
    ) -> None:
        """Empty at first.

        Args:
            args: as vLLM gives them.
            geometry: of blocks over the whole range.
            pager: has the pages.
            group_by_request: keep a request's blocks together, so that its end frees whole pages.
            kept_slots: see `SlotTable`.
            weight_pages: so many pages of the range are there at times only; usage is a share of the others.
            kwargs: as vLLM gives them.
        """
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._pager = pager
        self._group = group_by_request
        self.slots = SlotTable(geometry, kept_slots)
        lasting_bytes = (geometry.num_slots - weight_pages) * geometry.page_bytes
        self._lasting_blocks = min(self.num_gpu_blocks, lasting_bytes // geometry.block_bytes)
        if self.num_gpu_blocks > geometry.num_blocks:
            raise ContractError(f"vLLM made {self.num_gpu_blocks} blocks, the pool has room for {geometry.num_blocks}")
        self.free_block_queue.popleft_n(self.free_block_queue.num_free_blocks)
        self.free_block_queue = FreeKVCacheBlockQueue([])
        self._request: str | None = None
        self._last_slot: OrderedDict[str, int] = OrderedDict()  # where a request's latest block lies
        self._spare_pages: list[int] = []
        self._closed: dict[int, int] = {}  # slots that are to come free -> how many blocks on them are kept
        self._kept: set[int] = set()

    # ---- what vLLM calls

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        out: list[KVCacheBlock] = []
        slot = self._last_slot.get(self._request) if self._group and self._request else None
        for _ in range(num_blocks):
            picked = self.slots.pick_free(slot, prefer_empty=self._group)
            if picked is None:
                break
            block = self.blocks[picked]
            self.slots.use_free(picked)
            self.free_block_queue.remove(block)
            out.append(block)
            slot = self.slots.geometry.slots_of(picked)[-1]
        for block in self.free_block_queue.popleft_n(num_blocks - len(out)) if len(out) < num_blocks else ():
            self._maybe_evict_cached_block(block)
            self.slots.use_cached(block.block_id)
            out.append(block)
        for block in out:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        if self._group and self._request and slot is not None:
            self._last_slot[self._request] = slot
            self._last_slot.move_to_end(self._request)
            if len(self._last_slot) > _REQUESTS_REMEMBERED:
                self._last_slot.popitem(last=False)
        return out

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.slots.use_cached(block.block_id)
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        first, last = [], []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt or block.is_null:
                continue
            if self._closed and not self._closed.keys().isdisjoint(self.slots.geometry.slots_of(block.block_id)):
                self._maybe_evict_cached_block(block)
                self._keep(block.block_id)
                continue
            keep = self.enable_caching and block.block_hash is not None
            self.slots.release(block.block_id, keep)
            (last if keep else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is not None and block.ref_cnt == 0:
                self._drop_cached(block)
            else:
                self._maybe_evict_cached_block(block)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: object) -> None:
        raise ContractError("KV connectors cannot be combined with --coserve-rollout yet")

    def reset_prefix_cache(self) -> bool:
        if self.slots.num_used_blocks:
            return False
        self.forget_cached()
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block.clear()
        if self.metrics_collector:
            self.metrics_collector.reset()
        return True

    def forget_cached(self) -> None:
        """Turn all unreferenced prefix cache into free blocks."""
        for block in self.free_block_queue.get_all_free_blocks():
            if block.block_hash is not None:
                self._drop_cached(block)

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        total = self._lasting_blocks - 1
        return min(1.0, self.slots.num_used_blocks / total) if total > 0 else 0.0

    # ---- pages

    def ensure_free(self, num_blocks: int, request_id: str) -> None:
        """Have pages mapped for `num_blocks` blocks of a request, as far as can be; called before each check."""
        self._request = request_id
        slots = self.slots
        short = num_blocks - slots.num_free
        if short <= 0:
            return
        wanted = slots.geometry.pages_for(short)
        missing = num_blocks - self.free_block_queue.num_free_blocks  # not even by evicting our own cache
        self.add_pages(self._pager.acquire_pages(wanted, slots.geometry.pages_for(missing)))

    def add_pages(self, pages: list[int]) -> None:
        """Map pages that are ours at free slots; what completes no block is kept for the next time."""
        pages = self._spare_pages + pages
        self._spare_pages = []
        if not pages:
            return
        slots = self.slots.unmapped_slots(len(pages))
        self._spare_pages.extend(pages[len(slots) :])
        pages = pages[: len(slots)]
        gained = self.slots.map(slots, pages)
        self._pager.set_slots(slots, pages)
        self.free_block_queue.prepend_n([self.blocks[b] for b in gained])

    def drop_slots(self, slots: Iterable[int]) -> list[int]:
        """Unmap slots without blocks in use, their prefix cache is forgotten; returns their pages.

        The pages may have a new owner only after the worker has unmapped them.
        """
        slots = list(slots)
        pages = []
        for slot in slots:
            for block_id in list(self.slots.usable_on(slot)):
                block = self.blocks[block_id]
                if block.block_hash is not None:
                    self._drop_cached(block)
            page, lost = self.slots.unmap(slot)
            pages.append(page)
            for block_id in lost:
                self.free_block_queue.remove(self.blocks[block_id])
        if slots:
            self._pager.set_slots(slots, [-1] * len(slots))
        return pages

    def vacate(self, slots: Iterable[int], bound_s: float) -> list[int]:
        """Have slots come free as the requests on them end, and unmap those on which none is left.

        No other request gets a block on them or finds prefix cache there, until `reopen`. Call it again and again.

        Args:
            slots: mapped ones; those that were given before are looked after too.
            bound_s: about how long it may take to close further slots; the rest is for the next call.

        Returns:
            Pages as `drop_slots` does.
        """
        end_s = time.monotonic() + bound_s
        for slot in slots:
            if slot not in self._closed:
                self._close(slot)
                if time.monotonic() > end_s:
                    break
        pages = []
        for slot in [s for s, kept in self._closed.items() if self.slots.used[s] == kept]:
            for block_id in self._kept.intersection(self.slots.geometry.blocks_of(slot)):
                self._let_go(block_id)
            del self._closed[slot]
            pages += self.drop_slots([slot])
        return pages

    def reopen(self) -> None:
        """Use again what `vacate` has kept from requests."""
        for block_id in list(self._kept):
            self._let_go(block_id)
        self._closed.clear()

    def _close(self, slot: int) -> None:
        self._closed[slot] = 0
        for block_id in list(self.slots.usable_on(slot)):
            block = self.blocks[block_id]
            if block_id in self._kept:  # it lies on another closed slot too
                self._closed[slot] += 1
            elif block.ref_cnt:
                self._maybe_evict_cached_block(block)
            else:
                if block.block_hash is not None:
                    self._drop_cached(block)
                self.free_block_queue.remove(block)
                self.slots.use_free(block_id)
                self._keep(block_id)

    def _keep(self, block_id: int) -> None:
        """A block that no request has counts as in use: so nobody is given it, and its slots stay."""
        self._kept.add(block_id)
        for slot in self.slots.geometry.slots_of(block_id):
            if slot in self._closed:
                self._closed[slot] += 1

    def _let_go(self, block_id: int) -> None:
        self._kept.remove(block_id)
        for slot in self.slots.geometry.slots_of(block_id):
            if slot in self._closed:
                self._closed[slot] -= 1
        self.slots.release(block_id, False)
        self.free_block_queue.prepend_n([self.blocks[block_id]])

    def take_spare_pages(self) -> list[int]:
        """Pages that are ours and mapped nowhere; they may be given back at once."""
        spare, self._spare_pages = self._spare_pages, []
        return spare

    def slots_to_give(self, count: int) -> list[int]:
        """Up to `count` slots that cost least to give: empty ones, then those that were in use longest ago."""
        return self.slots.slots_to_give(count)

    def idle_slots(self, older_than_s: float) -> list[int]:
        """Slots with nothing in use since so many seconds."""
        return self.slots.idle_slots(older_than_s)

    def _drop_cached(self, block: KVCacheBlock) -> None:
        self._maybe_evict_cached_block(block)
        self.slots.uncache(block.block_id)
        self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n([block])
