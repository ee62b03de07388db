"""A sequence's own KV on pages that it can share with its forks.

A sequence is a list of *parts*, each an extent of pages::

    parent   [ pages 0 1 2 ][ page 3: 5 tokens, room for 11 ]
                   ‖  fork: full pages are shared, the last partial one is copied
    child    [ pages 0 1 2 ][ page 7: 5 tokens, room for 11 ]

Both go on independently. Parts are cut where the sequences part, so that the shared one is the same piece of memory
to each, and attention reads it once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from epic_engine.attention.base import SequenceKV

from .ledger import Extent
from .pages import PagePool, Slab

__all__ = ["PagedKV"]

_SPARE_SHARE = 4
_MOST_SPARE = 8


@dataclass(slots=True)
class _Part:
    """An extent and the tokens that may be kept in it.

    ``room`` is what the pages hold, or less where the last page is also held by others: then it is closed. A ``sealed``
    part is named by forks, too, and never extended.
    """

    slab: Slab
    extent: Extent
    start: int  # first slot in the slab
    room: int
    sealed: bool = False


class PagedKV(SequenceKV):
    """KV of one sequence on pages. One thread at a time may use it; its pool may be shared by many.

    Pages go back on :meth:`release`, or when it is garbage-collected.

    Parameters
    ----------
    pool
        Where pages come from.
    base
        Keys are rotated at ``position - base``.
    """

    def __init__(self, pool: PagePool, base: int = 0) -> None:
        self.length = 0
        self.base = base
        self._pool = pool
        self._parts: list[_Part] = []
        self._capacity = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit, those held included."""
        return self._capacity

    @property
    def extents(self) -> list[Extent]:
        """Pages held, in order."""
        return [part.extent for part in self._parts]

    @property
    def pages(self) -> int:
        """Pages held, shared ones included."""
        return sum(part.extent.pages for part in self._parts)

    def memory(self) -> list[tuple[Tensor, int, int]]:
        """Memory of the tokens that fit, in order: ``(slab, start, stop)``; equal for sequences that share it."""
        return [(part.slab.kv, part.start, part.start + part.room) for part in self._parts]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep the rows that follow the tokens held; ``length`` stays.

        Raises
        ------
        ValueError
            If they exceed ``capacity``: reserve first.
        """
        rows = keys.shape[1]
        if self.length + rows > self._capacity:
            raise ValueError(f"{rows} rows behind {self.length} exceed the capacity of {self._capacity}: reserve first")
        at, done = self.length, 0
        for part in self._parts:
            if at >= part.room:
                at -= part.room
                continue
            count = min(rows - done, part.room - at)
            own_keys, own_values = part.slab.layers[layer]
            if count == rows:
                own_keys.narrow(1, part.start + at, rows).copy_(keys)
                own_values.narrow(1, part.start + at, rows).copy_(values)
                return
            own_keys.narrow(1, part.start + at, count).copy_(keys.narrow(1, done, count))
            own_values.narrow(1, part.start + at, count).copy_(values.narrow(1, done, count))
            at, done = 0, done + count
            if done == rows:
                return

    def reserve(self, tokens: int, expected: int = 0) -> None:
        """Make room for as many tokens behind those held.

        Parameters
        ----------
        tokens
            At least so many.
        expected
            Tokens that may follow these: pages that are free anyway are taken with them, so that the sequence stays
            in one piece. :meth:`trim` gives them back.

        Raises
        ------
        OutOfPagesError
            If there are too few pages; then everything is as it was.
        """
        missing = self.length + tokens - self._capacity
        if missing <= 0:
            return
        pool = self._pool
        closed = self._capacity % pool.page_size  # tokens in a last page that was closed because others hold it, too
        last = self._parts[-1] if self._parts else None
        if closed and last is not None and pool.ledger.holders(last.extent.slab, last.extent.stop - 1) == 1:
            self._open(last, closed)
            closed, missing = 0, self.length + tokens - self._capacity
            if missing <= 0:
                return
        pages = pool.pages_for(closed + missing)
        if last is not None and not closed and (more := pool.grow(last.extent, pages)):
            self._append([more])
            return
        spare = min(max(self.pages // _SPARE_SHARE, pool.pages_for(expected)), _MOST_SPARE)
        extents = pool.allocate(pages, spare=spare)
        if closed:
            self._replace_last_page(extents, closed)
        else:
            self._append(extents)

    def _open(self, part: _Part, tokens: int) -> None:
        part.room += self._pool.page_size - tokens
        self._capacity += self._pool.page_size - tokens

    def _append(self, extents: Sequence[Extent]) -> None:
        size = self._pool.page_size
        for extent in extents:
            last = self._parts[-1] if self._parts else None
            if last and not last.sealed and (last.extent.slab, last.extent.stop) == (extent.slab, extent.start):
                last.extent = Extent(extent.slab, last.extent.start, last.extent.pages + extent.pages)
                last.room += extent.pages * size
            else:
                slab = self._pool.slab(extent.slab)
                self._parts.append(_Part(slab, extent, extent.start * size, extent.pages * size))
            self._capacity += extent.pages * size

    def _replace_last_page(self, extents: Sequence[Extent], tokens: int) -> None:
        """Copy the tokens of the last page, which others hold, too, into the first new one."""
        old = self._cut(self.pages - 1)
        assert len(old) == 1
        self._copy(old[0], extents[0], tokens)
        self._append(extents)
        self._pool.free(part.extent for part in old)

    def _copy(self, source: _Part, target: Extent, tokens: int) -> None:
        kv = source.slab.kv.narrow(3, source.start, tokens)
        self._pool.view(target, tokens).copy_(kv)

    def _cut(self, pages: int) -> list[_Part]:
        """Keep the first pages and return the parts behind them."""
        size = self._pool.page_size
        kept: list[_Part] = []
        behind: list[_Part] = []
        for part in self._parts:
            count = min(pages, part.extent.pages)
            pages -= count
            if count == part.extent.pages:
                kept.append(part)
            elif not count:
                behind.append(part)
            else:
                room = count * size
                kept.append(_Part(part.slab, part.extent.head(count), part.start, room, part.sealed))
                behind.append(
                    _Part(part.slab, part.extent.tail(count), part.start + room, part.room - room, part.sealed)
                )
        self._parts = kept
        self._capacity = sum(part.room for part in kept)
        return behind

    def fork(self) -> PagedKV:
        """A sequence with the same tokens that goes on by itself.

        Full pages are shared; of a partial last page the fork gets its own copy at once. Room reserved behind the
        tokens held stays with this sequence.

        Raises
        ------
        OutOfPagesError
            If there is no page for the copy; then everything is as it was.
        """
        pool = self._pool
        full, rest = divmod(self.length, pool.page_size)
        copy = pool.allocate(1) if rest else []
        child = PagedKV(pool, self.base)
        behind = self._cut(full)
        for part in self._parts:
            part.sealed = True
        child._parts = [_Part(p.slab, p.extent, p.start, p.room, sealed=True) for p in self._parts]
        child._capacity = self._capacity
        pool.share(child.extents)
        if copy:
            self._copy(behind[0], copy[0], rest)
            child._append(copy)
        self._parts += behind
        self._capacity += sum(part.room for part in behind)
        child.length = self.length
        return child

    def trim(self, tokens: int) -> None:
        """Give back what was taken beyond the room for as many tokens behind those held."""
        behind = self._cut(self._pool.pages_for(self.length + tokens))
        if behind:
            self._pool.free(part.extent for part in behind)

    def truncate(self, length: int, *, keep_room: bool = False) -> None:
        """Keep the first tokens only and give back the pages behind them, reserved ones included.

        Parameters
        ----------
        length
            Tokens to keep, at most those held; ``truncate(kv.length)`` gives back what was reserved in vain.
        keep_room
            Keep the pages as room for other tokens, unless forks hold some of them, too.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"{self.length} tokens cannot be cut to {length}")
        pool = self._pool
        if keep_room and not self._shared_from(length // pool.page_size):
            self.length = length
            return
        behind = self._cut(pool.pages_for(length))
        self.length = length
        if length % pool.page_size and self._shared_from(length // pool.page_size):
            last = self._parts[-1]
            unused = self._capacity - length
            last.room -= unused
            self._capacity -= unused
        if behind:
            pool.free(part.extent for part in behind)

    def _shared_from(self, page: int) -> bool:
        """Whether others hold one of the pages from this one on."""
        holders = self._pool.ledger.holders
        for part in self._parts:
            extent = part.extent
            if any(holders(extent.slab, p) > 1 for p in range(extent.start + max(page, 0), extent.stop)):
                return True
            page -= extent.pages
        return False

    def release(self) -> None:
        """Give back all pages. Again, nothing happens."""
        self.length = 0
        parts, self._parts, self._capacity = self._parts, [], 0
        if parts:
            self._pool.free(part.extent for part in parts)

    def __del__(self) -> None:
        if self._parts:
            self._pool.cleanups.append(partial(self._pool.free, self.extents))
