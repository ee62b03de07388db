"""The same through a real S3 server: moto's, in a process's thread, spoken to over HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkNotFoundError, FileStore, StoreError
from epic_engine.storage.publish import publish
from epic_engine.storage.remote import RemoteStore

from tests.engine.test_storage_publish import same, some

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

import s3fs  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    found = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def options(server: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Storage options, with an empty bucket ``corpora`` behind them."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    host, port = server.get_host_and_port()
    found = {
        "key": "k",
        "secret": "s",
        "endpoint_url": f"http://{host}:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    fs = s3fs.S3FileSystem(**found)
    if fs.exists("corpora"):
        fs.rm("corpora", recursive=True)
    fs.mkdir("corpora")
    return found


def test_one_machine_compiles_and_another_links(options: dict[str, Any], tmp_path: Path) -> None:
    url = "s3://corpora/manuals"
    source = FileStore(tmp_path / "source")
    chunks = some(*range(8))
    source.put(chunks[:5])
    assert publish(source, url, storage_options=options).chunks == 5
    store = RemoteStore(url, FileStore(tmp_path / "reader"), storage_options=options, refresh_seconds=1e9)
    store.prefetch([info.key for info, _ in chunks[:5]])
    assert same({info.key: store.load(info.key) for info in store.entries()}, chunks[:5])
    assert store.status.fetched == 5
    fs = s3fs.S3FileSystem(**options)
    fs.invalidate_cache()
    before = {path: fs.size(path) for path in fs.find("corpora")}
    source.put(chunks[5:])
    source.delete([chunks[0][0].key])
    report = publish(source, url, storage_options=options)
    assert (report.chunks, report.removed, report.generation) == (3, 1, 2)
    fs.invalidate_cache()
    after = {path: fs.size(path) for path in fs.find("corpora")}
    assert sum(size for path, size in after.items() if path not in before and path.endswith(".seg")) == report.nbytes
    assert set(before) <= set(after)
    assert store.refresh()
    assert same({info.key: store.load(info.key).clone() for info in store.entries()}, chunks[1:])
    store.close()
    source.close()


def test_damaged_and_missing_objects_are_misses(options: dict[str, Any], tmp_path: Path) -> None:
    url = "s3://corpora/manuals"
    source = FileStore(tmp_path / "source")
    chunks = some(*range(6))
    source.put(chunks)
    publish(source, url, storage_options=options)
    source.close()
    fs = s3fs.S3FileSystem(**options)
    (path,) = fs.glob("corpora/manuals/segments/*.seg")
    whole = fs.cat_file(path)
    rng = random.Random(3)
    damaged = bytearray(whole)
    damaged[rng.randrange(len(whole))] ^= 4
    misses = []
    for number, data in enumerate((bytes(damaged), whole[: len(whole) // 2], None)):
        fs.rm(path) if data is None else fs.pipe_file(path, data)
        store = RemoteStore(url, FileStore(tmp_path / f"reader-{number}"), storage_options=options)
        misses.append(0)
        for info, kv in chunks:
            try:
                assert torch.equal(store.load(info.key), kv)
            except ChunkNotFoundError:
                misses[-1] += 1
                assert store.info(info.key) is None
        assert store.status.reachable
        store.close()
    assert misses[0] <= 1
    assert 3 <= misses[1] <= 4
    assert misses[2] == 6


def test_a_server_or_bucket_that_is_not_there_is_a_miss(options: dict[str, Any], tmp_path: Path) -> None:
    source = FileStore(tmp_path / "source")
    source.put(some(1))
    gone = options | {"endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(StoreError, match="could not be published"):
        publish(source, "s3://corpora/manuals", storage_options=gone)
    source.close()
    for number, (url, changed) in enumerate((("s3://corpora/manuals", gone), ("s3://nowhere/manuals", options))):
        begin = time.monotonic()
        store = RemoteStore(url, FileStore(tmp_path / f"reader-{number}"), storage_options=changed, timeout=20.0)
        assert time.monotonic() - begin < 15.0
        assert store.info(some(1)[0][0].key) is None
        store.put(some(2))
        assert torch.equal(store.load(some(2)[0][0].key), some(2)[0][1])
        store.close()
