"""A chunk store in one directory: KV in a few large append-only files, a SQLite catalogue beside them.

A put appends its chunks to a segment, flushes it to disk, and then enters them into the catalogue in one transaction,
which is the commit point: what is not in the catalogue does not exist. ``docs/store-format.md`` has every detail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, ConfigError, StoreError

from . import faults
from .appender import Appender
from .catalogue import Catalogue, Place
from .checking import verify
from .compaction import Compactor
from .database import FAILURES, rebuilding
from .layout import Layout
from .leases import Leases
from .mending import mend
from .payload import Encoded, decode, encode
from .segment_maps import SegmentMaps
from .segment_table import SegmentTable
from .segments import DTYPES, Record, as_bytes, checksum_of
from .store import ChunkInfo, ChunkStore, GcReport, StoreUsage, VerifyReport
from .summary import StoreSummary, summarise
from .upkeep import Later, collect, sweep

__all__ = ["FileStore"]

_ATTEMPTS = 3
_USES_AFTER = 60.0
_TIDY_AFTER = 5.0
_WORTH_COMPACTING = 4 << 20


class FileStore(ChunkStore):
    """Chunks in one directory, shared by any number of threads and processes.

    Parameters
    ----------
    path
        Directory; made if absent. A store of an older format is brought up to date.
    compression
        ``"zstd"`` compresses new chunks; they are decompressed when they are loaded, not mapped.
    max_bytes
        What all chunks together may take from now on, in every process; the least worthy are evicted for new ones.
        None leaves it as it was.
    segment_bytes
        Size from which a new segment is begun.
    read_only
        Only read. A store that cannot be written is opened so by itself.

    Raises
    ------
    ConfigError
        If an option is unknown.
    StoreFormatError
        If it was written by a newer version.
    StoreError
        If it cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compression: str | None = None,
        max_bytes: int | None = None,
        segment_bytes: int = 1 << 30,
        read_only: bool = False,
    ) -> None:
        if compression not in (None, "zstd"):
            raise ConfigError(f"compression={compression!r} is not known: use None or 'zstd'.")
        if segment_bytes < 1 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError(f"segment_bytes={segment_bytes} and max_bytes={max_bytes} must be positive.")
        self.path = Path(path).expanduser().absolute()
        self._suffix = f"+{compression}" if compression else ""
        self._segment_bytes = segment_bytes
        self._layout = Layout(self.path)
        self._catalogue = self._open(read_only)
        self._table = SegmentTable(self._catalogue)
        self._leases = Leases(self._catalogue, self._layout.owners)
        self._appender = Appender(self._layout, self._table, segment_bytes)
        self._put_lock = threading.RLock()
        self._compact_lock = threading.Lock()
        self._stop = threading.Event()
        self._later = Later(self._tidy)
        self._maps = SegmentMaps(self._layout)
        self._lock = threading.Lock()
        # A tensor is kept for as long as somebody reads it: which those are is for them to say.
        self._tensors: WeakValueDictionary[bytes, Tensor] = WeakValueDictionary()
        self._intact: set[bytes] = set()
        self._uses: Counter[int] = Counter()
        if self._catalogue.writable:
            if max_bytes is not None and self._catalogue.setting("max_bytes") != max_bytes:
                self._catalogue.set("max_bytes", max_bytes)
            sweep(self._catalogue, self._layout)

    def _open(self, read_only: bool) -> Catalogue:
        try:
            if read_only:
                return Catalogue(self.path, read_only=True)
            try:
                self._layout.segments.mkdir(parents=True, exist_ok=True)
                return Catalogue(self.path)
            except (OSError, *FAILURES):
                file = self.path / "catalogue.sqlite"
                if not file.is_file() or all(os.access(path, os.W_OK) for path in (self.path, file)):
                    raise
                return Catalogue(self.path, read_only=True)
        except (OSError, *FAILURES) as error:
            raise StoreError(
                f"the chunk store {self.path} cannot be opened: {error}. Give a directory that can be written, or move "
                f"the damaged catalogue.sqlite away and make a new one from the segments with {rebuilding(self.path)}."
            ) from error

    @property
    def read_only(self) -> bool:
        """Whether chunks can only be read."""
        return not self._catalogue.writable

    # -- chunks ------------------------------------------------------------------------------------------------

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor | Encoded]]) -> None:
        """Keep chunks, all of them or none; returns when they are durable. What is encoded is not rounded again.

        Raises
        ------
        StoreError
            If they cannot be written, or a quota or the budget has no room for them; then nothing has changed.
        """
        latest = {info.key: (info, kv) for info, kv in chunks}
        with self._put_lock:
            self._catalogue.check_writable()
            if not latest:
                return
            with self._lock:
                uses, self._uses = self._uses, Counter()
            try:
                records = [self._append(info, kv) for info, kv in latest.values()]
                self._appender.sync()
                faults.point("put.synced")
                self._catalogue.put(records, uses)
            except BaseException as error:
                with self._lock:
                    self._uses.update(uses)
                if isinstance(error, StoreError):  # what was appended is whole, and dead
                    self._appender.committed()
                    raise
                self._appender.abandon()
                if isinstance(error, OSError | ValueError):
                    raise StoreError(
                        f"{len(latest)} chunks could not be written to {self.path}: {error}. Nothing was changed: free "
                        "disk space or mend the cause, then try again."
                    ) from error
                raise
            self._appender.committed()

    def _append(self, info: ChunkInfo, kv: Tensor | Encoded) -> tuple[int, Record]:
        encoded = encode(kv, info.encoding if "+" in info.encoding else info.encoding + self._suffix)
        entry = _as_stored(info, encoded)
        dtype = str(encoded.dtype).removeprefix("torch.")
        return self._appender.append(entry, tuple(encoded.shape), dtype, [as_bytes(part) for part in encoded.parts])

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""
        return self._catalogue.info(key)

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which of the keys the store has."""
        return self._catalogue.known(keys)

    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk as a memory map, compared with its checksum when this process first reads it.

        Raises
        ------
        ChunkNotFoundError
            If it is not stored, or was damaged: then it is taken out of the catalogue, so that it is compiled again.
        StoreError
            If its file cannot be read for another reason.
        """
        place, kv = self._reach(key, self._read)
        with self._lock:
            self._uses[place.ident] += 1
        if self._catalogue.writable:
            self._later.ask(_USES_AFTER)
        return kv

    def stored(self, key: ChunkKey) -> tuple[ChunkInfo, Encoded]:
        """Entry of a chunk with its stored bytes, mapped and compared with their checksum; raises as :meth:`load`."""
        place, raw = self._reach(key, self._payload)
        info = self._catalogue.info(key)
        if info is None:
            raise ChunkNotFoundError(f"chunk {key} is not in {self.path}: compile its tokens again.")
        return info, Encoded((raw,), place.encoding, place.shape, DTYPES[place.dtype])

    def _reach(self, key: ChunkKey, read: Callable[[Place], Tensor]) -> tuple[Place, Tensor]:
        """Read a chunk where it lies; it is taken out of the catalogue if it is damaged."""
        reason, before = "", None
        for attempt in range(_ATTEMPTS):
            found = self._catalogue.place(key)
            if found is None:
                raise ChunkNotFoundError(f"chunk {key} is not in {self.path}: compile its tokens again.")
            place, spot = found, (found.segment, found.start)
            try:
                return place, read(place)
            except FileNotFoundError as error:
                # It may have been copied elsewhere since the catalogue was asked.
                reason = str(error)
                if before == spot:
                    break
                before = spot
                continue
            except ValueError as error:
                reason = str(error)
                if not attempt and mend(self._catalogue, self._layout, place):
                    continue
                break
            except OSError as error:  # says nothing about the chunk: too many open files, no permission, …
                raise StoreError(f"chunk {key} could not be read from {self.path}: {error}") from error
        if self._catalogue.writable:
            self._catalogue.set_aside(place, reason)
        raise ChunkNotFoundError(f"chunk {key} was set aside ({reason}): compile its tokens again.")

    def _payload(self, place: Place, *, checked: bool = False) -> Tensor:
        if not place.whole:
            raise ValueError("its row in the catalogue is damaged")
        raw = self._maps.payload(place)
        if not checked and checksum_of([as_bytes(raw)]) != place.checksum:
            raise ValueError("its bytes differ from what was written")
        return raw

    def _read(self, place: Place) -> Tensor:
        if not place.whole:
            raise ValueError("its row in the catalogue is damaged")
        # Without the checksum, a row whose place was changed would be taken for the chunk that lies there.
        spot = b"%d %d %d " % (place.segment, place.offset, place.stored) + place.checksum
        with self._lock:
            found = self._tensors.get(spot)
            checked = spot in self._intact
        if found is not None:
            return found
        raw = self._payload(place, checked=checked)
        kv = decode(raw, place.encoding, place.shape, DTYPES[place.dtype])
        with self._lock:
            self._intact.add(spot)
            return self._tensors.setdefault(spot, kv)

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids, oldest first."""
        return self._catalogue.forms(namespace, fingerprint, content)

    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries, oldest first; read from the catalogue in pages."""
        return self._catalogue.entries()

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; their bytes are given back later, by :meth:`compact` or by itself."""
        return self._deleted(self._catalogue.delete(keys))

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids and what was compiled behind them."""
        return self._deleted(self._catalogue.erase(namespace, contents))

    def erase_namespace(self, namespace: str) -> int:
        """Forget every chunk of a tenant, and its quota."""
        return self._deleted(self._catalogue.erase_namespace(namespace))

    def _deleted(self, count: int) -> int:
        if count:
            self._later.ask(_TIDY_AFTER)
        return count

    # -- checking ----------------------------------------------------------------------------------------------

    def verify(
        self, *, repair: bool = False, quick: bool = False, progress: Callable[[int], None] | None = None
    ) -> VerifyReport:
        """Compare every chunk and the catalogue with what was written; look for files that nothing names.

        Parameters
        ----------
        repair, quick
            As in :meth:`ChunkStore.verify <epic_engine.ChunkStore.verify>`. A chunk whose row in the catalogue is
            damaged, but not its record, is reported and entered anew.
        progress
            Called with the number of chunks looked at.

        Raises
        ------
        StoreError
            If the catalogue itself is damaged, or a file cannot be read for a reason that says nothing about it.
        """
        return verify(self._catalogue, self._layout, repair=repair, quick=quick, progress=progress)

    # -- what stays and what goes ------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey]) -> int:
        """Never evict these chunks for lack of room."""
        return self._catalogue.pin(keys, True)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """Let pinned chunks be evicted again."""
        return self._catalogue.pin(keys, False)

    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit what a tenant may take, in every process."""
        self._catalogue.set_quota(namespace, nbytes)

    def usage(self) -> StoreUsage:
        """Chunks and bytes by namespace and model, and bytes that :meth:`compact` could give back."""
        return self._catalogue.usage(self._table.dead_bytes())

    @property
    def budget(self) -> int | None:
        """What all chunks together may take; None: no limit."""
        found = self._catalogue.setting("max_bytes")
        return None if found is None else int(found)

    def set_budget(self, nbytes: int | None) -> None:
        """Limit what all chunks together may take from the next put on, in every process; None: no limit."""
        if nbytes is not None and nbytes < 1:
            raise ConfigError(f"a budget of {nbytes} bytes holds nothing: give at least one byte, or None.")
        self._catalogue.set("max_bytes", nbytes)

    def summary(self) -> StoreSummary:
        """Chunks by namespace, model, context and encoding, limits and pins; reads the whole catalogue."""
        return summarise(self._catalogue)

    def gc(self) -> GcReport:
        """Remove what is expired, files and segments that nothing needs, old catalogues and dead leases."""
        self._catalogue.check_writable()
        expired = self._catalogue.expire()
        freed = self._compact(0.0, raw=False)
        report = collect(self._catalogue, self._layout, self._leases)
        report.expired += expired
        report.nbytes += freed
        return report

    def compact(self, *, live_share: float = 0.5, progress: Callable[[int, int], None] | None = None) -> int:
        """Give the bytes of deleted chunks back to the disk, and bring files of format 1 into segments.

        Parameters
        ----------
        live_share
            As in :meth:`ChunkStore.compact <epic_engine.ChunkStore.compact>`.
        progress
            Called with the files done and all that are rewritten.
        """
        self._catalogue.check_writable()
        return self._compact(live_share, raw=True, progress=progress)

    def _compact(
        self,
        live_share: float,
        *,
        raw: bool,
        gently: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        with self._compact_lock:
            with self._put_lock:
                self._table.measure(self._layout)
                wasteful = {segment.name for segment in self._table.wasteful(live_share, raw=False)}
                if self._appender.segment in wasteful:
                    self._appender.close()
            compactor = Compactor(self._catalogue, self._layout, self._segment_bytes, stop=self._stop, gently=gently)
            try:
                return compactor.run(live_share, raw=raw, progress=progress)
            except OSError as error:
                raise StoreError(
                    f"the segments of {self.path} could not be rewritten: {error}. No chunk is lost: free disk space "
                    "and try again."
                ) from error
            finally:
                self._forget_maps()

    def _forget_maps(self) -> None:
        """Let go of segments that are gone: the disk gets their bytes back when nobody maps them any more."""
        held = self._maps.held()
        if held:
            self._maps.forget(held - {segment.ident for segment in self._table.all() if not segment.gone})

    def _tidy(self) -> None:
        """What is done now and then on a thread of its own; nobody is there to see it fail."""
        with contextlib.suppress(StoreError):
            self._write_uses()
            self._catalogue.expire()
            self._forget_maps()
            wasteful = self._table.wasteful(0.5, raw=False)
            if any(segment.size - segment.live >= _WORTH_COMPACTING for segment in wasteful):
                self._compact(0.5, raw=False, gently=True)

    def _write_uses(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, Counter()
        if uses:
            self._catalogue.count_uses(uses)

    # -- who compiles what -------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Take the right to compile chunks; returns those that no other store object holds."""
        return self._leases.take(keys, seconds)

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Give leases back."""
        self._leases.release(keys)

    # -- life --------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Free bytes on the disk, or the budget if that is less."""
        budget = self._catalogue.setting("max_bytes")
        free = shutil.disk_usage(self.path).free
        return free if budget is None else min(free, int(budget))

    def close(self) -> None:
        """Write what is known about uses, give leases back and close every file. Closing twice is fine."""
        self._stop.set()
        self._later.close()
        with self._compact_lock, self._put_lock:
            if self._catalogue.closed:
                return
            if self._catalogue.writable:
                with contextlib.suppress(StoreError):  # a full disk; uses only say what is worth keeping
                    self._write_uses()
            with contextlib.suppress(StoreError, OSError):
                self._leases.close()
            self._appender.close()
            self._catalogue.close()
            self._tensors.clear()
            self._maps.forget(self._maps.held())


def _as_stored(info: ChunkInfo, kept: Encoded) -> ChunkInfo:
    """The entry as the catalogue keeps it."""
    if (info.nbytes, info.encoding) == (kept.kv_nbytes, kept.encoding):
        return info
    return replace(info, nbytes=kept.kv_nbytes, encoding=kept.encoding)
