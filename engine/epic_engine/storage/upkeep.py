"""What keeps a store tidy: removing what nothing needs, and doing so now and then by itself."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from . import faults
from .catalogue import Catalogue
from .compaction import remove_retired
from .layout import Layout
from .leases import Leases
from .locks import release, take
from .segment_table import SegmentTable
from .segments import SEGMENT_HEADER
from .store import GcReport

__all__ = ["Later", "collect", "orphans", "sweep"]


def orphans(catalogue: Catalogue, layout: Layout) -> list[Path]:
    """Files that no catalogue entry names and nobody is about to enter."""
    table = SegmentTable(catalogue)
    raw_files = list(layout.raw_files())  # before the catalogue is asked: what is entered meanwhile is no orphan
    found = []
    for name, lock in _unnamed(table, layout):
        found.append(layout.file(name))
        release(lock)
    known = table.names()
    found += [path for path in raw_files if path.relative_to(layout.kv).as_posix() not in known]
    return sorted(found)


def _unnamed(table: SegmentTable, layout: Layout) -> Iterator[tuple[str, FileLock]]:
    """Segments as files without an entry, locked."""
    names = list(layout.segment_names())
    known = table.names()
    for name in names:
        if name not in known and (lock := take(layout.lock(name))) is not None:
            if name not in table.names():
                yield name, lock
            else:
                release(lock)


def sweep(
    catalogue: Catalogue, layout: Layout, *, everything: bool = False, keep: Collection[Path] = ()
) -> list[tuple[Path, int]]:
    """Finish what processes have left undone that were killed; returns the files removed, with their sizes.

    Parameters
    ----------
    catalogue, layout
        The store's.
    everything
        Remove files with chunks in them, too, that the catalogue does not name. There are none unless somebody copied
        them there, or the catalogue was lost or replaced by an older one: then they are all that is left.
    keep
        Files that stay nevertheless.
    """
    table = SegmentTable(catalogue)
    removed: list[tuple[Path, int]] = []
    for segment in table.leaving():
        size = remove_retired(table, layout, segment)
        if size is not None:
            removed.append((layout.file(segment.name, segment.kind), size))
    for name, lock in _unnamed(table, layout):
        gone = False
        with contextlib.suppress(OSError):
            path = layout.file(name)
            gone = path not in keep and _removed(path, SEGMENT_HEADER if not everything else None, removed)
        release(lock, remove=gone)
    if everything:
        for path in set(orphans(catalogue, layout)).difference(keep):
            with contextlib.suppress(OSError):
                _removed(path, None, removed)
    known = table.names()
    for path in layout.segments.glob("*.lock"):
        if path != layout.compaction_lock and path.stem not in known and not path.with_suffix(".seg").exists():
            stale = take(path)
            if stale is not None:
                release(stale, remove=True)
    return removed


def _removed(path: Path, most: int | None, removed: list[tuple[Path, int]]) -> bool:
    size = path.stat().st_size
    if most is not None and size > most:
        return False
    faults.point("collect.unlinking")
    path.unlink()
    removed.append((path, size))
    return True


def collect(catalogue: Catalogue, layout: Layout, leases: Leases) -> GcReport:
    """Remove what is expired, what killed processes have left, old catalogues and dead leases."""
    report = GcReport(expired=catalogue.expire())
    gone = sweep(catalogue, layout)
    for path in layout.root.glob("catalogue.*"):
        if path.name.endswith((".tmp", ".old")) or (path.name.startswith("catalogue.v") and path.suffix == ".sqlite"):
            with contextlib.suppress(OSError):
                _removed(path, None, gone)
    if layout.scratch.is_dir() and not any(_busy(path) for path in layout.scratch.glob("*.lock")):
        shutil.rmtree(layout.scratch, ignore_errors=True)
    report.files = [layout.relative(path) for path, _ in gone]
    report.nbytes = sum(size for _, size in gone)
    report.quarantined = SegmentTable(catalogue).collect()
    report.leases = leases.collect()
    return report


def _busy(path: Path) -> bool:
    """Whether a process of an older version holds a lock."""
    lock = take(path)
    if lock is not None:
        release(lock)
    return lock is None


class Later:
    """Calls a method on a thread of its own some time after it was asked for; several requests are one call.

    Parameters
    ----------
    method
        Bound method; its object may be collected meanwhile, then nothing happens.
    """

    def __init__(self, method: Callable[[], Any]) -> None:
        self._method = weakref.WeakMethod(method)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._due = 0.0
        self._closed = False

    def ask(self, seconds: float) -> None:
        """Call the method in so many seconds, or sooner if that was asked for already."""
        due = time.monotonic() + seconds
        with self._lock:
            if self._closed or (self._timer is not None and self._due <= due):
                return
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = threading.Timer(seconds, _run, (weakref.ref(self),))
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # the interpreter ends, and begins no threads any more
                self._timer = None

    def call(self) -> None:
        """Call the method now; the timer's."""
        with self._lock:
            self._timer = None
        method = self._method()
        if method is not None:
            method()

    def close(self) -> None:
        """Nothing is called from now on."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()


def _run(later: weakref.ref[Later]) -> None:
    found = later()
    if found is not None:
        found.call()
