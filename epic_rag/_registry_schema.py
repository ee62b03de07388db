"""The registry's SQLite file: its tables, how it is opened, and what its errors mean."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from epic_rag.errors import RegistryError

__all__ = ["SCHEMA_VERSION", "connect", "translated_errors"]

SCHEMA_VERSION: Final = 1
# "EPIC": tells a registry from any other SQLite file.
_APPLICATION_ID: Final = 0x45504943
_BUSY_SECONDS: Final = 30.0

_TABLES: Final = (
    """
    CREATE TABLE documents (
        doc_id        TEXT PRIMARY KEY,
        source        TEXT NOT NULL,
        content_hash  TEXT NOT NULL,
        settings_hash TEXT NOT NULL,
        metadata      TEXT NOT NULL,  -- JSON object of strings
        added_at      REAL NOT NULL   -- seconds since the epoch
    ) STRICT
    """,
    """
    CREATE TABLE chunks (
        chunk_id    TEXT PRIMARY KEY,
        doc_id      TEXT NOT NULL REFERENCES documents (doc_id) ON DELETE CASCADE,
        ordinal     INTEGER NOT NULL,
        text        TEXT NOT NULL,
        token_ids   BLOB NOT NULL,    -- int32, little-endian
        token_count INTEGER NOT NULL,
        key         TEXT NOT NULL,
        embedding   BLOB NOT NULL,    -- float32, little-endian
        UNIQUE (doc_id, ordinal)
    ) STRICT
    """,
    "CREATE INDEX chunks_by_key ON chunks (key)",
    """
    CREATE TABLE settings (
        name   TEXT PRIMARY KEY,
        value  TEXT NOT NULL,
        frozen INTEGER NOT NULL
    ) STRICT
    """,
    "CREATE TABLE state (revision INTEGER NOT NULL) STRICT",
    "INSERT INTO state VALUES (0)",
)


def connect(path: Path) -> sqlite3.Connection:
    """Open a registry file, creating it (and its folder) when absent.

    Raises
    ------
    RegistryError
        If the file is not a registry, was written by a newer version, or cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegistryError(
            f"the folder {path.parent} cannot be made ({error.strerror}): use another directory"
        ) from error
    with translated_errors(path):
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as :class:`RegistryError` with what to do about them."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_NOTADB":
            text = "is not a registry (not an SQLite file): use another directory, or move the file away"
        elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            text = f"was locked by another process for {_BUSY_SECONDS:.0f} s: wait until its ingestion has ended"
        elif name.startswith("SQLITE_CORRUPT"):
            text = f"is damaged ({error}): restore a backup, or ingest into a new directory"
        elif name.startswith("SQLITE_FULL"):
            text = "cannot be written, the disk is full: free some space and repeat"
        elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            text = f"cannot be opened for writing ({error}): check its and its folder's permissions"
        else:
            text = f"failed ({name or type(error).__name__}: {error})"
        raise RegistryError(f"the registry {path} {text}") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # Nothing in the file is a program: a registry that somebody else made has no say in what runs here.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    # One read transaction: another process that makes the tables right now must be seen whole or not at all.
    connection.execute("BEGIN")
    try:
        _check_format(connection, path)
    finally:
        connection.execute("COMMIT")
    connection.execute("PRAGMA foreign_keys = ON")
    # What is deleted is overwritten: it may be somebody's text.
    connection.execute("PRAGMA secure_delete = ON")
    _use_write_ahead_log(connection, path)
    # FULL: in a write-ahead log NORMAL may lose the last transactions at a power cut, and the keys that
    # put_document reported as freed are deleted elsewhere on the strength of them.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Asked again under the lock: another process may have made the tables in between.
        if _check_format(connection, path) == 0:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _check_format(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of the file, 0 for a new one."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if version == 0 and application == 0 and tables == 0:
        return 0
    if application != _APPLICATION_ID:
        raise RegistryError(
            f"{path} is the SQLite file of another program: use another directory, or move the file away"
        )
    if connection.execute("SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
        raise RegistryError(f"{path} holds triggers or views, which no registry has: remove them, or ingest again")
    if version > SCHEMA_VERSION:
        raise RegistryError(
            f"the registry {path} has format {version}, this version reads up to {SCHEMA_VERSION}: upgrade "
            "with `pip install -U epic-rag`, or ingest into a new directory"
        )
    return version


def _use_write_ahead_log(connection: sqlite3.Connection, path: Path) -> None:
    # The switch needs the file to itself and, unlike a transaction, does not wait for it.
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise RegistryError(
            f"the registry {path} is on a file system without shared memory (mode {mode!r}): "
            "put the directory on a local disk"
        )
