"""Which format a store on disk has, found out without opening it: an older one is brought up to date by that."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from epic_engine.errors import StoreError

from . import schema

__all__ = ["StoredFormat", "stored_format"]


@dataclass(frozen=True)
class StoredFormat:
    """The format of a store on disk.

    Attributes
    ----------
    version
        Its format.
    newest
        The format that this version of the package writes.
    chunks
        Chunks in its catalogue; None in a format newer than that.
    """

    version: int
    newest: int
    chunks: int | None


def stored_format(path: str | os.PathLike[str]) -> StoredFormat | None:
    """The format of the store in a directory, or None where there is no catalogue.

    Raises
    ------
    StoreError
        If its catalogue cannot be read.
    """
    file = Path(path).expanduser().absolute() / "catalogue.sqlite"
    if not file.is_file():
        return None
    try:
        try:
            return _read(file, "mode=ro")
        except sqlite3.OperationalError:  # a directory that cannot be written
            return _read(file, "immutable=1")
    except sqlite3.Error as error:
        raise StoreError(
            f"the catalogue {file} cannot be read: {error}. Check who may read it; if it is damaged, make a new one "
            "from the segments with `epic-rag store rebuild`."
        ) from error


def _read(file: Path, options: str) -> StoredFormat:
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?{options}", uri=True, timeout=60)) as db:
        schema.distrust(db)
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        known = 0 < version <= schema.VERSION
        chunks = int(db.execute("SELECT count(*) FROM chunks").fetchone()[0]) if known else None
    return StoredFormat(version, schema.VERSION, chunks)
