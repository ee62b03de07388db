"""A sequence's own KV on shared pages, against plain arrays."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from epic_engine.errors import OutOfPagesError
from epic_engine.memory.paged_kv import PagedKV
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from .kv_memory import DIM, HEADS, LAYERS, PAGE, append, contents, make_pool, rows_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def filled(kv: PagedKV, tokens: int, seed: int) -> Tensor:
    kv.reserve(tokens)
    return append(kv, tokens, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_comes_back(dtype: torch.dtype) -> None:
    kv = PagedKV(make_pool(20, dtype), base=5)
    want = torch.cat([filled(kv, tokens, tokens) for tokens in (1, 3, 9, 4, 1)], dim=3)
    assert contents(kv).dtype == dtype
    assert torch.equal(contents(kv), want)
    assert (kv.length, kv.base) == (18, 5)
    assert kv.capacity == kv.pages * PAGE


def test_rows_are_visible_only_once_they_are_counted() -> None:
    kv = PagedKV(make_pool(20))
    want = filled(kv, 3, 1)
    kv.reserve(2)
    rows = rows_of(2, 2, kv)
    for layer in range(LAYERS):
        kv.write(layer, rows[layer, 0], rows[layer, 1])
    assert torch.equal(contents(kv), want)
    kv.length += 2
    assert torch.equal(contents(kv), torch.cat([want, rows], dim=3))


def test_writing_crosses_extents() -> None:
    pool = make_pool(32)
    kv, other = PagedKV(pool), PagedKV(pool)
    parts = []
    for seed in range(5):  # the other one stands in the way each time
        parts.append(filled(kv, PAGE, seed))
        filled(other, PAGE, seed)
    assert len(kv.pieces()) > 1
    kv.truncate(2)
    kv.reserve(40)
    want = torch.cat([parts[0][:, :, :, :2], append(kv, 40, 9)], dim=3)
    assert torch.equal(contents(kv), want)


def test_writing_without_room_is_refused() -> None:
    kv = PagedKV(make_pool(4))
    rows = rows_of(1, 1, kv)
    with pytest.raises(ValueError, match="reserve first"):
        kv.write(0, rows[0, 0], rows[0, 1])
    filled(kv, PAGE, 1)
    with pytest.raises(ValueError, match="reserve first"):
        kv.write(0, rows[0, 0], rows[0, 1])


def test_a_sequence_grows_in_place_where_it_can() -> None:
    kv = PagedKV(make_pool(1024))
    other = PagedKV(kv._pool)
    filled(kv, 1, 1)
    for seed in range(15):
        filled(kv, 1, seed)
    assert kv.extents[0].pages == 4
    filled(other, 1, 1)  # directly behind
    assert len(kv.pieces()) == len(other.pieces()) == 1


def test_a_sequence_that_cannot_grow_in_place_stays_in_few_pieces() -> None:
    pool = make_pool(2000)
    sequences = [PagedKV(pool) for _ in range(4)]
    for seed in range(300):
        for kv in sequences:
            filled(kv, 1, seed)
    assert all(len(kv.pieces()) < 20 for kv in sequences)
    assert all(kv.pages <= 1.25 * 300 / PAGE + 1 for kv in sequences)


def test_forks_name_the_same_memory_for_what_they_share() -> None:
    pool = make_pool(64)
    parent = PagedKV(pool, base=3)
    shared = filled(parent, 10, 1)
    parent.reserve(20)
    children = [parent.fork() for _ in range(3)]
    family = [parent, *children]
    own = [filled(kv, 5, 10 + i) for i, kv in enumerate(family)]
    grandchild = children[0].fork()
    first = {(kv.pieces()[0][0].data_ptr(), *kv.pieces()[0][1:]) for kv in [*family, grandchild]}
    assert first == {(parent.pieces()[0][0].data_ptr(), 0, 8)}
    assert [(kv.base, kv.length) for kv in family] == [(3, 15)] * 4
    for kv, rows in zip(family, own, strict=True):
        assert torch.equal(contents(kv), torch.cat([shared, rows], dim=3))
    assert torch.equal(contents(grandchild), contents(children[0]))
    # 2 shared pages; beyond them 4 sequences of 7 tokens, the parent's room, and the grandchild's partial page.
    assert pool.stats()["pages"]["private"] == 2 + 3 * 2 + 6 + 1


def test_a_fork_of_full_pages_copies_nothing() -> None:
    pool = make_pool(3)
    parent = PagedKV(pool)
    filled(parent, 2 * PAGE, 1)
    child = parent.fork()
    assert pool.stats()["pages"]["private"] == 2
    filled(child, 1, 2)
    with pytest.raises(OutOfPagesError):
        parent.reserve(1)
    child.release()
    filled(parent, 1, 3)
    assert contents(parent).shape[3] == 2 * PAGE + 1


def test_a_fork_of_full_pages_stays_one_piece_of_memory_to_both() -> None:
    parent = PagedKV(make_pool(256))
    filled(parent, 2 * PAGE, 1)
    child = parent.fork()
    for kv in (parent, child):
        filled(kv, 1, 2)
    assert [[piece[1:] for piece in kv.pieces()] for kv in (parent, child)] == [[(0, 8), (8, 9)], [(0, 8), (12, 13)]]


def test_a_shared_page_that_is_cut_into_is_copied_before_it_is_written() -> None:
    pool = make_pool(16)
    parent = PagedKV(pool)
    want = filled(parent, 10, 1)
    child = parent.fork()
    child.truncate(6)
    assert child.capacity == 6
    rows = filled(child, 3, 2)
    assert torch.equal(contents(child), torch.cat([want[:, :, :, :6], rows], dim=3))
    assert torch.equal(contents(parent), want)
    pool.check_integrity([*parent.extents, *child.extents])
    # Nobody else holds it any more: the page is used as it is.
    third = parent.fork()
    third.truncate(6)
    parent.release()
    child.release()
    before = third.extents
    third.reserve(2)
    assert third.extents == before
    assert third.capacity == 8


def test_room_is_kept_for_another_try_unless_a_fork_holds_it() -> None:
    pool = make_pool(32)
    kv = PagedKV(pool)
    want = filled(kv, 5, 1)
    filled(kv, 10, 2)
    kv.truncate(5, keep_room=True)
    assert kv.capacity == 16
    again = append(kv, 10, 3)
    child = kv.fork()
    kv.truncate(5, keep_room=True)
    assert kv.capacity == 5
    filled(kv, 10, 4)
    assert torch.equal(contents(child), torch.cat([want, again], dim=3))


def test_room_reserved_in_vain_goes_back() -> None:
    pool = make_pool(32)
    kv = PagedKV(pool)
    want = filled(kv, 5, 1)
    kv.reserve(50)
    kv.truncate(5)
    assert pool.stats()["pages"]["private"] == 2
    assert torch.equal(contents(kv), want)
    with pytest.raises(ValueError, match="cannot be cut"):
        kv.truncate(6)


def test_releasing_twice_and_forgetting_free_the_pages() -> None:
    pool = make_pool(8)
    kv = PagedKV(pool)
    filled(kv, 20, 1)
    kv.release()
    kv.release()
    assert (kv.length, kv.capacity, kv.pieces()) == (0, 0, [])
    kv = PagedKV(pool)
    filled(kv, 20, 1)
    child = kv.fork()
    del kv, child
    gc.collect()
    assert pool.stats()["pages"]["free"] == 8
    pool.check_integrity([])


class PagedKVMachine(RuleBasedStateMachine):
    """Sequences on a pool that is too small for them, each with an array of what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(24, slab_bytes=6 * make_pool(1).page_bytes)
        self.live: list[tuple[PagedKV, np.ndarray]] = []
        self.seed = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.live) - 1))

    @precondition(lambda self: len(self.live) < 6)
    @rule()
    def new(self) -> None:
        self.live.append((PagedKV(self.pool), np.empty((LAYERS, 2, HEADS, 0, DIM), np.float32)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 13), more=st.integers(0, 9))
    def grow(self, data: st.DataObject, tokens: int, more: int) -> None:
        index = self.pick(data)
        kv, want = self.live[index]
        before = kv.extents, kv.capacity, self.pool.stats()
        try:
            kv.reserve(tokens + more)
        except OutOfPagesError:
            assert (kv.extents, kv.capacity, self.pool.stats()) == before
            return
        self.seed += 1
        rows = append(kv, tokens, self.seed)
        self.live[index] = kv, np.concatenate([want, rows.numpy()], axis=3)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        kv, want = self.live[self.pick(data)]
        before = [(p[0].data_ptr(), *p[1:]) for p in kv.pieces()], kv.capacity, self.pool.stats()
        try:
            child = kv.fork()
        except OutOfPagesError:
            assert ([(p[0].data_ptr(), *p[1:]) for p in kv.pieces()], kv.capacity, self.pool.stats()) == before
            return
        assert kv.capacity == before[1]
        full = kv.length // PAGE * PAGE
        at, mine = 0, {(p[0].data_ptr(), *p[1:]) for p in kv.pieces()}
        for tensor, start, stop in child.pieces():
            if at < full:
                assert (tensor.data_ptr(), start, stop) in mine
            at += stop - start
        self.live.append((child, want.copy()))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep_room=st.booleans())
    def truncate(self, data: st.DataObject, keep_room: bool) -> None:
        index = self.pick(data)
        kv, want = self.live[index]
        length = data.draw(st.integers(0, kv.length))
        kv.truncate(length, keep_room=keep_room)
        self.live[index] = kv, want[:, :, :, :length]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.live.pop(self.pick(data))[0].release()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.live.pop(self.pick(data))

    @invariant()
    def all_is_as_written(self) -> None:
        for kv, want in self.live:
            assert np.array_equal(contents(kv).numpy(), want)
            assert kv.length <= kv.capacity <= kv.pages * PAGE
        self.pool.check_integrity([extent for kv, _ in self.live for extent in kv.extents])
        assert sum(s.kv.nbytes for s in self.pool._slabs.values()) <= 24 * self.pool.page_bytes

    def teardown(self) -> None:
        for kv, _ in self.live:
            kv.release()
        self.pool.check_integrity([])
        assert self.pool.stats()["pages"]["free"] == 24
        assert not self.pool._slabs


TestPagedKVMachine = PagedKVMachine.TestCase
TestPagedKVMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pages_for_what_is_expected_can_be_given_back() -> None:
    pool = make_pool(40, slab_bytes=1 << 20)
    kv = PagedKV(pool)
    kv.reserve(3, expected=5 * PAGE)
    assert (kv.pages, len(kv.extents)) == (6, 1)
    want = append(kv, 3, seed=1)
    kv.trim(PAGE)
    assert kv.pages == 2
    assert kv.capacity >= 3 + PAGE
    kv.trim(0)
    assert kv.pages == 1
    assert torch.equal(contents(kv), want)
    pool.check_integrity(kv.extents)
