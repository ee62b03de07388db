"""The store's SQLite file: opened, brought up to date, read and changed in transactions.

Two connections, each behind a lock of its own: one writes, the other reads what is committed, so that a look-up never
waits for a transaction.
"""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epic_engine.errors import StoreError, StoreFormatError

from . import schema
from .log_check import lost_commits

__all__ = ["FAILURES", "Database", "rebuilding"]

# The driver's second one: what a message quotes from a damaged file may be no UTF-8.
FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises."""

# What is changed again and again, as the tables of new keys are, is written to the log each time and from there to the
# file: a long log puts several changes of a page into the file at once. The cache holds the keys of a million chunks.
_LOG_PAGES = 16 << 10
_CACHE_KIB = 64 << 10


def rebuilding(directory: Path) -> str:
    """How a new catalogue is made, for messages."""
    command = f"epic-rag store rebuild --store {shlex.quote(str(directory))}"
    return f"`{command}`, or epic_engine.storage.rebuild.rebuild()"


class Database:
    """The SQLite file of one store, without a word about what is in it.

    Parameters
    ----------
    directory
        The store's; holds ``catalogue.sqlite``.
    read_only
        Never write. Nothing needs to be writable then, not even the directory.

    Raises
    ------
    StoreFormatError
        If it was written by a newer version, or by an older one and cannot be brought up to date.
    OSError, sqlite3.Error, UnicodeDecodeError
        If it cannot be opened.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        self._directory = directory
        self._file = directory / "catalogue.sqlite"
        self._read_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        if lost_commits(directory / "catalogue.sqlite-wal"):
            raise sqlite3.DatabaseError("its log, catalogue.sqlite-wal, is damaged: changes that were made are lost")
        if read_only:
            self._reader: sqlite3.Connection | None = self._open_read_only()
            return
        writer = sqlite3.connect(self._file, timeout=60, isolation_level=None, check_same_thread=False)
        try:
            schema.distrust(writer)
            writer.execute("PRAGMA journal_mode=WAL")
            writer.execute("PRAGMA synchronous=FULL")
            writer.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            writer.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
            self._prepare(writer)
            self._reader = sqlite3.connect(self._file, timeout=60, isolation_level=None, check_same_thread=False)
            schema.distrust(self._reader)
            self._reader.execute("PRAGMA query_only=ON")
        except BaseException:
            writer.close()
            raise
        self._writer = writer

    def _prepare(self, db: sqlite3.Connection) -> None:
        schema.migrate(db, self._directory)
        db.execute("BEGIN IMMEDIATE")
        try:
            version = self._version(db)
            if version == 0:
                if any((self._directory / "segments").glob("*.seg")):
                    raise StoreError(
                        f"the chunk store {self._directory} has lost its catalogue.sqlite: bring it back, make a new "
                        f"one from the segments with {rebuilding(self._directory)}, or remove the segments."
                    )
                schema.create(db)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _version(self, db: sqlite3.Connection) -> int:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, schema.VERSION):
            raise StoreFormatError(
                f"the chunk store {self._directory} has format {version}, this version reads {schema.VERSION}: "
                + (
                    "upgrade epic-rag, or ingest into a new directory."
                    if version > schema.VERSION
                    else "open it once where it can be written, which brings it up to date."
                )
            )
        return version

    def _open_read_only(self) -> sqlite3.Connection:
        log = self._file.with_name("catalogue.sqlite-wal")
        error: Exception | None = None
        # A database in a directory that cannot be written opens if it is declared immutable; that overlooks the
        # log, so it must be empty.
        for options in ("mode=ro", "immutable=1"):
            if options == "immutable=1" and log.exists() and log.stat().st_size:
                break
            db = None
            try:
                db = sqlite3.connect(
                    f"{self._file.as_uri()}?{options}", uri=True, timeout=60, isolation_level=None,
                    check_same_thread=False,
                )  # fmt: skip
                schema.distrust(db)
                if not self._version(db):
                    raise sqlite3.OperationalError("it is empty")
                db.execute("SELECT 1 FROM settings").fetchone()
                return db
            except FAILURES as caught:
                error = caught
                if db is not None:
                    db.close()
        raise error or sqlite3.OperationalError("its log cannot be read")

    @property
    def writable(self) -> bool:
        """Whether this catalogue can be changed."""
        return self._writer is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._reader is None

    def close(self) -> None:
        """Close the database. Closing twice is fine."""
        with self._write_lock, self._read_lock:
            for db in (self._reader, self._writer):
                if db is not None:
                    db.close()
            self._reader = self._writer = None

    # -- access ------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> StoreError:
        """What is raised where SQLite raises this."""
        return StoreError(
            f"the catalogue of {self._directory} failed: {error}. Free disk space, or try again; if it is damaged, "
            f"make a new one from the segments with {rebuilding(self._directory)}."
        )

    def _check_open(self) -> None:
        if self._reader is None:
            raise StoreError(f"the chunk store {self._directory} was closed: open it again.")

    def query(self, text: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, as of the last commit."""
        with self._read_lock:
            self._check_open()
            assert self._reader is not None
            try:
                return self._reader.execute(text, values).fetchall()
            except FAILURES as error:
                raise self.failed(error) from error

    def check_writable(self) -> None:
        """Raise StoreError if the store is closed or read-only."""
        self._check_open()
        if self._writer is None:
            raise StoreError(f"the chunk store {self._directory} is open for reading only: open it where it is yours.")

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction of the writing connection; it is undone if the block raises.

        Parameters
        ----------
        durable
            Wait for the disk. Without, a crash of the machine may undo it, but nothing before it.
        """
        with self._write_lock:
            self.check_writable()
            db = self._writer
            assert db is not None
            try:
                if not durable:
                    db.execute("PRAGMA synchronous=NORMAL")
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):  # such as a full disk, which has undone it already
                        db.execute("ROLLBACK")
                    raise
                finally:
                    if not durable:
                        db.execute("PRAGMA synchronous=FULL")
            except (*FAILURES, TypeError, OverflowError) as error:  # damaged rows hold other types
                raise self.failed(error) from error

    # -- settings ----------------------------------------------------------------------------------------------

    def setting(self, name: str) -> Any:
        """A setting of the store, None where it has none."""
        rows = self.query("SELECT value FROM settings WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def set(self, name: str, value: float | None) -> None:
        """Change a setting; None removes it."""
        with self.transaction() as db:
            db.execute("DELETE FROM settings WHERE name = ?", (name,))
            if value is not None:
                db.execute("INSERT INTO settings VALUES (?, ?)", (name, value))
