"""Who holds which pages: numbers only, no tensors.

Memory is counted in pages of a fixed budget::

    budget  = slab pages + mapped pages + headroom
    slab    = [ used | hole | used | used | hole ]        a used page has a count of its holders

A slab counts whole from the moment it exists. Chunks stand either on slab pages or, as memory maps, outside of slabs
but charged like them. A chunk that nobody leases and nobody pinned is *unused*: these stand in the order of their last
use and may be evicted from its front, unless a load still writes to them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from epic_engine.chunks import ChunkKey

__all__ = ["ChunkEntry", "Extent", "Ledger", "PageCounts"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive pages ``[start, start + pages)`` of a slab."""

    slab: int
    start: int
    pages: int

    @property
    def stop(self) -> int:
        """Page behind the last one."""
        return self.start + self.pages

    def head(self, pages: int) -> Extent:
        """The first pages."""
        return Extent(self.slab, self.start, pages)

    def tail(self, pages: int) -> Extent:
        """What follows the first pages."""
        return Extent(self.slab, self.start + pages, self.pages - pages)


@dataclass(eq=False, slots=True)
class ChunkEntry:
    """A chunk that occupies pages.

    Attributes
    ----------
    key
        Its name.
    pages
        Pages it takes.
    extent
        Where; None for a chunk that is mapped.
    leases
        Users that hold it now.
    loading
        Whether a load may still write to its pages.
    pinned
        Whether it stays without a user.
    retired
        No longer found by its key; goes with its last lease, or when its load ends.
    """

    key: ChunkKey
    pages: int
    extent: Extent | None
    leases: int = 0
    loading: bool = False
    pinned: bool = False
    retired: bool = False

    @property
    def unused(self) -> bool:
        """Whether its pages can be had, at the latest when its load has ended."""
        return not (self.leases or self.pinned)

    @property
    def over(self) -> bool:
        """Whether nothing keeps it any more."""
        return self.retired and self.unused and not self.loading


@dataclass(frozen=True)
class PageCounts:
    """Pages by what they are used for.

    ``total = free + private + chunks + mapped``; ``leased``, ``pinned`` and ``unused`` are parts of the chunks; the
    first two overlap where a pinned chunk is leased.
    """

    total: int
    free: int
    private: int
    chunks: int
    mapped: int
    leased: int
    pinned: int
    unused: int


class _Holes:
    """Free page ranges: best fit and merging of neighbours by look-up."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int, int]] = []  # (pages, slab, start), sorted
        self.by_start: dict[tuple[int, int], int] = {}  # (slab, start) -> pages
        self.by_stop: dict[tuple[int, int], int] = {}  # (slab, stop) -> start
        self.pages = 0

    def _insert(self, slab: int, start: int, pages: int) -> None:
        insort(self.by_size, (pages, slab, start))
        self.by_start[slab, start] = pages
        self.by_stop[slab, start + pages] = start
        self.pages += pages

    def remove(self, slab: int, start: int) -> int:
        """Take a whole hole out; returns its pages."""
        pages = self.by_start.pop((slab, start))
        del self.by_stop[slab, start + pages]
        del self.by_size[bisect_left(self.by_size, (pages, slab, start))]
        self.pages -= pages
        return pages

    def add(self, slab: int, start: int, pages: int) -> None:
        """Make a range free, merging it with free neighbours."""
        before = self.by_stop.get((slab, start))
        if before is not None:
            pages += self.remove(slab, before)
            start = before
        if (slab, start + pages) in self.by_start:
            pages += self.remove(slab, start + pages)
        self._insert(slab, start, pages)

    def take(self, pages: int, *, high: bool) -> Extent | None:
        """Pages from one end of the smallest hole that has as many, or None."""
        index = bisect_left(self.by_size, (pages, -1, -1))
        if index == len(self.by_size):
            return None
        _, slab, start = self.by_size[index]
        rest = self.remove(slab, start) - pages
        if rest:
            self._insert(slab, start if high else start + pages, rest)
        return Extent(slab, start + rest if high else start, pages)

    def take_at(self, slab: int, start: int, pages: int) -> bool:
        """Pages from the front of the hole that begins at ``start``, if there is one with as many."""
        if self.by_start.get((slab, start), 0) < pages:
            return False
        rest = self.remove(slab, start) - pages
        if rest:
            self._insert(slab, start + pages, rest)
        return True


class Ledger:
    """Counts of pages and chunks under one budget. Any thread may call anything; nothing here waits.

    Parameters
    ----------
    total
        Pages of the budget; ``peak`` is the most of them that were in use at a time.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        self._lock = threading.RLock()
        self._holes = _Holes()
        self._holders: dict[int, list[int]] = {}  # slab -> holders of each page
        self._free_in: dict[int, int] = {}  # slab -> free pages
        self._next_slab = 0
        self._slab_pages = 0
        self._mapped = 0
        self._current: dict[ChunkKey, ChunkEntry] = {}
        self._retired: set[ChunkEntry] = set()
        self._unused: OrderedDict[ChunkEntry, None] = OrderedDict()
        self._unused_pages = 0

    # -- pages -------------------------------------------------------------------------------------------------

    @property
    def headroom(self) -> int:
        """Pages of the budget that are neither slab nor mapped."""
        return self.total - self._slab_pages - self._mapped

    @property
    def hole_pages(self) -> int:
        """Free pages inside slabs."""
        return self._holes.pages

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return self.headroom + self.hole_pages

    def add_slab(self, pages: int) -> int:
        """Count a new slab of free pages; returns its number, which is never used again."""
        with self._lock:
            if not 0 < pages <= self.headroom:
                raise ValueError(f"a slab of {pages} pages does not fit the {self.headroom} left of the budget")
            slab = self._next_slab
            self._next_slab += 1
            self._holders[slab] = [0] * pages
            self._free_in[slab] = pages
            self._slab_pages += pages
            self._holes.add(slab, 0, pages)
            return slab

    def remove_slab(self, slab: int) -> None:
        """Forget a slab; all its pages must be free."""
        with self._lock:
            pages = len(self._holders[slab])
            if self._free_in[slab] != pages:
                raise ValueError(f"slab {slab} has {pages - self._free_in[slab]} pages in use")
            self._holes.remove(slab, 0)
            del self._holders[slab], self._free_in[slab]
            self._slab_pages -= pages

    def _hold(self, extent: Extent) -> Extent:
        self._holders[extent.slab][extent.start : extent.stop] = [1] * extent.pages
        self._free_in[extent.slab] -= extent.pages
        self.peak = max(self.peak, self.total - self.free)
        return extent

    def take(self, pages: int, *, high: bool = False) -> Extent | None:
        """One extent with a count of 1, best fit, or None where no hole is as long.

        Parameters
        ----------
        pages
            At least 1.
        high
            Take the upper end of the hole. Chunks do, so that sequences, which take the lower end, find room to grow
            behind them.
        """
        with self._lock:
            extent = self._holes.take(pages, high=high)
            return self._hold(extent) if extent else None

    def take_pieces(self, pages: int) -> list[Extent] | None:
        """Extents of as many pages in all, the longest holes first; None where there are too few."""
        with self._lock:
            if pages > self.hole_pages:
                return None
            found = []
            while pages:
                longest = self._holes.by_size[-1][0]
                extent = self._holes.take(min(pages, longest), high=False)
                assert extent is not None
                found.append(self._hold(extent))
                pages -= extent.pages
            return found

    def grow(self, extent: Extent, pages: int) -> Extent | None:
        """The pages directly behind an extent, if they are free."""
        with self._lock:
            if not self._holes.take_at(extent.slab, extent.stop, pages):
                return None
            return self._hold(Extent(extent.slab, extent.stop, pages))

    def share(self, extents: Iterable[Extent]) -> None:
        """Count one more holder of every page."""
        with self._lock:
            for extent in extents:
                holders = self._holders[extent.slab]
                self._check_held(extent)
                for page in range(extent.start, extent.stop):
                    holders[page] += 1

    def drop(self, extents: Iterable[Extent]) -> list[int]:
        """Count one holder less of every page; returns slabs that have no page in use any more."""
        with self._lock:
            empty = []
            for extent in extents:
                holders = self._holders[extent.slab]
                self._check_held(extent)
                begin = extent.start
                for page in range(extent.start, extent.stop):
                    holders[page] -= 1
                    if holders[page]:
                        self._release(extent.slab, begin, page)
                        begin = page + 1
                self._release(extent.slab, begin, extent.stop)
                if self._free_in[extent.slab] == len(holders):
                    empty.append(extent.slab)
            return empty

    def _release(self, slab: int, start: int, stop: int) -> None:
        if start < stop:
            self._holes.add(slab, start, stop - start)
            self._free_in[slab] += stop - start

    def _check_held(self, extent: Extent) -> None:
        if not all(self._holders[extent.slab][extent.start : extent.stop]):
            raise ValueError(f"{extent} has pages that nobody holds: they were given back before")

    def holders(self, slab: int, page: int) -> int:
        """Holders of one page."""
        return self._holders[slab][page]

    def charge(self, pages: int) -> bool:
        """Count pages that are mapped from elsewhere, if the headroom has as many."""
        with self._lock:
            if pages > self.headroom:
                return False
            self._mapped += pages
            self.peak = max(self.peak, self.total - self.free)
            return True

    def discharge(self, pages: int) -> None:
        """Take a charge back."""
        with self._lock:
            self._mapped -= pages

    # -- chunks ------------------------------------------------------------------------------------------------

    def entry(self, key: ChunkKey) -> ChunkEntry | None:
        """The chunk of this key, or None."""
        return self._current.get(key)

    def keys(self) -> list[ChunkKey]:
        """Keys of all chunks that can be found."""
        with self._lock:
            return list(self._current)

    def enter(self, key: ChunkKey, pages: int, extent: Extent | None) -> ChunkEntry:
        """Enter a chunk whose pages were taken (or charged, without an extent), with one lease."""
        with self._lock:
            if key in self._current:
                raise ValueError(f"chunk {key} is entered already")
            entry = self._current[key] = ChunkEntry(key, pages, extent, leases=1)
            return entry

    def _settle(self, entry: ChunkEntry) -> None:
        """Keep the order of unused chunks in step with an entry that changed."""
        if entry.unused and entry not in self._unused:
            self._unused[entry] = None
            self._unused_pages += entry.pages
        elif not entry.unused and entry in self._unused:
            del self._unused[entry]
            self._unused_pages -= entry.pages

    def lease(self, entry: ChunkEntry) -> None:
        """Count one more user."""
        with self._lock:
            entry.leases += 1
            self._settle(entry)

    def unlease(self, entry: ChunkEntry) -> bool:
        """Count one user less; returns whether the chunk has to be removed now."""
        with self._lock:
            if not entry.leases:
                raise ValueError(f"chunk {entry.key} is not leased")
            entry.leases -= 1
            self._settle(entry)
            return entry.over

    def begin_load(self, entry: ChunkEntry) -> None:
        """Keep a chunk's pages while a load writes to them."""
        entry.loading = True

    def end_load(self, entry: ChunkEntry) -> bool:
        """The load has ended; returns whether the chunk has to be removed now."""
        with self._lock:
            entry.loading = False
            return entry.over

    def pin(self, entry: ChunkEntry, pinned: bool) -> None:
        """Keep a chunk without a user, or no longer."""
        with self._lock:
            entry.pinned = pinned and not entry.retired
            self._settle(entry)

    def retire(self, entry: ChunkEntry) -> bool:
        """Let a chunk be found no more; returns whether it has to be removed now."""
        with self._lock:
            if not entry.retired:
                entry.retired, entry.pinned = True, False
                del self._current[entry.key]
                self._retired.add(entry)
                self._settle(entry)
            return entry.over

    def remove(self, entry: ChunkEntry) -> None:
        """Forget a retired chunk without users; its pages are given back separately."""
        with self._lock:
            if not entry.over:
                raise ValueError(f"chunk {entry.key} is in use")
            self._retired.remove(entry)
            del self._unused[entry]
            self._unused_pages -= entry.pages

    def coldest(self) -> ChunkEntry | None:
        """The unused chunk that was used longest ago, passing over those that are being loaded."""
        with self._lock:
            return next((entry for entry in self._unused if not (entry.loading or entry.retired)), None)

    def obtainable(self, *, mapped: bool) -> int:
        """Pages that could be had by evicting every unused chunk.

        Parameters
        ----------
        mapped
            For a charge, which pages inside slabs are of no use for; all chunks must be mapped then.
        """
        return (self.headroom if mapped else self.free) + self._unused_pages

    # -- figures -----------------------------------------------------------------------------------------------

    def counts(self) -> PageCounts:
        """Pages by use."""
        with self._lock:
            entries = [*self._current.values(), *self._retired]
            chunks = sum(e.pages for e in entries if e.extent)
            return PageCounts(
                total=self.total,
                free=self.free,
                private=self._slab_pages - self.hole_pages - chunks,
                chunks=chunks,
                mapped=self._mapped,
                leased=sum(e.pages for e in entries if e.leases),
                pinned=sum(e.pages for e in entries if e.pinned),
                unused=self._unused_pages,
            )

    def chunk_counts(self) -> dict[str, int]:
        """Chunks by state; ``resident`` counts all of them."""
        with self._lock:
            entries = [*self._current.values(), *self._retired]
            return {
                "resident": len(entries),
                "leased": sum(e.leases > 0 for e in entries),
                "pinned": sum(e.pinned for e in entries),
                "unused": len(self._unused),
                "retired": len(self._retired),
            }

    def check_integrity(self, held: Iterable[Extent] | None = None) -> None:
        """Recount everything.

        Parameters
        ----------
        held
            Extents of all sequences, one per holder; compared with the counts of the pages. None leaves that out.

        Raises
        ------
        AssertionError
            If something does not add up; says what.
        """
        with self._lock:
            self._check_holes()
            self._check_chunks()
            if held is not None:
                entries = [*self._current.values(), *self._retired]
                chunks = [e.extent for e in entries if e.extent]
                counted = Counter((e.slab, p) for e in (*held, *chunks) for p in range(e.start, e.stop))
                for slab, holders in self._holders.items():
                    for page, count in enumerate(holders):
                        found = counted.pop((slab, page), 0)
                        _require(found == count, f"page {page} of slab {slab} counts {count} holders, has {found}")
                _require(not counted, f"pages of slabs that do not exist are held: {sorted(counted)[:5]}")

    def _check_holes(self) -> None:
        holes = self._holes
        _require(holes.by_size == sorted((n, *at) for at, n in holes.by_start.items()), "holes are not sorted")
        _require(
            holes.by_stop == {(s, a + n): a for (s, a), n in holes.by_start.items()}, "ends of holes differ from starts"
        )
        _require(holes.pages == sum(holes.by_start.values()), "pages in holes are miscounted")
        _require(not set(holes.by_start) & set(holes.by_stop), "neighbouring holes were not merged")
        for slab, holders in self._holders.items():
            free = {p for (s, a), n in holes.by_start.items() if s == slab for p in range(a, a + n)}
            unheld = {page for page, count in enumerate(holders) if not count}
            _require(free == unheld, f"holes of slab {slab} differ from its pages without holders")
            _require(self._free_in[slab] == len(free), f"free pages of slab {slab} are miscounted")
        _require(self._slab_pages == sum(map(len, self._holders.values())), "pages of slabs are miscounted")
        _require(self.headroom >= 0, f"the budget is exceeded by {-self.headroom} pages")

    def _check_chunks(self) -> None:
        entries = [*self._current.values(), *self._retired]
        _require(self._mapped == sum(e.pages for e in entries if not e.extent), "mapped pages are miscounted")
        _require(set(self._unused) == {e for e in entries if e.unused}, "unused chunks differ from those without users")
        _require(self._unused_pages == sum(e.pages for e in self._unused), "pages of unused chunks are miscounted")
        _require(not any(e.over for e in entries), "a retired chunk without users was not removed")
        _require(all(e.leases >= 0 for e in entries), "a chunk has less than no leases")
        _require(all(e.extent is None or e.extent.pages == e.pages for e in entries), "a chunk's extent is too short")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
