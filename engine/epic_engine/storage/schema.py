"""The catalogue's tables, and how older ones become today's."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from epic_engine.chunks import ChunkKey

from . import faults
from .eviction import weight
from .segments import DTYPES, sync_directory
from .store import ChunkInfo

__all__ = ["RAW_FILE", "SEGMENT", "VERSION", "create", "insert_chunk", "intern", "migrate", "pack_ids", "unpack_ids"]

VERSION = 2
SEGMENT, RAW_FILE = 0, 1  # kinds of segments: a file of records; a safetensors file of format 1, one chunk

_STATEMENTS = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, quota INTEGER)",
    "CREATE TABLE fingerprints (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    "CREATE TABLE contexts (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    # Numbers of segments and chunks are never used again: processes remember places by them.
    """CREATE TABLE segments (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        kind INTEGER NOT NULL,
        size INTEGER NOT NULL,
        live INTEGER NOT NULL DEFAULT 0,
        gone INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL UNIQUE,
        namespace INTEGER NOT NULL,
        fingerprint INTEGER NOT NULL,
        content BLOB NOT NULL,
        context INTEGER NOT NULL,
        segment INTEGER NOT NULL,
        start INTEGER NOT NULL,
        offset INTEGER NOT NULL,
        stored INTEGER NOT NULL,
        span INTEGER NOT NULL,
        nbytes INTEGER NOT NULL,
        shape BLOB NOT NULL,
        dtype TEXT NOT NULL,
        encoding TEXT NOT NULL,
        checksum BLOB NOT NULL,
        created REAL NOT NULL,
        expires REAL,
        cost REAL,
        depends BLOB NOT NULL,
        token_ids BLOB NOT NULL,
        context_ids BLOB NOT NULL)""",
    "CREATE INDEX chunks_by_content ON chunks (namespace, content, fingerprint, created, key)",
    "CREATE INDEX chunks_by_age ON chunks (created, key)",
    "CREATE INDEX chunks_by_segment ON chunks (segment, start, span)",
    "CREATE INDEX chunks_by_expiry ON chunks (expires) WHERE expires IS NOT NULL",
    # What changes with every use lies apart from the token ids, so that a use rewrites few bytes.
    """CREATE TABLE ranks (
        chunk INTEGER PRIMARY KEY,
        namespace INTEGER NOT NULL,
        span INTEGER NOT NULL,
        weight REAL NOT NULL,
        priority REAL NOT NULL,
        uses INTEGER NOT NULL DEFAULT 1,
        used_at REAL NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX ranks_by_priority ON ranks (priority, chunk) WHERE NOT pinned",
    "CREATE INDEX ranks_by_namespace ON ranks (namespace, priority, chunk) WHERE NOT pinned",
    "CREATE INDEX ranks_pinned ON ranks (namespace, span) WHERE pinned",
    "CREATE TABLE dependencies (content BLOB NOT NULL, chunk INTEGER NOT NULL, PRIMARY KEY (content, chunk)) "
    "WITHOUT ROWID",
    "CREATE INDEX dependencies_by_chunk ON dependencies (chunk)",
    """CREATE TABLE tallies (
        namespace INTEGER NOT NULL,
        fingerprint INTEGER NOT NULL,
        chunks INTEGER NOT NULL,
        nbytes INTEGER NOT NULL,
        PRIMARY KEY (namespace, fingerprint)) WITHOUT ROWID""",
    "CREATE TABLE quarantine (id INTEGER PRIMARY KEY, key BLOB NOT NULL, segment TEXT NOT NULL, "
    "offset INTEGER NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL)",
    "CREATE TABLE leases (key BLOB PRIMARY KEY, owner TEXT NOT NULL, seconds REAL NOT NULL, expires REAL NOT NULL) "
    "WITHOUT ROWID",
    """CREATE TRIGGER chunks_enter AFTER INSERT ON chunks BEGIN
        UPDATE segments SET live = live + NEW.span WHERE id = NEW.segment;
        INSERT OR IGNORE INTO tallies VALUES (NEW.namespace, NEW.fingerprint, 0, 0);
        UPDATE tallies SET chunks = chunks + 1, nbytes = nbytes + NEW.span
            WHERE namespace = NEW.namespace AND fingerprint = NEW.fingerprint;
    END""",
    """CREATE TRIGGER chunks_leave AFTER DELETE ON chunks BEGIN
        UPDATE segments SET live = live - OLD.span WHERE id = OLD.segment;
        UPDATE tallies SET chunks = chunks - 1, nbytes = nbytes - OLD.span
            WHERE namespace = OLD.namespace AND fingerprint = OLD.fingerprint;
        DELETE FROM dependencies WHERE chunk = OLD.id;
        DELETE FROM ranks WHERE chunk = OLD.id;
    END""",
    """CREATE TRIGGER chunks_move AFTER UPDATE OF segment, span ON chunks BEGIN
        UPDATE segments SET live = live - OLD.span WHERE id = OLD.segment;
        UPDATE segments SET live = live + NEW.span WHERE id = NEW.segment;
        UPDATE tallies SET nbytes = nbytes - OLD.span + NEW.span
            WHERE namespace = NEW.namespace AND fingerprint = NEW.fingerprint;
        UPDATE ranks SET span = NEW.span WHERE chunk = NEW.id;
    END""",
    f"PRAGMA user_version={VERSION}",
)


def create(db: sqlite3.Connection) -> None:
    """Make all tables; inside a transaction."""
    for statement in _STATEMENTS:
        db.execute(statement)


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as packed int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(raw: bytes) -> tuple[int, ...]:
    """The inverse of :func:`pack_ids`."""
    return tuple(np.frombuffer(raw, dtype="<i4").tolist())


def intern(db: sqlite3.Connection, table: str, name: str) -> int:
    """Number of a namespace, fingerprint or context, entered if it is new."""
    row = db.execute(f"SELECT id FROM {table} WHERE name = ?", (name,)).fetchone()
    if row is None:
        return int(db.execute(f"INSERT INTO {table} (name) VALUES (?)", (name,)).lastrowid or 0)
    return int(row[0])


def insert_chunk(
    db: sqlite3.Connection,
    info: ChunkInfo,
    place: tuple[int, int, int, int, int],
    shape: tuple[int, ...],
    dtype: str,
    checksum: bytes,
    *,
    clock: float,
    pinned: bool = False,
) -> None:
    """Enter a chunk whose key is not in the catalogue; inside a transaction.

    Parameters
    ----------
    db
        Connection.
    info
        The chunk.
    place
        Segment, start of the record, offset and bytes of the payload, bytes of the record.
    shape, dtype, checksum
        Of the KV.
    clock
        Of the eviction.
    pinned
        Whether it must not be evicted.
    """
    span = place[-1]
    namespace = intern(db, "namespaces", info.namespace)
    cursor = db.execute(
        "INSERT INTO chunks (key, namespace, fingerprint, content, context, segment, start, offset, stored, span, "
        "nbytes, shape, dtype, encoding, checksum, created, expires, cost, depends, token_ids, context_ids) "
        f"VALUES ({', '.join('?' * 21)})",
        (
            bytes.fromhex(info.key.hex),
            namespace,
            intern(db, "fingerprints", info.fingerprint),
            bytes.fromhex(info.content),
            intern(db, "contexts", info.context),
            *place,
            info.nbytes,
            pack_ids(shape),
            dtype,
            info.encoding,
            checksum,
            info.created,
            info.expires,
            info.cost,
            b"".join(bytes.fromhex(d) for d in info.depends),
            pack_ids(info.token_ids),
            pack_ids(info.context_ids),
        ),
    )
    value = weight(info, span)
    db.execute(
        "INSERT INTO ranks (chunk, namespace, span, weight, priority, used_at, pinned) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (cursor.lastrowid, namespace, span, value, clock + value, info.created, pinned),
    )
    db.executemany(
        "INSERT OR IGNORE INTO dependencies VALUES (?, ?)",
        [(bytes.fromhex(content), cursor.lastrowid) for content in info.depends],
    )


# -- migrations ------------------------------------------------------------------------------------------------


def migrate(db: sqlite3.Connection, directory: Path) -> None:
    """Bring a catalogue of an older version up to date, each step in one transaction; a copy of it is kept.

    Raises
    ------
    sqlite3.Error, OSError
        If that fails; then the catalogue is what it was.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    while 0 < version < VERSION:
        _keep_copy(db, directory, version)
        db.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have been quicker.
            if int(db.execute("PRAGMA user_version").fetchone()[0]) == version:
                _MIGRATIONS[version](db, directory)
                faults.point("migrate.committing")
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        faults.point("migrate.committed")
        version = int(db.execute("PRAGMA user_version").fetchone()[0])


def _keep_copy(db: sqlite3.Connection, directory: Path, version: int) -> None:
    kept = directory / f"catalogue.v{version}.sqlite"
    if kept.exists():
        return
    temporary = directory / f"catalogue.v{version}.{uuid.uuid4().hex}.tmp"
    with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode=DELETE")
        db.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # the copied header says WAL
        meanwhile = int(copy.execute("PRAGMA user_version").fetchone()[0]) != version
    if meanwhile:  # another process has brought it up to date
        temporary.unlink()
        return
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, kept)
    sync_directory(directory)
    faults.point("migrate.copied")


def _from_1_to_2(db: sqlite3.Connection, directory: Path) -> None:
    """Every file of format 1 becomes a segment of its own, and is read where it lies."""
    db.execute("DROP INDEX IF EXISTS chunks_by_content")
    db.execute("DROP INDEX IF EXISTS dependencies_by_key")
    db.execute("DROP TABLE dependencies")
    db.execute("ALTER TABLE chunks RENAME TO chunks_1")
    create(db)
    rows = db.execute(
        "SELECT key, namespace, fingerprint, content, context, token_ids, context_ids, nbytes, shape, dtype, "
        "checksum, created, depends FROM chunks_1 ORDER BY created, key"
    )
    for row in rows:
        hexadecimal, namespace, fingerprint, content, context, token_ids, context_ids, nbytes = row[:8]
        shape, dtype, checksum, created, depends = row[8:]
        key = bytes.fromhex(hexadecimal)
        name = f"{hexadecimal[:2]}/{hexadecimal}.safetensors"
        kind = str(dtype).removeprefix("torch.")
        dimensions = tuple(json.loads(shape))
        try:
            size, offset = _payload_of(directory / "kv" / name, nbytes)
            if kind not in DTYPES:
                raise ValueError(f"dtype {kind} is unknown")
        except (OSError, ValueError, KeyError, TypeError) as error:
            db.execute(
                "INSERT INTO quarantine (key, segment, offset, reason, at) VALUES (?, ?, 0, ?, ?)",
                (key, name, f"not readable when the store was brought up to date: {error}", time.time()),
            )
            continue
        segment = db.execute("INSERT INTO segments (name, kind, size) VALUES (?, ?, ?)", (name, RAW_FILE, size))
        info = ChunkInfo(
            ChunkKey(hexadecimal),
            namespace,
            fingerprint,
            content,
            context,
            unpack_ids(token_ids),
            unpack_ids(context_ids),
            nbytes,
            created,
            tuple(json.loads(depends)),
        )
        sum_ = xxhash.xxh3_128_digest(b"") if checksum == "empty" else bytes.fromhex(checksum)
        place = (segment.lastrowid or 0, 0, offset, nbytes, size)
        insert_chunk(db, info, place, dimensions, kind, sum_, clock=0.0)
    db.execute("DROP TABLE chunks_1")


def _payload_of(file: Path, nbytes: int) -> tuple[int, int]:
    """Bytes of a safetensors file with one tensor ``kv``, and where the tensor begins."""
    with open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if length > size - 8:
            raise ValueError("its header is damaged")
        begin, end = json.loads(handle.read(length))["kv"]["data_offsets"]
    offset = 8 + length + begin
    if end - begin != nbytes or begin < 0 or offset + nbytes > size:
        raise ValueError("its header does not fit")
    return size, offset


_MIGRATIONS: dict[int, Callable[[sqlite3.Connection, Path], None]] = {1: _from_1_to_2}
