"""The catalogue's tables, and how older ones become today's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from epic_engine.chunks import ChunkKey

from . import faults, indices
from .eviction import weight
from .seals import NAMED, SEALED, pack_ids, pack_row, seal, unpack_ids, unpack_row
from .segments import DTYPES, RECORD_HEADER, metadata, read_record, sync_directory, unpack_header
from .store import ChunkInfo

__all__ = [
    "RAW_FILE",
    "SEGMENT",
    "VERSION",
    "create",
    "distrust",
    "insert_chunk",
    "intern",
    "migrate",
    "payload_of",
]

VERSION = 3
SEGMENT, RAW_FILE = 0, 1  # kinds of segments: a file of records; a safetensors file of format 1, one chunk

_KEY = re.compile("[0-9a-f]{64}")
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
        key BLOB NOT NULL,
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
        context_ids BLOB NOT NULL,
        seal BLOB NOT NULL)""",
    *indices.STATEMENTS,
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


def distrust(db: sqlite3.Connection) -> None:
    """Take nothing in the file for a program; to be called before anything else is read from it.

    Raises
    ------
    sqlite3.Error
        If it holds triggers or views that are not this format's: they would run whenever a table is used.
    """
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")
    known = {_spaced(statement) for statement in _STATEMENTS}
    for kind, name, text in db.execute("SELECT type, name, sql FROM sqlite_master WHERE type IN ('trigger', 'view')"):
        if not isinstance(text, str) or _spaced(text) not in known:
            raise sqlite3.DatabaseError(f"it holds the {kind} {str(name)[:80]!r}, which no chunk store has")


def _spaced(statement: str) -> str:
    return " ".join(statement.split())


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
    numbers: dict[tuple[str, str], int] | None = None,
) -> None:
    """Enter a chunk; inside a transaction.

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
    numbers
        Of names, by table and name, as far as they were looked up in this transaction; gets those of this chunk.

    Raises
    ------
    sqlite3.IntegrityError
        If its key is in the catalogue; nothing was entered then.
    """
    span = place[-1]
    row = pack_row(info, shape, dtype, checksum)
    key, _, _, content, _, ids, context_ids, nbytes, created, depends, expires, cost, _, sizes, _, _ = row
    numbers = {} if numbers is None else numbers
    names = ("namespaces", info.namespace), ("fingerprints", info.fingerprint), ("contexts", info.context)
    for name in names:
        if name not in numbers:
            numbers[name] = intern(db, *name)
    namespace, fingerprint, context = (numbers[name] for name in names)
    cursor = db.execute(
        "INSERT INTO chunks (key, namespace, fingerprint, content, context, segment, start, offset, stored, span, "
        "nbytes, shape, dtype, encoding, checksum, created, expires, cost, depends, token_ids, context_ids, seal) "
        f"VALUES ({', '.join('?' * 22)})",
        (
            key,
            namespace,
            fingerprint,
            content,
            context,
            *place,
            nbytes,
            sizes,
            dtype,
            info.encoding,
            checksum,
            created,
            expires,
            cost,
            depends,
            ids,
            context_ids,
            seal(row),
        ),
    )
    value = weight(info, span)
    db.execute(
        "INSERT INTO ranks (chunk, namespace, span, weight, priority, used_at, pinned) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (cursor.lastrowid, namespace, span, value, clock + value, info.created, pinned),
    )
    db.executemany(
        "INSERT OR IGNORE INTO recent_dependencies VALUES (?, ?)",
        [(bytes.fromhex(content), cursor.lastrowid) for content in info.depends],
    )
    if (cursor.lastrowid or 0) % indices.MERGE_EVERY == 0:
        indices.merge(db)


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


def _from_1(db: sqlite3.Connection, directory: Path) -> None:
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
    for key, *row in rows:
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise sqlite3.DatabaseError(f"it holds the row {str(key)[:80]!r}, which is no chunk's")
        name = f"{key[:2]}/{key}.safetensors"
        try:
            chunk = _chunk_of_1(key, row)
            with open(directory / "kv" / name, "rb") as file:
                size, offset = payload_of(file, chunk.info.nbytes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            db.execute(
                "INSERT INTO quarantine (key, segment, offset, reason, at) VALUES (?, ?, 0, ?, ?)",
                (bytes.fromhex(key), name, f"not readable when the store was brought up to date: {error}", time.time()),
            )
            continue
        segment = db.execute("INSERT INTO segments (name, kind, size) VALUES (?, ?, ?)", (name, RAW_FILE, size))
        place = (segment.lastrowid or 0, 0, offset, chunk.info.nbytes, size)
        insert_chunk(db, chunk.info, place, chunk.shape, chunk.dtype, chunk.checksum, clock=0.0)
    db.execute("DROP TABLE chunks_1")


@dataclass(frozen=True)
class _Chunk1:
    info: ChunkInfo
    shape: tuple[int, ...]
    dtype: str
    checksum: bytes


def _chunk_of_1(key: str, row: Sequence[Any]) -> _Chunk1:
    """A row of format 1; ValueError, TypeError, ... where that could not have been written."""
    namespace, fingerprint, content, context, token_ids, context_ids, nbytes, shape, dtype, checksum = row[:10]
    created, depends = row[10:]
    kind = str(dtype).removeprefix("torch.")
    if kind not in DTYPES:
        raise ValueError(f"dtype {kind} is unknown")
    sizes, digests = json.loads(shape), json.loads(depends)
    texts = (namespace, fingerprint, content, context, *digests)
    numbers = type(nbytes) is int and nbytes >= 0 and type(created) is float
    if not numbers or not all(isinstance(text, str) for text in texts):
        raise TypeError("its row in the catalogue is damaged")
    pack_ids(sizes)
    for digest in (content, *digests):
        bytes.fromhex(digest)
    info = ChunkInfo(
        ChunkKey(key), namespace, fingerprint, content, context, unpack_ids(token_ids), unpack_ids(context_ids),
        nbytes, created, tuple(digests),
    )  # fmt: skip
    sum_ = xxhash.xxh3_128_digest(b"") if checksum == "empty" else bytes.fromhex(checksum)
    return _Chunk1(info, tuple(sizes), kind, sum_)


def payload_of(file: BinaryIO, nbytes: int) -> tuple[int, int]:
    """Bytes of an open safetensors file with one tensor ``kv``, and where the tensor begins.

    Raises
    ------
    ValueError, KeyError, TypeError, RecursionError
        If it is damaged.
    OSError
        If it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise ValueError("its header is damaged")
    begin, end = json.loads(file.read(length))["kv"]["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError("its header is damaged")
    offset = 8 + length + begin
    if end - begin != nbytes or begin < 0 or offset + nbytes > size:
        raise ValueError("its header does not fit")
    return size, offset


def _from_2(db: sqlite3.Connection, directory: Path) -> None:
    """Every row gets the seal of the record that it names, so that one which was damaged before is known as such."""
    db.execute("DROP INDEX chunks_by_content")
    for statement in indices.STATEMENTS:
        db.execute(statement)
    indices.fill(db)
    db.execute("ALTER TABLE chunks ADD COLUMN seal BLOB NOT NULL DEFAULT x''")
    rows = db.execute(
        f"SELECT {SEALED}, c.id, c.start, c.offset, c.stored, iif(s.kind = {SEGMENT}, s.name, NULL) FROM {NAMED} "
        "LEFT JOIN segments s ON s.id = c.segment ORDER BY c.segment, c.start"
    )
    seals: list[tuple[bytes, int]] = []
    with contextlib.ExitStack() as stack:
        opened, file = None, None
        for row in rows:
            ident, start, offset, stored, name = row[17:]
            if name != opened:
                stack.close()
                opened, file = name, None
                with contextlib.suppress(OSError, ValueError):
                    file = stack.enter_context(open(directory / "segments" / f"{name}.seg", "rb")) if name else None
            with contextlib.suppress(TypeError, struct.error):  # what nobody can have written stays without
                seals.append((_first_seal(row, file, start, offset, stored), ident))
    db.executemany("UPDATE chunks SET seal = ? WHERE id = ?", seals)
    db.execute("PRAGMA user_version=3")


def _first_seal(row: Sequence[Any], file: BinaryIO | None, start: int, offset: int, stored: int) -> bytes:
    if file is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.seek(start)
            header = unpack_header(file.read(RECORD_HEADER))
            if header is not None and (header.key, header.offset(start), header.stored) == (row[0], offset, stored):
                kept = pack_ids(header.shape), header.dtype.encode(), header.checksum
                # Where the row's metadata has the digest of the record's, there is no need to read that.
                if kept == row[13:16] and xxhash.xxh3_128_digest(metadata(unpack_row(row))) == header.metadata_sum:
                    return seal(row)
                record = read_record(file, start)
                if record is not None:
                    return seal(pack_row(record.info, record.shape, record.dtype, record.checksum))
    return seal(row)


_MIGRATIONS: dict[int, Callable[[sqlite3.Connection, Path], None]] = {1: _from_1, 2: _from_2}
