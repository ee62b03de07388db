"""Which chunks are in memory, who holds them, and what they contain."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkKey, ChunkNotFoundError, ConfigError, FileStore, MemoryStore
from epic_engine.errors import OutOfPagesError, StoreError
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.memory.residency import Residency
from torch import Tensor

from tests.damage import damage

from .kv_memory import PAGE, chunk, keys_in_memory, make_pool, settled, store_of

PLACEMENTS = ["map", "pool"]


# -- leases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_leased_chunk_is_what_was_stored(opened: Any, placement: str) -> None:
    parts = [chunk(i, tokens) for i, tokens in enumerate((1, PAGE, PAGE + 1, 3 * PAGE - 1))]
    residency = opened(make_pool(20), store_of(*parts), placement=placement)
    keys = [info.key for info, _ in parts]
    with residency.acquire([*keys, keys[0]]) as lease:
        for info, kv in parts:
            assert torch.equal(lease.body(info.key).complete(), kv)
        settled(residency)
        residency.check_integrity([])
        assert residency.stats()["chunks"] == {"resident": 4, "leased": 4, "pinned": 0, "unused": 0, "retired": 0}
        pages = residency._pool.stats()["pages"]
        assert (pages["mapped"] if placement == "map" else pages["chunks"]) == 1 + 1 + 2 + 3
    assert residency.stats()["chunks"]["unused"] == 4
    with pytest.raises(ValueError, match="was released"):
        lease.body(keys[0])
    lease.release()
    residency.check_integrity([])


def test_a_mapped_body_is_the_stores_own_memory(opened: Any) -> None:
    info, kv = chunk(1)
    store = store_of((info, kv))
    residency = opened(make_pool(8), store)
    assert residency.placement == "map"
    with residency.acquire([info.key]) as lease:
        assert lease.body(info.key).kv.data_ptr() == store.load(info.key).data_ptr()


def test_everybody_shares_one_copy(opened: Any) -> None:
    info, kv = chunk(1)
    residency = opened(make_pool(2), store_of((info, kv)), placement="pool")
    leases = [residency.acquire([info.key]) for _ in range(5)]
    assert len({lease.body(info.key).complete().data_ptr() for lease in leases}) == 1
    for lease in leases[1:]:
        lease.release()
    with pytest.raises(OutOfPagesError):
        residency._pool.allocate(1)
    leases[0].release()
    residency._pool.allocate(2)


@pytest.mark.parametrize("needs", ["chunk", "sequence"])
def test_a_forgotten_lease_ends_by_itself(opened: Any, needs: str) -> None:
    parts = [chunk(i) for i in range(2)]
    residency = opened(make_pool(2), store_of(*parts))
    lease = residency.acquire([parts[0][0].key])
    settled(residency)
    lease.me = lease
    del lease
    gc.collect()
    if needs == "chunk":
        residency.acquire([parts[1][0].key]).release()
    else:
        residency._pool.free(residency._pool.allocate(2))
    residency.check_integrity([])


def test_unknown_placements_are_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'map' or 'pool'"):
        Residency(make_pool(2), MemoryStore(), placement="gpu")


# -- what does not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_chunks_that_do_not_fit_change_nothing(opened: Any, placement: str) -> None:
    parts = [chunk(i) for i in range(4)]
    keys = [info.key for info, _ in parts]
    pool = make_pool(7)
    residency = opened(pool, store_of(*parts), placement=placement)
    residency.acquire(keys[:2]).release()
    settled(residency)
    held = residency.acquire(keys[1:2])
    before = pool.stats(), residency.stats()
    with pytest.raises(OutOfPagesError, match=r"8 pages .* 2 of chunks") as caught:
        residency.acquire(keys)
    assert "3 are free" in str(caught.value)
    assert (pool.stats(), residency.stats()) == before
    with pytest.raises(ChunkNotFoundError, match="is not stored"):
        residency.acquire([keys[0], chunk(9)[0].key])
    assert (pool.stats(), residency.stats()) == before
    held.release()


def test_a_chunk_finds_no_place_between_the_pages_of_others(opened: Any) -> None:
    pool = make_pool(8, slab_bytes=1 << 30)
    (whole,) = pool.allocate(8)
    parts = [chunk(1, PAGE), chunk(2, 3 * PAGE)]
    residency = opened(pool, store_of(*parts), placement="pool")
    pool.free([whole.head(1), whole.tail(2).head(2), whole.tail(6)])
    with pytest.raises(OutOfPagesError):
        residency.acquire([info.key for info, _ in parts])
    assert keys_in_memory(residency) == set()
    residency.check_integrity([whole.tail(1).head(1), whole.tail(4).head(2)])


# -- eviction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_three_times_the_budget_rolls_through_oldest_first(opened: Any, placement: str) -> None:
    parts = [chunk(i) for i in range(24)]
    keys = [info.key for info, _ in parts]
    residency = opened(make_pool(16), store_of(*parts), placement=placement, threads=1)  # room for 8 chunks
    residency.pin(keys[:1])
    leased = residency.acquire(keys[1:2])
    model = []  # unused chunks, longest unused first
    draw = random.Random(5)
    for _ in range(150):
        key = draw.choice(keys[2:])
        with residency.acquire([key]) as lease:
            assert torch.equal(lease.body(key).complete(), parts[keys.index(key)][1])
            settled(residency)
        model = [*(k for k in model if k != key), key][-6:]
        assert keys_in_memory(residency) == {*model, *keys[:2]}
    assert residency.stats()["evictions"] > 50
    leased.release()
    residency.unpin(keys[:1])
    assert residency.reclaim(100) == 16
    assert keys_in_memory(residency) == set()
    residency.check_integrity([])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequences_take_the_pages_of_unused_chunks(opened: Any, placement: str) -> None:
    parts = [chunk(i) for i in range(4)]
    pool = make_pool(8)
    residency = opened(pool, store_of(*parts), placement=placement, threads=1)
    residency.acquire([info.key for info, _ in parts]).release()
    settled(residency)
    held = residency.acquire([parts[0][0].key])
    kv = PagedKV(pool)
    kv.reserve(3 * PAGE)
    assert keys_in_memory(residency) == {parts[0][0].key, parts[3][0].key}
    with pytest.raises(OutOfPagesError, match="hold 3 of their own and 2 of chunks"):
        kv.reserve(7 * PAGE)
    assert parts[3][0].key in keys_in_memory(residency), "nothing may be evicted in vain"
    residency.check_integrity(kv.extents)
    held.release()


def test_pins_last_until_unpin_or_forget(opened: Any) -> None:
    parts = [chunk(i) for i in range(3)]
    keys = [info.key for info, _ in parts]
    residency = opened(make_pool(4), store_of(*parts))
    residency.pin(keys[:2])
    settled(residency)
    assert residency.reclaim(4) == 0
    with pytest.raises(OutOfPagesError, match="4 are pinned"):
        residency.acquire(keys[2:])
    residency.unpin([*keys[:1], keys[2]])
    assert residency.reclaim(4) == 2
    residency.forget(keys)
    assert keys_in_memory(residency) == set()
    with pytest.raises(ChunkNotFoundError):
        residency.pin([chunk(9)[0].key])


# -- loads -----------------------------------------------------------------------------------------------------


def test_prefetching_evicts_neither_what_is_used_nor_its_own(opened: Any) -> None:
    parts = [chunk(i) for i in range(8)]
    keys = [info.key for info, _ in parts]
    residency = opened(make_pool(8), store_of(*parts), threads=1)
    residency.acquire(keys[:3]).release()
    settled(residency)
    with residency.acquire(keys[:1]):
        residency.prefetch([keys[1], chunk(99)[0].key, *keys[3:]])
        settled(residency)
        assert keys_in_memory(residency) == {keys[0], keys[1], keys[3], keys[4]}
    residency.check_integrity([])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_damaged_chunk_is_reported_and_leaves_nothing_behind(opened: Any, placement: str, tmp_path: Path) -> None:
    (good, _), (bad, kv) = parts = [chunk(1), chunk(2)]
    store = FileStore(tmp_path)
    store.put(parts)
    damage(tmp_path, bad.key.hex)
    residency = opened(make_pool(8), store, placement=placement)
    with residency.acquire([good.key, bad.key]) as lease:
        with pytest.raises(ChunkNotFoundError, match="compile its tokens again"):
            lease.body(bad.key).wait(0)
        with pytest.raises(ChunkNotFoundError):
            lease.body(bad.key).complete()
        lease.body(good.key).complete()
    settled(residency)
    assert keys_in_memory(residency) == {good.key}
    assert residency.stats()["failures"] == 1
    residency.check_integrity([])
    with pytest.raises(ChunkNotFoundError):
        residency.acquire([bad.key])
    store.put([(bad, kv)])
    with residency.acquire([bad.key]) as lease:
        assert torch.equal(lease.body(bad.key).complete(), kv)
    residency.close()
    store.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_store_that_fails_in_a_load_is_reported_to_all(opened: Any, placement: str) -> None:
    class Failing(MemoryStore):
        def load(self, key: ChunkKey) -> Tensor:
            raise StoreError("the disk is gone: mount it again.")

    store = Failing()
    store.put([chunk(1)])
    key = chunk(1)[0].key
    residency = opened(make_pool(8), store, placement=placement)
    leases = [residency.acquire([key]) for _ in range(3)]
    for lease in leases:
        with pytest.raises(StoreError, match="mount it again"):
            lease.body(key).complete()
        lease.release()
    settled(residency)
    residency.check_integrity([])
    assert residency._pool.stats()["pages"]["free"] == 8
    residency.prefetch([key])
    settled(residency)
    residency.check_integrity([])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_replaced_or_deleted_chunk_stays_with_its_holders_alone(opened: Any, placement: str, tmp_path: Path) -> None:
    info, old = chunk(1)
    _, new = chunk(1, version=1)
    store = FileStore(tmp_path)
    store.put([(info, old)])
    residency = opened(make_pool(8), store, placement=placement)
    first = residency.acquire([info.key])
    assert torch.equal(first.body(info.key).complete(), old)
    store.put([(info, new)])
    residency.forget([info.key])
    second = residency.acquire([info.key])
    assert torch.equal(second.body(info.key).complete(), new)
    store.delete([info.key])
    residency.forget([info.key, chunk(9)[0].key])
    with pytest.raises(ChunkNotFoundError):
        residency.acquire([info.key])
    assert torch.equal(first.body(info.key).kv, old)
    assert torch.equal(second.body(info.key).kv, new)
    settled(residency)
    assert residency.stats()["chunks"]["retired"] == 2
    residency.check_integrity([])
    first.release()
    second.release()
    assert residency._pool.stats()["pages"]["free"] == 8
    residency.close()
    store.close()
