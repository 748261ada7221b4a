"""Bookkeeping of an elastic block pool: which slots are mapped, how many blocks in use or cached lie on each.

Pure: it knows blocks and slots by number only, and neither vLLM nor the ledger. The engine's block pool drives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_coserve.memory.geometry import Geometry

NULL_BLOCK = 0  # vLLM's placeholder: never used, never free


class SlotTable:
    """Counts per slot, and free blocks grouped by slot.

    Every usable block (all its slots mapped) is in exactly one state: in use, cached (unreferenced prefix cache) or
    free. A block that straddles slots counts on each of them; its first slot is its home.
    """

    def __init__(self, geometry: Geometry, kept_slots: int = 0) -> None:
        """`kept_slots`: so many first slots never get a page of the pool (`memory.devices.kept_slots`)."""
        self.geometry, self.kept_slots = geometry, kept_slots
        n = geometry.num_slots
        self.page_of = [-1] * n
        self.used = [0] * n
        self.cached = [0] * n
        self.num_mapped = 0
        self.num_used_slots = 0  # slots with blocks in use
        self.num_used_blocks = 0
        self.num_free = 0  # free blocks, cached ones not counted
        self._usable = bytearray(geometry.num_blocks)
        self._free: dict[int, dict[int, None]] = {}  # home slot -> its free blocks
        self._empty: dict[int, None] = {}  # slots with free blocks and nothing else on them
        self._partial: dict[int, None] = {}  # slots with free blocks beside others

    # ---- mapping

    def unmapped_slots(self, count: int) -> list[int]:
        """`count` slots without a page, the lowest first, so that ranges stay contiguous.

        Blocks larger than a page need neighbouring slots, so there whole blocks are completed first.
        """
        out: list[int] = []
        if self.geometry.block_bytes > self.geometry.page_bytes:
            chosen: dict[int, None] = {}
            for block in range(1, self.geometry.num_blocks):
                if not self._usable[block]:
                    lacking = [s for s in self.geometry.slots_of(block) if self.page_of[s] < 0 and s not in chosen]
                    if lacking and lacking[0] < self.kept_slots:
                        continue  # it can never be completed
                    if len(chosen) + len(lacking) <= count:
                        chosen.update(dict.fromkeys(lacking))
                if len(chosen) == count:
                    break
            return sorted(chosen)
        for slot in range(self.kept_slots, len(self.page_of)):
            if self.page_of[slot] < 0:
                out.append(slot)
                if len(out) == count:
                    break
        return out

    def map(self, slots: Iterable[int], pages: Iterable[int]) -> list[int]:
        """Put pages under slots; returns the blocks that became usable (and free)."""
        slots = list(slots)
        for slot, page in zip(slots, pages, strict=True):
            if slot < self.kept_slots:
                raise ValueError(f"slot {slot} is kept for the placeholder block")
            if self.page_of[slot] >= 0:
                raise ValueError(f"slot {slot} already has page {self.page_of[slot]}")
            self.page_of[slot] = page
            self.num_mapped += 1
        gained = []
        for slot in slots:
            for block in self.geometry.blocks_of(slot):
                if block == NULL_BLOCK or self._usable[block]:
                    continue
                if all(self.page_of[s] >= 0 for s in self.geometry.slots_of(block)):
                    self._usable[block] = 1
                    self._add_free(block)
                    gained.append(block)
        return gained

    def unmap(self, slot: int) -> tuple[int, list[int]]:
        """Take the page from a slot that nothing uses; returns (page, blocks that are no longer usable).

        The caller has uncached the blocks on it before.
        """
        if self.used[slot] or self.cached[slot] or self.page_of[slot] < 0:
            raise ValueError(f"slot {slot} is not free to go: used {self.used[slot]}, cached {self.cached[slot]}")
        lost = []
        for block in self.geometry.blocks_of(slot):
            if self._usable[block]:
                self._remove_free(block)
                self._usable[block] = 0
                lost.append(block)
        page, self.page_of[slot] = self.page_of[slot], -1
        self.num_mapped -= 1
        return page, lost

    def usable_on(self, slot: int) -> Iterator[int]:
        """Usable blocks that touch a slot."""
        return (b for b in self.geometry.blocks_of(slot) if self._usable[b])

    # ---- state changes of a usable block

    def use_free(self, block: int) -> None:
        """free -> in use"""
        self._remove_free(block)
        self._count_used(block, 1)

    def use_cached(self, block: int) -> None:
        """cached -> in use"""
        self._count_cached(block, -1)
        self._count_used(block, 1)

    def release(self, block: int, keep_cached: bool) -> None:
        """in use -> cached or free"""
        self._count_used(block, -1)
        if keep_cached:
            self._count_cached(block, 1)
        else:
            self._add_free(block)

    def uncache(self, block: int) -> None:
        """cached -> free"""
        self._count_cached(block, -1)
        self._add_free(block)

    # ---- choosing

    def pick_free(self, slot: int | None, prefer_empty: bool) -> int | None:
        """A free block: on `slot` when it has one, else on an empty or a partly used slot, by preference."""
        if slot is not None and (free := self._free.get(slot)):
            return next(iter(free))
        first, second = (self._empty, self._partial) if prefer_empty else (self._partial, self._empty)
        for slots in (first, second):
            if slots:
                return next(iter(self._free[next(iter(slots))]))
        return None

    def empty_slots(self) -> list[int]:
        """Mapped slots with nothing in use and nothing cached."""
        return [s for s, p in enumerate(self.page_of) if p >= 0 and not self.used[s] and not self.cached[s]]

    def cached_only_slots(self) -> list[int]:
        """Mapped slots with cached blocks and none in use."""
        return [s for s, p in enumerate(self.page_of) if p >= 0 and not self.used[s] and self.cached[s]]

    # ---- internals

    def _add_free(self, block: int) -> None:
        home = self.geometry.slots_of(block)[0]
        self._free.setdefault(home, {})[block] = None
        self.num_free += 1
        self._classify_all(block)

    def _remove_free(self, block: int) -> None:
        home = self.geometry.slots_of(block)[0]
        free = self._free[home]
        del free[block]
        if not free:
            del self._free[home]
        self.num_free -= 1
        self._classify_all(block)

    def _count_used(self, block: int, delta: int) -> None:
        used = self.used
        for slot in self.geometry.slots_of(block):
            before = used[slot]
            used[slot] = after = before + delta
            self.num_used_slots += (after > 0) - (before > 0)
        self.num_used_blocks += delta
        self._classify_all(block)

    def _count_cached(self, block: int, delta: int) -> None:
        for slot in self.geometry.slots_of(block):
            self.cached[slot] += delta
        self._classify_all(block)

    def _classify_all(self, block: int) -> None:
        for slot in self.geometry.slots_of(block):
            if slot not in self._free:
                self._empty.pop(slot, None)
                self._partial.pop(slot, None)
            elif self.used[slot] or self.cached[slot]:
                self._empty.pop(slot, None)
                self._partial[slot] = None
            else:
                self._partial.pop(slot, None)
                self._empty[slot] = None
