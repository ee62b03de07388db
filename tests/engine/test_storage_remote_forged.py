"""A published catalogue is not trusted: what no store writes is refused, and what was there before stays."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from epic_engine import ChunkNotFoundError, FileStore, StoreFormatError
from epic_engine.storage.packed_files import PackedFile, fetch_file
from epic_engine.storage.publish import publish
from epic_engine.storage.remote import RemoteStore
from epic_engine.storage.seals import NAMED, SEALED, seal
from epic_engine.storage.snapshots import Current
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.faulty_files import FaultyFileSystem
from tests.engine.test_storage_publish import URL, segments, some

ROOT = "/bucket/corpus"
Change = Callable[[sqlite3.Connection], object]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteStore, dict[str, bytes]]]:
    """A reader, and what was published as generation 1: chunks 1 and 2."""
    FaultyFileSystem.reset()
    folder = tmp_path_factory.mktemp("forged")
    source = FileStore(folder / "source")
    source.put(some(1, 2))
    publish(source, URL)
    source.close()
    remote = RemoteStore(URL, FileStore(folder / "reader"), refresh_seconds=1e9, timeout=5.0)
    yield remote, FaultyFileSystem.files()
    remote.close()


@pytest.fixture
def store(reader: tuple[RemoteStore, dict[str, bytes]]) -> RemoteStore:
    """A reader that has generation 1; nothing of it was fetched."""
    remote, files = reader
    FaultyFileSystem.reset()
    for name, data in files.items():
        FaultyFileSystem.replace(name, data)
    remote.refresh()
    assert remote.status.generation == 1
    remote.cache.delete([info.key for info in remote.cache.entries()])
    FaultyFileSystem.reads.clear()
    return remote


def current() -> dict[str, Any]:
    return json.loads(FaultyFileSystem.files()[f"{ROOT}/current.json"])


def point_to(data: bytes, **changes: Any) -> None:
    """Publish bytes as the catalogue of generation 2, with everything that only says so in order."""
    fields = current() | {
        "generation": 2,
        "name": f"catalogues/2-{'a' * 32}.sqlite.zst",
        "nbytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
    }
    fields |= changes
    FaultyFileSystem.replace(f"{ROOT}/{fields['name']}", data)
    FaultyFileSystem.replace(f"{ROOT}/current.json", json.dumps(fields).encode())


def forge(tmp_path: Path, *changes: str | Change, sealed: bool = True) -> None:
    """Publish a changed catalogue, its digest, sizes and seals in order."""
    packed = FaultyFileSystem.files()[f"{ROOT}/{current()['name']}"]
    file = tmp_path / "forged.sqlite"
    file.write_bytes(zstandard.ZstdDecompressor().decompress(packed))
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        for change in changes:
            db.execute(change) if isinstance(change, str) else change(db)
        if sealed:
            for number, *row in db.execute(f"SELECT c.id, {SEALED} FROM {NAMED}").fetchall():
                with suppress(TypeError, struct.error):
                    db.execute("UPDATE chunks SET seal = ? WHERE id = ?", (seal(row[:-1]), number))
    data = file.read_bytes()
    point_to(zstandard.ZstdCompressor().compress(data), unpacked=len(data))


def unchanged(store: RemoteStore) -> bool:
    """Whether generation 1 is still there, whole, and only its segment was read."""
    for info, kv in some(1, 2):
        assert store.info(info.key) == info
        assert torch.equal(store.load(info.key), kv)
    known = {*segments(), f"{ROOT}/current.json", f"{ROOT}/catalogues/2-{'a' * 32}.sqlite.zst"}
    assert set(FaultyFileSystem.reads) <= known
    return True


def test_a_catalogue_with_another_segment_name_would_be_believed(store: RemoteStore, tmp_path: Path) -> None:
    """The forgeries below are refused for what they forge, not for how they are made."""
    forge(tmp_path, f"UPDATE segments SET name = '{'b' * 32}'")
    ((_, data),) = segments().items()
    FaultyFileSystem.replace(f"{ROOT}/segments/{'b' * 32}.seg", data)
    assert store.refresh()
    assert store.status.generation == 2
    for info, kv in some(1, 2):
        assert torch.equal(store.load(info.key), kv)
    assert f"{ROOT}/segments/{'b' * 32}.seg" in FaultyFileSystem.reads


NAMES = ["../../secret", "..", "", "A" * 32, "b" * 33, "b" * 32 + "\0/../x", "b" * 31 + "\n", "%2e%2e"]
FORGED: dict[str, list[str | Change]] = {
    **{
        f"segment named {name!r}": [lambda db, name=name: db.execute("UPDATE segments SET name = ?", (name,))]
        for name in NAMES
    },
    "segment named by a blob": ["UPDATE segments SET name = CAST(name AS BLOB)"],
    "file of format 1": ["UPDATE segments SET kind = 1"],
    "segment without end": ["UPDATE segments SET size = 1 << 60"],
    "record before the file": ["UPDATE chunks SET start = -64"],
    "record in the header": ["UPDATE chunks SET start = 0"],
    "record between places": ["UPDATE chunks SET start = start + 1"],
    "record behind the end": ["UPDATE chunks SET start = start + 640000, offset = offset + 640000"],
    "payload without end": ["UPDATE chunks SET stored = 1 << 50"],
    "payload of another size": ["UPDATE chunks SET stored = stored + 64"],
    "span of another size": ["UPDATE chunks SET span = 1 << 50"],
    "metadata without end": ["UPDATE chunks SET offset = offset + (1 << 40), span = span + (1 << 40)"],
    "key of another length": ["UPDATE chunks SET key = randomblob(30 + id)"],
    "key as text": ["UPDATE chunks SET key = hex(key)"],
    "content as a number": ["UPDATE chunks SET content = 5"],
    "shape of four numbers": ["UPDATE chunks SET shape = substr(shape, 1, 16)"],
    "unknown dtype": ["UPDATE chunks SET dtype = 'complex64'"],
    "unknown encoding": ["UPDATE chunks SET encoding = 'pickle'"],
    "token ids of half a number": ["UPDATE chunks SET token_ids = CAST(token_ids || x'00' AS BLOB)"],
    "namespace that is lost": ["DELETE FROM namespaces"],
    "segment that is lost": ["UPDATE chunks SET segment = 77"],
    "names that are no text": ["UPDATE namespaces SET name = x'ff'"],
    "a view": ["CREATE VIEW more AS SELECT 1"],
    "a trigger": ["CREATE TRIGGER more AFTER UPDATE ON chunks BEGIN SELECT 1; END"],
    "a table": ["CREATE TABLE more (x)"],
    "chunks as a view": [
        "ALTER TABLE chunks RENAME TO hidden",
        "CREATE VIEW chunks AS SELECT * FROM hidden",
    ],
    "another format": ["PRAGMA user_version = 2"],
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_catalogues_are_refused(
    store: RemoteStore, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    forge(tmp_path, *FORGED[what], sealed=what != "chunks as a view")
    assert not store.refresh()
    assert store.status.generation == 1
    assert unchanged(store)
    assert any("refused" in record.message for record in caplog.records)
    assert not list(store.local.path.rglob("incoming-*"))


@pytest.mark.parametrize(
    "change",
    [
        # Nothing is fetched for these:
        "UPDATE chunks SET shape = x'0200000002000000030000000600000008000000'",
        "UPDATE chunks SET shape = x'ffffff7f02000000ffffff7fffffff7fffffff7f'",
        "UPDATE chunks SET shape = x'02000000ffffffff030000000500000008000000'",
        "UPDATE chunks SET dtype = 'bfloat16'",
        "UPDATE chunks SET encoding = 'int8'",
        "UPDATE chunks SET nbytes = nbytes * 2",
        "UPDATE chunks SET token_ids = substr(token_ids, 1, 16)",
        # These are found out by the record:
        "UPDATE chunks SET encoding = 'raw+zstd'",
        "UPDATE chunks SET checksum = zeroblob(16)",
        "UPDATE chunks SET created = 3e9",
        "UPDATE namespaces SET name = 'victim'",
        "UPDATE chunks SET key = randomblob(32)",
    ],
)
def test_a_chunk_that_contradicts_its_entry_is_a_miss(store: RemoteStore, tmp_path: Path, change: str) -> None:
    forge(tmp_path, change)
    assert store.refresh()
    entries = list(store.entries())
    assert len(entries) == 2
    for info in entries:
        with pytest.raises(ChunkNotFoundError):
            store.load(info.key)
        assert store.info(info.key) is None
    assert store.cache.usage().chunks == 0
    impossible = any(name in change for name in ("shape", "dtype", "'int8'", "nbytes", "token_ids"))
    assert impossible == (not any(name.endswith(".seg") for name in FaultyFileSystem.reads))


def test_two_chunks_with_changed_places_are_misses(store: RemoteStore, tmp_path: Path) -> None:
    forge(
        tmp_path,
        "CREATE TEMP TABLE swapped AS SELECT 3 - id AS id, start, offset FROM chunks",
        "UPDATE chunks SET start = (SELECT start FROM swapped s WHERE s.id = chunks.id), "
        "offset = (SELECT offset FROM swapped s WHERE s.id = chunks.id)",
    )
    assert store.refresh()
    for info, _ in some(1, 2):
        with pytest.raises(ChunkNotFoundError):
            store.load(info.key)


def test_a_row_with_a_broken_seal_is_a_miss(store: RemoteStore, tmp_path: Path) -> None:
    forge(tmp_path, "UPDATE chunks SET expires = 9e9", sealed=False)
    assert store.refresh()
    assert store.known([info.key for info, _ in some(1, 2)]) == set()


def test_a_catalogue_that_grows_when_it_is_unpacked_is_refused(store: RemoteStore, tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    before = sorted(store.local.path.rglob("*"))
    for unpacked in (4096, 63 << 20, 65 << 20):
        point_to(bomb, unpacked=unpacked)
        assert not store.refresh()
        assert sorted(store.local.path.rglob("*")) == before
    assert unchanged(store)
    file = tmp_path / "unpacked"
    with pytest.raises(ValueError, match="does not hold"):
        fetch_file(
            lambda name, start, end: bomb[start:end],
            PackedFile("bomb.zst", len(bomb), xxhash.xxh3_128_hexdigest(bomb), 4096),
            file,
        )
    assert file.stat().st_size <= 4096


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../catalogue.sqlite"},
        {"name": f"catalogues/../2-{'a' * 32}.sqlite"},
        {"name": f"catalogues/2-{'a' * 32}.sqlite.zst\n"},
        {"name": 5},
        {"nbytes": -1},
        {"nbytes": 1 << 60},
        {"nbytes": True},
        {"unpacked": 1 << 60},
        {"digest": "0" * 32},
        {"digest": None},
        {"generation": "2"},
        {"previous": "/etc/passwd"},
        {"format": "something else"},
        {"version": 2},
        {"version": "3"},
    ],
)
def test_a_forged_pointer_is_refused(store: RemoteStore, changes: dict[str, Any]) -> None:
    packed = FaultyFileSystem.files()[f"{ROOT}/{current()['name']}"]
    point_to(packed)
    FaultyFileSystem.replace(f"{ROOT}/current.json", json.dumps(current() | changes).encode())
    assert not store.refresh()
    assert unchanged(store)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 20)])
def test_a_pointer_that_is_none_is_refused(store: RemoteStore, text: bytes) -> None:
    FaultyFileSystem.replace(f"{ROOT}/current.json", text)
    assert not store.refresh()
    assert unchanged(store)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from(["format", "version", "generation", "name", "nbytes", "digest", "unpacked", "previous"])
_valid = Current(3, f"catalogues/3-{'c' * 32}.sqlite", 7, "d" * 32, 7, f"catalogues/2-{'b' * 32}.sqlite.zst")


@settings(deadline=None)
@given(st.dictionaries(_fields, _json, max_size=4) | st.binary(max_size=40))
def test_pointers_are_read_or_refused(changes: dict[str, Any] | bytes) -> None:
    assert Current.of(_valid.text()) == _valid
    text = changes if isinstance(changes, bytes) else json.dumps(json.loads(_valid.text()) | changes).encode()
    try:
        found = Current.of(text)
    except (ValueError, StoreFormatError):
        return
    assert Current.of(found.text()) == found
    assert found.name.startswith("catalogues/")
    assert ".." not in found.name
