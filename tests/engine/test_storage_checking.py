"""A damaged catalogue never lies: whatever changes in it, entries and KV are what was put or are missing, and known.

Values are changed behind the store's back, with plain SQLite and bit by bit.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from epic_engine import ChunkInfo, ChunkKey, ChunkNotFoundError, FileStore, StoreError
from epic_engine.storage.catalogue import Catalogue
from epic_engine.storage.rebuild import rebuild
from epic_engine.storage.seals import seal
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.damage import flip, where
from tests.engine.format_1 import file_of, write_format_1
from tests.engine.test_store import entry
from tests.engine.version_2 import to_version_2

Chunk = tuple[ChunkInfo, Tensor]


def make_chunks() -> list[Chunk]:
    """Chunks of two tenants, two models and two contexts, with everything that an entry can say."""
    a, b, c, d, e, f = (
        entry(3),
        entry(4, namespace="two", created=1.5),
        entry(5, fingerprint="g", created=2.0),
        entry(6, context="head", created=-0.0),
        entry(7, created=3.0),
        entry(8, namespace="two", created=4.0),
    )
    d = replace(d[0], depends=(a[0].content, b[0].content), cost=2.5), d[1]
    e = replace(e[0], expires=4e9), e[1]
    f = replace(f[0], context_ids=()), f[1]
    return [a, b, c, d, e, f]


CHUNKS = make_chunks()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of all chunks in two segments."""
    path = tmp_path_factory.mktemp("original") / "store"
    store = FileStore(path, segment_bytes=7000)  # three records
    for chunk in CHUNKS:
        store.put([chunk])
    store.pin([CHUNKS[0][0].key])
    store.close()
    assert len(list(path.glob("segments/*.seg"))) == 2
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """The store, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "store"))


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db, db:
        assert db.execute(statement, values).rowcount >= 1


def ask(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path / "catalogue.sqlite")) as db:
        return db.execute(query, values).fetchall()


def present(store: FileStore, chunks: Sequence[Chunk] = CHUNKS) -> set[ChunkKey]:
    """Keys that can be loaded; nothing that the store says may be other than what was put."""
    put = {info.key: (info, kv) for info, kv in chunks}
    for info in store.entries():
        assert info == put[info.key][0]
    found = set()
    for key, (info, kv) in put.items():
        said = store.info(key)
        assert said in (None, info)
        assert store.known([key]) == ({key} if said else set())
        forms = store.forms(info.namespace, info.fingerprint, info.content)
        assert all(form == put[form.key][0] for form in forms)
        with suppress(ChunkNotFoundError):
            loaded = store.load(key)
            assert torch.equal(loaded, kv)
            assert loaded.dtype == kv.dtype
            found.add(key)
            assert store.info(key) == info  # mended, if it was damaged
    return found


KEYS = {info.key for info, _ in CHUNKS}

# -- one value -------------------------------------------------------------------------------------------------


def columns() -> list[tuple[str, str]]:
    """Every column of the tables that a chunk's entry is made from."""
    from epic_engine.storage import schema

    with closing(sqlite3.connect(":memory:")) as db:
        schema.create(db)
        names = ("chunks", "namespaces", "fingerprints", "contexts")
        return [(name, row[1]) for name in names for row in db.execute(f"PRAGMA table_info({name})")]


def other_values(value: Any, column: str) -> Iterator[Any]:
    """Values that it could become."""
    if isinstance(value, int):
        yield from (value + (64 if column == "id" else 1), -value - 1, value + (1 << 40))
        yield from () if column == "id" else ("x",)
    elif isinstance(value, float):
        yield from (value + 1e-9 if value < 10 else value - 5e9, 10.0, "x")
    elif isinstance(value, str):
        yield from (value + "x", "", chr(ord(value[0]) ^ 2) + value[1:], b"\xff\xfe")
    elif isinstance(value, bytes):
        yield from (
            bytes([*value[:-1], value[-1] ^ 4]) if value else b"1234",
            value[:-1] or b"1",
            value + b"\0" * 4,
            "x",
        )
    if column in ("expires", "cost"):
        yield None if value is not None else 7.0


UNSEALED = {("namespaces", "quota")}


@pytest.mark.parametrize(("table", "column"), columns())
def test_a_changed_value_is_known_and_never_believed(table: str, column: str, original: Path, tmp_path: Path) -> None:
    rows = ask(original, f"SELECT rowid, {column} FROM {table} ORDER BY rowid")
    cases = [(row, value) for row in (rows[0], rows[-1]) for value in other_values(row[1], column) if value != row[1]]
    if column == "segment":
        cases += [(rows[0], rows[-1][1])]
    assert cases or (table, column) in UNSEALED
    for number, ((rowid, _), value) in enumerate(cases):
        path = Path(shutil.copytree(original, tmp_path / str(number)))
        change(path, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", value, rowid)
        if table == "chunks":
            ((key,),) = ask(original, "SELECT key FROM chunks WHERE rowid = ?", rowid)
            touched = {ChunkKey(key.hex())}
        else:
            name = table[:-1]
            keys = ask(original, f"SELECT key FROM chunks WHERE {name} = ?", rowid)
            touched = {ChunkKey(key.hex()) for (key,) in keys}
        with closing(FileStore(path, read_only=True)) as store:
            said = {info.key for info in store.entries()}
            assert said >= KEYS - touched, value
            reports = store.verify(), store.verify(quick=True)
        for report in reports:
            assert len(report.corrupt + report.missing) == len(touched), (value, report)
            if column != "key":
                assert {*report.corrupt, *report.missing} == {key.hex for key in touched}, value
        with closing(FileStore(path)) as store:
            assert present(store) >= KEYS - touched, value
            store.verify(repair=True)
            assert store.verify().clean, value
            assert present(store) >= KEYS - touched, value
            store.compact(live_share=1.0)
            store.gc()
            assert present(store) >= KEYS - touched, value
            store.put(CHUNKS)
            assert present(store) == KEYS
            assert store.verify().clean
        shutil.rmtree(path)


@pytest.mark.parametrize(
    "column",
    ["namespace", "fingerprint", "content", "context", "nbytes", "shape", "dtype", "encoding", "checksum", "created",
     "cost", "depends", "token_ids", "context_ids", "seal", "offset", "stored", "span", "id"],
)  # fmt: skip
def test_a_damaged_row_is_mended_from_its_record(column: str, path: Path) -> None:
    """By loading or by repair; the pin stays."""
    (info, kv), lies = CHUNKS[0], where(path)[CHUNKS[0][0].key.hex]
    ((value,),) = ask(path, f"SELECT {column} FROM chunks WHERE key = ?", bytes.fromhex(info.key.hex))
    changed = {bytes: lambda: b"\1" * (len(value) + 4), int: lambda: value + 64, str: lambda: value + "x"}.get(
        type(value), lambda: 3.25
    )()
    pinned = "SELECT r.pinned FROM ranks r JOIN chunks c ON c.id = r.chunk WHERE c.key = ?"
    for mended_by in ("load", "repair"):
        change(path, f"UPDATE chunks SET {column} = ? WHERE key = ?", changed, bytes.fromhex(info.key.hex))
        with closing(FileStore(path)) as store:
            if column not in ("offset", "stored", "span", "id"):
                assert store.info(info.key) is None
            if mended_by == "load":
                assert torch.equal(store.load(info.key), kv)
                if column in ("span", "id"):  # all that is needed was right
                    continue
            else:
                assert store.verify(repair=True, quick=True).corrupt == [info.key.hex]
            assert store.verify().clean
            assert store.verify().quarantined == []
            assert store.info(info.key) == info
        if column != "id":
            assert ask(path, pinned, bytes.fromhex(info.key.hex)) == [(1,)]
        assert where(path)[info.key.hex] == lies
        with closing(FileStore(path)) as store:
            assert present(store) == KEYS


def test_a_changed_quota_changes_no_entry(path: Path) -> None:
    change(path, "UPDATE namespaces SET quota = 1 WHERE name = 'one'")
    with closing(FileStore(path)) as store:
        assert present(store) == KEYS
        assert store.verify().clean


@pytest.mark.parametrize("table", ["ranks", "recent_dependencies", "namespaces", "fingerprints", "contexts"])
def test_rows_that_are_gone_are_made_anew(table: str, path: Path) -> None:
    change(path, f"DELETE FROM {table}")
    with closing(FileStore(path)) as store:
        assert len(store.verify(repair=True).corrupt) == (1 if table == "recent_dependencies" else len(CHUNKS))
        assert store.verify().clean
        assert present(store) == KEYS
        assert store.erase("one", [CHUNKS[0][0].content]) == 2  # and what was compiled behind it


def test_a_damaged_row_is_no_obstacle_to_putting_its_chunk_again(path: Path) -> None:
    change(path, "DELETE FROM ranks")
    change(path, "UPDATE chunks SET token_ids = x'00'")
    with closing(FileStore(path)) as store:
        assert store.known([info.key for info, _ in CHUNKS]) == set()
        store.put(CHUNKS)
        assert present(store) == KEYS
        assert store.verify().clean


# -- where it lies ---------------------------------------------------------------------------------------------


def test_no_chunk_is_taken_for_another_whose_place_it_was_given(path: Path) -> None:
    """Also where this process has read and checked what lies there."""
    (a, kv), (b, _) = CHUNKS[0], CHUNKS[4]
    with closing(FileStore(path)) as store:
        held = [store.load(a.key), store.load(b.key)]
        theirs = "(SELECT {} FROM chunks WHERE key = x'" + b.key.hex + "')"
        moved = ", ".join(
            f"{name} = {theirs.format(name)}" for name in ("segment", "start", "offset", "stored", "span")
        )
        change(path, f"UPDATE chunks SET {moved} WHERE key = ?", bytes.fromhex(a.key.hex))
        for _ in range(2):
            with pytest.raises(ChunkNotFoundError):
                store.load(a.key)
        assert torch.equal(store.load(b.key), CHUNKS[4][1])
        assert torch.equal(held[0], kv)
        assert store.info(a.key) is None
        assert store.verify().quarantined == [a.key.hex]
    assert rebuild(path) == len(CHUNKS)
    with closing(FileStore(path)) as store:
        assert present(store) == KEYS


def test_an_older_record_of_the_chunk_is_not_taken_for_it(tmp_path: Path) -> None:
    (info, kv), path = entry(3), tmp_path / "store"
    store = FileStore(path)
    store.put([(info, kv)])
    old = where(path)[info.key.hex]
    store.put([(replace(info, created=5.0), kv + 1)])
    store.close()
    # Its place alone, and its place and another value.
    for seal_broken in (False, True):
        damaged = Path(shutil.copytree(path, tmp_path / str(seal_broken)))
        change(damaged, "UPDATE chunks SET start = ?", old.start)
        if seal_broken:
            change(damaged, "UPDATE chunks SET cost = 5")
        else:
            change(damaged, "UPDATE chunks SET offset = ?", old.offset)
        store = FileStore(damaged)
        assert len(store.verify().corrupt) == 1
        with pytest.raises(ChunkNotFoundError, match="set aside"):
            store.load(info.key)
        store.close()


def test_a_segment_that_was_cut(path: Path) -> None:
    lies = where(path)
    file = lies[CHUNKS[0][0].key.hex].file
    inside = [(info, kv) for info, kv in CHUNKS if lies[info.key.hex].file == file]
    first, second, third = (info for info, _ in inside)
    for size, left in (
        (lies[third.key.hex].offset + 5, {first.key, second.key}),
        (lies[third.key.hex].start + 64, {first.key, second.key}),
        (lies[second.key.hex].start, {first.key}),
        (30, set()),
        (0, set()),
    ):
        os.truncate(file, size)
        with closing(FileStore(path, read_only=True)) as store:
            for quick in (False, True):
                report = store.verify(quick=quick)
                assert set(report.corrupt) == {info.key.hex for info, _ in inside if info.key not in left}
                assert report.missing == []
            assert present(store) == (KEYS - {info.key for info, _ in inside}) | left
    with closing(FileStore(path)) as store:
        assert len(store.verify(repair=True).corrupt) == 3
        assert store.verify().clean
        store.put(CHUNKS)
        assert present(store) == KEYS


def test_a_segment_that_is_removed_while_it_is_known(path: Path) -> None:
    lies = where(path)
    file = lies[CHUNKS[0][0].key.hex].file
    file.unlink()
    gone = sorted(key for key, place in lies.items() if place.file == file)
    with closing(FileStore(path)) as store:
        report = store.verify(quick=True)
        assert sorted(report.missing) == gone
        assert report.corrupt == []
        assert {key.hex for key in present(store)} == lies.keys() - set(gone)


def test_a_segment_whose_name_was_lost_is_kept_by_repair(path: Path) -> None:
    change(path, "UPDATE segments SET name = ? WHERE id = 1", "0" * 32)
    files = {file: file.read_bytes() for file in path.glob("segments/*.seg")}
    with closing(FileStore(path)) as store:
        report = store.verify(repair=True)
        assert len(report.missing) == 3
        assert len(report.orphans) == 1
    assert {file: file.read_bytes() for file in path.glob("segments/*.seg")} == files
    assert rebuild(path) == len(CHUNKS)
    with closing(FileStore(path)) as store:
        assert present(store) == KEYS


def test_a_segment_that_is_marked_as_gone_by_mistake_stays(path: Path) -> None:
    change(path, "UPDATE segments SET gone = 1")
    with closing(FileStore(path)) as store:
        assert present(store) == KEYS
        store.gc()
        assert store.verify().clean
    assert ask(path, "SELECT DISTINCT gone FROM segments") == [(0,)]


def test_compaction_loses_no_chunk_with_a_damaged_row(path: Path) -> None:
    change(path, "UPDATE chunks SET namespace = namespace + 1")
    with closing(FileStore(path)) as store:
        store.delete([CHUNKS[1][0].key, CHUNKS[4][0].key])
        for _ in range(2):
            store.compact(live_share=1.0)
        assert present(store) == KEYS - {CHUNKS[1][0].key, CHUNKS[4][0].key}
        assert store.verify().clean
        assert store.usage().dead_bytes == 0


# -- bits ------------------------------------------------------------------------------------------------------


def bit_flipped(path: Path, rng: random.Random) -> str:
    """Flip a bit of the catalogue; look at everything, then repair; returns what came out."""
    file = path / "catalogue.sqlite"
    used = [at for at, byte in enumerate(file.read_bytes()) if byte]  # mostly, for much of so small a file is empty
    flip(file, rng.choice(used) if rng.random() < 0.9 else rng.randrange(file.stat().st_size), rng.randrange(8))
    try:
        with closing(FileStore(path)) as store, suppress(StoreError):  # a page that SQLite cannot read
            present(store)
        with closing(FileStore(path)) as store:
            report = store.verify()
            left = present(store)
            if not report.clean:
                store.verify(repair=True)
                assert store.verify().clean
                assert present(store) == left
                outcome = "reported"
            else:
                assert left | {ChunkKey(key) for key in report.quarantined} >= KEYS
                outcome = "set aside" if report.quarantined else "harmless"
    except StoreError:
        outcome = "refused"
    if outcome != "harmless":
        rebuild(path)
        with closing(FileStore(path)) as store:
            assert present(store) == KEYS
            assert store.verify().clean
    return outcome


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_of_the_catalogue(seed: int, original: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    outcomes = set()
    for number in range(10):
        path = Path(shutil.copytree(original, tmp_path / str(number)))
        outcomes.add(bit_flipped(path, rng))
        shutil.rmtree(path)
    assert outcomes


# -- seals -----------------------------------------------------------------------------------------------------


def test_a_seal_is_what_the_documentation_says(path: Path) -> None:
    rows = ask(
        path,
        "SELECT c.seal, c.key, n.name, f.name, c.content, x.name, c.token_ids, c.context_ids, c.depends, c.encoding, "
        "c.shape, c.dtype, c.checksum, c.nbytes, c.created, c.expires, c.cost FROM chunks c, namespaces n, "
        "fingerprints f, contexts x WHERE n.id = c.namespace AND f.id = c.fingerprint AND x.id = c.context",
    )
    assert len(rows) == len(CHUNKS)
    for found, *values in rows:
        parts = [part.encode() if isinstance(part, str) else part for part in values[:12]]
        nbytes, created, expires, cost = values[12:]
        raw = b"".join(struct.pack("<I", len(part)) for part in parts) + struct.pack(
            "<qddd", nbytes, created, expires or 0, cost or 0
        )
        raw += bytes([(expires is not None) + 2 * (cost is not None)]) + b"".join(parts)
        assert found == xxhash.xxh3_64_digest(raw)


PARTS = st.lists(st.sampled_from([b"", b"a", b"aa", b"aab", b"b", b"\0" * 4]), min_size=12, max_size=12)
NUMBERS = st.tuples(
    st.sampled_from([0, 1, 97]), st.sampled_from([0.0, 1.0]),
    st.sampled_from([None, 0.0, 1.0]), st.sampled_from([None, 0.0, 1.0]),
)  # fmt: skip


@given(PARTS, PARTS, NUMBERS, NUMBERS)
def test_two_rows_with_one_seal_are_one(a: list[bytes], b: list[bytes], m: tuple[Any, ...], n: tuple[Any, ...]) -> None:
    def row(parts: list[bytes], numbers: tuple[Any, ...]) -> list[Any]:
        nbytes, created, expires, cost = numbers
        return [*parts[:7], nbytes, created, parts[7], expires, cost, *parts[8:]]

    one, two = row(a, m), row(b, n)
    assert (seal(one) == seal(two)) == (one == two)
    cut = [*a[:1], a[1] + a[2][:1], a[2][1:], *a[3:]]  # a byte that changes sides
    assert (seal(one) == seal(row(cut, m))) == (a[2] == b"")


# -- older catalogues ------------------------------------------------------------------------------------------


def test_a_catalogue_of_version_2_is_sealed(path: Path) -> None:
    seals = ask(path, "SELECT key, seal FROM chunks ORDER BY key")
    to_version_2(path)
    with closing(FileStore(path)) as store:
        assert present(store) == KEYS
        assert store.verify().clean
        assert store.verify(quick=True).checked == len(CHUNKS)
    assert ask(path, "SELECT key, seal FROM chunks ORDER BY key") == seals
    assert ask(path, "PRAGMA user_version") == [(3,)]
    with closing(sqlite3.connect(path / "catalogue.v2.sqlite")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


def test_what_was_damaged_in_version_2_is_known_in_version_3(path: Path) -> None:
    to_version_2(path)
    lies = where(path)
    row, record, file = (CHUNKS[n][0].key for n in (0, 1, 5))
    change(path, "UPDATE chunks SET token_ids = x'00000001' WHERE key = ?", bytes.fromhex(row.hex))
    flip(lies[record.hex].file, lies[record.hex].start + 130)
    assert lies[file.hex].file != lies[row.hex].file
    lies[file.hex].file.unlink()
    with closing(FileStore(path)) as store:
        assert store.info(row) is None
        assert store.info(record) == CHUNKS[1][0]
        assert store.info(file) == CHUNKS[5][0]
        report = store.verify()
        assert set(report.corrupt) == {row.hex, record.hex}
        assert file.hex in report.missing
        assert present(store) == {info.key for info, _ in CHUNKS[:3]}


def test_from_version_1_by_version_2(tmp_path: Path) -> None:
    chunks = [entry(n, created=float(n)) for n in range(4)]
    write_format_1(tmp_path, chunks)
    keys = {info.key for info, _ in chunks}
    for _ in range(2):
        with closing(FileStore(tmp_path)) as store:
            assert present(store, chunks) == keys
            assert store.verify().clean
            assert store.verify(quick=True).clean
        assert ask(tmp_path, "PRAGMA user_version") == [(3,)]
        to_version_2(tmp_path)
    with closing(FileStore(tmp_path)) as store:
        store.compact()
        assert present(store, chunks) == keys
    assert not list(tmp_path.glob("kv/*/*"))


@pytest.mark.parametrize("column", ["offset", "start", "span", "stored", "shape", "token_ids", "namespace"])
def test_a_changed_value_of_a_chunk_in_format_1(column: str, tmp_path: Path) -> None:
    chunks = [entry(n) for n in range(3)]
    write_format_1(tmp_path, chunks)
    FileStore(tmp_path).close()
    key = chunks[1][0].key
    change(tmp_path, f"UPDATE chunks SET {column} = {column} + 8 WHERE key = ?", bytes.fromhex(key.hex))
    with closing(FileStore(tmp_path)) as store:
        for quick in (False, True):
            assert store.verify(quick=quick).corrupt == [key.hex]
        assert present(store, chunks) >= {chunks[0][0].key, chunks[2][0].key}
        store.verify(repair=True)
        assert store.verify().clean
        assert present(store, chunks) == {chunks[0][0].key, chunks[2][0].key}
    assert file_of(tmp_path, chunks[0][0]).exists()


# -- others at work --------------------------------------------------------------------------------------------


def test_what_is_deleted_moved_or_replaced_during_a_check_is_not_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(path)
    rows = Catalogue.rows
    meanwhile: list[Callable[[], object]] = [
        lambda: (store.delete([CHUNKS[1][0].key]), store.compact(live_share=1.0)),
        lambda: (store.put([CHUNKS[0], CHUNKS[1]]), store.compact(live_share=1.0)),
    ]

    def late(catalogue: Catalogue, after: int, limit: int) -> list[tuple[Any, ...]]:
        found = rows(catalogue, after, limit)
        if found and meanwhile:
            meanwhile.pop(0)()
        return found

    monkeypatch.setattr(Catalogue, "rows", late)
    while meanwhile:
        report = store.verify(repair=True)
        assert report.clean
        assert report.quarantined == []
    assert present(store) == KEYS
    store.close()


def test_checks_while_others_write(path: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            with closing(FileStore(path, segment_bytes=5000)) as other:
                rng = random.Random(1)
                while not stop.is_set():
                    other.put(rng.sample(CHUNKS, 3))
                    other.delete([rng.choice(CHUNKS)[0].key])
                    other.compact(live_share=0.9)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with closing(FileStore(path)) as store:
            for number in range(30):
                report = store.verify(quick=bool(number % 2))
                assert not report.corrupt + report.missing, report
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_progress_counts_what_was_looked_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epic_engine.storage import checking

    monkeypatch.setattr(checking, "_PAGE", 4)
    seen: list[int] = []
    with closing(FileStore(path)) as store:
        assert store.verify(progress=seen.append).checked == len(CHUNKS)
    assert seen == [4, 6]


def test_what_cannot_be_read_is_not_called_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    from epic_engine.storage import checking

    def refuse(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checking, "checksum_in", refuse)
    with pytest.raises(StoreError, match=r"could not be read.*Mend the cause"):
        store.verify(repair=True)
    assert store.verify(quick=True).clean
    store.close()


def test_a_damaged_catalogue_names_the_command(path: Path) -> None:
    file = path / "catalogue.sqlite"
    raw = bytearray(file.read_bytes())
    page = int.from_bytes(raw[16:18], "big")
    ((root,),) = ask(path, "SELECT rootpage FROM sqlite_master WHERE name = 'chunks_by_age'")
    raw[(root - 1) * page : (root - 1) * page + 64] = b"\xaa" * 64
    file.write_bytes(raw)
    with closing(FileStore(path)) as store, pytest.raises(StoreError, match=r"epic-rag store rebuild --store /"):
        store.verify()
