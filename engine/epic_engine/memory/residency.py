"""Compiled chunks in the memory that attention reads.

========  ============================================================================================
``map``   the store's own memory is read, a memory map where the store keeps files: no copy (CPU)
``pool``  KV is copied into pages of the pool, each chunk into one extent (GPU; possible on a CPU)
========  ============================================================================================

Either way a chunk is charged in whole pages, shared by all who lease it, and evicted when pages are short, the one
that was used longest ago first. Chunks that are leased or pinned stay.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import (
    ChunkNotFoundError,
    ConfigError,
    EngineClosedError,
    OutOfPagesError,
    StoreError,
)
from epic_engine.storage.store import ChunkInfo, ChunkStore

from .lease import Lease
from .ledger import ChunkEntry, Extent
from .load_rates import LoadRates
from .loader import Loader
from .maps import disk_bytes_read, in_memory
from .pages import PagePool
from .resident import Load, MappedResident, PooledResident, Resident, StreamedResident

__all__ = ["Residency"]

_GLANCE = 0.01


class Residency:
    """Which chunks are in memory. Any thread may call anything.

    Parameters
    ----------
    pool
        Where pages come from; its ``reclaim`` is set to :meth:`reclaim`.
    store
        Where chunks come from.
    placement
        ``"map"``, ``"pool"``, or ``"auto"``: map on a CPU, pool on a GPU.
    threads
        Chunks loaded at the same time; all but one of them may be compiled instead.
    recompile
        Compiles a chunk's tokens again, in the context that its ``context`` names; None: chunks are always loaded.
        Called on a loader's thread, so it must not need a thread that waits for chunks.
    token_seconds
        Seconds to compile one token, or None where that is unknown.

    Raises
    ------
    ConfigError
        If the placement is unknown, or ``map`` is asked for on a GPU.
    """

    def __init__(
        self,
        pool: PagePool,
        store: ChunkStore,
        *,
        placement: str = "auto",
        threads: int = 2,
        recompile: Callable[[ChunkInfo], Tensor] | None = None,
        token_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        on_gpu = pool.device.type == "cuda"
        if placement not in ("auto", "map", "pool"):
            raise ConfigError(f"chunk_placement={placement!r} is not known: use 'auto', 'map' or 'pool'.")
        if placement == "map" and on_gpu:
            raise ConfigError("chunk_placement='map' needs the CPU: a GPU reads its own memory. Use 'auto' or 'pool'.")
        self.placement = placement if placement != "auto" else "pool" if on_gpu else "map"
        self._store = store
        self._pool = pool
        self._ledger = pool.ledger
        self._layers = pool.spec.num_layers
        self._recompile = recompile
        self._rates = LoadRates(token_seconds)
        self._stream = torch.cuda.Stream(pool.device) if on_gpu else None
        self._loader = Loader(threads)
        # Compiling waits for the thread that runs passes, and a pass may wait for the rest of a chunk that is loaded:
        # one thread is always left for that.
        self._compiling = threading.Semaphore(threads - 1)
        self._lock = threading.RLock()
        self._residents: dict[ChunkEntry, Resident] = {}
        self._loads: dict[Resident, Load] = {}
        self._waited: set[Resident] = set()  # loads that count as a hit of where they come from
        self._ended = threading.Condition(self._lock)
        self._beginning = False
        self._counts: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._loaded: dict[str, dict[str, float]] = {
            source: {"count": 0, "bytes": 0, "seconds": 0.0} for source in ("host", "disk", "recomputed")
        }
        self._closed = False
        pool.reclaim = self.reclaim

    # -- leases ------------------------------------------------------------------------------------------------

    def acquire(self, keys: Iterable[ChunkKey]) -> Lease:
        """Hold chunks in memory; returns at once, while those that are not there are loaded.

        Parameters
        ----------
        keys
            A chunk named twice counts once.

        Raises
        ------
        ChunkNotFoundError
            If the store does not have a chunk. One that turns out to be damaged is reported by
            :meth:`Resident.wait <epic_engine.memory.resident.Resident.wait>`, and tried again by the next acquire.
        OutOfPagesError
            If they do not fit beside what is in use.
        EngineClosedError
            After :meth:`close`.
        """
        return self._acquire(keys, urgent=True)

    def _acquire(self, keys: Iterable[ChunkKey], *, urgent: bool) -> Lease:
        lease = Lease(self)
        try:
            with self._lock:
                self._pool.sweep()
                missing = self._join(lease, dict.fromkeys(keys), urgent)
            infos = [self._info(key) for key in missing]  # asks a data base: not under the lock
            if missing:
                self._store.prefetch(missing)
            with self._lock:
                while not self._complete(lease, infos, urgent):
                    pass
        except BaseException:
            lease.release()
            raise
        return lease

    def _complete(self, lease: Lease, infos: Sequence[ChunkInfo], urgent: bool) -> bool:
        """Lease and load what a lease lacks; False to try again, after somebody's load has ended."""
        # Others may have been here while the lock was free.
        self._join(lease, [info.key for info in infos if info.key not in lease._residents], urgent)
        joined = {key: resident.entry.pages for key, resident in lease._residents.items()}
        new = [info for info in infos if info.key not in joined]
        try:
            self._begin(lease, new, urgent)
        except OutOfPagesError:
            if self._end_unused_loads():
                return False
            lease.release()  # what it holds is not in the way of what it wants
            raise self._pool.out_of_pages(sum(joined.values()) + self._pages(new)) from None
        if urgent:
            self._hits["device"] += len(joined)
        return True

    def _info(self, key: ChunkKey) -> ChunkInfo:
        info = self._store.info(key)
        if info is None:
            raise ChunkNotFoundError(f"chunk {key} is not stored: compile its tokens again.")
        return info

    def _pages(self, infos: Iterable[ChunkInfo]) -> int:
        return sum(self._pool.pages_for(len(info.token_ids)) for info in infos)

    def _join(self, lease: Lease, keys: Iterable[ChunkKey], urgent: bool) -> list[ChunkKey]:
        """Lease what is in memory or on its way; returns the rest."""
        if self._closed:
            raise EngineClosedError("this engine was closed: make a new one.")
        missing = []
        for key in keys:
            entry = self._ledger.entry(key)
            if entry is None:
                missing.append(key)
            else:
                self._ledger.lease(entry)
                lease._residents[key] = self._residents[entry]
        if urgent:
            slow = [load for r in lease._residents.values() if (load := self._loads.get(r))]
            if slow:
                self._loader.hurry(slow)
        return missing

    def _begin(self, lease: Lease, infos: Sequence[ChunkInfo], urgent: bool) -> None:
        """Find room for chunks, all of them or none, and start their loads."""
        if not infos:
            return
        pages = self._pages(infos)
        if pages > self._ledger.obtainable(mapped=self.placement == "map"):
            raise self._pool.out_of_pages(pages)
        loads: list[Load] = []
        self._beginning = True
        try:
            for info in infos:
                loads.append(Load(self._enter(info), partial(self._fetch, info), self._finished))
        except BaseException:
            for load in loads:
                self._ledger.retire(load.resident.entry)
            self._let_go(load.resident for load in loads)
            raise
        finally:
            self._beginning = False
        for load in loads:
            lease._residents[load.resident.entry.key] = load.resident
            self._ledger.begin_load(load.resident.entry)
            self._loads[load.resident] = load
        if urgent:
            self._waited.update(load.resident for load in loads)
        else:
            self._counts["prefetched"] += len(loads)
        self._loader.submit(loads, urgent=urgent)

    def _enter(self, info: ChunkInfo) -> Resident:
        tokens = len(info.token_ids)
        pages = self._pool.pages_for(tokens)
        if self.placement == "map":
            self._pool.charge(pages)
            entry = self._ledger.enter(info.key, pages, None)
            resident: Resident = MappedResident(entry, self._layers)
        else:
            (extent,) = self._pool.allocate(pages, contiguous=True)
            entry = self._ledger.enter(info.key, pages, extent)
            kv = self._pool.view(extent, tokens)
            if self._stream is not None:
                resident = StreamedResident(entry, self._layers, kv, self._stream)
            else:
                resident = PooledResident(entry, self._layers, kv)
        self._residents[entry] = resident
        return resident

    def _release(self, lease: Lease) -> None:
        with self._lock:
            residents, lease._residents = lease._residents, {}
            self._let_go(residents.values())

    def _let_go(self, residents: Iterable[Resident]) -> None:
        with self._lock:
            for resident in residents:
                if self._ledger.unlease(resident.entry):
                    self._drop(resident.entry)

    # -- loads -------------------------------------------------------------------------------------------------

    def _fetch(self, info: ChunkInfo, load: Load) -> Tensor:
        # What was compiled behind other chunks needs them, too: it is loaded.
        quicker = self._recompile is not None and not info.depends and self._rates.recompute(info)
        if self._recompile is not None and quicker and self._compiling.acquire(blocking=False):
            try:
                load.source = "recomputed"
                return self._recompile(info)
            finally:
                self._compiling.release()
        before = disk_bytes_read()
        kv = self._store.load(info.key)
        self._check(info, kv)
        after = disk_bytes_read()
        read = after - before if before is not None and after is not None else 0
        cached = in_memory(kv)
        from_disk = 2 * read > kv.nbytes or (cached is not None and cached < 0.5)
        load.source = "disk" if from_disk else "host"
        return kv

    def _check(self, info: ChunkInfo, kv: Tensor) -> None:
        # Kernels read as much as the tokens say, whatever somebody has put under the key.
        spec = self._pool.spec
        expected = (spec.num_layers, 2, spec.num_kv_heads, len(info.token_ids), spec.head_dim)
        if tuple(kv.shape) != expected or kv.dtype != spec.dtype:
            raise StoreError(
                f"chunk {info.key} has KV of shape {list(kv.shape)} and {kv.dtype}, expected are {list(expected)} and "
                f"{spec.dtype}: it is another model's. Forget it and compile its tokens again."
            )

    def _finished(self, load: Load) -> None:
        resident = load.resident
        with self._lock:
            del self._loads[resident]
            waited = resident in self._waited
            self._waited.discard(resident)
            if resident.error is not None:
                self._counts["failures"] += 1
                self._ledger.retire(resident.entry)
            elif load.given_up:
                # Somebody may wait for it whose lease another thread has released.
                resident.fail(StoreError(f"the load of chunk {resident.entry.key} was given up: nobody leased it."))
            else:
                figures = self._loaded[load.source]
                figures["count"] += 1
                figures["bytes"] += load.nbytes
                figures["seconds"] += load.seconds
                self._hits[load.source] += waited
                if load.source != "recomputed":
                    self._rates.record(resident.entry.key, load.nbytes, load.seconds)
            if self._ledger.end_load(resident.entry):
                self._drop(resident.entry)
            self._ended.notify_all()

    def _end_unused_loads(self, *, running: bool = True) -> int:
        """Give up the loads of chunks that nobody uses; returns the pages given back.

        Parameters
        ----------
        running
            Where none could be given up at once, wait for one that is in a step.
        """
        freed = 0
        busy: Load | None = None
        for load in list(self._loads.values()):
            entry = load.resident.entry
            if not entry.unused:
                continue
            if self._loader.remove(load):
                self._ledger.retire(entry)
                load.give_up()
                freed += entry.pages
            elif load.source != "recomputed":  # compiling may need the very thread that would wait here
                busy = load
        if busy is not None and running and not freed:
            self._loader.stop(busy)
            self._ledger.retire(busy.resident.entry)
            self._ended.wait_for(lambda: busy.resident not in self._loads)
            freed = busy.resident.entry.pages
        return freed

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Start to load chunks that will be needed soon, as far as they fit beside what is in use.

        Evicts unused chunks, but none that the same call named before. Unknown chunks are passed over.
        """
        held = []
        for key in dict.fromkeys(keys):
            try:
                held.append(self._acquire([key], urgent=False))
            except (OutOfPagesError, EngineClosedError):
                break
            except (ChunkNotFoundError, StoreError):
                continue
        for lease in held:
            lease.release()

    # -- what stays and what goes ------------------------------------------------------------------------------

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Load chunks and keep them until :meth:`unpin` or :meth:`forget`, used or not. Raises as :meth:`acquire`."""
        wanted = list(keys)
        with self.acquire(wanted) as lease, self._lock:
            for key in wanted:
                self._ledger.pin(lease.body(key).entry, True)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Let chunks be evicted again when nobody uses them; others are passed over."""
        with self._lock:
            for key in keys:
                entry = self._ledger.entry(key)
                if entry is not None:
                    self._ledger.pin(entry, False)

    def reclaim(self, pages: int) -> int:
        """Evict unused chunks, least recently used first, until as many pages are given back.

        If there are none but such as are still being loaded, their loads are given up.

        Returns
        -------
        int
            Pages given back; fewer than asked for if nothing unused is left.
        """
        with self._lock:
            self._pool.sweep()
            freed = 0
            while freed < pages and (entry := self._ledger.coldest()):
                self._residents[entry].let_go()
                self._ledger.retire(entry)
                self._drop(entry)
                self._counts["evictions"] += 1
                freed += entry.pages
            if freed < pages:
                # Waiting frees the lock, which a call of _begin cannot bear.
                freed += self._end_unused_loads(running=not freed and not self._beginning)
            return freed

    def _drop(self, entry: ChunkEntry) -> None:
        self._ledger.remove(entry)
        del self._residents[entry]
        if entry.extent is None:
            self._pool.discharge(entry.pages)
        else:
            self._pool.free([entry.extent])

    def resident(self) -> list[ChunkKey]:
        """Chunks in memory, or on their way there."""
        return self._ledger.keys()

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """The store has deleted or replaced chunks: whoever holds one keeps it, and nobody gets it any more."""
        with self._lock:
            self._pool.sweep()
            for key in keys:
                entry = self._ledger.entry(key)
                if entry is not None and self._ledger.retire(entry):
                    self._drop(entry)

    def clear(self) -> None:
        """Forget every chunk."""
        self.forget(self._ledger.keys())

    def close(self) -> None:
        """Stop loading and forget every chunk; whoever waits for one gets an error. Closing twice is fine."""
        with self._lock:
            self._closed = True
        self._loader.close()
        with self._lock:
            for load in list(self._loads.values()):
                load.resident.fail(EngineClosedError("the engine was closed while this chunk was loaded."))
                self._finished(load)
            self.clear()

    # -- figures -----------------------------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    def stats(self) -> dict[str, Any]:
        """Figures since the start, and of now.

        Returns
        -------
        dict
            ``chunks`` by state; ``hits``: chunks acquired by where they were (device: in memory or on their way);
            ``loads`` by source: count, bytes, seconds; ``rates`` in bytes a second; ``evictions``, ``failures``,
            ``prefetched``, ``loading``. Pages are counted by :meth:`PagePool.stats`.
        """
        with self._lock:
            self._pool.sweep()
            return {
                "chunks": self._ledger.chunk_counts(),
                "hits": {tier: self._hits[tier] for tier in ("device", "host", "disk", "recomputed")},
                "loads": {source: dict(figures) for source, figures in self._loaded.items()},
                "rates": self._rates.stats(),
                "loading": len(self._loads),
                **{name: self._counts[name] for name in ("evictions", "failures", "prefetched")},
            }

    def check_integrity(self, held: Iterable[Extent] | None = None) -> None:
        """Recount everything; see :meth:`PagePool.check_integrity`.

        Parameters
        ----------
        held
            Extents of all sequences; None leaves out who holds the pages.

        Raises
        ------
        AssertionError
            If something does not add up; says what.
        """
        with self._lock:
            self._pool.sweep()
            self._pool.check_integrity(held)
            chunks = self._ledger.chunk_counts()
            if chunks["resident"] != len(self._residents):
                raise AssertionError(f"{chunks['resident']} chunks have pages, {len(self._residents)} are in memory")
            if {r.entry for r in self._loads} != {entry for entry in self._residents if entry.loading}:
                raise AssertionError("loads differ from the chunks that are being loaded")
