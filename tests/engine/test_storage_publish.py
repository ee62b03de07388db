"""Publishing a store: what is there afterwards, seen with plain fsspec, and whatever interrupts it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
import zstandard
from epic_engine import ChunkInfo, ChunkKey, ConfigError, FileStore, StoreError, StoreFormatError
from epic_engine.storage import publish as publishing
from epic_engine.storage.publish import publish
from epic_engine.storage.rebuild import rebuild
from epic_engine.storage.remote import RemoteStore
from torch import Tensor

from tests.damage import flip, where
from tests.engine.faulty_files import FaultyFileSystem
from tests.engine.test_store import entry

URL = "faulty://bucket/corpus"
Chunks = dict[ChunkKey, Tensor]


@pytest.fixture(autouse=True)
def _empty() -> None:
    FaultyFileSystem.reset()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "source")
    yield store
    store.close()


def some(*numbers: int, **options: str) -> list[tuple[ChunkInfo, Tensor]]:
    return [entry(number, created=float(number), **options) for number in numbers]


def seen(tmp_path: Path, name: str, url: str = URL) -> Chunks:
    """Everything that a new machine reads; each chunk must be found and loaded."""
    remote = RemoteStore(url, FileStore(tmp_path / name))
    try:
        return {info.key: remote.load(info.key).clone() for info in remote.entries()}
    finally:
        remote.close()


def same(found: Chunks, wanted: list[tuple[ChunkInfo, Tensor]]) -> bool:
    return set(found) == {info.key for info, _ in wanted} and all(torch.equal(found[i.key], kv) for i, kv in wanted)


def segments() -> dict[str, bytes]:
    return {name: data for name, data in FaultyFileSystem.files().items() if name.endswith(".seg")}


def named(catalogue: str, tmp_path: Path) -> set[str]:
    """Segments that the chunks of a published catalogue lie in."""
    file = tmp_path / "catalogue.sqlite"
    file.write_bytes(zstandard.ZstdDecompressor().decompress(FaultyFileSystem.files()[catalogue]))
    with closing(sqlite3.connect(file)) as db:
        rows = db.execute("SELECT DISTINCT s.name FROM segments s JOIN chunks c ON c.segment = s.id").fetchall()
    return {f"/bucket/corpus/segments/{name}.seg" for (name,) in rows}


@pytest.mark.parametrize("kind", ["memory", "file", "path"])
def test_another_machine_reads_what_was_published(source: FileStore, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "share" / "corpus"
    url = {"memory": f"memory://{tmp_path.name}-{id(source)}", "file": folder.as_uri(), "path": str(folder)}[kind]
    chunks = some(*range(12))
    source.put(chunks)
    steps: list[tuple[int, int]] = []
    report = publish(source, url, progress=lambda done, total: steps.append((done, total)))
    assert (report.chunks, report.removed, report.files, report.generation, report.damaged) == (12, 0, 1, 1, [])
    assert steps == [(done, 12) for done in range(13)]
    assert same(seen(tmp_path, "reader", url), chunks)
    fs, root = fsspec.core.url_to_fs(url)
    sizes = {path.rpartition("/")[2]: fs.size(path) for path in fs.find(root)}
    assert report.nbytes == sum(size for name, size in sizes.items() if name.endswith(".seg"))
    assert sorted(name.rpartition(".")[2] for name in sizes) == ["json", "seg", "zst"]


@pytest.mark.parametrize(
    ("encoding", "compression"), [("raw", "zstd"), ("int8", None), ("fp8", None), ("bf16", "zstd")]
)
def test_what_is_stored_arrives_bit_for_bit(tmp_path: Path, encoding: str, compression: str | None) -> None:
    source = FileStore(tmp_path / "source", compression=compression)
    source.put([(replace(info, encoding=encoding), kv) for info, kv in some(1, 2, 3)])
    publish(source, URL)
    remote = RemoteStore(URL, FileStore(tmp_path / "reader"))
    for info in source.entries():
        assert remote.info(info.key) == info
        assert torch.equal(remote.load(info.key), source.load(info.key))
    payloads = []
    for path in (source.path, remote.cache.path):
        found = where(path)
        payloads.append({k: at.file.read_bytes()[at.offset : at.offset + at.stored] for k, at in found.items()})
    assert payloads[0] == payloads[1]
    assert len(payloads[0]) == 3
    source.close()
    remote.close()


def test_only_new_chunks_are_copied(source: FileStore, tmp_path: Path) -> None:
    source.put(some(*range(10)))
    publish(source, URL)
    before = FaultyFileSystem.files()
    assert publish(source, URL).chunks == 0
    assert FaultyFileSystem.files() == before
    source.put(some(20))
    report = publish(source, URL)
    assert (report.chunks, report.files, report.generation) == (1, 1, 2)
    after = FaultyFileSystem.files()
    new = {name: data for name, data in after.items() if name not in before}
    assert {name: data for name, data in after.items() if name in before and "current" not in name} == {
        name: data for name, data in before.items() if "current" not in name
    }
    (segment,) = (data for name, data in new.items() if name.endswith(".seg"))
    kv = some(20)[0][1]
    assert kv.nbytes < len(segment) < kv.nbytes + 1024
    assert same(seen(tmp_path, "reader"), some(*range(10), 20))


def test_bytes_of_deleted_chunks_go_one_generation_later(source: FileStore, tmp_path: Path) -> None:
    chunks = some(1, 2)
    source.put(chunks[:1])
    publish(source, URL)
    source.put(chunks[1:])
    publish(source, URL)
    first, second = segments()
    old = RemoteStore(URL, FileStore(tmp_path / "old"), refresh_seconds=1e9)
    source.delete([chunks[0][0].key])
    assert publish(source, URL).removed == 1
    assert set(segments()) == {first, second}
    assert torch.equal(old.load(chunks[0][0].key), chunks[0][1])  # it has the generation before
    assert publish(source, URL).chunks == 0  # nothing changed: still the generation before
    assert set(segments()) == {first, second}
    source.put(some(3))
    publish(source, URL)
    assert first not in segments()
    assert len(segments()) == 2
    assert len([name for name in FaultyFileSystem.files() if "/catalogues/" in name]) == 2
    assert same(seen(tmp_path, "reader"), [*chunks[1:], *some(3)])
    old.close()


def test_segments_that_are_mostly_dead_are_rewritten(source: FileStore, tmp_path: Path) -> None:
    chunks = some(*range(10))
    source.put(chunks)
    publish(source, URL)
    (first,) = segments()
    source.delete([info.key for info, _ in chunks[:6]])
    report = publish(source, URL)
    assert (report.chunks, report.removed) == (4, 6)
    source.put(some(30))
    publish(source, URL)
    assert first not in segments()
    assert same(seen(tmp_path, "reader"), [*chunks[6:], *some(30)])


def test_many_chunks_are_several_segments_and_generations(
    source: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_SEGMENT_BYTES", 5000)
    monkeypatch.setattr(publishing, "_GROUP_BYTES", 10_000)
    chunks = some(*range(20))
    source.put(chunks)
    report = publish(source, URL)
    assert report.chunks == 20
    assert report.files == len(segments()) > 5
    assert report.generation > 2
    assert same(seen(tmp_path, "reader"), chunks)


def test_namespaces_are_published_apart(source: FileStore, tmp_path: Path) -> None:
    a, b = some(1, 2, namespace="a"), some(1, 2, namespace="b")
    source.put(a + b)
    publish(source, URL, namespaces=["a"])
    assert same(seen(tmp_path, "one"), a)
    source.delete([info.key for info, _ in a])
    publish(source, URL, namespaces=["b"])  # says nothing about a
    assert same(seen(tmp_path, "two"), a + b)
    assert publish(source, URL).removed == 2
    assert same(seen(tmp_path, "three"), b)


def test_an_expired_chunk_is_not_published(source: FileStore, tmp_path: Path) -> None:
    (info, kv), other = some(1)[0], some(2)[0]
    source.put([(replace(info, expires=1.0), kv), other])
    assert publish(source, URL).chunks == 1
    assert same(seen(tmp_path, "reader"), [other])


def test_a_damaged_chunk_is_reported_and_the_others_are_published(source: FileStore, tmp_path: Path) -> None:
    chunks = some(1, 2, 3)
    source.put(chunks)
    bad = chunks[1][0].key
    lies = where(source.path)[bad.hex]
    flip(lies.file, lies.offset + 100)
    report = publish(source, URL)
    assert (report.chunks, report.damaged) == (2, [bad.hex])
    assert source.info(bad) is None
    assert same(seen(tmp_path, "reader"), [chunks[0], chunks[2]])


def test_a_copy_of_what_is_published_is_a_store(source: FileStore, tmp_path: Path) -> None:
    chunks = some(1, 2, 3)
    source.put(chunks)
    publish(source, URL)
    folder = tmp_path / "copy" / "segments"
    folder.mkdir(parents=True)
    for name, data in segments().items():
        (folder / name.rpartition("/")[2]).write_bytes(data)
    assert rebuild(folder.parent) == 3
    copy = FileStore(folder.parent)
    assert all(torch.equal(copy.load(info.key), kv) for info, kv in chunks)
    copy.close()


# -- interrupted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_any_change_the_old_generation_stays(
    source: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    monkeypatch.setattr(publishing, "_SEGMENT_BYTES", 5000)
    old, new = some(*range(6)), some(*range(3, 11))
    source.put(old)
    publish(source, URL)
    source.delete([info.key for info, _ in old[:3]])
    publish(source, URL)
    before = old[3:]
    source.put(new)
    FaultyFileSystem.torn = torn
    start = FaultyFileSystem.files()
    committed = 0
    for step in range(1, 100):
        FaultyFileSystem.store.clear()
        for name, data in start.items():
            FaultyFileSystem.replace(name, data)
        FaultyFileSystem.writes, FaultyFileSystem.fail_at = 0, step
        killed = False
        try:
            publish(source, URL)
        except StoreError:
            killed = True
        FaultyFileSystem.fail_at = None
        if not killed:
            break
        is_new = json.loads(FaultyFileSystem.files()["/bucket/corpus/current.json"])["generation"] == 3
        committed += is_new
        assert same(seen(tmp_path, f"killed-{step}"), new if is_new else before)
        publish(source, URL)
        assert same(seen(tmp_path, f"again-{step}"), new)
        catalogues = [name for name in FaultyFileSystem.files() if "/catalogues/" in name]
        assert len(catalogues) == 2
        assert set(segments()) == set().union(*(named(name, tmp_path) for name in catalogues))
    assert step > 5
    assert committed >= 1  # killed while old objects were removed


def test_one_publisher_at_a_time(source: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path / "other")
    other.put(some(7))
    source.put(some(1))
    publish(source, URL)
    source.put(some(2))

    def meanwhile(done: int, total: int) -> None:
        if done == total:
            publish(other, URL)

    with pytest.raises(StoreError, match="somebody else"):
        publish(source, URL, progress=meanwhile)
    assert same(seen(tmp_path, "reader"), some(7))
    other.close()


def test_what_did_not_arrive_whole_is_not_committed(source: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: FaultyFileSystem, lpath: str, rpath: str, **_: object) -> None:
        self.replace(rpath, Path(lpath).read_bytes()[:-1])

    source.put(some(1))
    monkeypatch.setattr(FaultyFileSystem, "put_file", cut)
    with pytest.raises(StoreError, match="were written"):
        publish(source, URL)
    assert "/bucket/corpus/current.json" not in FaultyFileSystem.files()


def test_what_cannot_be_published_to_is_said(source: FileStore, tmp_path: Path) -> None:
    source.put(some(1))
    with pytest.raises(ConfigError, match="fsspec knows"):
        publish(source, "nowhere://bucket")
    FaultyFileSystem.replace("/bucket/corpus/current.json", b"{}")
    with pytest.raises(StoreError, match="damaged or not"):
        publish(source, URL)
    text = json.dumps({"format": "epic-rag remote store", "version": 99}).encode()
    FaultyFileSystem.replace("/bucket/corpus/current.json", text)
    with pytest.raises(StoreFormatError, match="same version"):
        publish(source, URL)
    assert set(FaultyFileSystem.files()) == {"/bucket/corpus/current.json"}
