"""Rewriting of segments that are mostly dead, so that the disk gets the bytes of deleted chunks back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from filelock import FileLock

from . import faults
from .appender import Appender
from .catalogue import Catalogue, Place
from .layout import Layout
from .locks import release, take
from .mending import mend
from .schema import SEGMENT
from .segment_maps import SegmentMaps
from .segment_table import Segment, SegmentTable
from .segments import Record, as_bytes, checksum_of
from .store import ChunkInfo

__all__ = ["Compactor", "remove_retired"]

_BATCH_BYTES = 64 << 20
_BATCH_CHUNKS = 256


class Compactor:
    """One pass over the segments of a store.

    Chunks are copied to another segment, made durable there, and only then looked up there, in transactions of bounded
    size; then the old file is forgotten and unlinked. Whoever has mapped it reads on.

    Parameters
    ----------
    catalogue, layout
        The store's.
    segment_bytes
        Size from which a segment is full.
    stop
        Ends the pass between two batches when set.
    gently
        Rest after each batch as long as it took.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        layout: Layout,
        segment_bytes: int,
        *,
        stop: threading.Event | None = None,
        gently: bool = False,
    ) -> None:
        self._catalogue = catalogue
        self._table = SegmentTable(catalogue)
        self._layout = layout
        self._segment_bytes = segment_bytes
        self._stop = stop or threading.Event()
        self._gently = gently
        self._maps = SegmentMaps(layout)
        self._appender = Appender(layout, self._table, segment_bytes)
        self._moves: list[tuple[Place, int, Record]] = []
        self._bytes = 0
        self._since = 0.0
        self._emptied: list[tuple[Segment, FileLock | None]] = []
        self._freed = 0

    def run(self, live_share: float, *, raw: bool, progress: Callable[[int, int], None] | None = None) -> int:
        """Rewrite what is wasteful; another process that does so already is left to it.

        Parameters
        ----------
        live_share
            Segments of which a smaller share is in use.
        raw
            Whether files of format 1 are rewritten, too, however much of them is in use.
        progress
            Called with the segments done and all of them.

        Returns
        -------
        int
            Bytes of files removed, less those written.

        Raises
        ------
        OSError, StoreError
            If files cannot be written; no chunk is lost by that.
        """
        self._layout.segments.mkdir(exist_ok=True)
        busy = take(self._layout.compaction_lock)
        if busy is None:
            return 0
        try:
            wasteful = self._table.wasteful(live_share, raw=raw)
            self._appender = Appender(
                self._layout, self._table, self._segment_bytes, (segment.name for segment in wasteful)
            )
            self._since = time.monotonic()
            for done, segment in enumerate(wasteful):
                if self._stop.is_set():
                    break
                if progress:
                    progress(done, len(wasteful))
                self._empty(segment)
            self._flush()
            if progress and not self._stop.is_set():
                progress(len(wasteful), len(wasteful))
        finally:
            for _, lock in self._emptied:
                if lock is not None:
                    release(lock)
            self._appender.close()
            release(busy)
        return self._freed

    def _empty(self, segment: Segment) -> None:
        """Copy what is in use of a segment, if nobody appends to it."""
        lock = None
        if segment.kind == SEGMENT:
            lock = take(self._layout.lock(segment.name))
            if lock is None:
                return
        whole = False
        try:
            whole = self._table.get(segment.ident) is not None and self._copy(segment)
        finally:
            if whole:
                self._emptied.append((segment, lock))
            elif lock is not None:
                release(lock)
        if len(self._emptied) >= _BATCH_CHUNKS:
            self._flush()

    def _copy(self, segment: Segment) -> bool:
        after = -1
        while rows := self._catalogue.in_segment(segment.ident, after, _BATCH_CHUNKS):
            for place, info in rows:
                if self._stop.is_set():
                    return False
                after = place.start
                self._copy_chunk(place, info)
                if self._bytes >= _BATCH_BYTES or len(self._moves) >= _BATCH_CHUNKS:
                    self._flush()
        return True

    def _copy_chunk(self, place: Place, info: ChunkInfo | None) -> None:
        try:
            if info is None or not place.whole:
                raise ValueError("its row in the catalogue is damaged")
            payload = as_bytes(self._maps.payload(place))
            if checksum_of([payload]) != place.checksum:
                raise ValueError("its bytes differ from what was written")
        except (FileNotFoundError, ValueError) as error:
            # What was mended has a new number, and is copied next time: its segment stays.
            if not mend(self._catalogue, self._layout, place):
                self._catalogue.set_aside(place, str(error))
            return
        segment, record = self._appender.append(info, place.shape, place.dtype, [payload])
        faults.point("compact.appended")
        self._moves.append((place, segment, record))
        self._bytes += record.end - record.start

    def _flush(self) -> None:
        """Let what was copied be read where it is now, and remove the files that are empty then."""
        if self._moves:
            self._appender.sync()
            faults.point("compact.synced")
            self._table.move(self._moves)
            self._freed -= self._bytes
            self._moves.clear()
            self._bytes = 0
            self._appender.committed()
        while self._emptied:
            self._remove(*self._emptied.pop())
        if self._gently:
            self._stop.wait(time.monotonic() - self._since)
        self._since = time.monotonic()

    def _remove(self, segment: Segment, lock: FileLock | None) -> None:
        removed = False
        try:
            if self._table.retire(segment.ident):
                self._maps.forget({segment.ident})
                size = remove_retired(self._table, self._layout, segment)
                removed = size is not None
                self._freed += size or 0
        finally:
            if lock is not None:
                release(lock, remove=removed)


def remove_retired(table: SegmentTable, layout: Layout, segment: Segment) -> int | None:
    """Remove the file of a segment that was retired, then its entry; returns its bytes, None if it cannot be removed.

    Whoever has it open on Windows keeps it there; the next process to open the store tries again.
    """
    path = layout.file(segment.name, segment.kind)
    size = 0
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return None
    faults.point("compact.unlinked")
    table.forget(segment.ident)
    return size
