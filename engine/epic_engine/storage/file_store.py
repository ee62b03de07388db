"""A chunk store in one directory: KV in a few large append-only files, a SQLite catalogue beside them.

A put appends its chunks to a segment, flushes it to disk, and then enters them into the catalogue in one transaction,
which is the commit point: what is not in the catalogue does not exist. ``docs/store-format.md`` has every detail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, ConfigError, StoreError

from . import faults
from .appender import Appender
from .catalogue import Catalogue, Place
from .compaction import Compactor
from .layout import Layout
from .leases import Leases
from .payload import decode, encode
from .schema import SEGMENT
from .segment_maps import SegmentMaps
from .segment_table import SegmentTable
from .segments import DTYPES, Record, as_bytes, checksum_of, read_header
from .store import ChunkInfo, ChunkStore, GcReport, StoreUsage, VerifyReport
from .upkeep import Later, collect, orphans, sweep

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
        self._tensors: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self._intact: set[tuple[int, int]] = set()
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
            except (OSError, sqlite3.Error):
                file = self.path / "catalogue.sqlite"
                if not file.is_file() or all(os.access(path, os.W_OK) for path in (self.path, file)):
                    raise
                return Catalogue(self.path, read_only=True)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the chunk store {self.path} cannot be opened: {error}. Give a directory that can be written, or "
                "move the damaged catalogue.sqlite away and make a new one from the segments with "
                "epic_engine.storage.rebuild.rebuild()."
            ) from error

    @property
    def read_only(self) -> bool:
        """Whether chunks can only be read."""
        return not self._catalogue.writable

    # -- chunks ------------------------------------------------------------------------------------------------

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor]]) -> None:
        """Keep chunks, all of them or none; returns when they are durable.

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

    def _append(self, info: ChunkInfo, kv: Tensor) -> tuple[int, Record]:
        encoded = encode(kv, info.encoding if "+" in info.encoding else info.encoding + self._suffix)
        entry = _as_stored(info, kv, encoded.encoding)
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
        reason, before = "", None
        for _ in range(_ATTEMPTS):
            found = self._catalogue.place(key)
            if found is None:
                raise ChunkNotFoundError(f"chunk {key} is not in {self.path}: compile its tokens again.")
            place, spot = found, (found.segment, found.start)
            try:
                kv = self._read(place)
            except FileNotFoundError as error:
                # It may have been copied elsewhere since the catalogue was asked.
                reason = str(error)
                if before == spot:
                    break
                before = spot
                continue
            except ValueError as error:
                reason = str(error)
                break
            except OSError as error:  # says nothing about the chunk: too many open files, no permission, …
                raise StoreError(f"chunk {key} could not be read from {self.path}: {error}") from error
            with self._lock:
                self._uses[place.ident] += 1
            if self._catalogue.writable:
                self._later.ask(_USES_AFTER)
            return kv
        if self._catalogue.writable:
            self._catalogue.set_aside(place, reason)
        raise ChunkNotFoundError(f"chunk {key} was set aside ({reason}): compile its tokens again.")

    def _read(self, place: Place) -> Tensor:
        spot = place.segment, place.start
        with self._lock:
            found = self._tensors.get(spot)
            checked = spot in self._intact
        if found is not None:
            return found
        raw = self._maps.payload(place)
        if not checked and checksum_of([as_bytes(raw)]) != place.checksum:
            raise ValueError("its bytes differ from what was written")
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

    def verify(self, *, repair: bool = False, quick: bool = False) -> VerifyReport:
        """Compare every chunk and the catalogue with what was written; look for files that nothing names.

        Raises
        ------
        StoreError
            If the catalogue itself is damaged, or a file cannot be read for a reason that says nothing about it.
        """
        report = VerifyReport()
        self._catalogue.sound()
        if repair:
            self._catalogue.check_writable()
        for place in self._catalogue.places():
            problem = self._problem(place, quick)
            # Meanwhile it may have been deleted, or copied elsewhere.
            if problem is not None and self._still(place):
                (report.missing if isinstance(problem, FileNotFoundError) else report.corrupt).append(place.key.hex)
                if repair:
                    self._catalogue.set_aside(place, str(problem))
            report.checked += 1
        report.orphans = [self._layout.relative(path) for path in orphans(self._catalogue, self._layout)]
        report.quarantined = [key.hex for key, _ in self._catalogue.quarantined()]
        if repair:
            sweep(self._catalogue, self._layout, everything=True)
        return report

    def _problem(self, place: Place, quick: bool) -> Exception | None:
        """What is wrong with a chunk's bytes, or None."""
        try:
            raw = self._maps.whole(place)
            if place.kind == SEGMENT:
                record = read_header(raw, place.start)
                if record is None or (record.info.key, record.offset, record.stored, record.checksum) != (
                    place.key,
                    place.offset,
                    place.stored,
                    place.checksum,
                ):
                    raise ValueError("its header differs from the catalogue")
            if not quick and checksum_of([as_bytes(self._maps.payload(place))]) != place.checksum:
                raise ValueError("its bytes differ from what was written")
        except (FileNotFoundError, ValueError) as error:
            return error
        except OSError as error:
            raise StoreError(f"chunk {place.key} could not be read from {self.path}: {error}") from error
        return None

    def _still(self, place: Place) -> bool:
        return self._catalogue.place_of(place.ident) == (place.segment, place.start)

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

    def gc(self) -> GcReport:
        """Remove what is expired, files and segments that nothing needs, old catalogues and dead leases."""
        self._catalogue.check_writable()
        expired = self._catalogue.expire()
        freed = self._compact(0.0, raw=False)
        report = collect(self._catalogue, self._layout, self._leases)
        report.expired += expired
        report.nbytes += freed
        return report

    def compact(self, *, live_share: float = 0.5) -> int:
        """Give the bytes of deleted chunks back to the disk, and bring files of format 1 into segments."""
        self._catalogue.check_writable()
        return self._compact(live_share, raw=True)

    def _compact(self, live_share: float, *, raw: bool, gently: bool = False) -> int:
        with self._compact_lock:
            with self._put_lock:
                wasteful = {segment.name for segment in self._table.wasteful(live_share, raw=False)}
                if self._appender.segment in wasteful:
                    self._appender.close()
            compactor = Compactor(self._catalogue, self._layout, self._segment_bytes, stop=self._stop, gently=gently)
            try:
                return compactor.run(live_share, raw=raw)
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


def _as_stored(info: ChunkInfo, kv: Tensor, encoding: str) -> ChunkInfo:
    """The entry as the catalogue keeps it."""
    if (info.nbytes, info.encoding) == (kv.nbytes, encoding):
        return info
    return replace(info, nbytes=kv.nbytes, encoding=encoding)
