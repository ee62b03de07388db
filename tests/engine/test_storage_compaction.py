"""Compaction: what is in use moves, what is not goes, and nobody who reads notices."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from epic_engine import ChunkNotFoundError, FileStore, StoreError
from epic_engine.storage import compaction, faults
from epic_engine.storage.segments import scan

from tests.damage import damage, where
from tests.engine.test_store import entry

CHUNKS = [entry(n) for n in range(12)]
KEYS = [info.key for info, _ in CHUNKS]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Three segments of four chunks, of which the first two are mostly dead."""
    made = FileStore(tmp_path, segment_bytes=4 * 2368)
    made.put(CHUNKS)
    assert len({lies.file for lies in where(tmp_path).values()}) == 3
    made.delete([*KEYS[:3], *KEYS[4:7]])
    return made


LEFT = [CHUNKS[n] for n in (3, 7, 8, 9, 10, 11)]


def _intact(store: FileStore, chunks: object = None) -> bool:
    return all(torch.equal(store.load(i.key), kv) and store.info(i.key) == i for i, kv in LEFT)


def test_what_is_dead_goes_and_the_rest_moves(store: FileStore, tmp_path: Path) -> None:
    before = where(tmp_path)
    size = sum(f.stat().st_size for f in tmp_path.glob("segments/*.seg"))
    assert store.compact() == size - sum(f.stat().st_size for f in tmp_path.glob("segments/*.seg")) + 64
    after = where(tmp_path)
    moved = {key for key in after if after[key] != before[key]}
    assert moved == {KEYS[3].hex, KEYS[7].hex}
    assert _intact(store)
    assert store.verify().clean
    assert sorted(r.info.key for f in tmp_path.glob("segments/*.seg") for r in scan(f)) == sorted(
        i.key for i, _ in LEFT
    )
    assert store.compact() == 0
    assert (
        not {path.stem for path in tmp_path.glob("segments/*.lock")}
        - {"compaction"}
        - {path.stem for path in tmp_path.glob("segments/*.seg")}
    )


def test_readers_go_on_reading_what_was_removed(store: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path)
    held = [other.load(i.key) for i, _ in LEFT]
    store.compact(live_share=1.0)
    assert all(torch.equal(a, kv) for a, (_, kv) in zip(held, LEFT, strict=True))
    assert _intact(other)
    assert other.verify().clean


def test_a_reader_whose_file_has_just_gone_asks_again(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look-up and the opening of the file, another process rewrites the segment."""
    other = FileStore(tmp_path)
    place, asked = other._catalogue.place, []

    def stale(key: object) -> object:
        found = place(key)  # type: ignore[arg-type]
        if not asked:
            asked.append(key)
            store.compact(live_share=1.0)
        return found

    monkeypatch.setattr(other._catalogue, "place", stale)
    assert torch.equal(other.load(KEYS[3]), CHUNKS[3][1])
    assert _intact(other)
    assert other.verify().quarantined == []


@pytest.mark.parametrize("point", ["compact.appended", "compact.synced", "compact.committed", "compact.retired"])
def test_puts_and_deletes_meanwhile(point: str, store: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path)
    passed = []

    def meanwhile(name: str) -> None:
        if name == point and not passed:
            passed.append(name)
            other.delete([KEYS[7]])
            other.put([(CHUNKS[3][0], CHUNKS[3][1] + 1), entry(20)])

    with faults.install(meanwhile):
        store.compact()
    assert passed
    for reader in (store, other, FileStore(tmp_path)):
        assert torch.equal(reader.load(KEYS[3]), CHUNKS[3][1] + 1)
        assert torch.equal(reader.load(entry(20)[0].key), entry(20)[1])
        assert reader.info(KEYS[7]) is None
        assert all(torch.equal(reader.load(i.key), kv) for i, kv in LEFT[2:])
        assert reader.verify().clean
        assert reader.usage().chunks == 6


def test_the_writers_own_segment_is_left_to_it(store: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path)
    other.put([entry(n) for n in range(30, 34)])
    other.delete([entry(n)[0].key for n in range(30, 33)])
    mine = where(tmp_path)[entry(33)[0].key.hex].file
    store.compact()
    assert mine.exists()
    other.compact()
    assert not mine.exists()
    assert torch.equal(other.load(entry(33)[0].key), entry(33)[1])


def test_a_second_compactor_leaves_it_to_the_first(store: FileStore, tmp_path: Path) -> None:
    other, freed = FileStore(tmp_path), []

    def meanwhile(name: str) -> None:
        if name == "compact.synced":
            freed.append(other.compact())

    with faults.install(meanwhile):
        store.compact()
    assert freed == [0]


def test_a_damaged_chunk_is_set_aside_and_not_copied(store: FileStore, tmp_path: Path) -> None:
    damage(tmp_path, KEYS[3].hex)
    store.compact()
    assert store.verify().quarantined == [KEYS[3].hex]
    with pytest.raises(ChunkNotFoundError):
        store.load(KEYS[3])
    assert all(torch.equal(store.load(i.key), kv) for i, kv in LEFT[1:])


def test_small_transactions(store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_BATCH_CHUNKS", 1)
    commits = []
    with faults.install(lambda name: commits.append(name) if name == "compact.committed" else None):
        store.compact(live_share=1.0)
    assert len(commits) == 2
    assert _intact(store)
    assert store.verify().clean


def test_a_full_disk_loses_nothing(store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epic_engine.storage import segments

    def full(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "writev", full)
        with pytest.raises(StoreError, match=r"could not be rewritten.*No space left.*No chunk is lost"):
            store.compact()
    assert _intact(store)
    assert store.verify().clean
    assert store.compact() > 0
    assert _intact(store)


def test_closing_ends_a_pass_between_two_batches(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_BATCH_CHUNKS", 1)
    closing = threading.Thread(target=store.close)

    def meanwhile(name: str) -> None:
        if name == "compact.committed" and not closing.is_alive():
            closing.start()
            store._stop.wait(10)

    with faults.install(meanwhile):
        store._compact(1.0, raw=False, gently=True)
    closing.join(10)
    assert not closing.is_alive()
    again = FileStore(tmp_path)
    assert _intact(again)
    assert again.verify().clean


def test_a_process_that_only_reads_lets_go_of_what_was_removed(store: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path)
    assert _intact(other)
    gone = where(tmp_path)[KEYS[3].hex].file
    store.compact()

    def mapped() -> bool:
        return any(str(gone) in line for line in Path("/proc/self/maps").read_text().splitlines())

    assert not gone.exists()
    assert mapped()
    other._tidy()
    store._tidy()
    assert not mapped()
    assert _intact(other)


def test_copies_of_a_compaction_that_failed_are_not_left(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "compact.synced":
            raise OSError(28, "No space left on device")

    store = FileStore(tmp_path, segment_bytes=4 * 2368)
    store.put(CHUNKS[:10])  # the third segment has room for two, where copies go
    store.close()
    store = FileStore(tmp_path, segment_bytes=4 * 2368)
    store.delete(KEYS[:3])
    with faults.install(fail), pytest.raises(StoreError):
        store.compact()
    store.delete([KEYS[3]])
    store.compact(live_share=1.0)
    kept = [record.info.key for file in tmp_path.glob("segments/*.seg") for record in scan(file)]
    assert sorted(kept) == sorted(KEYS[4:10])
    assert store.verify().clean
