"""Memory of the rollout's weights as pages of the pool: there for serving while the weights are off the device."""

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.page_kits import BudgetKit, CudaKit
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.words import Word
from vllm_coserve.engine.rollout_runtime import RolloutRuntime
from vllm_coserve.engine.serving_runtime import ServingRuntime
from vllm_coserve.engine.supervisor import Supervisor
from vllm_coserve.memory.cuda import CudaDriver, CudaEraser
from vllm_coserve.memory.cuda_calls import CudaCallError
from vllm_coserve.memory.cuda_pages import BudgetPages, WithWeightPages
from vllm_coserve.memory.host import HostDriver, PoolEraser, create_pool
from vllm_coserve.memory.ledger import Owner, RolloutLedger, ServingLedger, has_weight_pages
from vllm_coserve.policy.memory import MemoryConfig, can_spare_weight_pages

_POOL, _WEIGHTS = 8, 3


@pytest.fixture
def block():
    block, fd = ControlBlock.create(_POOL, 4096, weight_pages=_WEIGHTS)
    os.close(fd)
    return block


@pytest.fixture
def discarded():
    return []


@pytest.fixture
def ledger(block, discarded):
    def discard(page, count):
        assert all(block.owners[page : page + count] != Owner.WEIGHTS), "the weights may have it already"
        discarded.append((page, count))

    return ServingLedger(block.owners, lambda page, count: None, weight_pages=_WEIGHTS, discard=discard)


# ---- ledger


def test_weight_pages_are_lent_to_serving_alone_and_given_back_before_the_weights_return(block, ledger, discarded):
    theirs = RolloutLedger(block.owners)
    assert has_weight_pages(block.owners, _POOL)
    assert ledger.take(20, Owner.SERVING) == list(range(_POOL))
    ledger.put(range(_POOL))
    assert theirs.lend_weight_pages(_POOL, _WEIGHTS) == _WEIGHTS
    assert theirs.lend_weight_pages(_POOL, _WEIGHTS) == 0
    ledger.withhold(False)
    assert (ledger.free_pages, ledger.reserve_pages) == (_POOL, _WEIGHTS), "their memory is not had yet"
    assert (ledger.make_weight_pages(1), ledger.make_weight_pages(99)) == (1, _WEIGHTS - 1)
    assert (ledger.free_pages, ledger.reserve_pages) == (_POOL + _WEIGHTS, 0)
    assert ledger.take(20, Owner.ROLLOUT) == list(range(_POOL)), "weights that come back would take them from it"
    ledger.put_all_of_rollout()
    ledger.clean_some(99)
    held = ledger.take(9, Owner.SERVING)
    assert held == list(range(9))
    assert ledger.withhold(True) == 1 and discarded == [(9, 2)]
    assert not has_weight_pages(block.owners, _POOL)
    assert ledger.take(1, Owner.SERVING) == []
    ledger.put(held)
    assert ledger.take(20, Owner.SERVING) == list(range(_POOL)), "serving does not take back what it is to leave"
    assert ledger.withhold(True) == 0 and discarded == [(9, 2), (8, 1)]
    assert has_weight_pages(block.owners, _POOL)


def test_a_pool_without_weight_pages_is_as_it_was(discarded):
    owners = np.zeros(4, dtype=np.uint8)
    ledger = ServingLedger(owners, lambda page, count: None)
    assert ledger.withhold(True) == ledger.withhold(False) == 0 and has_weight_pages(owners, 4)
    assert ledger.take(9, Owner.SERVING) == [0, 1, 2, 3]


def test_serving_is_handed_no_weight_page_whose_memory_cannot_be_had(block):
    tries = []

    def erase(page, count):
        tries.append((page, count))
        if page >= _POOL:
            raise OSError("scripted")

    ledger = ServingLedger(block.owners, erase, weight_pages=_WEIGHTS)
    for _ in range(2):
        RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
        ledger.withhold(False)
        with pytest.raises(OSError, match="scripted"):
            ledger.make_weight_pages(99)
        before = len(tries)
        assert not ledger.make_weight_pages(99) and not ledger.reserve_pages
        assert len(tries) == before, "it is asked for once each time that they are lent"
        assert ledger.take(99, Owner.SERVING) == list(range(_POOL))
        ledger.put(range(_POOL))
        ledger.clean_some(99)
        assert ledger.free_pages == _POOL
        assert ledger.withhold(True) == 0 and has_weight_pages(block.owners, _POOL)


def test_no_page_is_handed_out_whose_memory_is_gone_when_giving_it_back_fails_half_way(block, monkeypatch):
    monkeypatch.setattr("vllm_coserve.memory.ledger._DISCARDED_AT_ONCE", 1)
    made, fails = set(), [True]

    def discard(page, count):
        if page > _POOL and fails:
            raise OSError(fails.pop())
        made.difference_update(range(page, page + count))

    ledger = ServingLedger(
        block.owners, lambda page, count: made.update(range(page, page + count)), weight_pages=_WEIGHTS, discard=discard
    )
    RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
    ledger.withhold(False)
    ledger.make_weight_pages(99)
    with pytest.raises(OSError):
        ledger.withhold(True)
    assert not has_weight_pages(block.owners, _POOL)
    ledger.withhold(False)
    taken = ledger.take(99, Owner.SERVING)
    assert {page for page in taken if page >= _POOL} <= made
    ledger.put(taken)
    assert ledger.withhold(True) == 0 and not made & set(range(_POOL, _POOL + _WEIGHTS))


def test_weight_pages_are_the_last_that_serving_is_handed(block, ledger):
    RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
    ledger.withhold(False)
    ledger.make_weight_pages(99)
    assert ledger.take(_POOL + 1, Owner.SERVING) == list(range(_POOL + 1)), "also where the pool's are not clean"


def test_a_host_without_memory_to_spare_gives_none_for_weight_pages():
    page, spare = 64 << 10, [0]
    fd = create_pool(_POOL, page, _WEIGHTS)
    eraser = PoolEraser(fd, _POOL, page, _WEIGHTS, spare_bytes=lambda: spare[0])
    eraser.zero(0, _POOL)
    with pytest.raises(OSError, match="no memory to spare"):
        eraser.zero(_POOL)
    spare[0] = 1 << 40
    eraser.zero(_POOL)
    eraser.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("used", "begun", "spares"), [(80, False, True), (81, False, False), (81, True, True), (90, True, True)]
)
def test_serving_spares_them_when_the_pool_that_remains_has_its_headroom(used, begun, spares):
    assert can_spare_weight_pages(used, 100, MemoryConfig(headroom_fraction=0.2), begun) is spares
    assert not can_spare_weight_pages(91, 100, MemoryConfig(headroom_fraction=0.2), True)


# ---- memory


def test_host_memory_under_weight_pages_comes_with_zeroing_and_goes_with_discarding():
    page = 64 << 10
    fd = create_pool(_POOL, page, _WEIGHTS)

    def resident():
        return os.fstat(fd).st_blocks * 512 // page

    eraser, driver = PoolEraser(fd, _POOL, page, _WEIGHTS), HostDriver(fd, _POOL + _WEIGHTS, page)
    assert resident() == _POOL
    eraser.zero(_POOL, 2)
    assert resident() == _POOL + 2
    driver.map_run(1, _POOL, 2)
    memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (2 * page)).from_address(driver.address + page))
    memory[:] = 7
    driver.unmap_run(1, 2)
    eraser.discard(_POOL, 2)
    assert resident() == _POOL
    driver.map_run(0, _POOL, 1)
    assert not np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * page).from_address(driver.address)).any()
    driver.close()
    eraser.close()
    os.close(fd)


@pytest.mark.parametrize("kind", [CudaKit, BudgetKit])
def test_a_device_that_is_full_has_either_the_weights_or_serving_s_pages_there(kind):
    kit = kind(4, capacity_pages=6)
    kit.pages["serving"] = pages = WithWeightPages(kit.devices["serving"], kit.pool, 2)
    serving, eraser = CudaDriver(kit.devices["serving"], pages, 6), CudaEraser(kit.devices["serving"], pages)
    weights = CudaDriver(kit.devices["rollout"], BudgetPages(kit.devices["rollout"], 2, kit.page, fresh=False), 2)
    serving.map_run(0, 0, 4)
    kit.fill(serving, 0, 4, 0xAA)
    weights.map_run(0, 0, 2)
    kit.fill(weights, 0, 2, 0xEE)
    with pytest.raises(CudaCallError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        eraser.zero(4, 2)
    weights.unmap_run(0, 2)
    eraser.zero(4, 2)
    with pytest.raises(CudaCallError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        weights.map_run(0, 0, 2)
    serving.map_run(4, 4, 2)
    assert kit.read(serving, 4, 2) == bytes(2 * kit.page), "whatever the weights were"
    kit.fill(serving, 4, 2, 0xAB)
    serving.unmap_run(3, 3)
    eraser.zero(3, 3)
    serving.map_run(3, 3, 3)
    assert kit.read(serving, 3, 3) == bytes(3 * kit.page) and kit.read(serving, 0, 1) == b"\xaa" * kit.page
    serving.unmap_run(4, 2)
    eraser.discard(4, 2)
    weights.map_run(0, 0, 2)
    assert kit.board.used_bytes == 6 * kit.page
    for part in (eraser, serving, weights):
        part.close()
    kit.close()


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"]
)
def test_a_call_that_fails_while_a_weight_page_gets_its_memory_is_made_good_by_the_next(call):
    kit = CudaKit(2)
    kit.pages["serving"] = pages = WithWeightPages(kit.devices["serving"], kit.pool, 1)
    eraser, api = CudaEraser(kit.devices["serving"], pages), kit.apis["serving"]
    before = len(api.calls)
    eraser.zero(2)
    eraser.discard(2, 1)
    api.fail_at = len(api.calls) + api.calls[before:].index(call) + 1
    with pytest.raises(CudaCallError):
        eraser.zero(2)
    eraser.zero(2)
    driver = CudaDriver(kit.devices["serving"], pages, 3)
    driver.map_run(0, 2, 1)
    assert kit.read(driver, 0, 1) == bytes(kit.page)
    driver.close()
    eraser.close()
    kit.close()


# ---- engine cores and supervisor


def _serving(block, ledger):
    runtime = SimpleNamespace(
        block=block, ledger=ledger, _memory_config=MemoryConfig(), _withholding=True, _weight_pages_left=0, woken=0
    )
    runtime.pool = SimpleNamespace(slots=SimpleNamespace(num_used_slots=0))
    runtime.wake_main = lambda: setattr(runtime, "woken", runtime.woken + 1)
    return runtime


def test_the_arbiter_lends_them_while_the_rollout_lives_and_is_deactivated(block, ledger):
    runtime, theirs = _serving(block, ledger), RolloutLedger(block.owners)
    block.set(Word.GENERATION, 1)
    block.set(Word.ROLLOUT_DEACTIVATED, 1)
    theirs.lend_weight_pages(_POOL, _WEIGHTS)
    ServingRuntime._share_weight_pages(runtime)
    assert runtime.woken == 1, "slots that it has closed are open again"
    ledger.make_weight_pages(99)
    held = ledger.take(9, Owner.SERVING)
    runtime.pool.slots.num_used_slots = 9
    block.set(Word.ACTIVE_WANTED, 1)
    ServingRuntime._share_weight_pages(runtime)
    assert ledger.free_pages == 2 and runtime.woken == 1, "serving needs them"
    runtime.pool.slots.num_used_slots = 1
    ServingRuntime._share_weight_pages(runtime)
    assert runtime.woken == 2 and not has_weight_pages(block.owners, _POOL)
    ledger.put(held)
    ServingRuntime._share_weight_pages(runtime)
    assert has_weight_pages(block.owners, _POOL) and not runtime._weight_pages_left


@pytest.mark.parametrize("word", ["GENERATION_DEAD", "ACTIVE_WANTED"])
def test_they_go_back_when_the_rollout_dies_or_is_activated(block, ledger, word):
    block.set(Word.GENERATION, 1)
    block.set(Word.ROLLOUT_DEACTIVATED, 1)
    RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
    runtime = _serving(block, ledger)
    ServingRuntime._share_weight_pages(runtime)
    assert not has_weight_pages(block.owners, _POOL)
    block.set(Word[word], 1)
    ServingRuntime._share_weight_pages(runtime)
    assert has_weight_pages(block.owners, _POOL)


@pytest.mark.parametrize(
    ("freed_bytes", "loaded", "busy", "lent"),
    [
        (3 * 4096, False, False, 3),
        (2 * 4096 + 1, False, False, 2),
        (1 << 40, False, False, 3),
        (3 * 4096, True, False, 0),
        (3 * 4096, False, True, 0),
    ],
)
def test_the_rollout_lends_what_its_weights_have_really_left(block, freed_bytes, loaded, busy, lent):
    block.set(Word.FREED_BYTES, freed_bytes)
    runtime = RolloutRuntime.__new__(RolloutRuntime)
    runtime.block, runtime.ledger = block, RolloutLedger(block.owners)
    runtime.weights = SimpleNamespace(loaded=loaded, busy=busy, waits=False)
    runtime._lend_weight_pages()
    assert (block.owners == Owner.WEIGHTS).sum() == _WEIGHTS, "serving would not know yet that it may"
    block.set(Word.ROLLOUT_DEACTIVATED, 1)
    assert runtime._has_orders() == bool(lent), "also where an activation has taken them back, and was revoked"
    runtime._lend_weight_pages()
    assert (block.owners == Owner.WEIGHTS).sum() == _WEIGHTS - lent
    assert not runtime._has_orders()


def test_a_restart_waits_until_serving_has_left_the_weights_memory(block, ledger, caplog, monkeypatch):
    monkeypatch.setattr("vllm_coserve.engine.supervisor._CLEAR_TIMEOUT_S", 0.05)
    RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
    block.set(Word.SERVING_READY, 1)
    waits = threading.Thread(target=Supervisor(SimpleNamespace(), block, [])._await_weight_pages)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive() and "left its weights' memory" in caplog.text
    ledger.withhold(True)
    waits.join(10)
    assert not waits.is_alive()


def test_a_restart_does_not_wait_for_a_serving_engine_that_is_gone(block):
    RolloutLedger(block.owners).lend_weight_pages(_POOL, _WEIGHTS)
    Supervisor(SimpleNamespace(), block, [])._await_weight_pages()
