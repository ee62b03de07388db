"""Chunk stores: both kinds by the same tests, then what only files can suffer."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import (
    ChunkInfo,
    ChunkKey,
    ChunkNotFoundError,
    ChunkStore,
    FileStore,
    MemoryStore,
    StoreError,
    StoreFormatError,
)
from epic_engine.chunks import content_digest
from epic_engine.memory import file_store
from torch import Tensor


def entry(
    number: int,
    *,
    context: str = "isolated",
    namespace: str = "one",
    created: float = 0.0,
    fingerprint: str = "f",
) -> tuple[ChunkInfo, Tensor]:
    ids = tuple(range(number, number + 5))
    key = ChunkKey.of(fingerprint, namespace, context, ids)
    generator = torch.Generator().manual_seed(number)
    kv = torch.randn(2, 2, 3, 5, 8, generator=generator)
    info = ChunkInfo(key, namespace, fingerprint, content_digest(ids), context, ids, (1, 1), kv.nbytes, created)
    return info, kv


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    made: ChunkStore = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
    yield made
    made.close()


# -- both ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_put_comes_back(store: ChunkStore, dtype: torch.dtype) -> None:
    info, kv = entry(3, created=12.5)
    kv = kv.to(dtype)
    info = replace(info, nbytes=kv.nbytes)
    want = kv.clone()
    assert store.info(info.key) is None
    store.put([(info, kv)])
    kv.zero_()  # the caller may reuse its buffer
    assert store.info(info.key) == info
    assert torch.equal(store.load(info.key), want)
    assert store.load(info.key).dtype == dtype


def test_a_view_is_stored_as_what_it_shows(store: ChunkStore) -> None:
    info, _ = entry(3)
    wide = torch.randn(2, 2, 3, 11, 8)
    store.put([(info, wide[:, :, :, 4:9])])
    assert torch.equal(store.load(info.key), wide[:, :, :, 4:9])


def test_an_unknown_key(store: ChunkStore) -> None:
    key = entry(3)[0].key
    assert store.info(key) is None
    assert store.delete([key]) == 0
    assert store.known([key]) == set()
    with pytest.raises(ChunkNotFoundError, match=f"{key}.*compile its tokens again"):
        store.load(key)


def test_a_known_key_is_replaced(store: ChunkStore) -> None:
    (info, kv), other = entry(3), entry(4)
    store.put([(info, kv), other])
    assert torch.equal(store.load(info.key), kv)
    store.put([(info, kv + 1)])
    assert torch.equal(store.load(info.key), kv + 1)
    assert len(list(store.entries())) == 2


def test_the_same_key_twice_in_one_put(store: ChunkStore) -> None:
    info, kv = entry(3)
    store.put([(info, kv), entry(4), (info, kv + 1)])
    assert torch.equal(store.load(info.key), kv + 1)
    assert len(list(store.entries())) == 2
    store.put([])


def test_forms_and_entries_are_oldest_first(store: ChunkStore) -> None:
    young, _ = a = entry(3, context="head", created=3.0)
    old, _ = b = entry(3, context="sink:4", created=1.0)
    others = [entry(4, created=2.0), entry(3, namespace="two"), entry(3, fingerprint="g")]
    store.put([a, b, *others])
    assert store.forms("one", "f", young.content) == [old, young]
    assert store.forms("one", "f", content_digest([99])) == []
    assert [i.created for i in store.entries()] == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert store.known([young.key, entry(9)[0].key]) == {young.key}


def test_deleting_counts_and_leaves_kv_in_use_readable(store: ChunkStore) -> None:
    a, b = entry(3), entry(4)
    store.put([a, b])
    held = store.load(a[0].key)
    assert store.delete([a[0].key, a[0].key, entry(9)[0].key]) == 1
    assert store.info(a[0].key) is None
    assert torch.equal(held, a[1])
    with pytest.raises(ChunkNotFoundError):
        store.load(a[0].key)
    assert [i.key for i in store.entries()] == [b[0].key]
    assert store.verify().clean
    assert store.verify().checked == 1
    assert store.free_bytes() > 1 << 20


def test_threads_write_and_read_at_once(store: ChunkStore) -> None:
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for number in range(offset, offset + 8):
                info, kv = entry(number)
                store.put([(info, kv)])
                assert torch.equal(store.load(info.key), kv)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(o,)) for o in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(list(store.entries())) == 16


# -- files -----------------------------------------------------------------------------------------------------


def _file(path: Path, key: ChunkKey) -> Path:
    (found,) = path.glob(f"kv/*/{key}.safetensors")
    return found


def test_kv_is_read_from_the_mapped_file(tmp_path: Path) -> None:
    with_file = FileStore(tmp_path)
    info, kv = entry(3)
    with_file.put([(info, kv)])
    loaded = with_file.load(info.key)
    assert with_file.load(info.key) is loaded
    address = loaded.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.endswith(str(_file(tmp_path, info.key)))
            break
    else:
        pytest.fail("the tensor lies in no mapping")


def test_another_process_finds_everything(tmp_path: Path) -> None:
    first = FileStore(tmp_path)
    entries = [entry(n) for n in range(3)]
    first.put(entries)
    second = FileStore(tmp_path)
    assert all(torch.equal(second.load(i.key), kv) and second.info(i.key) == i for i, kv in entries)
    first.delete([entries[0][0].key])
    with pytest.raises(ChunkNotFoundError):  # although it is mapped
        second.load(entries[0][0].key)
    first.close()
    second.close()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_flipped_byte_anywhere_is_never_served(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    info, kv = entry(3)
    store.put([(info, kv)])
    file = _file(tmp_path, info.key)
    intact = file.read_bytes()
    harmless = 0
    store.close()
    rng = random.Random(0)
    header = 8 + int.from_bytes(intact[:8], "little")
    for at in [*range(8), *rng.sample(range(8, header), 60), *rng.sample(range(header, len(intact)), 30)]:
        damaged = bytearray(intact)
        damaged[at] ^= 1 << rng.randrange(8)
        store = FileStore(tmp_path)
        store.put([(info, kv)])
        file.write_bytes(damaged)
        try:
            loaded: Tensor | str = store.load(info.key)
        except ChunkNotFoundError as error:
            loaded = str(error)
        if isinstance(loaded, Tensor):
            assert torch.equal(loaded, kv)
            assert at < header  # in the names and the text beside the numbers
            harmless += 1
        else:
            assert "set aside" in loaded
            assert store.info(info.key) is None
            assert list(store.entries()) == []
            with pytest.raises(ChunkNotFoundError, match="is not in"):
                store.load(info.key)
            assert store.verify().clean
        store.close()
    assert 0 < harmless < 60


def test_verify_reports_and_repair_cleans(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    entries = [entry(n) for n in range(4)]
    store.put(entries)
    keys = [i.key for i, _ in entries]
    damaged = _file(tmp_path, keys[0])
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    _file(tmp_path, keys[1]).unlink()
    cut = _file(tmp_path, keys[2])
    os.truncate(cut, cut.stat().st_size // 2)
    orphan = tmp_path / "kv" / "ff" / f"{'f' * 64}.safetensors"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"x")
    for repair in (False, True):
        report = store.verify(repair=repair)
        assert (report.checked, set(report.corrupt)) == (4, {keys[0].hex, keys[2].hex})
        assert report.missing == [keys[1].hex]
        assert report.orphans == [str(orphan.relative_to(tmp_path))]
        assert not report.clean
    report = store.verify()
    assert report.clean
    assert report.checked == 1
    assert [i.key for i in store.entries()] == [keys[3]]
    assert len(list(tmp_path.glob("kv/*/*.safetensors"))) == 1


def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put([entry(3)])
    store.close()
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version=2")
    db.close()
    with pytest.raises(StoreFormatError, match=r"has format 2, this version reads 1: upgrade"):
        FileStore(tmp_path)
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version=1")
    db.close()
    store = FileStore(tmp_path)
    assert len(list(store.entries())) == 1


def test_a_catalogue_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"cannot be opened.*move the damaged"):
        FileStore(tmp_path)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Give a directory that can be written"):
        FileStore(tmp_path / "file")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    info, kv = entry(3)
    store.put([(info, kv)])
    store.close()
    store.close()
    for use in (
        lambda: store.info(info.key),
        lambda: store.load(info.key),
        lambda: store.put([(info, kv)]),
        lambda: store.delete([info.key]),
        lambda: store.forms("one", "f", info.content),
        lambda: store.entries(),
        lambda: store.verify(),
    ):
        with pytest.raises(StoreError, match="was closed"):
            use()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_store, "save_file", full)
    with pytest.raises(StoreError, match="No space left"):
        store.put([entry(3)])
    assert store.info(entry(3)[0].key) is None
    assert store.verify().clean
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.skipif(os.name == "nt", reason="limits and /dev are POSIX")
def test_a_process_out_of_file_handles_does_not_throw_chunks_away(tmp_path: Path) -> None:
    import resource

    store = FileStore(tmp_path)
    info, kv = entry(3)
    store.put([(info, kv)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[0]), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                handles.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(StoreError, match="could not be read"):
            store.load(info.key)
        with pytest.raises((StoreError, OSError), match="Too many open files"):
            store.verify(repair=True)
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(store.load(info.key), kv)


@pytest.mark.parametrize("other", ["verify", "delete"])
def test_nobody_removes_a_file_between_its_rename_and_its_entry(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a writer stands between the two steps, another process repairs the store or deletes the same key."""
    writer, cleaner = FileStore(tmp_path), FileStore(tmp_path)
    info, kv = entry(3)
    cleaner.put([entry(4), *([(info, kv)] if other == "delete" else [])])
    threads = []
    sync = file_store._fsync_directory

    def meanwhile(path: Path) -> None:
        sync(path)
        if (tmp_path / "kv" / info.key.hex[:2] / f"{info.key}.safetensors").exists() and not threads:
            work = (lambda: cleaner.verify(repair=True)) if other == "verify" else lambda: cleaner.delete([info.key])
            threads.append(threading.Thread(target=work))
            threads[0].start()
            threads[0].join(timeout=0.5)

    monkeypatch.setattr(file_store, "_fsync_directory", meanwhile)
    writer.put([(info, kv + 1)])
    threads[0].join()
    if other == "verify":
        assert torch.equal(writer.load(info.key), kv + 1)
    assert writer.verify().clean


def test_a_chunk_stored_again_while_it_is_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, cleaner = FileStore(tmp_path), FileStore(tmp_path)
    info, kv = entry(3)
    writer.put([(info, kv)])
    enter, entered = cleaner._transaction, []

    def transaction() -> Any:
        if len(entered) == 1:  # the entry is gone, the file still there
            writer.put([(info, kv)])
        entered.append(1)
        return enter()

    monkeypatch.setattr(cleaner, "_transaction", transaction)
    assert cleaner.delete([info.key]) == 1
    assert len(entered) == 2
    assert cleaner.verify().clean
    assert torch.equal(cleaner.load(info.key), kv)
