"""A store in front of a published one: what is read, and that nothing wrong is, whatever becomes of the other side."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epic_engine import (
    ChunkInfo,
    ChunkKey,
    ChunkNotFoundError,
    ConfigError,
    Engine,
    FileStore,
    MemoryStore,
    SamplingParams,
)
from epic_engine.storage import remote_reader
from epic_engine.storage.publish import publish
from epic_engine.storage.remote import RemoteStore
from torch import Tensor

from tests.engine.faulty_files import FaultyFileSystem
from tests.engine.models import tiny
from tests.engine.test_storage_publish import URL, segments, some
from tests.engine.test_store import entry

Opener = Callable[..., RemoteStore]


@pytest.fixture(autouse=True)
def _empty() -> None:
    FaultyFileSystem.reset()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "source")
    yield store
    store.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Opener]:
    """Opens remote stores that are closed when the test ends; each name is a machine."""
    made: list[RemoteStore] = []

    def open_one(name: str = "reader", **options: float) -> RemoteStore:
        options = {"refresh_seconds": 1e9, "timeout": 5.0, **options}
        made.append(RemoteStore(URL, FileStore(tmp_path / name), **options))
        return made[-1]

    yield open_one
    for store in made:
        store.close()


def reads(ending: str) -> int:
    return sum(name.endswith(ending) for name in FaultyFileSystem.reads)


def missing(store: RemoteStore, info: ChunkInfo) -> bool:
    """Whether a chunk is a miss in every respect."""
    with pytest.raises(ChunkNotFoundError):
        store.load(info.key)
    assert store.info(info.key) is None
    assert store.known([info.key]) == set()
    assert info.key not in {form.key for form in store.forms(info.namespace, info.fingerprint, info.content)}
    assert info.key not in {form.key for form in store.entries()}
    return True


def test_look_ups_are_those_of_one_store(source: FileStore, reader: Opener) -> None:
    """Against a store that holds the chunks of both sides."""
    there = [*some(1, 2, 3, 4), entry(3, context="head", created=9.0), entry(5, namespace="two", created=0.5)]
    here = [*some(2), entry(3, context="sink:4", created=1.5), *some(8)]
    source.put(there)
    publish(source, URL)
    store = reader()
    store.put(here)
    both = MemoryStore()
    both.put(there + here)
    assert list(store.entries()) == list(both.entries())
    for info, _ in there + here:
        assert store.info(info.key) == both.info(info.key)
        assert store.forms(info.namespace, "f", info.content) == both.forms(info.namespace, "f", info.content)
        assert torch.equal(store.load(info.key), both.load(info.key))
    keys = [info.key for info, _ in there + here] + [ChunkKey("0" * 64)]
    assert store.known(keys) == both.known(keys)
    assert {info.key for info in store.cache.entries()} == {i.key for i, _ in there} - {i.key for i, _ in here}
    assert store.usage().chunks == len({*keys}) - 1
    assert store.verify().clean
    assert store.verify().checked == len({*keys}) - 1


def test_a_chunk_is_fetched_once_and_then_mapped(source: FileStore, reader: Opener) -> None:
    (info, kv) = some(1)[0]
    source.put([(info, kv), *some(2)])
    publish(source, URL)
    store = reader()
    assert reads(".seg") == 0
    for _ in range(3):
        assert torch.equal(store.load(info.key), kv)
    assert reads(".seg") == 1
    assert (store.status.fetched, store.status.nbytes) == (1, kv.nbytes)
    store.close()
    FaultyFileSystem.down = True
    assert torch.equal(reader().load(info.key), kv)


def test_fetched_chunks_stay_within_their_limit(source: FileStore, reader: Opener) -> None:
    chunks = some(*range(10))
    source.put(chunks)
    publish(source, URL)
    store = reader(cache_bytes=3 * 2400)
    for info, kv in chunks:
        assert torch.equal(store.load(info.key), kv)
    assert 0 < store.cache.usage().nbytes <= 3 * 2400
    tight = reader("tight", cache_bytes=100)  # not even one
    assert torch.equal(tight.load(chunks[0][0].key), chunks[0][1])
    assert tight.cache.usage().nbytes == 0


def test_what_is_published_later_is_found(source: FileStore, reader: Opener) -> None:
    old, new = some(1, 2), some(3)
    source.put(old)
    publish(source, URL)
    store = reader()
    for info, _ in old:
        store.load(info.key)
    source.delete([old[0][0].key])
    source.put(new)
    publish(source, URL)
    assert missing(store, new[0][0])
    assert store.refresh()
    assert not store.refresh()
    assert missing(store, old[0][0])
    assert {info.key for info in store.cache.entries()} == {old[1][0].key}
    assert torch.equal(store.load(new[0][0].key), new[0][1])


def test_a_thread_looks_for_newer_generations(source: FileStore, reader: Opener) -> None:
    source.put(some(1))
    publish(source, URL)
    store = reader(refresh_seconds=0.05)
    source.put(some(2))
    publish(source, URL)
    key = some(2)[0][0].key
    end = time.monotonic() + 10
    while store.info(key) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert store.info(key) is not None


def test_two_processes_share_what_they_fetched(source: FileStore, reader: Opener) -> None:
    source.put(some(1))
    publish(source, URL)
    first, second = reader(), reader()
    assert reads(".zst") == 1
    source.put(some(2))
    publish(source, URL)
    FaultyFileSystem.reads.clear()
    assert first.refresh()
    assert second.refresh()
    assert reads(".zst") == 1
    kv = first.load(some(2)[0][0].key)
    assert torch.equal(second.load(some(2)[0][0].key), kv)
    assert reads(".seg") == 1


# -- deleted here ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "erase", "erase_namespace"])
def test_what_was_deleted_does_not_come_back(source: FileStore, reader: Opener, how: str) -> None:
    (victim, kv), other = entry(1, namespace="a", created=1.0), entry(2, namespace="b", created=2.0)
    behind = replace(entry(3, namespace="a", created=3.0)[0], depends=(victim.content,)), entry(3)[1]
    source.put([(victim, kv), behind, other])
    publish(source, URL)
    store = reader()
    store.load(victim.key)
    gone = {
        "delete": lambda: store.delete([victim.key, ChunkKey("1" * 64)]),
        "erase": lambda: store.erase("a", [victim.content]),
        "erase_namespace": lambda: store.erase_namespace("a"),
    }[how]()
    assert gone == (1 if how == "delete" else 2)

    def check(found: RemoteStore) -> None:
        assert missing(found, victim)
        assert (how == "delete") == (found.info(behind[0].key) is not None)
        assert torch.equal(found.load(other[0].key), other[1])

    check(store)
    assert victim.key not in {info.key for info in store.cache.entries()}
    source.put([(replace(victim, created=5.0), kv), *some(9)])
    publish(source, URL)
    assert store.refresh()
    check(store)
    store.close()
    check(reader())


def test_what_is_stored_again_is_there_again(source: FileStore, reader: Opener) -> None:
    chunk, other = some(1)[0], some(2)[0]
    source.put([chunk, other])
    publish(source, URL)
    store = reader()
    assert store.erase("one", [chunk[0].content]) == 1
    assert store.delete([other[0].key]) == 1
    store.put([chunk])
    assert store.delete([ChunkKey("1" * 64)]) == 0
    assert torch.equal(store.load(chunk[0].key), chunk[1])
    assert missing(store, other[0])
    assert store.local.delete([chunk[0].key]) == 1  # evicted, say: it is published, and hidden no more
    assert torch.equal(store.load(chunk[0].key), chunk[1])


# -- the other side fails --------------------------------------------------------------------------------------


def test_damaged_objects_are_misses_and_never_wrong(source: FileStore, reader: Opener) -> None:
    rng = random.Random(5)
    chunks = dict(some(*range(4)))
    source.put(list(chunks.items()))
    publish(source, URL)
    ((name, whole),) = segments().items()
    right = 0
    for case in range(24):
        data = bytearray(whole)
        if case % 4:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        FaultyFileSystem.replace(name, bytes(data))
        store = reader(f"case-{case % 3}")
        store.cache.delete([info.key for info in chunks])
        for info, kv in chunks.items():
            try:
                assert torch.equal(store.load(info.key), kv)
                right += 1
            except ChunkNotFoundError:
                assert missing(store, info)
                assert store.status.unusable >= 1
                store.put([(info, kv)])  # compiled again
                assert torch.equal(store.load(info.key), kv)
                store.local.delete([info.key])
        store.close()
    assert 24 < right < 96


def test_a_missing_object_is_a_miss_until_something_newer_is_published(source: FileStore, reader: Opener) -> None:
    chunk = some(1)[0]
    source.put([chunk])
    publish(source, URL)
    ((name, whole),) = segments().items()
    del FaultyFileSystem.store[name]
    store = reader()
    assert missing(store, chunk[0])
    FaultyFileSystem.replace(name, whole)
    assert missing(store, chunk[0])
    source.put(some(2))
    publish(source, URL)
    assert store.refresh()
    assert torch.equal(store.load(chunk[0].key), chunk[1])


def test_a_broken_line_is_a_miss_told_once_and_left_alone(
    source: FileStore, reader: Opener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_reader, "_FIRST_PAUSE", 0.2)
    chunks = some(*range(6))
    source.put(chunks)
    publish(source, URL)
    store = reader(refresh_seconds=0.0)
    store.load(chunks[0][0].key)
    FaultyFileSystem.down = True
    with pytest.raises(ChunkNotFoundError):
        store.load(chunks[1][0].key)
    asked = len(FaultyFileSystem.reads)
    for info, _ in chunks[1:]:
        assert missing(store, info)
    assert torch.equal(store.load(chunks[0][0].key), chunks[0][1])
    assert len(FaultyFileSystem.reads) == asked
    assert sum("does not answer" in record.message for record in caplog.records) == 1
    assert not store.status.reachable
    FaultyFileSystem.down = False
    end = time.monotonic() + 10
    while store.info(chunks[2][0].key) is None and time.monotonic() < end:  # a thread tries again
        time.sleep(0.02)
    assert torch.equal(store.load(chunks[2][0].key), chunks[2][1])


def test_an_answer_is_not_awaited_for_longer_than_said(source: FileStore, reader: Opener) -> None:
    chunks = some(1, 2)
    source.put(chunks)
    publish(source, URL)
    store = reader(timeout=0.2)
    FaultyFileSystem.slow = 6.0
    begin = time.monotonic()
    with pytest.raises(ChunkNotFoundError, match="within"):
        store.load(chunks[0][0].key)
    assert missing(store, chunks[1][0])
    assert not store.refresh()
    assert time.monotonic() - begin < 4.0


def test_it_opens_without_the_network(source: FileStore, reader: Opener) -> None:
    chunks = some(1, 2)
    source.put(chunks)
    publish(source, URL)
    reader().load(chunks[0][0].key)
    FaultyFileSystem.down = True
    store = reader()
    assert torch.equal(store.load(chunks[0][0].key), chunks[0][1])
    assert missing(store, chunks[1][0])
    assert store.status.generation == 1
    new = reader("new")
    assert list(new.entries()) == []
    new.put(some(3))
    assert torch.equal(new.load(some(3)[0][0].key), some(3)[0][1])


def test_nothing_published_yet_is_told_and_found_later(
    source: FileStore, reader: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    store = reader()
    store.refresh()
    assert sum("nothing is published" in record.message for record in caplog.records) == 1
    source.put(some(1))
    publish(source, URL)
    assert store.refresh()
    assert store.info(some(1)[0][0].key) is not None


def test_a_catalogue_that_was_damaged_here_is_fetched_again(source: FileStore, reader: Opener, tmp_path: Path) -> None:
    chunks = some(*range(30))
    source.put(chunks)
    publish(source, URL)
    reader().close()
    (file,) = tmp_path.glob("reader/remote/*/generations/*/catalogue.sqlite")
    data = bytearray(file.read_bytes())
    for at in range(4096, len(data), 512):
        data[at : at + 400] = b"\xff" * 400
    file.write_bytes(data)
    store = reader()
    for _ in range(100):
        found = [info for info, _ in chunks if store.info(info.key) == info]
        if len(found) == len(chunks):
            break
        time.sleep(0.02)
    assert len(found) == len(chunks)
    assert all(torch.equal(store.load(info.key), kv) for info, kv in chunks)


def test_options_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    local = FileStore(tmp_path / "local")
    with pytest.raises(ConfigError, match="timeout"):
        RemoteStore(URL, local, timeout=0)
    with pytest.raises(ConfigError, match="fsspec knows"):
        RemoteStore("nowhere://bucket", local)
    local.close()


# -- many at once ----------------------------------------------------------------------------------------------


def test_threads_that_want_one_chunk_fetch_it_once(source: FileStore, reader: Opener) -> None:
    (info, kv) = some(1)[0]
    source.put([(info, kv)])
    publish(source, URL)
    store = reader()
    FaultyFileSystem.slow = 0.2
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(store.load(info.key))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(torch.equal(one, kv) for one in found)
    assert reads(".seg") == 1


def test_chunks_are_fetched_side_by_side(source: FileStore, reader: Opener) -> None:
    chunks = some(*range(8))
    source.put(chunks)
    publish(source, URL)
    store = reader()
    FaultyFileSystem.slow = 0.5
    store.prefetch([info.key for info, _ in chunks])
    assert all(torch.equal(store.load(info.key), kv) for info, kv in chunks)
    assert FaultyFileSystem.most_at_once > 4
    assert reads(".seg") == 8


# -- the engine ------------------------------------------------------------------------------------------------


def test_an_engine_answers_as_the_one_that_compiled(tmp_path: Path) -> None:
    model = tiny("llama")
    texts = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36]]
    sampling = SamplingParams(max_tokens=6)
    source = FileStore(tmp_path / "source")
    with Engine(model, store=source, selftest=False) as engine:
        keys = engine.compile_many(texts)
        wanted = engine.generate([[5, 6], *keys, [7, 8]], sampling)
    publish(source, URL)
    source.close()
    store = RemoteStore(URL, FileStore(tmp_path / "reader"))
    puts = []
    original, store.put = store.put, lambda chunks: puts.append(len(chunks)) or original(chunks)  # type: ignore[method-assign]
    with Engine(model, store=store, selftest=False) as engine:
        assert engine.compile_many(texts) == keys
        assert engine.find(texts[1]) == keys[1]
        assert engine.generate([[5, 6], *keys, [7, 8]], sampling).token_ids == wanted.token_ids
        assert puts == []
        assert store.status.fetched == 3
        engine.forget(keys[:1])
        with pytest.raises(ChunkNotFoundError):
            engine.generate([[5, 6], *keys, [7, 8]], sampling)
        assert engine.compile(texts[0]) == keys[0]
        assert puts == [1]
        assert engine.generate([[5, 6], *keys, [7, 8]], sampling).token_ids == wanted.token_ids
    store.close()


def test_an_engine_compiles_what_cannot_be_fetched(tmp_path: Path) -> None:
    model = tiny("llama")
    texts = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25]]
    source = FileStore(tmp_path / "source")
    with Engine(model, store=source, selftest=False) as engine:
        keys = engine.compile_many(texts)
        wanted = engine.generate([*keys, [7, 8]], SamplingParams(max_tokens=6))
    publish(source, URL)
    source.close()
    store = RemoteStore(URL, FileStore(tmp_path / "reader"))
    FaultyFileSystem.down = True
    with Engine(model, store=store, selftest=False) as engine:
        with pytest.raises(ChunkNotFoundError):
            engine.generate([*keys, [7, 8]], SamplingParams(max_tokens=6))
        assert engine.compile_many(texts) == keys
        found = engine.generate([*keys, [7, 8]], SamplingParams(max_tokens=6))
    assert found.token_ids == wanted.token_ids
    assert store.local.usage().chunks == 2
    store.close()
