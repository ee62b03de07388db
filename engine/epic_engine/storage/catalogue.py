"""Which chunks the store has and where they lie. Look-ups are single queries by an index."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ConfigError

from . import faults, schema
from .database import Database
from .eviction import no_room, victims
from .schema import unpack_ids
from .segments import Record
from .store import ChunkInfo, StoreUsage

__all__ = ["Catalogue", "Place"]

_PAGE = 1000
_MOST_VARIABLES = 500
_INFO = (
    "c.key, n.name, f.name, c.content, x.name, c.token_ids, c.context_ids, c.nbytes, c.created, c.depends, "
    "c.expires, c.cost, c.encoding"
)
_NAMED = (
    "FROM chunks c JOIN namespaces n ON n.id = c.namespace JOIN fingerprints f ON f.id = c.fingerprint "
    "JOIN contexts x ON x.id = c.context"
)
_LIVE = "(c.expires IS NULL OR c.expires > ?)"
_PLACE = (
    "c.id, c.key, c.segment, s.name, s.kind, c.start, c.offset, c.stored, c.span, c.shape, c.dtype, c.encoding, "
    "c.checksum"
)


@dataclass(frozen=True)
class Place:
    """Where a chunk's payload lies, and how to read it; ``span`` is what the whole record takes."""

    ident: int
    key: ChunkKey
    segment: int
    name: str
    kind: int
    start: int
    offset: int
    stored: int
    span: int
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    checksum: bytes


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is no digest: hexadecimal digits are expected.") from None


def _info(row: tuple[Any, ...]) -> ChunkInfo:
    key, namespace, fingerprint, content, context, token_ids, context_ids, nbytes, created, depends, *rest = row
    return ChunkInfo(
        ChunkKey(key.hex()),
        namespace,
        fingerprint,
        content.hex(),
        context,
        unpack_ids(token_ids),
        unpack_ids(context_ids),
        nbytes,
        created,
        tuple(depends[i : i + 32].hex() for i in range(0, len(depends), 32)),
        *rest,
    )


def _place(row: tuple[Any, ...]) -> Place:
    fields = (row[0], ChunkKey(row[1].hex()), *row[2:9], unpack_ids(row[9]), *row[10:])
    return Place(*fields)


def _setting(db: sqlite3.Connection, name: str) -> Any:
    row = db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None


class Catalogue(Database):
    """Everything the store knows about its chunks. Parameters and errors are those of the database."""

    # -- look-ups ----------------------------------------------------------------------------------------------

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """A chunk's entry, unless it is expired."""
        rows = self.query(f"SELECT {_INFO} {_NAMED} WHERE c.key = ? AND {_LIVE}", (bytes.fromhex(key.hex), time.time()))
        return _info(rows[0]) if rows else None

    def place(self, key: ChunkKey) -> Place | None:
        """Where a chunk lies, unless it is expired."""
        rows = self.query(
            f"SELECT {_PLACE} FROM chunks c JOIN segments s ON s.id = c.segment WHERE c.key = ? AND {_LIVE}",
            (bytes.fromhex(key.hex), time.time()),
        )
        return _place(rows[0]) if rows else None

    def place_of(self, ident: int) -> tuple[int, int] | None:
        """Segment and start of a chunk's record by the chunk's number, or None."""
        rows = self.query("SELECT segment, start FROM chunks WHERE id = ?", (ident,))
        return (rows[0][0], rows[0][1]) if rows else None

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which keys are there and not expired."""
        found: set[ChunkKey] = set()
        for at in range(0, len(keys), _MOST_VARIABLES):
            part = [bytes.fromhex(key.hex) for key in keys[at : at + _MOST_VARIABLES]]
            marks = ", ".join("?" * len(part))
            rows = self.query(f"SELECT c.key FROM chunks c WHERE c.key IN ({marks}) AND {_LIVE}", (*part, time.time()))
            found.update(ChunkKey(key.hex()) for (key,) in rows)
        return found

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All forms of a content, oldest first."""
        rows = self.query(
            f"SELECT {_INFO} {_NAMED} WHERE n.name = ? AND c.content = ? AND f.name = ? AND {_LIVE} "
            "ORDER BY c.created, c.key",
            (namespace, _digest(content), fingerprint, time.time()),
        )
        return [_info(row) for row in rows]

    def entries(self) -> Iterator[ChunkInfo]:
        """All entries that are not expired, oldest first, a page at a time."""
        self._check_open()
        return self._entries()

    def _entries(self) -> Iterator[ChunkInfo]:
        after: tuple[float, bytes] = (float("-inf"), b"")
        while True:
            rows = self.query(
                f"SELECT {_INFO} {_NAMED} WHERE (c.created, c.key) > (?, ?) AND {_LIVE} "
                "ORDER BY c.created, c.key LIMIT ?",
                (*after, time.time(), _PAGE),
            )
            if not rows:
                return
            after = rows[-1][8], rows[-1][0]
            yield from map(_info, rows)

    def places(self) -> Iterator[Place]:
        """Where every chunk lies, the expired ones included, a page at a time."""
        last = 0
        while True:
            rows = self.query(
                f"SELECT {_PLACE} FROM chunks c JOIN segments s ON s.id = c.segment WHERE c.id > ? "
                "ORDER BY c.id LIMIT ?",
                (last, _PAGE),
            )
            if not rows:
                return
            last = rows[-1][0]
            yield from map(_place, rows)

    def in_segment(self, segment: int, after: int, limit: int) -> list[tuple[Place, ChunkInfo]]:
        """The first chunks of a segment whose records begin behind a place, in the order of the file."""
        rows = self.query(
            f"SELECT {_PLACE}, {_INFO} {_NAMED} JOIN segments s ON s.id = c.segment WHERE c.segment = ? AND "
            "c.start > ? ORDER BY c.start LIMIT ?",
            (segment, after, limit),
        )
        return [(_place(row[:13]), _info(row[13:])) for row in rows]

    def quarantined(self) -> list[tuple[ChunkKey, str]]:
        """Chunks that were set aside, with the names of their segments."""
        return [(ChunkKey(k.hex()), n) for k, n in self.query("SELECT key, segment FROM quarantine ORDER BY id")]

    def usage(self, dead: int) -> StoreUsage:
        """Chunks and bytes by namespace and model."""
        rows = self.query(
            "SELECT n.name, f.name, t.chunks, t.nbytes FROM tallies t JOIN namespaces n ON n.id = t.namespace "
            "JOIN fingerprints f ON f.id = t.fingerprint WHERE t.chunks ORDER BY n.name, f.name"
        )
        aside = self.query("SELECT count(*) FROM quarantine")[0][0]
        return StoreUsage({(n, f): (chunks, nbytes) for n, f, chunks, nbytes in rows}, dead, aside)

    def sound(self) -> None:
        """Have SQLite check its own file; StoreError if it is damaged."""
        found = self.query("PRAGMA quick_check(1)")[0][0]
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
            for segment, record in records:
                key = bytes.fromhex(record.info.key.hex)
                old = db.execute(
                    "SELECT r.chunk, r.pinned FROM ranks r JOIN chunks c ON c.id = r.chunk WHERE c.key = ?", (key,)
                ).fetchone()
                if old:
                    db.execute("DELETE FROM chunks WHERE id = ?", (old[0],))
                span = record.end - record.start
                place = (segment, record.start, record.offset, record.stored, span)
                schema.insert_chunk(
                    db, record.info, place, record.shape, record.dtype, record.checksum,
                    clock=clock, pinned=bool(old and old[1]),
                )  # fmt: skip
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
        return self._forget(lambda db: db.executemany("DELETE FROM chunks WHERE key = ?", raw).rowcount if raw else 0)

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget all forms of contents and what was compiled behind them; returns how many chunks."""
        digests = [_digest(content) for content in contents]

        def change(db: sqlite3.Connection) -> int:
            count = 0
            row = db.execute("SELECT id FROM namespaces WHERE name = ?", (namespace,)).fetchone()
            for digest in digests if row else ():
                for condition in ("content = ?", "id IN (SELECT chunk FROM dependencies WHERE content = ?)"):
                    text = f"DELETE FROM chunks WHERE namespace = ? AND {condition}"
                    count += db.execute(text, (*row, digest)).rowcount
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
                "DELETE FROM chunks WHERE id = ? AND segment = ? AND start = ?",
                (place.ident, place.segment, place.start),
            ).rowcount
            if gone:
                db.execute(
                    "INSERT INTO quarantine (key, segment, offset, reason, at) VALUES (?, ?, ?, ?, ?)",
                    (bytes.fromhex(place.key.hex), place.name, place.offset, reason, time.time()),
                )
            faults.point("quarantine.committing")
        faults.point("quarantine.committed")

    def pin(self, keys: Sequence[ChunkKey], pinned: bool) -> int:
        """Pin or unpin chunks; returns how many there are."""
        raw = [(pinned, bytes.fromhex(key.hex)) for key in dict.fromkeys(keys)]
        with self.transaction() as db:
            return sum(
                db.execute(
                    "UPDATE ranks SET pinned = ? WHERE chunk = (SELECT id FROM chunks WHERE key = ?)", r
                ).rowcount
                for r in raw
            )

    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit a namespace, known or not."""
        with self.transaction() as db:
            ident = schema.intern(db, "namespaces", namespace)
            db.execute("UPDATE namespaces SET quota = ? WHERE id = ?", (nbytes, ident))
