"""Where new records go: into a segment that has room and no writer, or into a new one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Sequence

from filelock import FileLock

from . import faults
from .layout import Layout
from .locks import release, take
from .segment_table import SegmentTable
from .segments import Buffer, Record, SegmentWriter
from .store import ChunkInfo

__all__ = ["Appender"]

_NAMES = 8


class Appender:
    """Appends records for one transaction at a time; for one thread at a time.

    No segment's lock is given back before its records are in the catalogue: to others they would be dead.

    Parameters
    ----------
    layout, table
        The store's files, and what the catalogue knows of them.
    segment_bytes
        Size from which a segment is full.
    avoid
        Names of segments that must not be appended to.
    """

    def __init__(self, layout: Layout, table: SegmentTable, segment_bytes: int, avoid: Iterable[str] = ()) -> None:
        self._layout = layout
        self._table = table
        self._segment_bytes = segment_bytes
        self._avoid = set(avoid)
        self._writer: SegmentWriter | None = None
        self._full: list[SegmentWriter] = []

    @property
    def segment(self) -> str | None:
        """Name of the segment that the next record may go into."""
        return self._writer.path.stem if self._writer else None

    def append(self, info: ChunkInfo, shape: Sequence[int], dtype: str, parts: Sequence[Buffer]) -> tuple[int, Record]:
        """Append a record; returns the number of its segment with it. Raises as :meth:`SegmentWriter.append`."""
        if self._writer is not None and self._writer.end >= self._segment_bytes:
            self._full.append(self._writer)
            self._writer = None
        if self._writer is None:
            self._writer = self._resumed() or self._created()
        return self._writer.ident, self._writer.append(info, shape, dtype, parts)

    def _resumed(self) -> SegmentWriter | None:
        for segment in self._table.unfinished(self._segment_bytes):
            if segment.name in self._avoid or (lock := take(self._layout.lock(segment.name))) is None:
                continue
            try:
                # Before the lock was taken, the segment may have been filled, or rewritten elsewhere.
                if self._table.get(segment.ident) is not None:
                    writer = SegmentWriter.resume(self._layout.file(segment.name), lock)
                    if writer.end < self._segment_bytes:
                        writer.ident = segment.ident
                        return writer
                    writer.close()
                    continue
            except (OSError, ValueError):  # damaged: its chunks are found out when they are read
                self._avoid.add(segment.name)
            except BaseException:
                release(lock)
                raise
            release(lock)
        return None

    def _named(self) -> tuple[str, FileLock]:
        """A new name, and the lock of it."""
        self._layout.segments.mkdir(exist_ok=True)
        for _ in range(_NAMES):
            name = uuid.uuid4().hex
            lock = take(self._layout.lock(name))
            if lock is not None:  # otherwise somebody who tidies up has it for a moment
                return name, lock
        raise OSError(f"{self._layout.segments} allows no locks on its files")

    def _created(self) -> SegmentWriter:
        name, lock = self._named()
        writer = None
        try:
            faults.point("segment.locked")
            writer = SegmentWriter.create(self._layout.file(name), lock)
            faults.point("segment.created")
            writer.ident = self._table.enter(name, writer.end)
            faults.point("segment.entered")
            return writer
        except BaseException:
            self._withdraw(name, lock, writer)
            raise

    def _withdraw(self, name: str, lock: FileLock, writer: SegmentWriter | None) -> None:
        """Leave no file that nothing names; if that fails, too, the next process to open the store removes it."""
        with contextlib.suppress(Exception):
            if name not in self._table.names():
                self._layout.file(name).unlink(missing_ok=True)
        if writer is not None:
            writer.close()
        else:
            release(lock)

    def sync(self) -> None:
        """Make what was appended durable."""
        for writer in (*self._full, self._writer):
            if writer is not None:
                writer.sync()

    def committed(self) -> None:
        """What was appended is in the catalogue, or never will be."""
        for writer in self._full:
            writer.close()
        self._full.clear()

    def abandon(self) -> None:
        """Something failed: go on in another segment."""
        if self._writer is not None:
            self._avoid.add(self._writer.path.stem)
        self.close()

    def close(self) -> None:
        """Give the segments free; the next record takes one again."""
        self.committed()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
