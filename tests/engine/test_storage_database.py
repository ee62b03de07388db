"""The catalogue's indices, looked at with plain SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError
from epic_engine.storage.file_store import FileStore
from epic_engine.storage.store import ChunkInfo

from tests.engine.version_2 import to_version_2


def ask(path: Path, text: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db:
        return db.execute(text).fetchall()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def put(path: Path, first: int, count: int) -> None:
    kv = torch.zeros(1, 2, 1, 2, 2)
    infos = [
        ChunkInfo(ChunkKey(digest(f"k{n}")), "one", "f", digest(f"c{n}"), "isolated", (n, n), (), kv.nbytes, float(n))
        for n in range(first, first + count)
    ]
    with closing(FileStore(path)) as store:
        store.put([(info, kv) for info in infos])


def like(digest: str, shared: int) -> str:
    """Another digest that begins with the same bytes."""
    return digest[: 2 * shared] + "".join("e" if digit == "f" else "f" for digit in digest[2 * shared :])


def test_digests_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    put(tmp_path, 0, 5)
    # The indices know sixteen bytes of a key and eight of a content.
    key, content = digest("k2"), digest("c2")
    other, others = ChunkKey(like(key, 16)), like(content, 8)
    with closing(FileStore(tmp_path)) as store:
        assert store.known([other]) == set()
        assert store.known([other, ChunkKey(key)]) == {ChunkKey(key)}
        assert store.info(other) is None
        with pytest.raises(ChunkNotFoundError):
            store.load(other)
        assert store.forms("one", "f", others) == []
        assert store.pin([other]) == store.delete([other]) == store.erase("one", [others]) == 0
        assert [info.key.hex for info in store.forms("one", "f", content)] == [key]
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)) as db:
        db.execute(
            "UPDATE chunks SET content = ? WHERE key = ?",
            (bytes.fromhex(like(content, 8)), bytes.fromhex(digest("k3"))),
        )
    with closing(FileStore(tmp_path)) as store:
        assert store.erase("one", [content]) == 1
    assert ask(tmp_path, "SELECT count(*) FROM chunks") == [(4,)]


def test_a_key_is_there_once(tmp_path: Path) -> None:
    put(tmp_path, 0, 2)
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(
            "UPDATE chunks SET key = ? WHERE key = ?", (bytes.fromhex(digest("k0")), bytes.fromhex(digest("k1")))
        )


def test_version_2_gets_the_same_indices(tmp_path: Path) -> None:
    put(tmp_path / "new", 0, 3)
    put(tmp_path / "old", 0, 3)
    to_version_2(tmp_path / "old")
    FileStore(tmp_path / "old").close()
    text = "SELECT type, name, sql FROM sqlite_master WHERE name != 'chunks' ORDER BY name"
    assert ask(tmp_path / "old", text) == ask(tmp_path / "new", text)
    everything = "SELECT head, chunk FROM {0} UNION ALL SELECT head, chunk FROM recent_{0} ORDER BY chunk"
    for name in ("keys", "contents"):
        entries = ask(tmp_path / "old", everything.format(name))
        assert entries == ask(tmp_path / "new", everything.format(name))
        assert len(entries) == 3
    with closing(FileStore(tmp_path / "old")) as store:
        assert [info.token_ids for info in store.forms("one", "f", digest("c1"))] == [(1, 1)]
