"""Publishing: a store's chunks become objects below a URL, which other machines link from.

What is published never changes: segments and catalogues are written under new names, and the replacement of
``current.json`` is the commit. Whatever ends a publication before that, readers have the generation before; what was
left behind is removed by the next publication.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epic_engine.errors import StoreError

from . import schema
from .catalogue import Catalogue, Place
from .file_store import FileStore
from .indices import KEY_IS
from .layout import Layout
from .locks import release, take
from .objects import Objects
from .segment_maps import SegmentMaps
from .segment_table import SegmentTable
from .segments import Record, SegmentWriter, as_bytes, checksum_of
from .snapshots import CURRENT, MOST_CURRENT, Current, Snapshot, download, written
from .store import ChunkInfo

__all__ = ["PublishReport", "publish"]

_SEGMENT_BYTES = 256 << 20
_GROUP_BYTES = 1 << 30
_BATCH = 256
_LIVE_SHARE = 0.5


@dataclass
class PublishReport:
    """What a publication did.

    Attributes
    ----------
    chunks
        Chunks copied there now.
    removed
        Chunks that are published no more.
    files, nbytes
        Segments written, and their bytes.
    generation
        Of what is published now.
    damaged
        Keys of chunks whose bytes here differ from what was written; they were set aside.
    """

    chunks: int = 0
    removed: int = 0
    files: int = 0
    nbytes: int = 0
    generation: int = 0
    damaged: list[str] = field(default_factory=list)


def publish(
    store: FileStore,
    url: str,
    *,
    namespaces: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PublishReport:
    """Make what is below a URL equal to a store. One publisher at a time; readers need not know.

    Only new chunks are copied, as they are stored. What the store has lost since, by deletion, eviction or expiry, is
    published no more; its bytes go with the next publication. About every gigabyte is a generation of its own, so that
    what is interrupted goes on where it stopped.

    Parameters
    ----------
    store
        Its chunks are published.
    url
        Where to, such as ``"s3://bucket/prefix"``.
    namespaces
        Tenants to publish; what is published of others stays as it is. None: all.
    storage_options
        For fsspec: credentials, endpoints.
    progress
        Called with the chunks copied and all that are to be copied.

    Raises
    ------
    ConfigError
        If the URL cannot be used or a package is missing.
    StoreFormatError
        If another version of this package has published there.
    StoreError
        If it cannot be written, or somebody else has published meanwhile. What was published before is whole.
    """
    objects = Objects(url, storage_options)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="epic-rag-publish-") as directory,
            contextlib.closing(Catalogue(store.path, read_only=store.read_only)) as catalogue,
        ):
            publication = _Publication(catalogue, Layout(store.path), objects, Path(directory), namespaces)
            try:
                return publication.run(progress)
            finally:
                publication.close()
    except StoreError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise StoreError(
            f"{store.path} could not be published to {url}: {error}. What was published before is whole: mend the "
            "cause and publish again, which goes on where this stopped."
        ) from error


class _Publication:
    """One call of :func:`publish`."""

    def __init__(
        self, catalogue: Catalogue, layout: Layout, objects: Objects, directory: Path, namespaces: Sequence[str] | None
    ) -> None:
        self._catalogue = catalogue
        self._maps = SegmentMaps(layout)
        self._objects = objects
        self._directory = directory
        self._namespaces = None if namespaces is None else set(namespaces)
        self._report = PublishReport()
        self._text = self._current_text()
        self._old = self._fetched(self._text)
        self._new = sqlite3.connect(directory / "new.sqlite", isolation_level=None)
        self._new.execute("PRAGMA synchronous=OFF")  # it is copied when it is whole
        self._new.execute("BEGIN")
        schema.create(self._new)
        self._wasteful: set[int] = set()
        self._records: list[Record] = []
        self._writer: SegmentWriter | None = None
        self._uncommitted = 0
        self._changed = self._text is None

    def close(self) -> None:
        """Close what is open."""
        if self._writer is not None:
            self._writer.close()
        self._new.close()
        if self._old is not None:
            self._old.close()

    # -- what is there -----------------------------------------------------------------------------------------

    def _current_text(self) -> bytes | None:
        try:
            return self._objects.read_small(CURRENT, MOST_CURRENT)
        except FileNotFoundError:
            return None

    def _fetched(self, text: bytes | None) -> Snapshot | None:
        if text is None:
            return None
        current = Current.of(text)
        home = self._directory / "old"
        home.mkdir()
        download(self._objects.read, current, home / "catalogue.sqlite")
        return Snapshot(home, current)

    def _mine(self, namespace: str) -> bool:
        return self._namespaces is None or namespace in self._namespaces

    def _keep_published(self) -> None:
        """Enter what is published already and stays."""
        if self._old is None:
            return
        for segment in SegmentTable(self._old).all():
            if segment.gone:  # for a whole generation
                continue
            number = self._enter_segment(segment.name, segment.size)
            for rows in _pages(self._old, segment.ident):
                here = self._catalogue.known([info.key for _, info in rows if info])
                for place, info in rows:
                    if info is None:
                        raise ValueError("a row of the published catalogue is damaged")
                    if self._mine(info.namespace) and info.key not in here:
                        self._report.removed += 1
                        self._changed = True
                        continue
                    self._enter(number, info, place.shape, place.dtype, place.checksum, place)
        self._wasteful = {
            row[0] for row in self._new.execute(f"SELECT id FROM segments WHERE live < size * {_LIVE_SHARE}")
        }

    def _wanted(self) -> Iterator[tuple[Place, ChunkInfo]]:
        """Chunks of the store that are to be copied, in the order of its files."""
        for segment in SegmentTable(self._catalogue).all():
            for rows in _pages(self._catalogue, segment.ident):
                here = self._catalogue.known([info.key for _, info in rows if info])
                for place, info in rows:
                    if info is not None and info.key in here and self._mine(info.namespace):
                        row = self._new.execute(
                            f"SELECT c.segment FROM chunks c WHERE {KEY_IS}", (bytes.fromhex(info.key.hex),)
                        ).fetchone()
                        if row is None or row[0] in self._wasteful:
                            yield place, info

    # -- copying -----------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, int], None] | None) -> PublishReport:
        """Publish."""
        self._keep_published()
        total = sum(1 for _ in self._wanted())
        for done, (place, info) in enumerate(self._wanted()):
            if progress:
                progress(done, total)
            self._copy(place, info)
        if progress:
            progress(total, total)
        self._upload()
        if self._changed:
            self._commit()
        self._clean()
        return self._report

    def _copy(self, place: Place, info: ChunkInfo) -> None:
        found: Place | None = place
        for _ in range(2):
            if found is None:  # deleted meanwhile
                return
            try:
                payload = as_bytes(self._maps.payload(found))
                if checksum_of([payload]) != found.checksum:
                    raise ValueError("its bytes differ from what was written")
                break
            except FileNotFoundError as error:
                # It may have been copied elsewhere since the catalogue was asked.
                moved = self._catalogue.place(info.key)
                if moved is not None and (moved.segment, moved.start) == (found.segment, found.start):
                    self._damaged(found, error)
                    return
                found = moved
            except ValueError as error:
                self._damaged(found, error)
                return
        else:
            return
        writer = self._writer or self._opened()
        self._records.append(writer.append(info, found.shape, found.dtype, [payload]))
        self._report.chunks += 1
        if writer.end >= _SEGMENT_BYTES:
            self._upload()
        if self._uncommitted >= _GROUP_BYTES:
            self._commit()

    def _damaged(self, place: Place, error: Exception) -> None:
        self._report.damaged.append(place.key.hex())
        if self._catalogue.writable:
            self._catalogue.set_aside(place, str(error))

    def _opened(self) -> SegmentWriter:
        path = self._directory / f"{uuid.uuid4().hex}.seg"
        lock = take(path.with_suffix(".lock"))
        if lock is None:
            raise StoreError(f"{self._directory} allows no locks: set TMPDIR to a directory of a local disk.")
        try:
            self._writer = SegmentWriter.create(path, lock)
        except BaseException:
            release(lock)
            raise
        return self._writer

    def _upload(self) -> None:
        """Bring the segment that was written there, and enter what is in it."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.close()
        name = writer.path.stem
        self._objects.upload(f"segments/{name}.seg", writer.path)
        writer.path.unlink()
        number = self._enter_segment(name, writer.end)
        for record in self._records:
            self._new.execute(f"DELETE FROM chunks AS c WHERE {KEY_IS}", (bytes.fromhex(record.info.key.hex),))
            self._enter(number, record.info, record.shape, record.dtype, record.checksum, record)
        self._records.clear()
        self._report.files += 1
        self._report.nbytes += writer.end
        self._uncommitted += writer.end
        self._changed = True

    def _enter_segment(self, name: str, size: int) -> int:
        cursor = self._new.execute(
            "INSERT INTO segments (name, kind, size) VALUES (?, ?, ?)", (name, schema.SEGMENT, size)
        )
        return int(cursor.lastrowid or 0)

    def _enter(
        self, segment: int, info: ChunkInfo, shape: tuple[int, ...], dtype: str, checksum: bytes, at: Place | Record
    ) -> None:
        span = at.span if isinstance(at, Place) else at.end - at.start
        place = (segment, at.start, at.offset, at.stored, span)
        schema.insert_chunk(self._new, info, place, shape, dtype, checksum, clock=0.0)

    # -- committing --------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        before = Current.of(self._text) if self._text is not None else None
        self._new.execute("UPDATE segments SET gone = 1 WHERE live = 0")
        self._new.execute("COMMIT")
        current, file = written(
            self._new,
            self._directory,
            before.generation + 1 if before else 1,
            uuid.uuid4().hex,
            before.name if before else None,
        )
        self._new.execute("BEGIN")
        self._objects.upload(current.name, file)
        file.unlink()
        if self._current_text() != self._text:
            raise StoreError(
                f"somebody else has published to {self._objects.url} meanwhile, and that stays. One publisher at a "
                "time is supported: publish again when the other has ended."
            )
        self._text = current.text()
        self._objects.write(CURRENT, self._text)
        self._uncommitted = 0
        self._changed = False

    def _clean(self) -> None:
        """Remove what neither this generation nor the one before needs, and what interrupted publications left."""
        if self._text is None:
            return
        current = Current.of(self._text)
        self._report.generation = current.generation
        known = self._new.execute("SELECT name FROM segments").fetchall()
        needed = {current.name, current.previous}
        if self._old is not None:
            needed.add(self._old.current.name)
            if self._old.current == current:  # nothing has changed: what was gone then still is about to go
                known += self._old.query("SELECT name FROM segments")
        needed |= {f"segments/{name}.seg" for (name,) in known}
        there = [*self._objects.names("segments"), *self._objects.names("catalogues")]
        self._objects.remove([name for name in there if name not in needed])


def _pages(catalogue: Catalogue, segment: int) -> Iterator[list[tuple[Place, ChunkInfo | None]]]:
    """The chunks of a segment in the order of the file."""
    after = -1
    while rows := catalogue.in_segment(segment, after, _BATCH):
        after = rows[-1][0].start
        yield rows
