"""Which files the store has, which chunks move from one to another, and which files nothing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from . import faults
from .catalogue import Catalogue, Place
from .layout import Layout, is_name
from .schema import SEGMENT
from .segments import SEGMENT_HEADER, Record

__all__ = ["Segment", "SegmentTable"]


@dataclass(frozen=True)
class Segment:
    """A file that holds chunks.

    Attributes
    ----------
    ident
        Its number, never used again.
    name
        Of the file, without folder and ending; with both of them below ``kv`` for a file of format 1.
    kind
        :data:`~epic_engine.storage.schema.SEGMENT` or :data:`~epic_engine.storage.schema.RAW_FILE`.
    size, live
        Bytes when it was last written to, and those of them that chunks need.
    gone
        Its file is about to be removed, or was.
    """

    ident: int
    name: str
    kind: int
    size: int
    live: int
    gone: bool


class SegmentTable:
    """The catalogue's knowledge of files."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def _select(self, condition: str, *values: object) -> list[Segment]:
        rows = self._catalogue.query(f"SELECT id, name, kind, size, live, gone FROM segments WHERE {condition}", values)
        return [
            Segment(row[0], row[1], row[2], _count(row[3]), _count(row[4]), bool(row[5]))
            for row in rows
            if is_name(row[1], row[2])
        ]

    def all(self) -> list[Segment]:
        """Every segment, oldest first."""
        return self._select("1 ORDER BY id")

    def leaving(self) -> list[Segment]:
        """Segments that no chunk needs any more and whose files are to be removed."""
        # Asked again, for the mark is one bit of a file.
        return self._select("gone AND NOT EXISTS (SELECT 1 FROM chunks WHERE segment = segments.id) ORDER BY id")

    def get(self, ident: int) -> Segment | None:
        """A segment, or None if it is gone or about to be removed."""
        found = self._select("id = ? AND NOT gone", ident)
        return found[0] if found else None

    def names(self) -> set[str]:
        """Names of all files."""
        return {row[0] for row in self._catalogue.query("SELECT name FROM segments")}

    def wasteful(self, live_share: float, *, raw: bool) -> list[Segment]:
        """Segments of which less than a share is needed, and with ``raw`` all files of format 1, emptiest first."""
        condition = (
            "NOT gone AND (live = 0 OR (kind = ? AND live < (size - ?) * ?) OR (kind != ? AND ?)) "
            "ORDER BY live * 1.0 / size, id"
        )
        return self._select(condition, SEGMENT, SEGMENT_HEADER, live_share, SEGMENT, raw)

    def unfinished(self, size: int) -> list[Segment]:
        """Segments with room that are mostly alive, the fullest first."""
        condition = "NOT gone AND kind = ? AND size < ? AND live * 2 >= size ORDER BY size DESC LIMIT 16"
        return self._select(condition, SEGMENT, size)

    def dead_bytes(self) -> int:
        """Bytes of files that no chunk needs."""
        text = "SELECT coalesce(sum(size - live - iif(kind = ?, ?, 0)), 0) FROM segments"
        return int(self._catalogue.query(text, (SEGMENT, SEGMENT_HEADER))[0][0])

    def measure(self, layout: Layout) -> None:
        """Take note of bytes behind the last commit: they are of records that were never entered, or are torn."""
        grown = []
        for segment in self.all():
            with contextlib.suppress(OSError):  # a file that is absent is found out when its chunks are read
                size = layout.file(segment.name, segment.kind).stat().st_size
                if size > segment.size:
                    grown.append((size, segment.ident))
        if grown:
            with self._catalogue.transaction() as db:
                db.executemany("UPDATE segments SET size = max(size, ?) WHERE id = ?", grown)

    def enter(self, name: str, size: int) -> int:
        """Enter a new segment; returns its number."""
        with self._catalogue.transaction() as db:
            cursor = db.execute("INSERT INTO segments (name, kind, size) VALUES (?, ?, ?)", (name, SEGMENT, size))
            return int(cursor.lastrowid or 0)

    def move(self, moves: Sequence[tuple[Place, int, Record]]) -> None:
        """Let chunks be read from another segment, those of them that are still where they were.

        Parameters
        ----------
        moves
            Where each was, and the segment and record that it was copied to.
        """
        with self._catalogue.transaction() as db:
            for place, segment, record in moves:
                span = record.end - record.start
                db.execute(
                    "UPDATE chunks SET segment = ?, start = ?, offset = ?, span = ? "
                    "WHERE id = ? AND segment = ? AND start = ?",
                    (segment, record.start, record.offset, span, place.ident, place.segment, place.start),
                )
                db.execute("UPDATE segments SET size = max(size, ?) WHERE id = ?", (record.end, segment))
            faults.point("compact.committing")
        faults.point("compact.committed")

    def retire(self, ident: int) -> bool:
        """Say that a segment's file is to be removed, unless it holds a chunk; whether that is so.

        The entry stays until the file is gone: a file with records in it that no entry names has lost its catalogue.
        """
        with self._catalogue.transaction() as db:
            changed = db.execute(
                "UPDATE segments SET gone = 1 WHERE id = ? AND NOT EXISTS (SELECT 1 FROM chunks WHERE segment = ?)",
                (ident, ident),
            ).rowcount
            faults.point("compact.retiring")
        faults.point("compact.retired")
        return bool(changed)

    def forget(self, ident: int) -> None:
        """Forget a segment whose file was removed."""
        with self._catalogue.transaction() as db:
            db.execute("DELETE FROM segments WHERE id = ? AND gone", (ident,))
            faults.point("compact.forgetting")
        faults.point("compact.forgotten")

    def collect(self) -> int:
        """Drop entries that name nothing, and count anew; returns chunks set aside whose bytes are gone."""
        with self._catalogue.transaction() as db:
            gone = db.execute("DELETE FROM quarantine WHERE segment NOT IN (SELECT name FROM segments)").rowcount
            db.execute("DELETE FROM tallies WHERE chunks = 0")
            db.execute("DELETE FROM fingerprints WHERE id NOT IN (SELECT fingerprint FROM tallies)")
            db.execute(
                "DELETE FROM namespaces WHERE quota IS NULL AND id NOT IN (SELECT namespace FROM tallies)",
            )
            db.execute(
                "UPDATE segments SET live = coalesce((SELECT sum(span) FROM chunks WHERE segment = segments.id), 0)"
            )
            db.execute("UPDATE segments SET gone = 0 WHERE gone AND live > 0")
            for table in ("ranks", "dependencies", "recent_dependencies"):
                db.execute(f"DELETE FROM {table} WHERE chunk NOT IN (SELECT id FROM chunks)")
            faults.point("collect.committing")
        faults.point("collect.committed")
        return gone


def _count(value: object) -> int:
    """A number of bytes; a damaged one is none."""
    return value if isinstance(value, int) else 0
