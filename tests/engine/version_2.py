"""Catalogues as version 2 had them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

__all__ = ["to_version_2"]


def to_version_2(path: Path) -> None:
    """Make a catalogue what it was before rows had seals and digests had tables of their own."""
    with closing(sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)) as db:
        for trigger in ("keys_enter", "keys_leave", "keys_change"):
            db.execute(f"DROP TRIGGER {trigger}")
        db.execute("INSERT INTO dependencies SELECT * FROM recent_dependencies")
        for table in ("recent_keys", "keys", "recent_contents", "contents", "recent_dependencies"):
            db.execute(f"DROP TABLE {table}")
        db.execute("CREATE INDEX chunks_by_content ON chunks (namespace, content, fingerprint, created, key)")
        db.execute("ALTER TABLE chunks DROP COLUMN seal")
        db.execute("PRAGMA user_version=2")
