"""Chunks and sequences on one budget: everything at once, in any order and from many threads."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from epic_engine import ChunkKey, ChunkNotFoundError, FileStore
from epic_engine.errors import OutOfPagesError
from epic_engine.memory.lease import Lease
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.memory.residency import Residency
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from .kv_memory import DIM, HEADS, LAYERS, PAGE, append, chunk, contents, keys_in_memory, make_pool, settled, store_of

PLACEMENTS = ["map", "pool"]
TOKENS = (3, PAGE, 2 * PAGE, 3 * PAGE + 1, 6 * PAGE)


class MemoryMachine(RuleBasedStateMachine):
    """Chunks and sequences on one budget that is too small for all of them."""

    @initialize(placement=st.sampled_from(PLACEMENTS))
    def begin(self, placement: str) -> None:
        self.pool = make_pool(24)
        self.chunks = [chunk(i, tokens) for i, tokens in enumerate(TOKENS * 2)]
        self.keys = [info.key for info, _ in self.chunks]
        self.store = store_of(*self.chunks)
        self.stored = {info.key: kv for info, kv in self.chunks}
        self.residency = Residency(self.pool, self.store, placement=placement, threads=1)
        self.leases: list[tuple[Lease, dict[ChunkKey, Tensor]]] = []
        self.sequences: list[tuple[PagedKV, np.ndarray]] = []
        self.pinned: set[ChunkKey] = set()
        self.versions = 0

    some = st.lists(st.integers(0, 2 * len(TOKENS) - 1), max_size=4)

    @rule(numbers=some)
    def acquire(self, numbers: list[int]) -> None:
        keys = [self.keys[i] for i in numbers]
        try:
            lease = self.residency.acquire(keys)
        except ChunkNotFoundError:
            assert any(key not in self.stored for key in keys)
            return
        except OutOfPagesError:
            return
        self.leases.append((lease, {key: self.stored[key] for key in keys}))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["release", "twice", "drop"]))
    def release(self, data: st.DataObject, how: str) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if how != "drop":
            lease.release()
        if how == "twice":
            lease.release()

    @rule(numbers=some)
    def prefetch(self, numbers: list[int]) -> None:
        self.residency.prefetch([self.keys[i] for i in numbers])

    @rule(number=st.integers(0, 2 * len(TOKENS) - 1))
    def pin(self, number: int) -> None:
        try:
            self.residency.pin([self.keys[number]])
        except (ChunkNotFoundError, OutOfPagesError):
            return
        self.pinned.add(self.keys[number])

    @rule(numbers=some)
    def unpin(self, numbers: list[int]) -> None:
        self.residency.unpin([self.keys[i] for i in numbers])
        self.pinned.difference_update(self.keys[i] for i in numbers)

    @rule(number=st.integers(0, 2 * len(TOKENS) - 1), again=st.booleans())
    def change(self, number: int, again: bool) -> None:
        key = self.keys[number]
        self.store.delete([key])
        self.stored.pop(key, None)
        if again:
            self.versions += 1
            info, kv = chunk(number, len(self.chunks[number][0].token_ids), self.versions)
            self.store.put([(info, kv)])
            self.stored[key] = kv
        self.residency.forget([key])
        self.pinned.discard(key)

    @rule(pages=st.integers(1, 24))
    def reclaim(self, pages: int) -> None:
        unused = self.pool.ledger.counts().unused
        freed = self.residency.reclaim(pages)
        assert freed >= min(pages, unused)

    @rule(tokens=st.integers(1, 20), data=st.data())
    def write(self, tokens: int, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences)))
        if index == len(self.sequences):
            self.sequences.append((PagedKV(self.pool), np.empty((LAYERS, 2, HEADS, 0, DIM), np.float32)))
        kv, want = self.sequences[index]
        try:
            kv.reserve(tokens)
        except OutOfPagesError:
            return
        rows = append(kv, tokens, index + tokens)
        self.sequences[index] = kv, np.concatenate([want, rows.numpy()], axis=3)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        kv, want = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        try:
            self.sequences.append((kv.fork(), want))
        except OutOfPagesError:
            return

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), drop=st.booleans())
    def end(self, data: st.DataObject, drop: bool) -> None:
        kv, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if not drop:
            kv.release()

    @invariant()
    def all_is_as_written(self) -> None:
        if not hasattr(self, "residency"):
            return
        settled(self.residency)  # what fits must not depend on the loader's speed
        for kv, want in self.sequences:
            assert np.array_equal(contents(kv).numpy(), want)
        for lease, wanted in self.leases:
            for key, want in wanted.items():
                assert torch.equal(lease.body(key).complete(), want)
        self.residency.check_integrity([e for kv, _ in self.sequences for e in kv.extents])
        assert self.pinned <= keys_in_memory(self.residency)
        mapped = self.pool.ledger.counts().mapped
        assert sum(s.kv.nbytes for s in self.pool._slabs.values()) <= (24 - mapped) * self.pool.page_bytes

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for lease, _ in self.leases:
            lease.release()
        for kv, _ in self.sequences:
            kv.release()
        self.residency.close()
        self.residency.check_integrity([])
        assert self.pool.stats()["pages"]["free"] == 24


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_many_threads_share_a_residency(placement: str, tmp_path: Path) -> None:
    parts = [chunk(i, tokens) for i, tokens in enumerate(TOKENS * 3)]
    store = FileStore(tmp_path)
    store.put(parts)
    pool = make_pool(40)
    residency = Residency(pool, store, placement=placement)
    errors: list[BaseException] = []
    short = threading.Event()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        kept: list[PagedKV] = []
        try:
            for step in range(120):
                chosen = draw.sample(parts, draw.randint(1, 4))
                keys = [info.key for info, _ in chosen]
                action = draw.random()
                if action < 0.1:
                    residency.prefetch(keys)
                elif action < 0.15:
                    residency.forget(keys)
                elif action < 0.2:
                    residency.reclaim(draw.randint(1, 10))
                elif action < 0.25 and kept:
                    kept.pop()  # collected, not released
                try:
                    lease = residency.acquire(keys)
                    for info, kv in chosen:
                        assert torch.equal(lease.body(info.key).complete(), kv)
                    own = PagedKV(pool)
                    own.reserve(draw.randint(1, 12))
                    rows = append(own, own.capacity, seed)
                    kept.append(own.fork())
                    assert torch.equal(contents(own), rows)
                    for info, kv in chosen:
                        assert torch.equal(lease.body(info.key).kv, kv)
                    if step % 3:
                        lease.release()
                        own.release()
                except OutOfPagesError:
                    short.set()
                    kept.clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert not errors
    assert short.is_set(), "the budget was never short: this test tries nothing"
    del threads
    gc.collect()
    settled(residency)
    residency.check_integrity([])
    residency.clear()
    residency.check_integrity([])
    assert pool.stats()["pages"]["free"] == 40
    residency.close()
    store.close()
