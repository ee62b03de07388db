"""A new catalogue from the segments, where the old one is damaged or lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

from filelock import FileLock

from epic_engine.errors import StoreError

from . import faults, schema
from .indices import KEY_IS
from .layout import Layout
from .locks import release, take
from .segments import Record, salvage, sync_directory

__all__ = ["rebuild"]


def rebuild(path: str | os.PathLike[str]) -> int:
    """Make a new catalogue from what the segments say; nobody may have the store open.

    Of several records of one key, the last that was compiled counts. Chunks that had been deleted come back, unless
    their segments were compacted since; pins, quotas and uses are lost, and so are files of format 1. The old catalogue
    is kept beside the new one, as ``catalogue.sqlite.old``, until :meth:`~epic_engine.ChunkStore.gc`.

    Parameters
    ----------
    path
        Directory of the store.

    Returns
    -------
    int
        Chunks found.

    Raises
    ------
    StoreError
        If somebody writes to the store, or it cannot be read or written. The store is what it was then.
    """
    layout = Layout(Path(path).expanduser().absolute())
    locks: list[FileLock] = []
    try:
        if not layout.segments.is_dir():
            raise StoreError(f"{layout.root} holds no segments: give the directory of a chunk store.")
        for name in layout.segment_names():
            lock = take(layout.lock(name))
            if lock is None:
                raise StoreError(f"a process writes to {layout.root}: end it and try again.")
            locks.append(lock)
        return _rebuild(layout)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the catalogue of {layout.root} could not be made anew: {error}") from error
    finally:
        for lock in locks:
            release(lock)


def _rebuild(layout: Layout) -> int:
    new = layout.root / "catalogue.sqlite.tmp"
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        schema.create(db)
        for name in sorted(layout.segment_names(), key=lambda n: (layout.file(n).stat().st_mtime_ns, n)):
            path = layout.file(name)
            cursor = db.execute(
                "INSERT INTO segments (name, kind, size) VALUES (?, ?, ?)", (name, schema.SEGMENT, path.stat().st_size)
            )
            for record in salvage(path):
                _enter(db, cursor.lastrowid or 0, record)
        count = int(db.execute("SELECT count(*) FROM chunks").fetchone()[0])
        db.execute("COMMIT")
    with open(new, "rb+") as file:
        os.fsync(file.fileno())
    faults.point("rebuild.written")
    old = layout.root / "catalogue.sqlite"
    # A log that stands beside another database is taken for that one's: it goes before the new one comes.
    for path in (old, old.with_name("catalogue.sqlite-wal")):
        if path.exists():
            shutil.copyfile(path, f"{path}.old")
    faults.point("rebuild.copied")
    if old.with_name("catalogue.sqlite-wal").exists():
        old.unlink(missing_ok=True)  # without its log it would pass for the catalogue, and be an older one
    for ending in ("-wal", "-shm"):
        old.with_name(f"catalogue.sqlite{ending}").unlink(missing_ok=True)
    os.replace(new, old)
    sync_directory(layout.root)
    faults.point("rebuild.replaced")
    return count


def _enter(db: sqlite3.Connection, segment: int, record: Record) -> None:
    key = bytes.fromhex(record.info.key.hex)
    row = db.execute(f"SELECT c.created FROM chunks c WHERE {KEY_IS}", (key,)).fetchone()
    if row is not None and row[0] > record.info.created:
        return
    db.execute(f"DELETE FROM chunks AS c WHERE {KEY_IS}", (key,))
    place = (segment, record.start, record.offset, record.stored, record.end - record.start)
    schema.insert_chunk(
        db, record.info, place, record.shape, record.dtype, record.checksum, clock=0.0
    )  # fmt: skip
