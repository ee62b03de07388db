"""Statements that several of the registry's methods share, or that say more than their method."""

import sqlite3
from collections.abc import Iterable
from typing import Final

from epic_rag._registry_records import DOCUMENT_COLUMNS
from epic_rag.errors import RegistryError

__all__ = ["LISTED", "check_dimension", "keys_of", "unreferenced"]

LISTED: Final = (
    f"SELECT {DOCUMENT_COLUMNS}, (SELECT count(*) FROM chunks c WHERE c.doc_id = d.doc_id), "
    "(SELECT coalesce(sum(token_count), 0) FROM chunks c WHERE c.doc_id = d.doc_id) FROM documents d"
)
"""A document's row, and the numbers of its chunks and tokens."""


def check_dimension(connection: sqlite3.Connection, dimension: int) -> None:
    """Refuse embeddings that do not fit those that are there."""
    row = connection.execute("SELECT length(embedding) / 4 FROM chunks LIMIT 1").fetchone()
    if row is not None and row[0] != dimension:
        raise RegistryError(
            f"embeddings have {dimension} dimensions, those in the registry {row[0]}: use the same embedder, "
            "or ingest into a new directory"
        )


def keys_of(connection: sqlite3.Connection, doc_id: str) -> list[str]:
    """The different keys of a document's chunks, sorted."""
    rows = connection.execute("SELECT DISTINCT key FROM chunks WHERE doc_id = ? ORDER BY key", (doc_id,))
    return [row[0] for row in rows]


def unreferenced(connection: sqlite3.Connection, keys: Iterable[str]) -> list[str]:
    """Those of the keys that no chunk uses."""
    used = "SELECT 1 FROM chunks WHERE key = ? LIMIT 1"
    return [key for key in keys if connection.execute(used, (key,)).fetchone() is None]
