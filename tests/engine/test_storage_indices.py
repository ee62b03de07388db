"""The tables by which chunks are found: small ones that are emptied into large ones. Looked at with plain SQLite."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkNotFoundError, FileStore, StoreError
from epic_engine.storage import faults, indices
from epic_engine.storage.rebuild import rebuild

from tests.engine.format_1 import write_format_1
from tests.engine.test_store import entry
from tests.engine.version_2 import to_version_2

TABLES = ("recent_keys", "keys", "recent_contents", "contents")
DEPENDENCIES = "SELECT * FROM recent_dependencies UNION ALL SELECT * FROM dependencies"
CHUNKS = [entry(n, namespace="one" if n % 3 else "two", created=float(n)) for n in range(10)]
for _n in (1, 8):
    CHUNKS[_n] = replace(CHUNKS[_n][0], depends=(CHUNKS[4][0].content,)), CHUNKS[_n][1]
KEYS = [info.key for info, _ in CHUNKS]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "MERGE_EVERY", 7)


def ask(path: Path, text: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db:
        return db.execute(text, values).fetchall()


def change(path: Path, text: str, *values: object) -> int:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db, db:
        return db.execute(text, values).rowcount


def counts(path: Path) -> tuple[int, ...]:
    return tuple(ask(path, f"SELECT count(*) FROM {table}")[0][0] for table in TABLES)


def check_tables(path: Path) -> None:
    """Every chunk has one entry of each kind, and nothing else has."""
    rows = ask(path, "SELECT id, key, namespace, content FROM chunks")
    keys = ask(path, "SELECT head, chunk FROM recent_keys") + ask(path, "SELECT head, chunk FROM keys")
    contents = ask(path, "SELECT * FROM recent_contents") + ask(path, "SELECT * FROM contents")
    assert sorted(keys) == sorted((key[:16], ident) for ident, key, _, _ in rows)
    behind = ask(path, "SELECT depends, id FROM chunks")
    cut = {(depends[at : at + 32], ident) for depends, ident in behind for at in range(0, len(depends), 32)}
    assert sorted(ask(path, DEPENDENCIES)) == sorted(cut)
    assert sorted(contents) == sorted((namespace, content[:8], ident) for ident, _, namespace, content in rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store whose first seven chunks are in the large tables, and three in the small ones."""
    path = tmp_path / "store"
    with closing(FileStore(path)) as store:
        store.put(CHUNKS)
        store.pin([KEYS[1], KEYS[8]])
    assert counts(path) == (3, 7, 3, 7)
    check_tables(path)
    return path


def test_new_entries_are_moved_when_there_are_enough(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path)) as store:
        for number, chunk in enumerate(CHUNKS, start=1):
            store.put([chunk])
            assert counts(tmp_path) == (number % 7, number - number % 7) * 2
            assert store.known(KEYS) == set(KEYS[:number])
        check_tables(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_chunks_are_found(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    want: dict[int, torch.Tensor] = {}
    contexts = ("isolated", "head")
    chunks = [entry(n // 2, context=contexts[n % 2], created=float(n)) for n in range(24)]
    depends = [(entry(n - 1)[0].content,) if n % 3 == 0 and n else () for n in range(12)]
    chunks = [(replace(info, depends=depends[n // 2]), kv) for n, (info, kv) in enumerate(chunks)]
    with closing(FileStore(tmp_path, segment_bytes=10_000)) as store:
        for step in range(60):
            some = rng.sample(range(24), rng.randint(1, 5))
            if rng.random() < 0.6:
                store.put([(chunks[n][0], chunks[n][1] + step) for n in some])
                want |= {n: chunks[n][1] + step for n in some}
            elif rng.random() < 0.6:
                assert store.delete([chunks[n][0].key for n in some]) == len(want.keys() & set(some))
                want = {n: kv for n, kv in want.items() if n not in some}
            else:
                content = chunks[some[0]][0].content
                gone = {n for n in want if content in (chunks[n][0].content, *chunks[n][0].depends)}
                assert store.erase("one", [content]) == len(gone)
                want = {n: kv for n, kv in want.items() if n not in gone}
            assert store.known([info.key for info, _ in chunks]) == {chunks[n][0].key for n in want}
            check_tables(tmp_path)
        for n, (info, _) in enumerate(chunks):
            forms = [chunks[m][0] for m in sorted(want) if chunks[m][0].content == info.content]
            assert store.forms("one", "f", info.content) == forms
            assert store.info(info.key) == (info if n in want else None)
            assert n not in want or torch.equal(store.load(info.key), want[n])
        assert store.verify().clean
        assert store.verify().strays == 0
    assert max(counts(tmp_path)[::2]) < 7


def test_a_put_that_is_undone_leaves_the_tables_as_they_were(path: Path) -> None:
    def fail(name: str) -> None:
        if name == "put.committing":
            raise OSError(5, "Input/output error")

    before = {table: ask(path, f"SELECT * FROM {table}") for table in TABLES}
    with closing(FileStore(path)) as store:
        with faults.install(fail), pytest.raises(StoreError, match="Input"):
            store.put([entry(n) for n in range(20, 30)])
        assert {table: ask(path, f"SELECT * FROM {table}") for table in TABLES} == before
        store.put([entry(n) for n in range(20, 24)])
        assert counts(path) == (0, 14) * 2


# -- entries that are lost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("kind", ["keys", "contents"])
@pytest.mark.parametrize("how", ["gone", "another chunk", "another digest"])
def test_a_chunk_that_an_index_has_lost_is_reported_and_found_again(
    path: Path, how: str, kind: str, number: int
) -> None:
    (info, kv), table = CHUNKS[number], kind if number < 7 else f"recent_{kind}"
    ((ident,),) = ask(path, "SELECT id FROM chunks WHERE key = ?", bytes.fromhex(info.key.hex))
    text = {
        "gone": "DELETE FROM {} WHERE chunk = ?",
        "another chunk": "UPDATE {} SET chunk = chunk + 1000 WHERE chunk = ?",
        "another digest": "UPDATE {} SET head = x'00' || head WHERE chunk = ?",
    }[how].format(table)
    assert change(path, text, ident) == 1
    with closing(FileStore(path)) as store:
        if kind == "keys":
            assert store.known(KEYS) == {*KEYS} - {info.key}
            with pytest.raises(ChunkNotFoundError):
                store.load(info.key)
        else:
            assert store.forms(info.namespace, "f", info.content) == []
            assert torch.equal(store.load(info.key), kv)
        assert store.verify(quick=True).clean
        for repair in (False, True):
            report = store.verify(repair=repair)
            assert (report.corrupt, report.missing, report.checked) == ([info.key.hex], [], 10)
            assert repair or report.strays == (how != "gone")  # a new entry may take the place of an old one
        report = store.verify()
        assert (report.clean, report.strays, report.quarantined) == (True, 0, [])
        assert store.known(KEYS) == set(KEYS)
        assert store.forms(info.namespace, "f", info.content) == [info]
        assert torch.equal(store.load(info.key), kv)
    check_tables(path)
    pinned = "SELECT c.key FROM chunks c JOIN ranks r ON r.chunk = c.id WHERE r.pinned ORDER BY c.created"
    assert ask(path, pinned) == [(bytes.fromhex(KEYS[n].hex),) for n in (1, 8)]


def test_all_entries_are_lost(path: Path) -> None:
    for table in TABLES:
        change(path, f"DELETE FROM {table}")
    with closing(FileStore(path)) as store:
        assert store.known(KEYS) == set()
        assert len(list(store.entries())) == 10
        assert set(store.verify(repair=True).corrupt) == {key.hex for key in KEYS}
        assert store.verify().clean
        assert all(torch.equal(store.load(info.key), kv) for info, kv in CHUNKS)
    check_tables(path)


def test_a_chunk_of_format_1_is_found_again(tmp_path: Path) -> None:
    write_format_1(tmp_path, CHUNKS[:3])
    FileStore(tmp_path).close()
    assert change(tmp_path, "DELETE FROM recent_keys WHERE chunk = 2") == 1
    with closing(FileStore(tmp_path)) as store:
        assert len(store.verify(repair=True).corrupt) == 1
        assert store.verify().clean
        assert all(torch.equal(store.load(info.key), kv) for info, kv in CHUNKS[:3])


@pytest.mark.parametrize("number", [1, 8])
def test_of_a_lost_chunk_that_was_put_again_the_new_one_stays(path: Path, number: int) -> None:
    info, kv = CHUNKS[number]
    change(
        path, f"DELETE FROM {'keys' if number < 7 else 'recent_keys'} WHERE head = ?", bytes.fromhex(info.key.hex)[:16]
    )
    with closing(FileStore(path)) as store:
        store.put([(replace(info, created=50.0), kv + 1)])
        assert torch.equal(store.load(info.key), kv + 1)
        assert store.verify(repair=True).corrupt == [info.key.hex]
        report = store.verify()
        assert (report.clean, report.checked, report.quarantined) == (True, 10, [])
        assert torch.equal(store.load(info.key), kv + 1)
        assert store.usage().chunks == 10
    check_tables(path)


def test_entries_that_lead_nowhere_are_harmless(path: Path) -> None:
    key = bytes.fromhex(KEYS[0].hex)
    change(path, "INSERT INTO keys VALUES (?, 1000)", bytes(16))
    change(path, "INSERT INTO recent_keys VALUES (?, 2)", b"\1" * 16)
    change(path, "INSERT INTO contents VALUES (1, ?, 1000)", bytes(8))
    change(path, "INSERT INTO recent_contents VALUES (2, ?, 2)", key[:8])
    with closing(FileStore(path)) as store:
        assert store.known(KEYS) == set(KEYS)
        for repair in (False, True):
            report = store.verify(repair=repair)
            assert (report.clean, report.strays) == (True, 4)
        assert store.verify().strays == 0
    check_tables(path)


def test_a_row_with_a_damaged_key_is_mended_and_leaves_nothing(path: Path) -> None:
    """The entry still has the key that was put."""
    for number in (1, 8):
        with closing(sqlite3.connect(path / "catalogue.sqlite")) as db, db:
            ((trigger,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'keys_change'").fetchall()
            db.execute("DROP TRIGGER keys_change")
            db.execute("UPDATE chunks SET key = zeroblob(32) WHERE key = ?", (bytes.fromhex(KEYS[number].hex),))
            db.execute(trigger)
        with closing(FileStore(path)) as store:
            assert store.known(KEYS) == {*KEYS} - {KEYS[number]}
            assert store.verify().corrupt == ["00" * 32]
            store.verify(repair=True)
            assert store.verify().clean
            assert all(torch.equal(store.load(info.key), kv) for info, kv in CHUNKS)
        check_tables(path)


# -- from elsewhere --------------------------------------------------------------------------------------------


def test_older_catalogues_and_new_ones_have_the_same_entries(path: Path, tmp_path: Path) -> None:
    write_format_1(tmp_path / "old", CHUNKS)
    rebuilt = Path(shutil.copytree(path, tmp_path / "rebuilt"))
    assert rebuild(rebuilt) == 10
    to_version_2(path)
    for store_path in (tmp_path / "old", path, rebuilt):
        FileStore(store_path).close()
        check_tables(store_path)
        assert counts(store_path)[1] >= 7


# -- plans -----------------------------------------------------------------------------------------------------


def test_every_change_goes_by_an_index(path: Path) -> None:
    with closing(FileStore(path)) as store:
        texts: list[str] = []
        db = store._catalogue._writer
        assert db is not None
        db.set_trace_callback(texts.append)
        store.put([CHUNKS[0], entry(30)])
        store.delete([KEYS[2]])
        store.erase("one", [CHUNKS[4][0].content])
        store.pin([KEYS[5]])
        db.set_trace_callback(None)
        wanted = [text for text in texts if "keys" in text or "contents" in text]
        assert len(wanted) >= 5
        for text in wanted:
            if not text.startswith("--"):  # what a trigger does
                check_plan(db, text)


@pytest.mark.parametrize("statements", [indices._ENTER, indices._LEAVE, indices._FORGET, indices._ONCE])
def test_triggers_go_by_the_tables(statements: str) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        from epic_engine.storage import schema

        schema.create(db)
        values = {"id": "7", "key": f"x'{'ab' * 32}'", "namespace": "1", "content": f"x'{'cd' * 32}'"}
        for text in statements.replace("RAISE(ABORT, ", "coalesce(1, ").split(";"):
            for name, value in values.items():
                text = text.replace(f"NEW.{name}", value).replace(f"OLD.{name}", value)
            if text.strip():
                check_plan(db, text)


def check_plan(db: sqlite3.Connection, text: str) -> None:
    plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}")]
    assert not any(step.startswith("SCAN") or "TEMP B-TREE" in step for step in plan), (text, plan)
