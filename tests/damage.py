"""Where a store's chunks lie, read without the store's own code, and ways to damage them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lies:
    """File, start of the record, offset and bytes of the payload."""

    file: Path
    start: int
    offset: int
    stored: int


def where(store: Path) -> dict[str, Lies]:
    """Where every chunk lies, by its key in hex."""
    with closing(sqlite3.connect(store / "catalogue.sqlite")) as db:
        rows = db.execute(
            "SELECT hex(c.key), s.name, s.kind, c.start, c.offset, c.stored FROM chunks c "
            "JOIN segments s ON s.id = c.segment ORDER BY c.id"
        ).fetchall()
    return {
        key.lower(): Lies(store / "kv" / name if kind else store / "segments" / f"{name}.seg", *place)
        for key, name, kind, *place in rows
    }


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with open(file, "rb+") as handle:
        handle.seek(at)
        (byte,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte ^ (1 << bit)]))


def damage(store: Path, *keys: str) -> list[str]:
    """Change a bit in the payload of these chunks (of all, if none is named); returns their keys."""
    lies = where(store)
    chosen = list(keys) or list(lies)
    for key in chosen:
        flip(lies[key].file, lies[key].offset + lies[key].stored - 1)
    return chosen
