"""Which chunks the store has and where they lie. Look-ups are single queries by an index."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ConfigError

from . import faults, indices, schema
from .database import Database
from .eviction import no_room, victims
from .indices import BEHIND, CONTENT_IS, KEY_IS, LOST, STRAYS
from .schema import SEGMENT
from .seals import NAMED, SEALED, entry_of, is_whole, unpack_ids
from .segments import DTYPES, Record
from .store import ChunkInfo, StoreUsage

__all__ = ["Catalogue", "Place", "place_of_row"]

_PAGE = 1000
_MOST_VARIABLES = 500
_LIVE = "(c.expires IS NULL OR c.expires > ?)"
_PLACE = f"c.id, c.segment, s.name, s.kind, c.start, c.offset, c.stored, c.span, {SEALED}"
_PLACED = f"{NAMED} LEFT JOIN segments s ON s.id = c.segment"


@dataclass(frozen=True)
class Place:
    """Where a chunk's payload lies, and how to read it.

    Attributes
    ----------
    ident, key
        The chunk's number and key.
    segment, name, kind
        Number, name and kind of its file; the name is empty if the catalogue has lost it.
    start, offset, stored, span
        Where its record and its payload begin, bytes of payload and of the whole record.
    whole
        Whether the row is what was entered. Of one that is not, nothing can be believed, not even that numbers are
        numbers, and what follows is empty.
    shape, dtype, encoding, checksum
        Of the KV.
    """

    ident: int
    key: bytes
    segment: int
    name: str
    kind: int
    start: int
    offset: int
    stored: int
    span: int
    whole: bool
    shape: tuple[int, ...] = ()
    dtype: str = ""
    encoding: str = ""
    checksum: bytes = b""


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is no digest: hexadecimal digits are expected.") from None


def place_of_row(row: Sequence[Any]) -> Place:
    """Where a chunk lies, from a row of :meth:`Catalogue.rows`."""
    ident, segment, name, kind, start, offset, stored, span = row[:8]
    entry, numbers = row[8:25], (segment, *row[4:8])
    shape: tuple[int, ...] = ()
    dtype, encoding, checksum = "", "", b""
    whole = is_whole(entry) and set(map(type, numbers)) == {int} and min(numbers) >= 0
    if whole:
        try:
            shape, dtype, encoding, checksum = unpack_ids(entry[13]), entry[14].decode(), entry[12].decode(), entry[15]
            whole = dtype in DTYPES
        except ValueError:  # a seal is no signature
            whole = False
    name, kind = ("", SEGMENT) if name is None else (name, kind)
    return Place(
        ident, entry[0], segment, name, kind, start, offset, stored, span, whole, shape, dtype, encoding, checksum
    )  # fmt: skip


def _infos(rows: Iterable[Sequence[Any]]) -> list[ChunkInfo]:
    """Entries of the rows that are what was entered."""
    return [info for info in map(entry_of, rows) if info is not None]


def _setting(db: sqlite3.Connection, name: str) -> Any:
    row = db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None


class Catalogue(Database):
    """Everything the store knows about its chunks. Parameters and errors are those of the database."""

    # -- look-ups ----------------------------------------------------------------------------------------------

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """A chunk's entry, unless it is expired."""
        raw = bytes.fromhex(key.hex)
        found = _infos(self.query(f"SELECT {SEALED} FROM {NAMED} WHERE {KEY_IS} AND {_LIVE}", (raw, time.time())))
        return found[0] if found else None

    def place(self, key: ChunkKey) -> Place | None:
        """Where a chunk lies, unless it is expired."""
        raw = bytes.fromhex(key.hex)
        rows = self.query(f"SELECT {_PLACE} FROM {_PLACED} WHERE {KEY_IS} AND {_LIVE}", (raw, time.time()))
        return place_of_row(rows[0]) if rows else None

    def place_of(self, ident: int) -> tuple[int, int] | None:
        """Segment and start of a chunk's record by the chunk's number, or None."""
        rows = self.query("SELECT segment, start FROM chunks WHERE id = ?", (ident,))
        return (rows[0][0], rows[0][1]) if rows else None

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which keys are there and not expired."""
        found: set[ChunkKey] = set()
        for at in range(0, len(keys), _MOST_VARIABLES):
            part = [bytes.fromhex(key.hex)[:16] for key in keys[at : at + _MOST_VARIABLES]]
            condition = indices.one_of(len(part))
            rows = self.query(f"SELECT {SEALED} FROM {NAMED} WHERE {condition} AND {_LIVE}", (*part, time.time()))
            found.update(ChunkKey(row[0].hex()) for row in rows if is_whole(row))
        return found.intersection(keys)

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All forms of a content, oldest first."""
        rows = self.query(
            f"SELECT {SEALED} FROM {NAMED} WHERE {CONTENT_IS} AND f.name = ? AND {_LIVE}",
            (_digest(content), namespace, fingerprint, time.time()),
        )
        return sorted(_infos(rows), key=lambda info: (info.created, info.key))

    def entries(self) -> Iterator[ChunkInfo]:
        """All entries that are not expired, oldest first, a page at a time."""
        self._check_open()
        return self._entries()

    def _entries(self) -> Iterator[ChunkInfo]:
        after: tuple[float, bytes] = (float("-inf"), b"")
        while True:
            rows = self.query(
                f"SELECT {SEALED} FROM {NAMED} WHERE (c.created, c.key) > (?, ?) AND {_LIVE} "
                "ORDER BY c.created, c.key LIMIT ?",
                (*after, time.time(), _PAGE),
            )
            if not rows:
                return
            last = rows[-1][8], rows[-1][0]
            if not self.query("SELECT (?, ?) > (?, ?)", (*last, *after))[0][0]:
                raise self.failed(sqlite3.DatabaseError("its index of ages is damaged"))
            after = last
            yield from _infos(rows)

    def rows(self, after: int, limit: int) -> list[tuple[Any, ...]]:
        """Rows of the first chunks with greater numbers, for checking, the expired included.

        Each has what :func:`place_of_row` takes: the chunk's number, the number, name and kind of its file, start,
        offset, stored, span, and :data:`~epic_engine.storage.seals.SEALED`; then whether it has a rank, and how many
        dependencies the catalogue has for it.
        """
        return self.query(
            f"SELECT {_PLACE}, r.chunk IS NOT NULL, (SELECT count(*) FROM dependencies d WHERE d.chunk = c.id) "
            "+ (SELECT count(*) FROM recent_dependencies d WHERE d.chunk = c.id) "
            f"FROM {_PLACED} LEFT JOIN ranks r ON r.chunk = c.id WHERE c.id > ? ORDER BY c.id LIMIT ?",
            (after, limit),
        )

    def lost(self, first: int, last: int) -> list[int]:
        """Numbers of chunks from one number to another that are not found by their key or their content."""
        rows = self.query(f"SELECT c.id FROM chunks c WHERE c.id BETWEEN ? AND ? AND {LOST}", (first, last))
        return [row[0] for row in rows]

    def strays(self) -> int:
        """How many entries of the indices lead to no chunk, or to another."""
        return int(self.query(STRAYS)[0][0])

    def in_segment(self, segment: int, after: int, limit: int) -> list[tuple[Place, ChunkInfo | None]]:
        """The first chunks of a segment whose records begin behind a place, in the order of the file.

        Those with damaged rows come without an entry.
        """
        rows = self.query(
            f"SELECT {_PLACE} FROM {_PLACED} WHERE c.segment = ? AND c.start > ? ORDER BY c.start LIMIT ?",
            (segment, after, limit),
        )
        return [(place_of_row(row), entry_of(row[8:])) for row in rows]

    def quarantined(self) -> list[str]:
        """Keys of chunks that were set aside, in hex."""
        return [row[0].lower() for row in self.query("SELECT hex(key) FROM quarantine ORDER BY id")]

    def usage(self, dead: int) -> StoreUsage:
        """Chunks and bytes by namespace and model."""
        rows = self.query(
            "SELECT n.name, f.name, t.chunks, t.nbytes FROM tallies t JOIN namespaces n ON n.id = t.namespace "
            "JOIN fingerprints f ON f.id = t.fingerprint WHERE t.chunks ORDER BY n.name, f.name"
        )
        aside = self.query("SELECT count(*) FROM quarantine")[0][0]
        return StoreUsage({(n, f): (chunks, nbytes) for n, f, chunks, nbytes in rows}, dead, aside)

    def sound(self, *, quick: bool) -> None:
        """Have SQLite check its own file, with ``quick`` but for its indices; StoreError if it is damaged."""
        found = self.query(f"PRAGMA {'quick_check' if quick else 'integrity_check'}(1)")[0][0]
        if found != "ok":
            raise self.failed(sqlite3.DatabaseError(found))

    # -- chunks ------------------------------------------------------------------------------------------------

    def put(self, records: Sequence[tuple[int, Record]], uses: Mapping[int, int]) -> None:
        """Enter chunks in place of those of the same keys, and make room for them; the commit point of a put.

        Parameters
        ----------
        records
            With the number of their segment.
        uses
            As for :meth:`count_uses`.

        Raises
        ------
        StoreError
            If a quota or the budget has no room for them.
        """
        with self.transaction() as db:
            self._count(db, uses)
            clock = _setting(db, "clock") or 0.0
            newest = db.execute("SELECT coalesce(max(id), 0) FROM chunks").fetchone()[0]
            ends: dict[int, int] = {}
            sizes: dict[str, int] = {}
            numbers: dict[tuple[str, str], int] = {}
            for segment, record in records:
                key = bytes.fromhex(record.info.key.hex)
                span = record.end - record.start
                place = (segment, record.start, record.offset, record.stored, span)
                chunk = (record.info, place, record.shape, record.dtype, record.checksum)
                try:  # most keys are new, which is found out by entering them
                    schema.insert_chunk(db, *chunk, clock=clock, numbers=numbers)
                except sqlite3.IntegrityError:
                    pinned = self._remove(db, key)
                    schema.insert_chunk(db, *chunk, clock=clock, pinned=pinned, numbers=numbers)
                ends[segment] = max(ends.get(segment, 0), record.end)
                sizes[record.info.namespace] = sizes.get(record.info.namespace, 0) + span
            for namespace, wanted in sizes.items():
                self._enforce_quota(db, namespace, wanted, newest)
            limit = _setting(db, "max_bytes")
            if limit is not None:
                self._make_room(db, None, "the store", int(limit), sum(sizes.values()), newest)
            # Priorities are reckoned from the clock after what had to go has gone.
            reached = _setting(db, "clock") or 0.0
            if reached != clock:
                db.execute("UPDATE ranks SET priority = ? + weight WHERE chunk > ?", (reached, newest))
            db.executemany("UPDATE segments SET size = max(size, ?) WHERE id = ?", [(e, s) for s, e in ends.items()])
            faults.point("put.committing")
        faults.point("put.committed")

    def _remove(self, db: sqlite3.Connection, key: bytes) -> bool:
        """Remove a chunk; whether it was pinned."""
        text = f"SELECT c.id, r.pinned FROM chunks c LEFT JOIN ranks r ON r.chunk = c.id WHERE {KEY_IS}"
        old = db.execute(text, (key,)).fetchone()
        if old is None:
            return False
        db.execute("DELETE FROM chunks WHERE id = ?", (old[0],))
        return bool(old[1])

    def _enforce_quota(self, db: sqlite3.Connection, namespace: str, wanted: int, newest: int) -> None:
        ident, quota = db.execute("SELECT id, quota FROM namespaces WHERE name = ?", (namespace,)).fetchone()
        if quota is not None:
            self._make_room(db, ident, f"namespace {namespace!r}", quota, wanted, newest)

    def _make_room(
        self, db: sqlite3.Connection, namespace: int | None, what: str, limit: int, wanted: int, newest: int
    ) -> None:
        """Evict until a namespace (None: the store) is within its limit, but nothing newer than chunk ``newest``."""
        where, values = ("1", ()) if namespace is None else ("namespace = ?", (namespace,))

        def excess() -> int:
            return (
                db.execute(f"SELECT coalesce(sum(nbytes), 0) FROM tallies WHERE {where}", values).fetchone()[0] - limit
            )

        if excess() <= 0:
            return
        db.execute(f"DELETE FROM chunks WHERE expires <= ? AND id <= ? AND {where}", (time.time(), newest, *values))
        ranked = db.execute(
            f"SELECT chunk, span, priority FROM ranks WHERE NOT pinned AND {where} AND chunk <= ? "
            "ORDER BY priority, chunk",
            (*values, newest),
        )
        found = victims(ranked, excess())
        ranked.close()
        if found is None:
            pinned = db.execute(f"SELECT coalesce(sum(span), 0) FROM ranks WHERE pinned AND {where}", values).fetchone()
            raise no_room(what, limit, wanted, pinned[0])
        chosen, clock = found
        db.executemany("DELETE FROM chunks WHERE id = ?", [(ident,) for ident in chosen])
        if chosen:
            clock = max(clock, _setting(db, "clock") or 0.0)
            db.execute("INSERT OR REPLACE INTO settings VALUES ('clock', ?)", (clock,))

    def count_uses(self, uses: Mapping[int, int]) -> None:
        """Add uses by chunks' numbers; those of chunks that are gone are dropped."""
        with self.transaction(durable=False) as db:
            self._count(db, uses)

    def _count(self, db: sqlite3.Connection, uses: Mapping[int, int]) -> None:
        if uses:
            clock, now = _setting(db, "clock") or 0.0, time.time()
            db.executemany(
                "UPDATE ranks SET uses = uses + ?, used_at = ?, priority = ? + (uses + ?) * weight WHERE chunk = ?",
                [(count, now, clock, count, ident) for ident, count in uses.items()],
            )

    def _forget(self, change: Callable[[sqlite3.Connection], int]) -> int:
        with self.transaction() as db:
            count = change(db)
            faults.point("delete.committing")
        faults.point("delete.committed")
        return count

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; returns how many there were."""
        raw = [(bytes.fromhex(key.hex),) for key in keys]
        text = f"DELETE FROM chunks AS c WHERE {KEY_IS}"
        return self._forget(lambda db: db.executemany(text, raw).rowcount if raw else 0)

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget all forms of contents and what was compiled behind them; returns how many chunks."""
        digests = [_digest(content) for content in contents]

        def change(db: sqlite3.Connection) -> int:
            count = 0
            for digest in digests:
                for condition in (CONTENT_IS, BEHIND):
                    count += db.execute(f"DELETE FROM chunks AS c WHERE {condition}", (digest, namespace)).rowcount
            return count

        return self._forget(change)

    def erase_namespace(self, namespace: str) -> int:
        """Forget a namespace's chunks and quota; returns how many chunks there were."""

        def change(db: sqlite3.Connection) -> int:
            db.execute("UPDATE namespaces SET quota = NULL WHERE name = ?", (namespace,))
            return db.execute(
                "DELETE FROM chunks WHERE namespace = (SELECT id FROM namespaces WHERE name = ?)", (namespace,)
            ).rowcount

        return self._forget(change)

    def expire(self) -> int:
        """Forget what is expired; returns how many chunks."""
        if not self.query("SELECT 1 FROM chunks WHERE expires <= ? LIMIT 1", (time.time(),)):
            return 0
        return self._forget(lambda db: db.execute("DELETE FROM chunks WHERE expires <= ?", (time.time(),)).rowcount)

    def set_aside(self, place: Place, reason: str) -> None:
        """Take a damaged chunk out of the catalogue, unless it has been stored anew or moved meanwhile."""
        with self.transaction() as db:
            gone = db.execute(
                "DELETE FROM chunks WHERE id = ? AND segment IS ? AND start IS ?",
                (place.ident, place.segment, place.start),
            ).rowcount
            if gone:
                db.execute(
                    "INSERT INTO quarantine (key, segment, offset, reason, at) VALUES (?, ?, ?, ?, ?)",
                    (place.key, place.name, place.offset, reason, time.time()),
                )
            faults.point("quarantine.committing")
        faults.point("quarantine.committed")

    def mend(self, place: Place, record: Record) -> bool:
        """Enter a chunk as its record says, in place of a damaged row; the pin stays.

        Returns
        -------
        bool
            Whether that was done: not if the row is gone or was moved, or there is another one of the record's chunk.
        """
        key = bytes.fromhex(record.info.key.hex)
        with self.transaction() as db:
            row = db.execute(
                "SELECT r.pinned FROM chunks c LEFT JOIN ranks r ON r.chunk = c.id "
                "WHERE c.id = ? AND c.segment IS ? AND c.start IS ?",
                (place.ident, place.segment, place.start),
            ).fetchone()
            if (
                row is None
                or db.execute(f"SELECT 1 FROM chunks c WHERE {KEY_IS} AND c.id != ?", (key, place.ident)).fetchone()
            ):
                return False
            db.execute("DELETE FROM chunks WHERE id = ?", (place.ident,))
            schema.insert_chunk(
                db, record.info, (place.segment, record.start, record.offset, record.stored, record.end - record.start),
                record.shape, record.dtype, record.checksum, clock=_setting(db, "clock") or 0.0, pinned=bool(row[0]),
            )  # fmt: skip
            return True

    def find_again(self, ident: int) -> None:
        """Have a chunk found by its key and its content, unless its key has been put again: then forget this one."""
        with self.transaction() as db:
            row = db.execute("SELECT key FROM chunks WHERE id = ?", (ident,)).fetchone()
            if row and db.execute(f"SELECT 1 FROM chunks c WHERE {KEY_IS} AND c.id != ?", (row[0], ident)).fetchone():
                db.execute("DELETE FROM chunks WHERE id = ?", (ident,))
            else:
                db.execute("UPDATE chunks SET id = id WHERE id = ?", (ident,))  # by a trigger

    def drop_strays(self) -> None:
        """Drop entries of the indices that lead to no chunk, or to another."""
        with self.transaction() as db:
            indices.drop_strays(db)

    def pin(self, keys: Sequence[ChunkKey], pinned: bool) -> int:
        """Pin or unpin chunks; returns how many there are."""
        raw = [(bytes.fromhex(key.hex), pinned) for key in dict.fromkeys(keys)]
        with self.transaction() as db:
            return sum(
                db.execute(
                    f"UPDATE ranks SET pinned = ?2 WHERE chunk = (SELECT c.id FROM chunks c WHERE {KEY_IS})", r
                ).rowcount
                for r in raw
            )

    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit a namespace, known or not."""
        with self.transaction() as db:
            ident = schema.intern(db, "namespaces", namespace)
            db.execute("UPDATE namespaces SET quota = ? WHERE id = ?", (nbytes, ident))
