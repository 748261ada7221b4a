"""Page drivers of all kinds behind one face, so that a test can be run with each: two engines over one pool."""

import ctypes
import os

from tests.unit.fake_cuda import GRANULARITY, Board, FakeCuda
from vllm_coserve.memory.cuda import CudaDriver, CudaEraser, NoEraser
from vllm_coserve.memory.cuda_calls import Device
from vllm_coserve.memory.cuda_pages import BudgetPages, SharedPages, import_page, make_pool
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool


class HostKit:
    """Memory file and mmap."""

    page = 64 << 10

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self._fd = create_pool(num_pages, self.page)

    def driver(self, side, num_slots=None):
        return HostDriver(self._fd, num_slots or self.num_pages, self.page)

    def eraser(self):
        return PoolEraser(self._fd, self.num_pages, self.page)

    def fill(self, driver, slot, count, byte):
        ctypes.memset(driver.address + slot * self.page, byte, count * self.page)

    def read(self, driver, slot, count):
        return ctypes.string_at(driver.address + slot * self.page, count * self.page)

    def close(self):
        os.close(self._fd)


class CudaKit:
    """The CUDA driver over the fake; pages are shared: the serving side owns the pool, the rollout imports handles."""

    page = 2 * GRANULARITY
    exports = True

    def __init__(self, num_pages, capacity_pages=None):
        self.num_pages = num_pages
        self.board = Board((capacity_pages or 10 * num_pages) * self.page)
        self.apis = {side: FakeCuda(self.board, exports=self.exports) for side in ("serving", "rollout")}
        self.devices = {side: Device(api=api) for side, api in self.apis.items()}
        serving, rollout = self.devices.values()
        self.pool = make_pool(serving, num_pages, self.page)
        self.pages = {"serving": self.pool, "rollout": self._in(rollout)}

    def _in(self, device):
        handles = []
        for page in range(self.num_pages):
            fd = self.pool.export(page)
            handles.append(import_page(device, fd))
            os.close(fd)
        return SharedPages(device, handles, self.page)

    def driver(self, side, num_slots=None, **kwargs):
        return CudaDriver(self.devices[side], self.pages[side], num_slots or self.num_pages, **kwargs)

    def eraser(self):
        return CudaEraser(self.devices["serving"], self.pool)

    def api_of(self, driver):
        return driver._device.api

    def fill(self, driver, slot, count, byte):
        self.api_of(driver).write(driver.address + slot * self.page, bytes([byte]) * count * self.page)

    def read(self, driver, slot, count):
        return self.api_of(driver).read(driver.address + slot * self.page, count * self.page)

    def really_mapped(self, driver):
        """The page under each slot as the device sees it, -1 for none. Which page a budget is of cannot be seen: 0."""
        api, table = self.api_of(driver), [-1] * driver.num_slots
        for slot in range(driver.num_slots):
            mapping = api.mappings.get(driver.address + slot * self.page)
            if mapping is not None:
                assert mapping.accessible and mapping.size == self.page
                table[slot] = self.page_of(mapping.memory)
        return table

    def page_of(self, memory):
        serving = self.apis["serving"]
        return [serving._handles[h][0].inode for h in self.pool._handles].index(memory.inode)

    def close(self):
        """The pool goes, and with it the last of what both processes had."""
        for pages in self.pages.values():
            pages.close()
        for side, api in self.apis.items():
            assert api.nothing_left(), f"{side} leaks"
            assert not api.violations, api.violations
        assert not self.board.used_bytes


class BudgetKit(CudaKit):
    """The same where handles cannot be exported."""

    exports = False

    def _in(self, device):
        return BudgetPages(device, self.num_pages, self.page)

    def eraser(self):
        return NoEraser()

    def page_of(self, memory):
        return 0


KITS = [HostKit, CudaKit, BudgetKit]
