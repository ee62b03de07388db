"""The budget, the counts behind it, and the memory that they stand for."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from epic_engine import ChunkKey, ConfigError
from epic_engine.errors import InsufficientResourcesError, OutOfPagesError
from epic_engine.memory.budget import format_bytes, parse_memory
from epic_engine.memory.ledger import Extent, Ledger
from epic_engine.memory.pages import PagePool
from epic_engine.model.spec import ModelSpec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .kv_memory import CPU, PAGE, make_pool, make_spec

# -- budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GiB", 8 << 30),
        ("512MB", 512_000_000),
        (" 1.5 kib ", 1536),
        ("2048", 2048),
        ("100b", 100),
        ("0.25", 4 << 30),
        (0.25, 4 << 30),
        (1.0, 16 << 30),
        (4096, 4096),
        (None, 8 << 30),
    ],
)
def test_a_budget_is_read(value: str | int | float | None, expected: int) -> None:
    assert parse_memory(value, 16 << 30) == expected


def test_the_share_that_none_stands_for() -> None:
    assert parse_memory(None, 1000, share=0.8) == 800


@pytest.mark.parametrize("value", ["", "much", "8 QiB", "-1", "1e9", 1.5, 0.0, -0.5, "1.5", True, float("nan")])
def test_what_is_no_budget_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match=r"memory=.*(0\.5|whole bytes)"):
        parse_memory(value, 16 << 30)


@pytest.mark.parametrize("value", [0, -5, "0", "17GiB", (16 << 30) + 1])
def test_a_budget_that_is_not_there_is_refused(value: str | int) -> None:
    with pytest.raises(ConfigError, match=r"16\.0 GiB are free"):
        parse_memory(value, 16 << 30)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


# -- ledger ----------------------------------------------------------------------------------------------------


def key_of(number: int) -> ChunkKey:
    return ChunkKey(f"{number:064x}")


def test_the_smallest_hole_that_fits_is_taken_from_the_asked_end() -> None:
    ledger = Ledger(30)
    ledger.add_slab(30)
    whole = ledger.take(30)
    assert whole is not None
    ledger.drop([Extent(0, 2, 8), Extent(0, 14, 5), Extent(0, 25, 5)])
    assert ledger.take(4) == Extent(0, 14, 4)
    assert ledger.take(4, high=True) == Extent(0, 26, 4)
    assert ledger.take(9) is None
    assert ledger.take_pieces(10) == [Extent(0, 2, 8), Extent(0, 18, 1), Extent(0, 25, 1)]
    assert ledger.take_pieces(1) is None


def test_an_extent_grows_into_free_pages_only() -> None:
    ledger = Ledger(10)
    ledger.add_slab(10)
    first, second = ledger.take(3), ledger.take(3)
    assert first is not None
    assert second is not None
    assert ledger.grow(first, 1) is None
    assert ledger.grow(second, 4) == Extent(0, 6, 4)
    ledger.drop([second])
    assert ledger.grow(first, 4) is None
    assert ledger.grow(first, 2) == Extent(0, 3, 2)
    ledger.check_integrity([first, Extent(0, 3, 2), Extent(0, 6, 4)])


def test_giving_back_twice_is_refused() -> None:
    ledger = Ledger(10)
    ledger.add_slab(10)
    extent = ledger.take(3)
    assert extent is not None
    ledger.drop([extent])
    with pytest.raises(ValueError, match="given back before"):
        ledger.drop([extent])
    with pytest.raises(ValueError, match="given back before"):
        ledger.share([extent])
    entry = ledger.enter(key_of(1), 1, None)
    ledger.unlease(entry)
    with pytest.raises(ValueError, match="is not leased"):
        ledger.unlease(entry)


def test_unused_chunks_stand_in_order_of_their_last_use() -> None:
    ledger = Ledger(10)
    assert ledger.charge(6)
    a, b, c = (ledger.enter(key_of(i), 2, None) for i in range(3))
    assert ledger.coldest() is None
    assert ledger.obtainable(mapped=True) == 4
    for entry in (b, a, c):
        ledger.unlease(entry)
    assert ledger.coldest() is b
    assert ledger.obtainable(mapped=True) == 10
    ledger.lease(b)
    assert ledger.coldest() is a
    ledger.pin(a, True)
    assert ledger.coldest() is c
    ledger.unlease(b)
    ledger.pin(a, False)
    assert ledger.coldest() is c
    ledger.lease(c)
    ledger.unlease(c)
    assert ledger.coldest() is b
    ledger.begin_load(b)
    assert ledger.coldest() is a
    assert ledger.obtainable(mapped=True) == 10
    assert not ledger.retire(b)
    with pytest.raises(ValueError, match="is in use"):
        ledger.remove(b)
    assert ledger.end_load(b)
    ledger.remove(b)
    ledger.discharge(2)
    ledger.check_integrity()


@pytest.mark.parametrize("break_it", ["holder", "hole", "unused", "mapped", "foreign"])
def test_a_wrong_count_is_noticed(break_it: str) -> None:
    ledger = Ledger(20)
    ledger.add_slab(10)
    extent = ledger.take(3)
    assert extent is not None
    ledger.charge(2)
    entry = ledger.enter(key_of(1), 2, None)
    ledger.check_integrity([extent])
    held = [extent]
    if break_it == "holder":
        ledger.share([extent])
    elif break_it == "hole":
        ledger._holes.take(1, high=False)
    elif break_it == "unused":
        entry.leases = 0
    elif break_it == "mapped":
        ledger.discharge(1)
    else:
        held = [extent, Extent(7, 0, 1)]
    with pytest.raises(AssertionError, match=r"holders|holes|unused|mapped|do not exist"):
        ledger.check_integrity(held)


class LedgerMachine(RuleBasedStateMachine):
    """Against a model that counts every page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(40)
        self.held: list[Extent] = []
        self.slabs: dict[int, int] = {}
        self.charged = 0

    @property
    def used(self) -> set[tuple[int, int]]:
        return {(e.slab, p) for e in self.held for p in range(e.start, e.stop)}

    def gain(self, extents: list[Extent]) -> None:
        for extent in extents:
            pages = {(extent.slab, p) for p in range(extent.start, extent.stop)}
            assert not pages & self.used
            assert extent.stop <= self.slabs[extent.slab]
            self.held.append(extent)

    @rule(pages=st.integers(1, 25))
    def add_slab(self, pages: int) -> None:
        room = 40 - sum(self.slabs.values()) - self.charged
        assert self.ledger.headroom == room
        if pages <= room:
            self.slabs[self.ledger.add_slab(pages)] = pages
        else:
            with pytest.raises(ValueError, match="does not fit"):
                self.ledger.add_slab(pages)

    @rule(pages=st.integers(1, 12), high=st.booleans())
    def take(self, pages: int, high: bool) -> None:
        extent = self.ledger.take(pages, high=high)
        if extent is not None:
            assert extent.pages == pages
            self.gain([extent])
        else:
            for slab, size in self.slabs.items():
                marks = "".join("x" if (slab, page) in self.used else "." for page in range(size))
                assert "." * pages not in marks

    @rule(pages=st.integers(1, 25))
    def take_pieces(self, pages: int) -> None:
        found = self.ledger.take_pieces(pages)
        if found is None:
            assert sum(self.slabs.values()) - len(self.used) < pages
        else:
            assert sum(e.pages for e in found) == pages
            self.gain(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), pages=st.integers(1, 5))
    def grow(self, data: st.DataObject, pages: int) -> None:
        extent = data.draw(st.sampled_from(self.held))
        wanted = range(extent.stop, extent.stop + pages)
        possible = wanted.stop <= self.slabs[extent.slab] and not any((extent.slab, p) in self.used for p in wanted)
        more = self.ledger.grow(extent, pages)
        assert (more is not None) == possible
        if more:
            assert more == Extent(extent.slab, extent.stop, pages)
            self.gain([more])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.held))
        head = extent.head(data.draw(st.integers(1, extent.pages)))
        self.ledger.share([head])
        self.held.append(head)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        extent = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        cut = data.draw(st.integers(0, extent.pages - 1))
        if cut:
            self.held.append(extent.head(cut))
        empty = self.ledger.drop([extent.tail(cut)])
        assert empty == ([] if any(s == extent.slab for s, _ in self.used) else [extent.slab])
        for slab in empty:
            self.ledger.remove_slab(slab)
            del self.slabs[slab]

    @rule(pages=st.integers(0, 20))
    def charge(self, pages: int) -> None:
        room = 40 - sum(self.slabs.values()) - self.charged
        assert self.ledger.charge(pages) == (pages <= room)
        if pages <= room:
            self.ledger.enter(key_of(random.getrandbits(200)), pages, None)
            self.charged += pages

    @invariant()
    def it_adds_up(self) -> None:
        self.ledger.check_integrity(self.held)
        counts = self.ledger.counts()
        assert counts.private == len(self.used)
        assert counts.mapped == self.charged
        assert counts.free == 40 - len(self.used) - self.charged
        held = Counter((e.slab, p) for e in self.held for p in range(e.start, e.stop))
        assert all(self.ledger.holders(s, p) == held[s, p] for s, n in self.slabs.items() for p in range(n))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# -- pool ------------------------------------------------------------------------------------------------------


def slab_pages(pool: PagePool) -> int:
    return sum(slab.kv.shape[3] // PAGE for slab in pool._slabs.values())


def test_slabs_come_and_go_with_their_pages() -> None:
    pool = make_pool(64)  # slabs of 4 pages
    assert slab_pages(pool) == 0
    (first,) = pool.allocate(2)
    assert slab_pages(pool) == 4
    (second,) = pool.allocate(2)
    assert (first.slab, second.start) == (second.slab, first.stop)
    (long,) = pool.allocate(10, contiguous=True)
    assert slab_pages(pool) == 14
    assert pool.view(long, 3).shape == (2, 2, 3, 3, 8)
    pool.free([first, long])
    assert slab_pages(pool) == 4
    pool.free([second])
    assert slab_pages(pool) == 0
    pool.check_integrity([])
    assert pool.stats()["pages"]["free"] == 64


def test_a_slab_on_a_large_budget_has_its_usual_size() -> None:
    pool = make_pool(10_000, slab_bytes=50 * make_pool(1).page_bytes)
    pool.allocate(3)
    assert slab_pages(pool) == 50


def test_chunks_leave_sequences_room_to_grow() -> None:
    pool = make_pool(256)  # slabs of 16 pages
    (own,), (body,) = pool.allocate(3), pool.allocate(5, contiguous=True)
    assert (own, body) == (Extent(0, 0, 3), Extent(0, 11, 5))
    assert pool.grow(own, 8) == Extent(0, 3, 8)


def test_the_last_pages_are_found_in_pieces() -> None:
    pool = make_pool(16)
    (whole,) = pool.allocate(16)
    ones = [Extent(whole.slab, page, 1) for page in range(16)]
    pool.free(ones[::2])
    got = pool.allocate(8)
    assert len(got) == 8
    assert sum(e.pages for e in got) == 8
    with pytest.raises(OutOfPagesError):
        pool.allocate(1)
    pool.check_integrity([*ones[1::2], *got])


def test_one_piece_is_not_made_of_two() -> None:
    pool = make_pool(16, slab_bytes=1 << 30)
    whole = pool.allocate(16)[0]
    pool.free([whole.head(2), whole.tail(2).head(4).tail(2)])
    with pytest.raises(OutOfPagesError):
        pool.allocate(4, contiguous=True)
    assert sum(e.pages for e in pool.allocate(4)) == 4


def test_spare_pages_are_taken_only_where_they_follow() -> None:
    pool = make_pool(16)
    (extent,) = pool.allocate(3, spare=2)
    assert extent.pages == 5
    (extent,) = pool.allocate(10, spare=2)
    assert extent.pages == 10
    assert pool.allocate(1, spare=16) == [Extent(extent.slab + 1, 0, 1)]


def test_short_memory_is_told_with_numbers() -> None:
    pool = make_pool(10)
    pool.allocate(4)
    pool.charge(3)
    pool.ledger.pin(pool.ledger.enter(key_of(1), 3, None), True)
    with pytest.raises(OutOfPagesError) as caught:
        pool.allocate(5)
    text = str(caught.value)
    for part in ("5 pages", "10 pages", "3 are free", "hold 4 of their own", "3 of chunks", "3 are pinned", "memory="):
        assert part in text
    with pytest.raises(OutOfPagesError, match="4 pages"):
        pool.charge(4)
    assert isinstance(caught.value, InsufficientResourcesError)
    assert pool.stats()["bytes"]["private"] == 4 * pool.page_bytes


def test_pages_are_reclaimed_without_a_lock_and_only_if_that_helps() -> None:
    pool = make_pool(10)
    held = [pool.allocate(2)[0] for _ in range(5)]
    for number, extent in enumerate(held[:3]):
        pool.ledger.unlease(pool.ledger.enter(key_of(number), 2, extent))
    asked: list[int] = []

    def reclaim(pages: int) -> int:
        asked.append(pages)
        entry = pool.ledger.coldest()
        if entry is None or entry.extent is None:
            return 0
        pool.ledger.retire(entry)
        pool.ledger.remove(entry)
        worker = threading.Thread(target=pool.free, args=([entry.extent],))  # would hang on a lock held here
        worker.start()
        worker.join(10)
        assert not worker.is_alive()
        return entry.pages

    pool.reclaim = reclaim
    with pytest.raises(OutOfPagesError, match="6 of unused chunks"):
        pool.allocate(7)
    assert asked == []
    assert sum(e.pages for e in pool.allocate(3)) == 3
    assert asked == [3, 1]


def test_pages_of_the_dead_come_back() -> None:
    pool = make_pool(4)

    class Owner:
        def __init__(self) -> None:
            self.extents = pool.allocate(4)
            self.me = self  # only the collector frees it

        def __del__(self) -> None:
            pool.cleanups.append(partial(pool.free, self.extents))

    Owner()
    gc.collect()
    assert sum(e.pages for e in pool.allocate(4)) == 4


def test_pages_made_in_inference_mode_can_be_written_elsewhere() -> None:
    pool = make_pool(4)
    with torch.inference_mode():
        (extent,) = pool.allocate(1)
    view = pool.view(extent, 2)
    assert not view.is_inference()
    view.fill_(1)


def test_a_budget_without_a_page_and_empty_pages_are_refused() -> None:
    spec = make_spec()
    with pytest.raises(ConfigError, match="does not hold one page"):
        PagePool(spec, PAGE * spec.kv_bytes_per_token - 1, CPU, page_size=PAGE)
    with pytest.raises(ConfigError, match="at least 1 token"):
        PagePool(spec, 1 << 20, CPU, page_size=0)


def test_pages_are_as_large_as_counted() -> None:
    spec: ModelSpec = make_spec(torch.bfloat16)
    pool = PagePool(spec, 1 << 20, CPU, page_size=PAGE)
    (extent,) = pool.allocate(5)
    assert pool.view(extent, 5 * PAGE).numel() * 2 == 5 * pool.page_bytes
    assert [pool.pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_many_threads_share_a_pool() -> None:
    pool = make_pool(60)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        held: list[list[Extent]] = []
        try:
            for _ in range(300):
                if held and draw.random() < 0.5:
                    pool.free(held.pop(draw.randrange(len(held))))
                    continue
                try:
                    extents = pool.allocate(draw.randint(1, 9), contiguous=draw.random() < 0.3)
                except OutOfPagesError:
                    continue
                for extent in extents:
                    pool.view(extent, extent.pages * PAGE).fill_(seed)
                held.append(extents)
                for own in held:
                    assert all(bool((pool.view(e, e.pages * PAGE) == seed).all()) for e in own)
            for own in held:
                pool.free(own)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    pool.check_integrity([])
    assert pool.stats()["pages"]["free"] == 60
