"""How the catalogue's file is laid out, read with plain SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from epic_engine.chunks import ChunkKey
from epic_engine.storage.file_store import FileStore
from epic_engine.storage.store import ChunkInfo


def ask(path: Path, text: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db:
        return db.execute(text).fetchall()


def put(path: Path, first: int, count: int) -> None:
    kv = torch.zeros(1, 2, 1, 2, 2)

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    infos = [
        ChunkInfo(ChunkKey(digest(f"k{n}")), "one", "f", digest(f"c{n}"), "isolated", (n, n), (), kv.nbytes, float(n))
        for n in range(first, first + count)
    ]
    with closing(FileStore(path)) as store:
        store.put([(info, kv) for info in infos])


def written_by_a_put(path: Path, first: int) -> int:
    """Bytes of the log after one put of 20 chunks, on top of what is there."""
    log = path / "catalogue.sqlite-wal"
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as other:  # so that the log stays when the store closes
        other.execute("SELECT * FROM settings").fetchall()
        put(path, first, 20)
        return log.stat().st_size


def test_a_new_catalogue_has_small_pages(tmp_path: Path) -> None:
    put(tmp_path, 0, 1)
    assert ask(tmp_path, "PRAGMA page_size") == [(1024,)]
    assert ask(tmp_path, "PRAGMA journal_mode") == [("wal",)]


def test_a_chunk_costs_few_bytes_of_log_however_many_there_are(tmp_path: Path) -> None:
    for there, more in ((0, 4000), (4020, 8000)):
        put(tmp_path, there, more)
        # Its key and its content change a page each, and pages of SQLite's usual size would be more than that.
        assert written_by_a_put(tmp_path, there + more) / 20 < 2 * 4096


def test_version_2_gets_the_same_indices(tmp_path: Path) -> None:
    put(tmp_path / "new", 0, 3)
    put(tmp_path / "old", 0, 3)
    with closing(sqlite3.connect(tmp_path / "old" / "catalogue.sqlite", isolation_level=None)) as db:
        db.execute("DROP INDEX chunks_by_content")
        db.execute("CREATE INDEX chunks_by_content ON chunks (namespace, content, fingerprint, created, key)")
        db.execute("DROP INDEX chunks_by_key")
        db.execute("ALTER TABLE chunks DROP COLUMN seal")
        db.execute("PRAGMA user_version=2")
    FileStore(tmp_path / "old").close()
    text = "SELECT name, sql FROM sqlite_master WHERE type = 'index' ORDER BY name"
    assert ask(tmp_path / "old", text) == ask(tmp_path / "new", text)
    with closing(FileStore(tmp_path / "old")) as store:
        content = hashlib.sha256(b"c1").hexdigest()
        assert [info.token_ids for info in store.forms("one", "f", content)] == [(1, 1)]
