"""What was deleted here and is still published elsewhere: it must not come back."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from epic_engine.chunks import ChunkKey
from epic_engine.errors import StoreError

from .store import ChunkInfo

__all__ = ["Tombstones"]

_MOST_VARIABLES = 500


class Tombstones:
    """Chunks, contents and namespaces that are hidden, in one SQLite file that several processes share.

    Parameters
    ----------
    file
        Made if absent.

    Raises
    ------
    StoreError
        If it cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        with self._reporting():
            self._db = sqlite3.connect(file, timeout=60, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS hidden (what TEXT PRIMARY KEY) WITHOUT ROWID")

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._file}, which says what was deleted, cannot be used: {error}. Free disk space; if it is "
                "damaged, remove it: then what was deleted here comes back if it is still published."
            ) from error

    def hide_chunks(self, keys: Iterable[ChunkKey]) -> None:
        """Hide chunks of these keys; durable when it returns."""
        self._add(f"key {key.hex}" for key in keys)

    def hide_contents(self, namespace: str, contents: Iterable[str]) -> None:
        """Hide every form of some contents, and what was compiled behind them."""
        self._add(f"content {content} {namespace}" for content in contents)

    def hide_namespace(self, namespace: str) -> None:
        """Hide every chunk of a tenant."""
        self._add([f"namespace {namespace}"])

    def _add(self, what: Iterable[str]) -> None:
        with self._reporting(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("INSERT OR IGNORE INTO hidden VALUES (?)", [(one,) for one in what])
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def welcome(self, infos: Iterable[ChunkInfo]) -> None:
        """Chunks were stored here again: they and their contents are hidden no more."""
        what = {w for info in infos for w in (f"key {info.key.hex}", f"content {info.content} {info.namespace}")}
        if self.any():
            with self._reporting(), self._lock:
                self._db.executemany("DELETE FROM hidden WHERE what = ?", [(one,) for one in what])

    def visible(self, infos: Iterable[ChunkInfo]) -> list[ChunkInfo]:
        """Those of some chunks that are not hidden."""
        left = list(infos)
        if not left or not self.any():
            return left
        return [info for info in left if not self._hidden(info)]

    def any(self) -> bool:
        """Whether anything is hidden."""
        with self._reporting(), self._lock:
            return self._db.execute("SELECT 1 FROM hidden LIMIT 1").fetchone() is not None

    def _hidden(self, info: ChunkInfo) -> bool:
        what = [f"key {info.key.hex}", f"namespace {info.namespace}"]
        what += [f"content {content} {info.namespace}" for content in (info.content, *info.depends)]
        with self._reporting(), self._lock:
            for at in range(0, len(what), _MOST_VARIABLES):
                part = what[at : at + _MOST_VARIABLES]
                marks = ", ".join("?" * len(part))
                if self._db.execute(f"SELECT 1 FROM hidden WHERE what IN ({marks}) LIMIT 1", part).fetchone():
                    return True
        return False

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        with self._lock:
            self._db.close()
