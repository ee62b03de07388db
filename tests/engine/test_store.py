"""Chunk stores: both kinds by the same tests, then what only files can suffer."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epic_engine import (
    ChunkInfo,
    ChunkKey,
    ChunkNotFoundError,
    ChunkStore,
    ConfigError,
    FileStore,
    MemoryStore,
    StoreError,
    StoreFormatError,
)
from epic_engine.chunks import content_digest
from epic_engine.storage import faults, segments
from torch import Tensor

from tests.damage import damage, flip, where


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


def test_kv_is_read_from_the_mapped_file(tmp_path: Path) -> None:
    with_file = FileStore(tmp_path)
    info, kv = entry(3)
    with_file.put([(info, kv)])
    loaded = with_file.load(info.key)
    assert with_file.load(info.key) is loaded
    address = loaded.data_ptr()
    assert address % 64 == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.endswith(str(where(tmp_path)[info.key.hex].file))
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
    third = FileStore(tmp_path)
    third.put([entry(7)])
    assert len(list(tmp_path.glob("segments/*.seg"))) == 1  # nobody holds it any more, so it is gone on with


def test_a_flipped_byte_anywhere_is_never_served(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    info, kv = entry(3)
    store.put([(info, kv)])
    lies = where(tmp_path)[info.key.hex]
    store.close()
    size = lies.file.stat().st_size
    rng = random.Random(0)
    assert lies.offset + lies.stored + 63 >= size
    length = int.from_bytes(lies.file.read_bytes()[lies.start + 8 : lies.start + 12], "little")
    checked = range(lies.start, lies.start + 128 + length)  # header and metadata of the record, without padding
    payload = range(lies.offset, lies.offset + lies.stored)
    for at in [*range(64), *rng.sample(checked, 60), *rng.sample(payload, 40), *range(payload[-1] + 1, size)]:
        bit = rng.randrange(8)
        flip(lies.file, at, bit)
        store = FileStore(tmp_path)
        report = store.verify()
        assert report.corrupt == ([info.key.hex] if at in checked or at in payload else [])
        assert (store.verify(quick=True).corrupt == report.corrupt) == (at not in payload)
        if at in payload:
            with pytest.raises(ChunkNotFoundError, match="set aside"):
                store.load(info.key)
            assert store.info(info.key) is None
            assert list(store.entries()) == []
            with pytest.raises(ChunkNotFoundError, match="is not in"):
                store.load(info.key)
            report = store.verify()
            assert report.clean
            assert report.quarantined == [info.key.hex]
            store.put([(info, kv)])
            assert torch.equal(store.load(info.key), kv)
            store.compact(live_share=1.0)
            store.gc()
            assert store.verify().quarantined == []
            lies = where(tmp_path)[info.key.hex]
        else:
            assert torch.equal(store.load(info.key), kv)
            flip(lies.file, at, bit)
        store.close()
        assert lies.file.stat().st_size == size


def test_verify_reports_and_repair_cleans(tmp_path: Path) -> None:
    store = FileStore(tmp_path, segment_bytes=1)  # a segment for every chunk
    entries = [entry(n) for n in range(5)]
    store.put(entries)
    keys = [i.key for i, _ in entries]
    lies = where(tmp_path)
    damage(tmp_path, keys[0].hex)
    lies[keys[1].hex].file.unlink()
    os.truncate(lies[keys[2].hex].file, lies[keys[2].hex].offset + 8)
    flip(lies[keys[4].hex].file, lies[keys[4].hex].start + 20)
    orphans = [tmp_path / "segments" / f"{'f' * 32}.seg", tmp_path / "kv" / "ff" / f"{'f' * 64}.safetensors"]
    for orphan in orphans:
        orphan.parent.mkdir(parents=True, exist_ok=True)
        orphan.write_bytes(b"x" * 65)
    report = store.verify(quick=True)
    assert set(report.corrupt) == {keys[2].hex, keys[4].hex}  # the numbers themselves were not read
    assert report.missing == [keys[1].hex]
    for repair in (False, True):
        report = store.verify(repair=repair)
        assert (report.checked, set(report.corrupt)) == (5, {keys[0].hex, keys[2].hex, keys[4].hex})
        assert report.missing == [keys[1].hex]
        assert report.orphans == sorted(str(orphan.relative_to(tmp_path)) for orphan in orphans)
        assert not report.clean
    report = store.verify()
    assert report.clean
    assert report.checked == 1
    assert len(report.quarantined) == 4
    assert [i.key for i in store.entries()] == [keys[3]]
    assert not any(orphan.exists() for orphan in orphans)
    store.gc()
    assert [path.name for path in tmp_path.glob("segments/*.seg")] == [lies[keys[3].hex].file.name]
    assert store.verify().quarantined == []


def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put([entry(3)])
    store.close()
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version=4")
    db.close()
    for read_only in (False, True):
        with pytest.raises(StoreFormatError, match=r"has format 4, this version reads 3: upgrade"):
            FileStore(tmp_path, read_only=read_only)
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version=3")
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


@pytest.mark.parametrize("options", [{"compression": "zip"}, {"max_bytes": 0}, {"segment_bytes": 0}])
def test_options_that_are_none(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FileStore(tmp_path, **options)  # type: ignore[arg-type]


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
        lambda: store.gc(),
        lambda: store.compact(),
        lambda: store.usage(),
        lambda: store.pin([info.key]),
        lambda: store.lease([info.key], 1.0),
    ):
        with pytest.raises(StoreError, match="was closed"):
            use()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_leaves_nothing_behind(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.put([entry(4)])
    known = where(tmp_path)[entry(4)[0].key.hex].file

    def full(descriptor: int, buffers: list[memoryview]) -> int:
        os.write(descriptor, bytes(buffers[0])[:17])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "writev", full)
        with pytest.raises(StoreError, match=rf"2 chunks could not be written.*{os.strerror(number)}.*try again"):
            store.put([entry(3), entry(4)])
    assert store.info(entry(3)[0].key) is None
    assert torch.equal(store.load(entry(4)[0].key), entry(4)[1])
    assert store.verify().clean
    store.put([entry(3)])
    assert torch.equal(store.load(entry(3)[0].key), entry(3)[1])
    assert where(tmp_path)[entry(3)[0].key.hex].file != known  # a file that failed once is left alone
    assert store.verify().clean


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


def test_maps_of_a_growing_segment_keep_no_handles(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    held = []
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        store.put([entry(number)])
        held.append(store.load(entry(number)[0].key))
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert all(torch.equal(kv, entry(number)[1]) for number, kv in enumerate(held))


@pytest.mark.parametrize("other", ["repair", "delete", "compact", "gc"])
@pytest.mark.parametrize("point", ["segment.locked", "segment.created", "put.appended", "put.synced"])
def test_nobody_takes_away_what_is_about_to_be_entered(other: str, point: str, tmp_path: Path) -> None:
    """While a writer stands between two steps, another process cleans up or deletes the same key."""
    writer, cleaner = FileStore(tmp_path), FileStore(tmp_path)
    info, kv = entry(3)
    cleaner.put([entry(4), (info, kv)])
    passed = []

    def meanwhile(name: str) -> None:
        if name == point and not passed:
            passed.append(name)
            work = {
                "repair": lambda: cleaner.verify(repair=True),
                "delete": lambda: cleaner.delete([info.key]),
                "compact": lambda: cleaner.compact(live_share=1.0),
                "gc": cleaner.gc,
            }
            thread = threading.Thread(target=work[other])
            thread.start()
            thread.join(timeout=20)
            assert not thread.is_alive()

    with faults.install(meanwhile):
        writer.put([(info, kv + 1)])
    assert passed
    for store in (writer, cleaner):
        assert torch.equal(store.load(info.key), kv + 1)
        assert torch.equal(store.load(entry(4)[0].key), entry(4)[1])
        assert store.verify().clean


# -- read-only -------------------------------------------------------------------------------------------------


def _use_read_only(store: FileStore) -> None:
    info, kv = entry(3)
    assert store.read_only
    assert torch.equal(store.load(info.key), kv)
    assert store.known([info.key, entry(5)[0].key]) == {info.key}
    assert len(list(store.entries())) == len(store.forms("one", "f", info.content)) == 1
    assert store.verify().clean
    assert store.usage().chunks == 1
    for change in (
        lambda: store.put([(info, kv)]),
        lambda: store.delete([info.key]),
        lambda: store.lease([info.key], 1.0),
        lambda: store.compact(),
        lambda: store.gc(),
        lambda: store.pin([info.key]),
        lambda: store.set_quota("one", 5),
        lambda: store.verify(repair=True),
    ):
        with pytest.raises(StoreError, match="for reading only"):
            change()
    store.close()


def test_a_store_is_opened_for_reading_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        FileStore(tmp_path, read_only=True)
    writer = FileStore(tmp_path)
    writer.put([entry(3)])
    _use_read_only(FileStore(tmp_path, read_only=True))
    writer.close()
    before = (tmp_path / "catalogue.sqlite").read_bytes()
    _use_read_only(FileStore(tmp_path, read_only=True))
    assert (tmp_path / "catalogue.sqlite").read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become somebody else")
def test_a_store_of_somebody_else_is_opened_for_reading_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        root = Path(name)
        root.chmod(0o755)
        store = FileStore(root / "store")
        store.put([entry(3)])
        store.close()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(65534)
                _use_read_only(FileStore(root / "store"))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_damage_in_a_store_for_reading_only_is_a_miss(tmp_path: Path) -> None:
    writer = FileStore(tmp_path)
    writer.put([entry(3)])
    damage(tmp_path)
    reader = FileStore(tmp_path, read_only=True)
    for _ in range(2):
        with pytest.raises(ChunkNotFoundError, match="set aside"):
            reader.load(entry(3)[0].key)
    assert writer.info(entry(3)[0].key) is not None
