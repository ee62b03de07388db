"""What a published store says about itself: a small file that names the newest catalogue, and that catalogue.

::

    URL/current.json                            which generation is the newest; its replacement is the commit
    URL/catalogues/<generation>-<32 hex>.sqlite(.zst)
    URL/segments/<32 hex>.seg

A catalogue that comes from elsewhere is not trusted: it is compared with its digest, its tables with this version's,
and every row with what a store writes, before anything is looked up in it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epic_engine.chunks import ChunkKey
from epic_engine.errors import StoreFormatError

from . import schema
from .catalogue import Catalogue
from .indices import BEHIND, CONTENT_IS
from .packed_files import PackedFile, fetch_file, pack_file
from .payload import ENCODINGS
from .segments import ALIGNMENT, DTYPES, SEGMENT_HEADER

__all__ = ["CURRENT", "MOST_CURRENT", "MOST_PAYLOAD", "Current", "Snapshot", "check_snapshot", "download", "written"]

CURRENT = "current.json"
MOST_CURRENT = 1 << 16
MOST_PAYLOAD = 8 << 30
_MOST_CATALOGUE = 32 << 30
_MOST_METADATA = 64 << 20
_MOST_SEGMENT = 1 << 40
_FORMAT = "epic-rag remote store"
_NAME = re.compile(r"catalogues/\d{1,18}-[0-9a-f]{32}\.sqlite(\.zst)?", re.ASCII)
_SEGMENT_NAME = re.compile("[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class Current:
    """Which catalogue is the newest.

    Attributes
    ----------
    generation
        Counts the commits.
    name
        Of the catalogue's object.
    nbytes, digest
        Bytes of the object, and their XXH3-128 in hex.
    unpacked
        Bytes of the catalogue without compression.
    previous
        Name of the catalogue before, which readers may still be fetching; None for the first.
    """

    generation: int
    name: str
    nbytes: int
    digest: str
    unpacked: int
    previous: str | None = None

    @property
    def packed(self) -> PackedFile:
        """The catalogue's object."""
        return PackedFile(self.name, self.nbytes, self.digest, self.unpacked)

    def text(self) -> bytes:
        """As it is kept."""
        head = {"format": _FORMAT, "version": schema.VERSION}
        return json.dumps(head | asdict(self), indent=1).encode()

    @classmethod
    def of(cls, text: bytes) -> Current:
        """The inverse of :meth:`text`.

        Raises
        ------
        StoreFormatError
            If another version of this package wrote it.
        ValueError
            If it is damaged, or nothing of ours.
        """
        try:
            found: Any = json.loads(text)
            if found["format"] != _FORMAT:
                raise ValueError("its format is unknown")
            version = found["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{CURRENT} is damaged or not an epic-rag store's: {error}") from error
        if version != schema.VERSION:
            raise StoreFormatError(
                f"the remote store has format {str(version)[:20]}, this version reads {schema.VERSION}: use the same "
                "version of epic-rag where it is published and where it is read, and publish it again."
            )
        current = cls(*(found.get(name) for name in ("generation", "name", "nbytes", "digest", "unpacked", "previous")))
        current.packed.check(_MOST_CATALOGUE)
        texts = (current.name, current.name if current.previous is None else current.previous)
        numbered = type(current.generation) is int and current.generation > 0
        if not numbered or not all(isinstance(text, str) and _NAME.fullmatch(text) for text in texts):
            raise ValueError(f"{CURRENT} is damaged")
        return current


class Snapshot(Catalogue):
    """A published catalogue that was checked, as a file here; closed when nobody uses it any more.

    Parameters
    ----------
    directory
        Holds it, as ``catalogue.sqlite``.
    current
        What it was published as.
    """

    def __init__(self, directory: Path, current: Current) -> None:
        super().__init__(directory, read_only=True)
        self.directory = directory
        self.current = current

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            self.close()

    def saw(self, namespace: str, content: str) -> set[ChunkKey]:
        """Every form of a content, and what was compiled behind it."""
        digest = bytes.fromhex(content)
        found: set[ChunkKey] = set()
        for condition in (CONTENT_IS, BEHIND):
            rows = self.query(f"SELECT c.key FROM chunks c WHERE {condition}", (digest, namespace))
            found.update(ChunkKey(key.hex()) for (key,) in rows)
        return found

    def of_namespace(self, namespace: str) -> set[ChunkKey]:
        """Keys of a tenant's chunks."""
        rows = self.query(
            "SELECT c.key FROM chunks c JOIN namespaces n ON n.id = c.namespace WHERE n.name = ?", (namespace,)
        )
        return {ChunkKey(key.hex()) for (key,) in rows}


def written(
    db: sqlite3.Connection, directory: Path, generation: int, unique: str, previous: str | None
) -> tuple[Current, Path]:
    """Write a catalogue as it is published: a clean copy without what only writers need. Returns its file, too.

    Parameters
    ----------
    db
        The catalogue, outside a transaction.
    directory
        Where the object goes.
    generation, unique, previous
        Number and 32 hexadecimal digits of the new generation, and the catalogue's name before it.
    """
    plain = directory / f"{generation}-{unique}.sqlite"
    db.execute("DELETE FROM ranks")
    db.execute("VACUUM INTO ?", (str(plain),))
    packed, file = pack_file(plain, f"catalogues/{plain.name}")
    return Current(generation, packed.name, packed.nbytes, packed.digest, packed.unpacked, previous), file


def download(read: Callable[[str, int, int], bytes], current: Current, file: Path) -> None:
    """Bring a catalogue here and check it; the file is new.

    Parameters
    ----------
    read
        Reads bytes of an object, as :meth:`Objects.read <epic_engine.storage.objects.Objects.read>`.
    current
        Which one.
    file
        Where it goes.

    Raises
    ------
    ValueError
        If it is not what was published, or could not have been written by a store.
    StoreFormatError
        If zstandard is needed and not installed.
    """
    fetch_file(read, current.packed, file)
    check_snapshot(file)


# -- checking --------------------------------------------------------------------------------------------------


_ROW = f"""
    typeof(c.key) = 'blob' AND length(c.key) = 32 AND typeof(c.content) = 'blob' AND length(c.content) = 32
    AND typeof(c.start) = 'integer' AND c.start >= {SEGMENT_HEADER} AND c.start % {ALIGNMENT} = 0
    AND typeof(c.offset) = 'integer' AND c.offset % {ALIGNMENT} = 0
    AND c.offset BETWEEN c.start + {ALIGNMENT} AND c.start + {_MOST_METADATA}
    AND typeof(c.stored) = 'integer' AND c.stored BETWEEN 0 AND {MOST_PAYLOAD}
    AND typeof(c.span) = 'integer' AND c.start + c.span <= s.size
    AND c.span = c.offset - c.start + (c.stored + {ALIGNMENT - 1}) / {ALIGNMENT} * {ALIGNMENT}
    AND typeof(c.nbytes) = 'integer' AND c.nbytes >= 0 AND typeof(c.shape) = 'blob' AND length(c.shape) = 20
    AND typeof(c.dtype) = 'text' AND c.dtype IN ({", ".join(f"'{d}'" for d in DTYPES)})
    AND typeof(c.encoding) = 'text'
    AND c.encoding IN ({", ".join(f"'{e}{z}'" for e in ENCODINGS for z in ("", "+zstd"))})
    AND typeof(c.checksum) = 'blob' AND length(c.checksum) = 16
    AND typeof(c.created) = 'real' AND typeof(c.expires) IN ('real', 'null') AND typeof(c.cost) IN ('real', 'null')
    AND typeof(c.depends) = 'blob' AND length(c.depends) % 32 = 0
    AND typeof(c.token_ids) = 'blob' AND length(c.token_ids) % 4 = 0
    AND typeof(c.context_ids) = 'blob' AND length(c.context_ids) % 4 = 0
    AND typeof(c.seal) = 'blob' AND n.id IS NOT NULL AND f.id IS NOT NULL AND x.id IS NOT NULL
"""


def check_snapshot(file: Path) -> None:
    """Compare a catalogue that comes from elsewhere with what a store writes.

    Raises
    ------
    ValueError
        If it holds tables, triggers or views that are not ours, or rows that no store would write.
    """
    db = None
    try:
        db = sqlite3.connect(f"{file.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
        schema.distrust(db)
        if db.execute("PRAGMA user_version").fetchone()[0] != schema.VERSION:
            raise ValueError("it has another format than was announced")
        if _tables(db) != _own_tables():
            raise ValueError("its tables are not those of a store")
        if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise ValueError("its pages are damaged")
        for name, kind, size, gone in db.execute("SELECT name, kind, size, gone FROM segments"):
            if not (
                isinstance(name, str)
                and _SEGMENT_NAME.fullmatch(name)
                and kind == schema.SEGMENT
                and type(size) is int
                and SEGMENT_HEADER <= size <= _MOST_SEGMENT
                and gone in (0, 1)
            ):
                raise ValueError("it names files that a store does not have")
        for table in ("namespaces", "fingerprints", "contexts"):
            if not all(isinstance(name, str) for (name,) in db.execute(f"SELECT name FROM {table}")):
                raise ValueError("it has names that are no text")
        odd = db.execute(
            "SELECT 1 FROM chunks c LEFT JOIN segments s ON s.id = c.segment LEFT JOIN namespaces n "
            "ON n.id = c.namespace LEFT JOIN fingerprints f ON f.id = c.fingerprint LEFT JOIN contexts x "
            f"ON x.id = c.context WHERE NOT coalesce({_ROW}, 0) LIMIT 1"
        ).fetchone()
        if odd is not None:
            raise ValueError("it has rows that no store writes")
    except (sqlite3.Error, ValueError) as error:
        raise ValueError(f"the published catalogue is refused: {error}") from error
    finally:
        if db is not None:
            db.close()


def _tables(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    rows = db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master")
    return {(kind, name, table, " ".join(text.split())) for kind, name, table, text in rows}


def _own_tables() -> set[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        schema.create(db)
        return _tables(db)
