"""What stays and what goes: expiry, pins, quotas, the budget and its order, namespaces, uses."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epic_engine import ChunkInfo, ChunkKey, ChunkNotFoundError, ChunkStore, FileStore, MemoryStore, StoreError
from epic_engine.chunks import content_digest
from epic_engine.storage.eviction import SECONDS_PER_TOKEN, victims, weight
from epic_engine.storage.segments import as_bytes, pack, padded
from torch import Tensor

from tests.damage import damage, where
from tests.engine.test_store import entry


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    made: ChunkStore = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
    yield made
    made.close()


def sized(number: int, tokens: int, cost: float | None, namespace: str = "one") -> tuple[ChunkInfo, Tensor]:
    """A chunk of so many tokens; 64 bytes of KV each."""
    ids = tuple(range(number, number + tokens))
    kv = torch.full((1, 2, 1, tokens, 8), float(number))
    key = ChunkKey.of("f", namespace, "isolated", ids)
    return ChunkInfo(key, namespace, "f", content_digest(ids), "isolated", ids, (), kv.nbytes, 0.0, cost=cost), kv


def keys_of(store: ChunkStore) -> set[ChunkKey]:
    return {info.key for info in store.entries()}


# -- expiry ----------------------------------------------------------------------------------------------------


def test_an_expired_chunk_is_a_miss_and_goes(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forever, until = entry(3), entry(4)
    until = replace(until[0], expires=5e9), until[1]
    store.put([forever, until])
    held = store.load(until[0].key)
    assert store.info(until[0].key) == until[0]
    for now, there in ((5e9 - 1, True), (5e9, False), (5e9 + 1, False)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert (store.info(until[0].key) is not None) == there
        assert (until[0].key in store.known([until[0].key, forever[0].key])) == there
        assert len(store.forms("one", "f", until[0].content)) == there
        assert len(keys_of(store)) == 1 + there
    with pytest.raises(ChunkNotFoundError):
        store.load(until[0].key)
    assert store.usage().chunks == 2
    assert store.gc().expired == 1
    assert store.gc().expired == 0
    assert store.usage().chunks == 1
    assert torch.equal(held, until[1])
    store.put([(replace(until[0], expires=6e9), until[1])])
    assert torch.equal(store.load(until[0].key), until[1])
    assert store.verify().clean


# -- quotas, pins, namespaces ----------------------------------------------------------------------------------


def size_of(store: ChunkStore, tokens: int) -> int:
    """What one chunk of so many tokens takes in this store."""
    store.put([sized(900, tokens, 1.0, "probe")])
    (size,) = (nbytes for (name, _), (_, nbytes) in store.usage().models.items() if name == "probe")
    store.erase_namespace("probe")
    return size


def test_a_quota_evicts_the_tenants_own_chunks_alone(store: ChunkStore) -> None:
    size = size_of(store, 4)
    store.set_quota("one", 3 * size)
    theirs = [sized(n, 4, 0.0, "two") for n in range(3)]
    store.put(theirs)
    mine = [sized(10 + n, 4, float(1 + n)) for n in range(3)]
    store.put(mine)
    assert len(keys_of(store)) == 6
    store.put([sized(20, 4, 9.0)])  # the cheapest of its own goes, though others' are cheaper
    assert keys_of(store) == {i.key for i, _ in (*theirs, *mine[1:], sized(20, 4, 9.0))}
    with pytest.raises(StoreError, match=rf"namespace 'one' may take {3 * size:,} bytes.*pinned chunks take 0.*raise"):
        store.put([sized(30 + n, 4, 9.0) for n in range(4)])
    assert len(keys_of(store)) == 6
    assert store.pin([mine[1][0].key, mine[2][0].key, sized(99, 4, 1.0)[0].key]) == 2
    with pytest.raises(StoreError, match=rf"pinned chunks take {2 * size:,}, and the new chunks need {2 * size:,}"):
        store.put([sized(40 + n, 4, 9.0) for n in range(2)])
    store.put([sized(40, 4, 0.0)])
    assert keys_of(store) == {i.key for i, _ in (*theirs, *mine[1:], sized(40, 4, 0.0))}
    store.put([mine[1]])  # a chunk that is replaced needs no more room, and stays pinned
    store.put([sized(41, 4, 0.0)])
    assert {mine[1][0].key, mine[2][0].key} < keys_of(store)
    assert store.unpin([mine[1][0].key, mine[1][0].key]) >= 1
    store.set_quota("one", size)
    with pytest.raises(StoreError, match="may take"):
        store.put([sized(42, 4, 0.0)])
    store.set_quota("one", None)
    store.put([sized(50 + n, 4, 1.0) for n in range(5)])
    assert store.usage().models["one", "f"][0] == 8
    assert store.verify().clean


def test_a_tenant_is_erased_with_everything(store: ChunkStore) -> None:
    chunks = [sized(n, 4, 1.0, ("one", "two")[n % 2]) for n in range(6)]
    store.put(chunks)
    store.set_quota("one", 10**6)
    assert store.erase_namespace("one") == 3
    assert store.erase_namespace("one") == 0
    assert store.erase_namespace("none") == 0
    assert keys_of(store) == {i.key for i, _ in chunks[1::2]}
    assert {name for name, _ in store.usage().models} == {"two"}
    assert store.delete([chunks[1][0].key]) == 1
    assert store.usage().chunks == 2
    store.gc()
    assert keys_of(store) == {i.key for i, _ in chunks[3::2]}


# -- the budget ------------------------------------------------------------------------------------------------


class Plain:
    """GreedyDual-Size-Frequency as the paper has it, for chunks that are put once and then used."""

    def __init__(self, limit: int) -> None:
        self.limit, self.clock = limit, 0.0
        self.held: dict[ChunkKey, tuple[int, float, int, float]] = {}

    def put(self, key: ChunkKey, size: int, cost: float) -> None:
        while sum(s for s, *_ in self.held.values()) + size > self.limit:
            lowest = min(self.held, key=lambda k: self.held[k][3])
            self.clock = self.held.pop(lowest)[3]
        self.held[key] = size, cost, 1, self.clock + cost / size

    def use(self, key: ChunkKey) -> None:
        size, cost, uses, _ = self.held[key]
        self.held[key] = size, cost, uses + 1, self.clock + (uses + 1) * cost / size


def test_the_budget_keeps_what_a_plain_gdsf_keeps(tmp_path: Path) -> None:
    limit = 60_000
    store = FileStore(tmp_path / "store", max_bytes=limit)
    plain = Plain(limit)
    rng = random.Random(7)
    for number in range(150):
        info, kv = sized(number, rng.choice([4, 40, 90]), rng.uniform(0.1, 5.0))
        store.put([(info, kv)])
        head, _, stored = pack(info, kv.shape, "float32", [as_bytes(kv)])
        plain.put(info.key, len(head) + padded(stored), info.cost or 0.0)
        assert keys_of(store) == set(plain.held), number
        for key in rng.sample(sorted(plain.held), min(2, len(plain.held))):
            store.load(key)
            plain.use(key)
        store._write_uses()  # otherwise the next put writes them, too late for the order of equal clocks
    assert plain.clock > 0
    assert store.usage().nbytes <= limit
    store.close()
    again = FileStore(tmp_path / "store")  # the limit stays with the store
    again.put([sized(1000 + n, 40, 1.0) for n in range(3)])
    assert again.usage().chunks > 3
    assert again.usage().nbytes <= limit
    assert again.free_bytes() <= limit
    with pytest.raises(StoreError, match=r"the store may take .* the new chunks need"):
        again.put([sized(2000 + n, 90, 1.0) for n in range(40)])
    assert again.verify().clean


def test_uses_reach_the_catalogue_with_the_next_put_or_close(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put([entry(3), entry(4)])

    def uses() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as db:
            return [row[0] for row in db.execute("SELECT uses FROM ranks ORDER BY chunk")]

    for _ in range(5):
        store.load(entry(3)[0].key)
    assert uses() == [1, 1]
    store.put([entry(5)])
    assert uses() == [6, 1, 1]
    store.load(entry(4)[0].key)
    store.close()
    assert uses() == [6, 2, 1]


def test_a_refused_put_loses_no_uses(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put([entry(3)])
    store.load(entry(3)[0].key)
    store.set_quota("one", 10)
    with pytest.raises(StoreError):
        store.put([entry(4)])
    assert store._uses.total() == 1


def test_what_is_evicted_is_readable_for_who_holds_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    size = size_of(store, 4)
    store.put([sized(1, 4, 1.0)])
    held = store.load(sized(1, 4, 1.0)[0].key)
    store.close()
    store = FileStore(tmp_path, max_bytes=size)
    store.put([sized(2, 4, 9.0)])
    store.compact(live_share=1.0)
    assert keys_of(store) == {sized(2, 4, 9.0)[0].key}
    assert torch.equal(held, sized(1, 4, 1.0)[1])


def test_the_expired_go_before_the_worthless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(FileStore(tmp_path / "probe"), 4)
    store = FileStore(tmp_path / "store", max_bytes=3 * size)
    dear = sized(1, 4, 100.0)
    store.put([(replace(dear[0], expires=time.time() + 1000), dear[1]), sized(2, 4, 0.0)])
    later = time.time() + 2000
    monkeypatch.setattr(time, "time", lambda: later)
    store.put([sized(3, 4, 1.0), sized(4, 4, 1.0)])
    assert keys_of(store) == {sized(n, 4, 1.0)[0].key for n in (2, 3, 4)}


def test_weights_and_victims() -> None:
    info = sized(1, 10, None)[0]
    assert weight(info, 100) == pytest.approx(10 * SECONDS_PER_TOKEN / 100)
    assert weight(replace(info, cost=3.0), 100) == pytest.approx(0.03)
    assert weight(replace(info, cost=-3.0), 0) == 0.0
    ranked = [("a", 5, 0.1), ("b", 5, 0.2), ("c", 5, 0.3)]
    assert victims(ranked, 0) == ([], 0.0)
    assert victims(ranked, 6) == (["a", "b"], 0.2)
    assert victims(ranked, 16) is None


def test_usage_tells_what_could_be_given_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    chunks = [entry(n, fingerprint="fg"[n % 2]) for n in range(4)]
    store.put(chunks)
    usage = store.usage()
    assert {name: chunks for name, (chunks, _) in usage.models.items()} == {("one", "f"): 2, ("one", "g"): 2}
    assert usage.dead_bytes == usage.quarantined == 0
    assert usage.nbytes == sum(f.stat().st_size - 64 for f in tmp_path.glob("segments/*.seg"))
    damage(tmp_path, chunks[0][0].key.hex)
    with pytest.raises(ChunkNotFoundError):
        store.load(chunks[0][0].key)
    store.delete([chunks[1][0].key])
    after = store.usage()
    assert (after.chunks, after.quarantined) == (2, 1)
    assert after.dead_bytes == usage.nbytes - after.nbytes
    assert store.compact() == 0  # half of it is still in use
    assert store.compact(live_share=0.6) == after.dead_bytes + 64  # and a header
    store.put([chunks[2]])
    assert store.usage().dead_bytes == usage.nbytes // 4


def test_the_store_tidies_up_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epic_engine.storage import file_store

    monkeypatch.setattr(file_store, "_TIDY_AFTER", 0.01)
    monkeypatch.setattr(file_store, "_WORTH_COMPACTING", 1)
    store = FileStore(tmp_path)
    chunks = [entry(n) for n in range(8)]
    store.put(chunks)
    before = set(tmp_path.glob("segments/*.seg"))
    store.delete([i.key for i, _ in chunks[:6]])
    deadline = time.monotonic() + 20
    while set(tmp_path.glob("segments/*.seg")) & before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(tmp_path.glob("segments/*.seg")) & before
    assert all(torch.equal(store.load(i.key), kv) for i, kv in chunks[6:])
    store.close()


def test_a_store_that_nobody_holds_is_collected(tmp_path: Path) -> None:
    import gc
    import weakref

    store = FileStore(tmp_path)
    store.put([entry(3)])
    store.load(entry(3)[0].key)  # a timer is set for its uses
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    FileStore(tmp_path).put([entry(4)])
    assert len({lies.file for lies in where(tmp_path).values()}) == 1  # its segment is free


# -- leases ----------------------------------------------------------------------------------------------------


def test_a_lease_is_held_by_one(tmp_path: Path) -> None:
    one, two = FileStore(tmp_path), FileStore(tmp_path)
    a, b, c = (entry(n)[0].key for n in range(3))
    assert one.lease([a, b, a], 60) == {a, b}
    assert one.lease([a], 60) == {a}
    assert two.lease([a, c], 60) == {c}
    two.release([a, c])
    assert two.lease([a], 60) == set()
    one.release([a])
    assert two.lease([a, b], 60) == {a}
    one.close()
    assert two.lease([a, b], 60) == {a, b}


@pytest.mark.parametrize(
    ("passed", "free"), [(0.0, False), (59.0, False), (60.0, True), (1e6, True), (-1.0, True), (-1e6, True)]
)
def test_a_lease_ends_with_its_time_or_when_the_clock_jumps(
    passed: float, free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = FileStore(tmp_path), FileStore(tmp_path)
    key = entry(1)[0].key
    now = time.time()
    clock: Callable[[], float] = lambda: now  # noqa: E731
    monkeypatch.setattr(time, "time", clock)
    assert one.lease([key], 60) == {key}
    monkeypatch.setattr(time, "time", lambda: now + passed)
    assert two.gc().leases == free
    assert two.lease([key], 60) == ({key} if free else set())


def test_memory_grants_everything() -> None:
    store = MemoryStore()
    keys = [entry(n)[0].key for n in range(3)]
    assert store.lease(keys, 1.0) == set(keys)
    store.release(keys)
    assert store.compact() == 0
