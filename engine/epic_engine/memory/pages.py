"""Page memory of one device under one budget.

A *slab* is a tensor ``(layers, 2, kv_heads, slots, head_dim)`` with ``slots = pages * page_size``: within a layer and
head the slots of an extent lie next to each other, so attention reads an extent as a view, without a gather::

    slab.kv[..., extent.start * page_size : extent.stop * page_size, :]

On CUDA one slab takes the whole budget at once, because device memory is not shared well with others. On a CPU slabs
are made when they are needed and dropped when nothing is left in them, so that memory goes back to the system.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch
from torch import Tensor

from epic_engine.errors import ConfigError, InsufficientResourcesError, OutOfPagesError
from epic_engine.model.spec import ModelSpec

from .budget import format_bytes
from .ledger import Extent, Ledger

__all__ = ["PagePool", "Slab"]

_SLAB_BYTES = 64 << 20
# A slab counts whole, however little of it is used: on a small budget it is a small part.
_SLAB_SHARE = 16


class Slab:
    """Memory of consecutive pages.

    Attributes
    ----------
    number
        As in :attr:`Extent.slab <epic_engine.memory.ledger.Extent.slab>`.
    kv
        ``(layers, 2, kv_heads, slots, head_dim)``.
    layers
        Views of ``kv``: keys and values of each layer, ``(kv_heads, slots, head_dim)``.
    """

    def __init__(self, number: int, kv: Tensor) -> None:
        self.number = number
        self.kv = kv
        self.layers = [(layer[0], layer[1]) for layer in kv]


class PagePool:
    """Hands out pages for the KV of sequences and chunks. Any thread may call anything.

    Parameters
    ----------
    spec
        Model shapes.
    budget
        Bytes for everything: slabs, and maps that are charged.
    device
        Where the memory is.
    page_size
        Tokens a page.
    slab_bytes
        Size of a slab on a CPU; smaller where the budget is small, larger where one extent needs it.

    Attributes
    ----------
    spec, device, page_size
        As given.
    page_bytes
        Bytes a page.
    ledger
        The counts behind the pool.
    reclaim
        Asked for pages when there are too few: gives up unused chunks and returns the pages that it gave back, 0 if it
        has nothing left. Called without any lock of the pool.
    cleanups
        What is left to do for owners that were garbage-collected without a release. Finalizers run at any point, even
        inside this class, so they only append here; the next call that needs pages does it.

    Raises
    ------
    ConfigError
        If the budget does not hold one page.
    InsufficientResourcesError
        If the device does not have the memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        budget: int,
        device: torch.device,
        *,
        page_size: int = 16,
        slab_bytes: int = _SLAB_BYTES,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} must be at least 1 token.")
        self.device = device
        self.page_size = page_size
        self.page_bytes = page_size * spec.kv_bytes_per_token
        if budget < self.page_bytes:
            raise ConfigError(
                f"a memory budget of {format_bytes(budget)} does not hold one page of {page_size} tokens "
                f"({format_bytes(self.page_bytes)}): give more memory."
            )
        self.ledger = Ledger(budget // self.page_bytes)
        self.reclaim: Callable[[int], int] | None = None
        self.cleanups: deque[Callable[[], None]] = deque()
        self.spec = spec
        self._lock = threading.Lock()
        self._slabs: dict[int, Slab] = {}
        self._slab_pages = max(1, min(slab_bytes // self.page_bytes, self.total_pages // _SLAB_SHARE))
        self._whole = device.type == "cuda"
        if self._whole:
            try:
                self._add_slab(self.total_pages)
            except torch.OutOfMemoryError as error:
                raise InsufficientResourcesError(
                    f"{device} does not have {format_bytes(budget)} for KV: give less memory."
                ) from error

    @property
    def total_pages(self) -> int:
        """Pages of the budget."""
        return self.ledger.total

    def pages_for(self, tokens: int) -> int:
        """Pages that hold as many tokens."""
        return -(-tokens // self.page_size)

    def slab(self, number: int) -> Slab:
        """The memory behind an extent that is held."""
        return self._slabs[number]

    def view(self, extent: Extent, tokens: int) -> Tensor:
        """The first tokens of an extent: ``(layers, 2, kv_heads, tokens, head_dim)``."""
        return self._slabs[extent.slab].kv.narrow(3, extent.start * self.page_size, tokens)

    def _add_slab(self, pages: int) -> None:
        spec = self.spec
        shape = (spec.num_layers, 2, spec.num_kv_heads, pages * self.page_size, spec.head_dim)
        # Whoever needs the first page may be computing in inference mode, whose tensors nobody else could write to.
        with torch.inference_mode(False):
            kv = torch.empty(shape, dtype=spec.dtype, device=self.device)
            slab = Slab(self.ledger.add_slab(pages), kv)
        self._slabs[slab.number] = slab

    def allocate(self, pages: int, *, contiguous: bool = False, spare: int = 0) -> list[Extent]:
        """Take pages, in one extent where possible.

        Parameters
        ----------
        pages
            At least 1.
        contiguous
            Take one extent or fail: for chunks.
        spare
            Take up to as many pages more, if they follow without evicting anything.

        Raises
        ------
        OutOfPagesError
            If there are not as many, even without unused chunks. Nothing was taken.
        """
        if spare:
            self.sweep()
            with self._lock:
                found = self._take(pages + spare, contiguous=True)
            if found:
                return found
        while True:
            self.sweep()
            with self._lock:
                found = self._take(pages, contiguous=contiguous)
                missing = pages - self.ledger.free
            if found:
                return found
            self._reclaim(missing, pages, mapped=False)

    def _take(self, pages: int, *, contiguous: bool) -> list[Extent] | None:
        ledger = self.ledger
        extent = ledger.take(pages, high=contiguous)
        if extent is None and pages <= ledger.headroom:
            self._add_slab(min(max(pages, self._slab_pages), ledger.headroom))
            extent = ledger.take(pages, high=contiguous)
        if extent is not None:
            return [extent]
        if contiguous or pages > ledger.free:
            return None
        if pages > ledger.hole_pages:
            self._add_slab(ledger.headroom)
        return ledger.take_pieces(pages)

    def grow(self, extent: Extent, pages: int) -> Extent | None:
        """The pages directly behind an extent, if they are free."""
        self.sweep()
        with self._lock:
            return self.ledger.grow(extent, pages)

    def share(self, extents: Iterable[Extent]) -> None:
        """Count one more holder of each extent."""
        self.ledger.share(extents)

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back; pages that others hold stay."""
        with self._lock:
            for number in self.ledger.drop(extents):
                if not self._whole:
                    self.ledger.remove_slab(number)
                    del self._slabs[number]

    def charge(self, pages: int) -> None:
        """Count mapped memory against the budget.

        Raises
        ------
        OutOfPagesError
            If it does not fit, even without unused chunks. Nothing was charged.
        """
        while True:
            self.sweep()
            with self._lock:
                if self.ledger.charge(pages):
                    return
                missing = pages - self.ledger.headroom
            self._reclaim(missing, pages, mapped=True)

    def discharge(self, pages: int) -> None:
        """Take a charge back."""
        with self._lock:
            self.ledger.discharge(pages)

    def sweep(self) -> None:
        """Give back the pages of owners that were garbage-collected. Needs the pool's lock to be free."""
        while self.cleanups:
            try:
                clean_up = self.cleanups.popleft()
            except IndexError:  # another thread was faster
                return
            clean_up()

    def _reclaim(self, missing: int, pages: int, *, mapped: bool) -> None:
        """Have unused chunks evicted, unless even all of them would not be enough."""
        possible = pages <= self.ledger.obtainable(mapped=mapped)
        if possible and self.reclaim is not None and self.reclaim(max(missing, 1)):
            return
        raise self.out_of_pages(pages)

    def out_of_pages(self, pages: int) -> OutOfPagesError:
        """The error for a request of as many pages, with the numbers of now."""
        counts = self.ledger.counts()
        wanted, budget = pages * self.page_bytes, self.total_pages * self.page_bytes
        return OutOfPagesError(
            f"{pages} pages of KV memory ({format_bytes(wanted)}) are wanted. Of {counts.total} pages "
            f"({format_bytes(budget)}), {counts.free} are free; running requests hold {counts.private} of their own "
            f"and {counts.leased} of chunks, {counts.pinned} are pinned, and {counts.unused} of unused chunks could "
            "be evicted. Give more with memory=…, link fewer or shorter chunks, or lower max_tokens."
        )

    def stats(self) -> dict[str, dict[str, int]]:
        """Pages and bytes by use: see :class:`~epic_engine.memory.ledger.PageCounts`."""
        self.sweep()
        pages = asdict(self.ledger.counts())
        return {"pages": pages, "bytes": {use: count * self.page_bytes for use, count in pages.items()}}

    def check_integrity(self, held: Iterable[Extent] | None = None) -> None:
        """Recount all pages; see :meth:`Ledger.check_integrity <epic_engine.memory.ledger.Ledger.check_integrity>`."""
        self.sweep()
        with self._lock:
            self.ledger.check_integrity(held)
            slots = sum(slab.kv.shape[3] for slab in self._slabs.values())
            counts = self.ledger.counts()
            if slots != (self.total_pages - counts.mapped - self.ledger.headroom) * self.page_size:
                raise AssertionError("slabs and their count differ")
