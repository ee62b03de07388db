"""The catalogue: stores of format 1 become today's, look-ups go by indices, a lost catalogue is made anew."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epic_engine import ChunkInfo, ChunkNotFoundError, FileStore, StoreError, StoreFormatError
from epic_engine.storage import catalogue, faults
from epic_engine.storage.rebuild import rebuild
from torch import Tensor

from tests.damage import flip, where
from tests.engine.format_1 import file_of, write_format_1
from tests.engine.test_store import entry


def _old_chunks() -> list[tuple[ChunkInfo, Tensor]]:
    a, b = entry(3, context="head", created=3.0), entry(3, context="sink:4", created=1.0)
    behind = entry(8, created=4.0)
    behind = replace(behind[0], depends=(a[0].content, entry(9)[0].content)), behind[1]
    narrow = entry(5, created=2.0)
    half = narrow[1].to(torch.bfloat16)
    return [a, b, behind, (replace(narrow[0], nbytes=half.nbytes), half), entry(6, namespace="two")]


# -- format 1 --------------------------------------------------------------------------------------------------


def test_a_store_of_format_1_is_read_in_place(tmp_path: Path) -> None:
    chunks = _old_chunks()
    write_format_1(tmp_path, chunks)
    before = (tmp_path / "catalogue.sqlite").read_bytes()
    files = {path: path.read_bytes() for path in tmp_path.glob("kv/*/*")}
    with pytest.raises(StoreFormatError, match=r"has format 1.*open it once where it can be written"):
        FileStore(tmp_path, read_only=True)
    assert (tmp_path / "catalogue.sqlite").read_bytes() == before
    store = FileStore(tmp_path)
    assert list(store.entries()) == sorted((i for i, _ in chunks), key=lambda i: (i.created, i.key))
    assert all(torch.equal(store.load(i.key), kv) and store.load(i.key).dtype == kv.dtype for i, kv in chunks)
    assert store.forms("one", "f", chunks[0][0].content) == [chunks[1][0], chunks[0][0]]
    assert {path: path.read_bytes() for path in tmp_path.glob("kv/*/*")} == files
    assert store.verify().clean
    assert store.verify(quick=True).checked == len(chunks)
    assert store.usage().models == {
        ("one", "f"): (4, sum(len(files[file_of(tmp_path, i)]) for i, _ in chunks[:4])),
        ("two", "f"): (1, len(files[file_of(tmp_path, chunks[4][0])])),
    }
    assert store.erase("one", [chunks[0][0].content]) == 3  # both forms, and what was compiled behind them
    store.close()
    with closing(sqlite3.connect(tmp_path / "catalogue.v1.sqlite")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM chunks").fetchone() == (len(chunks),)


def test_compaction_brings_format_1_into_segments(tmp_path: Path) -> None:
    chunks = _old_chunks()
    write_format_1(tmp_path, chunks)
    store = FileStore(tmp_path)
    held = store.load(chunks[0][0].key)
    store.delete([chunks[1][0].key])
    store.gc()
    assert not file_of(tmp_path, chunks[1][0]).exists()
    assert len(list(tmp_path.glob("kv/*/*"))) == len(chunks) - 1  # what is in use stays until it is asked for
    assert not (tmp_path / "catalogue.v1.sqlite").exists()
    assert not (tmp_path / "tmp").exists()
    store.compact()
    assert not list(tmp_path.glob("kv/*/*"))
    left = [c for c in chunks if c is not chunks[1]]
    assert all(store.info(i.key) == i and torch.equal(store.load(i.key), kv) for i, kv in left)
    assert torch.equal(held, chunks[0][1])
    assert store.verify().clean


def test_what_is_damaged_in_format_1_is_a_miss(tmp_path: Path) -> None:
    chunks = [entry(n) for n in range(5)]
    write_format_1(tmp_path, chunks)
    files = [file_of(tmp_path, info) for info, _ in chunks]
    files[0].unlink()
    os.truncate(files[1], 100)
    flip(files[2], 3, 7)  # the length of its header
    flip(files[3], files[3].stat().st_size - 1)
    store = FileStore(tmp_path)
    assert [i.key for i in store.entries()] == sorted((chunks[3][0].key, chunks[4][0].key))
    assert store.verify().corrupt == [chunks[3][0].key.hex]
    assert len(store.verify().quarantined) == 3
    with pytest.raises(ChunkNotFoundError, match="set aside"):
        store.load(chunks[3][0].key)
    assert torch.equal(store.load(chunks[4][0].key), chunks[4][1])
    store.put(chunks[:4])
    assert all(torch.equal(store.load(i.key), kv) for i, kv in chunks)


def kill_at(point: str, action: Callable[[], object]) -> None:
    """Do something in a process that dies at a fault point."""

    def die(name: str) -> None:
        if name == point:
            os._exit(9)

    child = os.fork()
    if child == 0:
        with faults.install(die):
            action()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("point", ["migrate.copied", "migrate.committing", "migrate.committed"])
def test_a_process_killed_in_a_migration_leaves_one_format_or_the_other(point: str, tmp_path: Path) -> None:
    chunks = _old_chunks()
    write_format_1(tmp_path, chunks)

    kill_at(point, lambda: FileStore(tmp_path))
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3 if point == "migrate.committed" else 1,)
        assert db.execute("SELECT count(*) FROM chunks").fetchone() == (len(chunks),)
    store = FileStore(tmp_path)
    assert all(store.info(i.key) == i and torch.equal(store.load(i.key), kv) for i, kv in chunks)
    assert store.verify().clean


def test_several_open_a_store_of_format_1_at_once(tmp_path: Path) -> None:
    chunks = _old_chunks()
    write_format_1(tmp_path, chunks)
    stores: list[FileStore] = []
    threads = [threading.Thread(target=lambda: stores.append(FileStore(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 4
    assert all(torch.equal(store.load(i.key), kv) for store in stores for i, kv in chunks)


# -- look-ups --------------------------------------------------------------------------------------------------


def test_every_look_up_goes_by_an_index(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put([entry(3)])
    texts: list[str] = []
    reader = store._catalogue._reader
    assert reader is not None
    info, _ = entry(3)
    reader.set_trace_callback(texts.append)
    store.info(info.key)
    store.load(info.key)
    store.known([info.key])
    store.forms("one", "f", info.content)
    next(store.entries())
    reader.set_trace_callback(None)
    assert len(texts) >= 5
    for text in texts:
        # SQLite shows infinity as it does not read it.
        plan = [row[3] for row in reader.execute(f"EXPLAIN QUERY PLAN {text}".replace("-Inf", "-9e999"))]
        assert plan
        slow = [step for step in plan if step != "SCAN CONSTANT ROW"]  # two numbers are compared
        assert not any(step.startswith("SCAN") or "TEMP B-TREE" in step for step in slow), (text, plan)


def test_entries_are_read_in_pages_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_PAGE", 3)
    store = FileStore(tmp_path)
    chunks = [entry(n, created=float(n // 4)) for n in range(11)]
    store.put(chunks)
    want = sorted((i for i, _ in chunks), key=lambda i: (i.created, i.key))
    assert list(store.entries()) == want
    seen = []
    for info in store.entries():
        seen.append(info)
        store.delete([info.key])
    assert seen == want
    assert store.verify().checked == 0


def test_a_look_up_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    store, other = FileStore(tmp_path), FileStore(tmp_path)
    store.put([entry(3)])
    answers = []

    def meanwhile(name: str) -> None:
        if name == "put.committing":
            for reader in (store, other):
                thread = threading.Thread(target=lambda r=reader: answers.append(r.load(entry(3)[0].key)))
                thread.start()
                thread.join(timeout=10)
                assert not thread.is_alive()
            assert store.info(entry(4)[0].key) is None

    with faults.install(meanwhile):
        store.put([entry(4)])
    assert len(answers) == 2


# -- a catalogue that is lost ----------------------------------------------------------------------------------


def test_a_lost_catalogue_is_made_anew(tmp_path: Path) -> None:
    store = FileStore(tmp_path, segment_bytes=4000)
    chunks = [entry(n, namespace="one" if n % 2 else "two", created=float(n)) for n in range(9)]
    behind = replace(chunks[0][0], depends=(chunks[1][0].content,), cost=2.0, expires=4e9), chunks[0][1]
    chunks[0] = behind
    store.put(chunks)
    store.put([(chunks[3][0], chunks[3][1] + 1), (replace(chunks[4][0], created=20.0), chunks[4][1] + 1)])
    chunks[3] = chunks[3][0], chunks[3][1] + 1
    chunks[4] = replace(chunks[4][0], created=20.0), chunks[4][1] + 1
    with pytest.raises(StoreError, match="a process writes to"):
        rebuild(tmp_path)
    store.close()
    damaged = where(tmp_path)[chunks[5][0].key.hex]
    flip(damaged.file, damaged.offset)
    assert len({lies.file for lies in where(tmp_path).values()}) > 2
    old = (tmp_path / "catalogue.sqlite").read_bytes()
    (tmp_path / "catalogue.sqlite").write_bytes(b"no database" * 500)
    with pytest.raises(StoreError, match="move the damaged"):
        FileStore(tmp_path)
    (tmp_path / "catalogue.sqlite").unlink()
    with pytest.raises(StoreError, match="has lost its catalogue"):
        FileStore(tmp_path)
    (tmp_path / "catalogue.sqlite").write_bytes(old)
    assert rebuild(tmp_path) == 8
    del chunks[5]
    store = FileStore(tmp_path)
    assert all(store.info(i.key) == i and torch.equal(store.load(i.key), kv) for i, kv in chunks)
    assert store.verify().clean
    assert store.erase("one", [chunks[1][0].content]) == 1  # another tenant's chunk was compiled behind it
    assert store.erase("two", [chunks[1][0].content]) == 1
    assert (tmp_path / "catalogue.sqlite.old").read_bytes() == old
    store.gc()
    assert not (tmp_path / "catalogue.sqlite.old").exists()


@pytest.mark.parametrize("point", ["rebuild.written", "rebuild.copied", "rebuild.replaced"])
def test_a_process_killed_in_a_rebuild(point: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    chunks = [entry(n) for n in range(4)]
    store.put(chunks)
    store.close()

    kill_at(point, lambda: rebuild(tmp_path))
    assert rebuild(tmp_path) == 4
    store = FileStore(tmp_path)
    assert all(torch.equal(store.load(i.key), kv) for i, kv in chunks)


def test_there_is_nothing_to_rebuild(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no segments"):
        rebuild(tmp_path / "nowhere")
