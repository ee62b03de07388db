"""Exports: read by the safetensors library alone, and brought into other stores bit for bit."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from epic_engine import (
    ChunkInfo,
    ChunkKey,
    ChunkNotFoundError,
    ChunkStore,
    CompileContext,
    ConfigError,
    Engine,
    FileStore,
    ImportReport,
    MemoryStore,
    StoreError,
    export_chunks,
    import_chunks,
)
from epic_engine.chunks import content_digest
from epic_engine.storage import exporting, faults, importing
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.damage import damage, where
from tests.engine.fault_hooks import at, throw

from .format_1 import write_format_1
from .models import tiny

HEAD = CompileContext("head", (1, 2, 3))
ENCODINGS = ("raw", "bf16", "int8", "fp8")
LARGEST = {"int8": 127, "fp8": 448}


def chunk(
    number: int,
    *,
    encoding: str = "raw",
    namespace: str = "one",
    context: CompileContext = HEAD,
    dtype: torch.dtype = torch.float32,
    dim: int = 8,
    **other: Any,
) -> tuple[ChunkInfo, Tensor]:
    """A chunk of five tokens, with a key as the engine makes it."""
    ids = tuple(range(number, number + 5))
    kv = torch.randn(2, 2, 3, 5, dim, generator=torch.Generator().manual_seed(number)).to(dtype)
    key = ChunkKey.of("f", namespace, context.identity, ids)
    info = ChunkInfo(
        key, namespace, "f", content_digest(ids), context.name, ids, context.token_ids, kv.nbytes, float(number),
        encoding=encoding, **other,
    )  # fmt: skip
    return info, kv


MIXED = [
    chunk(1),
    chunk(2, encoding="int8", cost=0.25),
    chunk(3, dtype=torch.bfloat16, context=CompileContext("isolated"), expires=5e9),
    chunk(4, encoding="fp8", namespace="two", dim=3),
    chunk(5, encoding="bf16", dtype=torch.float64),
    chunk(6, dtype=torch.float64),
    chunk(7, dtype=torch.float16, context=CompileContext("sink:2", (9, 9))),
]


@pytest.fixture(params=["memory", "file", "zstd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    made: ChunkStore = (
        MemoryStore()
        if request.param == "memory"
        else FileStore(tmp_path / "store", compression="zstd" if request.param == "zstd" else None)
    )
    yield made
    made.close()


def filled(*chunks: tuple[ChunkInfo, Tensor]) -> MemoryStore:
    made = MemoryStore()
    made.put(chunks)
    return made


def header_of(file: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """Tensors and metadata of a safetensors file, and where its data begin."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    return header, header.pop("__metadata__"), 8 + length


def plain_info(info: ChunkInfo) -> ChunkInfo:
    return replace(info, encoding=info.encoding.removesuffix("+zstd"))


# -- what an export is -----------------------------------------------------------------------------------------


def dequantised(scales: Tensor, numbers: Tensor, largest: int) -> Tensor:
    """KV in float64 from what a file holds; keys are turned back by the matrix of the signs (-1)^(bits in common)."""
    kv = scales.double()[..., None] * numbers.double()
    dim = kv.shape[-1]
    size = dim & -dim
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        for j in range(i // size * size, i // size * size + size):
            matrix[i, j] = (-1) ** (i % size & j % size).bit_count() / size**0.5
    assert numbers.double().abs().max() <= largest
    kv[:, 0] = kv[:, 0] @ matrix
    return kv


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_library_alone_reads_an_export(encoding: str, store: ChunkStore, tmp_path: Path) -> None:
    chunks = [chunk(n, encoding=encoding, dim=dim) for n, dim in ((1, 8), (2, 12), (3, 64))]
    store.put(chunks)
    report = export_chunks(store, tmp_path / "out")
    assert (report.chunks, report.files, report.missing) == (3, ["chunks-00001.safetensors"], [])
    tensors = load_file(tmp_path / "out" / report.files[0])
    names = {"raw": ["kv"], "bf16": ["kv"]}.get(encoding, ["numbers", "scales"])
    assert sorted(tensors) == sorted(f"{info.key}.{name}" for info, _ in chunks for name in names)
    for info, kv in chunks:
        if encoding == "raw":
            assert torch.equal(tensors[f"{info.key}.kv"], kv)
        elif encoding == "bf16":
            found = tensors[f"{info.key}.kv"]
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, kv.bfloat16())
        else:
            scales, numbers = tensors[f"{info.key}.scales"], tensors[f"{info.key}.numbers"]
            assert (scales.dtype, numbers.dtype) == (
                torch.bfloat16,
                {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[encoding],
            )
            exact = dequantised(scales, numbers, LARGEST[encoding])
            assert (store.load(info.key).double() - exact).abs().max() < 1e-5
            assert (kv.double() - exact).abs().max() < {"int8": 0.05, "fp8": 0.2}[encoding]


def test_what_the_metadata_say(tmp_path: Path) -> None:
    store = filled(*MIXED)
    report = export_chunks(store, tmp_path / "out")
    file = tmp_path / "out" / report.files[0]
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert (metadata.pop("format"), metadata.pop("version")) == ("epic-rag chunks", "1")
    tensors, _, begin = header_of(file)
    assert begin % 8 == 0
    raw = file.read_bytes()
    for info, kv in MIXED:
        text = metadata.pop(info.key.hex)
        assert metadata.pop(f"{info.key}.xxh3_128") == xxhash.xxh3_128_hexdigest(text.encode())
        meta = json.loads(text)
        want = {name: value for name, value in asdict(info).items() if name != "key"}
        assert meta.pop("chunk") == json.loads(json.dumps(want))
        assert meta.pop("shape") == list(kv.shape)
        assert meta.pop("dtype") == str(kv.dtype).removeprefix("torch.")
        assert meta.pop("head") is None
        sums = meta.pop("checksums")
        assert not meta
        for name, checksum in sums.items():
            start, end = tensors[f"{info.key}.{name}"]["data_offsets"]
            assert xxhash.xxh3_128_hexdigest(raw[begin + start : begin + end]) == checksum
            width = {"F64": 8, "F32": 4, "I8": 1, "F8_E4M3": 1}.get(tensors[f"{info.key}.{name}"]["dtype"], 2)
            assert start % width == 0
    assert not metadata
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index == {
        "format": "epic-rag chunks",
        "version": 1,
        "chunks": len(MIXED),
        "files": [
            {
                "name": file.name,
                "chunks": len(MIXED),
                "bytes": len(raw),
                "xxh3_128": xxhash.xxh3_128_hexdigest(raw),
            }
        ],
    }
    assert report.nbytes == len(raw)
    assert sorted(os.listdir(tmp_path / "out")) == ["chunks-00001.safetensors", "index.json"]


def test_several_files(tmp_path: Path) -> None:
    chunks = [chunk(n) for n in range(10)]
    seen: list[tuple[int, int]] = []
    size = chunks[0][1].nbytes
    report = export_chunks(
        filled(*chunks), tmp_path / "out", file_bytes=3 * size, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(n, 10) for n in range(1, 11)]
    files = [tmp_path / "out" / name for name in report.files]
    assert [len(load_file(file)) for file in files] == [3, 3, 3, 1]
    assert report.nbytes == sum(file.stat().st_size for file in files)
    seen.clear()
    other = MemoryStore()
    assert import_chunks(other, tmp_path / "out", progress=lambda *at: seen.append(at)) == ImportReport(chunks=10)
    assert seen == [(n, 10) for n in range(1, 11)]
    alone = MemoryStore()
    assert import_chunks(alone, files[1]) == ImportReport(chunks=3)
    assert {info.key for info in alone.entries()} == {info.key for info, _ in chunks[3:6]}
    report = export_chunks(filled(*chunks), tmp_path / "tiny", file_bytes=1)
    assert len(report.files) == 10
    with pytest.raises(ConfigError, match="file_bytes=0"):
        export_chunks(other, tmp_path / "none", file_bytes=0)


def test_headers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_HEADER_BYTES", 10_000)
    report = export_chunks(filled(*(chunk(n) for n in range(40))), tmp_path / "out")
    assert len(report.files) > 3
    assert all(header_of(tmp_path / "out" / name)[2] <= 10_000 for name in report.files)
    assert import_chunks(MemoryStore(), tmp_path / "out").chunks == 40


def test_an_empty_store(tmp_path: Path) -> None:
    assert export_chunks(MemoryStore(), tmp_path / "out").files == []
    assert import_chunks(MemoryStore(), tmp_path / "out") == ImportReport()


# -- round trips -----------------------------------------------------------------------------------------------


def payloads(path: Path) -> dict[str, bytes]:
    """The stored bytes of every chunk of a store, read without its code."""
    return {key: lies.file.read_bytes()[lies.offset : lies.offset + lies.stored] for key, lies in where(path).items()}


def test_stored_bytes_come_back_bit_for_bit(store: ChunkStore, tmp_path: Path) -> None:
    """Through two exports and a compressing store; the last store has what a store gets that is given the KV itself."""
    first = FileStore(tmp_path / "first")
    first.put(MIXED)
    want, loaded = payloads(tmp_path / "first"), {info.key: first.load(info.key).clone() for info, _ in MIXED}
    export_chunks(first, tmp_path / "a")
    assert import_chunks(store, tmp_path / "a") == ImportReport(chunks=len(MIXED))
    export_chunks(store, tmp_path / "b")
    last = FileStore(tmp_path / "last")
    assert import_chunks(last, tmp_path / "b") == ImportReport(chunks=len(MIXED))
    assert payloads(tmp_path / "last") == want
    for info, _ in MIXED:
        for each in (store, last):
            found = each.load(info.key)
            assert found.dtype == loaded[info.key].dtype
            assert torch.equal(found, loaded[info.key])
            assert plain_info(each.info(info.key) or info) == info
    if isinstance(store, FileStore):
        zstd = "zstd" in str(store.info(MIXED[0][0].key))
        magic = {payload[:4] for payload in payloads(store.path).values()}
        assert (magic == {struct.pack("<I", 0xFD2FB528)}) == zstd
    for made in (first, last):
        assert made.verify().clean
        made.close()


def test_what_the_store_has_stays(tmp_path: Path) -> None:
    export_chunks(filled(*MIXED), tmp_path / "out")
    store = FileStore(tmp_path / "store")
    other = replace(MIXED[0][0], created=99.0, cost=3.0)
    store.put([(other, MIXED[0][1] + 1)])
    assert import_chunks(store, tmp_path / "out") == ImportReport(chunks=len(MIXED) - 1, known=1)
    assert store.info(other.key) == other
    assert torch.equal(store.load(other.key), MIXED[0][1] + 1)
    before = {file: file.stat().st_size for file in tmp_path.glob("store/segments/*.seg")}
    assert import_chunks(store, tmp_path / "out") == ImportReport(known=len(MIXED))
    assert before == {file: file.stat().st_size for file in tmp_path.glob("store/segments/*.seg")}


def test_pins_stay_behind(tmp_path: Path) -> None:
    first, last = FileStore(tmp_path / "first"), FileStore(tmp_path / "last")
    first.put(MIXED)
    assert first.pin([info.key for info, _ in MIXED]) == len(MIXED)
    export_chunks(first, tmp_path / "out")
    import_chunks(last, tmp_path / "out")
    last.set_quota("one", 1 << 20)
    spans = [nbytes for (name, _), (_, nbytes) in last.usage().models.items() if name == "one"]
    last.set_quota("one", sum(spans))
    last.put([chunk(40)])  # evicts, which a pinned chunk would forbid
    assert last.usage().chunks <= len(MIXED)


def test_only_what_is_asked_for(store: ChunkStore, tmp_path: Path) -> None:
    store.put(MIXED)
    keys = {name: {info.key for info, _ in MIXED if info.namespace == name} for name in ("one", "two")}
    absent = chunk(50)[0].key
    (two,) = keys["two"]
    report = export_chunks(store, tmp_path / "two", namespace="two")
    assert (report.chunks, report.missing) == (1, [])
    some = [MIXED[0][0].key, absent, two, MIXED[0][0].key]
    report = export_chunks(store, tmp_path / "some", keys=some)
    assert (report.chunks, report.missing) == (2, [absent.hex])
    report = export_chunks(store, tmp_path / "mine", keys=some, namespace="one")
    assert (report.chunks, report.missing) == (1, [absent.hex, two.hex])
    export_chunks(store, tmp_path / "all")
    for name in ("one", "two"):
        taken = MemoryStore()
        report = import_chunks(taken, tmp_path / "all", namespace=name)
        assert {info.key for info in taken.entries()} == keys[name]
        assert report == ImportReport(chunks=len(keys[name]), skipped=len(MIXED) - len(keys[name]))
    assert import_chunks(MemoryStore(), tmp_path / "two") == ImportReport(chunks=1)


def test_expired_chunks(store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(MIXED)
    export_chunks(store, tmp_path / "before")
    monkeypatch.setattr(time, "time", lambda: 5e9)
    report = export_chunks(store, tmp_path / "after")
    assert (report.chunks, report.missing) == (len(MIXED) - 1, [])
    report = export_chunks(store, tmp_path / "asked", keys=[MIXED[2][0].key])
    assert (report.chunks, report.missing) == (0, [MIXED[2][0].key.hex])
    taken = MemoryStore()
    assert import_chunks(taken, tmp_path / "before") == ImportReport(chunks=len(MIXED) - 1, skipped=1)
    assert taken.info(MIXED[2][0].key) is None


def test_chunks_of_an_engine_with_their_neighbours(tmp_path: Path) -> None:
    """What one engine has compiled is exact in another; with neighbours, keys are made of other chunks' keys."""
    a, b, c = ([seed + n for n in range(9)] for seed in (10, 40, 70))
    head = [5, 6, 7]
    first, second = FileStore(tmp_path / "first"), FileStore(tmp_path / "second")
    with Engine(tiny("llama"), store=first, selftest=False) as engine:
        keys = engine.compile_neighbours([a, b, c], [[b], [c, a], []], head=head)
        keys += [engine.compile(a), engine.compile(b, "sink:2")]
        keys += engine.compile_neighbours([a], [[c, c]], head=[])
        want = engine.score([head, *keys, [3, 4]], [7, 8], policy="naive")
    count = len(list(first.entries()))
    assert len({info.context for info in first.entries()}) == 5
    assert export_chunks(first, tmp_path / "out").chunks == count
    assert import_chunks(second, tmp_path / "out") == ImportReport(chunks=count)
    assert sorted(map(str, second.entries())) == sorted(map(str, first.entries()))
    with Engine(tiny("llama"), store=second, selftest=False) as engine:
        assert all(engine.has(key) for key in keys)
        assert torch.equal(engine.score([head, *keys, [3, 4]], [7, 8], policy="naive"), want)
        assert engine.erase([c]) == 4  # two forms of c, and what was compiled behind it


@pytest.mark.parametrize(("count", "provable"), [(1, True), (2, False)])
def test_a_chunk_whose_other_forms_are_gone(count: int, provable: bool, tmp_path: Path) -> None:
    a, b, c = ([seed + n for n in range(9)] for seed in (10, 40, 70))
    store = MemoryStore()
    with Engine(tiny("llama"), store=store, selftest=False) as engine:
        (key,) = engine.compile_neighbours([a], [[b, c][:count]], head=[5, 6, 7])
        store.delete([info.key for info in store.entries() if info.key != key])
    export_chunks(store, tmp_path / "out")
    report = import_chunks(MemoryStore(), tmp_path / "out")
    if provable:
        assert report == ImportReport(chunks=1)
    else:
        assert report.chunks == 0
        ((name, reason),) = report.problems
        assert (name, reason[:25]) == (key.hex, "its key cannot be checked")


def test_an_import_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_BATCH_CHUNKS", 3)
    export_chunks(filled(*(chunk(n) for n in range(10))), tmp_path / "out")
    store = FileStore(tmp_path / "store")

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_chunks(store, tmp_path / "out", progress=stop)
    assert len(list(store.entries())) == 6
    assert import_chunks(store, tmp_path / "out") == ImportReport(chunks=4, known=6)


def test_a_store_without_room(tmp_path: Path) -> None:
    export_chunks(filled(*MIXED), tmp_path / "out")
    store = FileStore(tmp_path / "store", max_bytes=1000)
    with pytest.raises(StoreError, match=r"the store may take 1,000 bytes"):
        import_chunks(store, tmp_path / "out")
    assert list(store.entries()) == []


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [chunk(n) for n in range(10)]
    monkeypatch.setattr(importing, "_BATCH_BYTES", 2 * chunks[0][1].nbytes)
    export_chunks(filled(*chunks), tmp_path / "out")
    sizes: list[int] = []

    class Counting(MemoryStore):
        def put(self, chunks: Sequence[Any]) -> None:
            sizes.append(len(chunks))
            super().put(chunks)

    assert import_chunks(Counting(), tmp_path / "out").chunks == 10
    assert sizes == [2] * 5


# -- what happens meanwhile ------------------------------------------------------------------------------------


def test_damaged_chunks_are_set_aside_and_named(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.put(MIXED)
    bad = [MIXED[1][0].key.hex, MIXED[5][0].key.hex]
    damage(tmp_path / "store", *bad)
    report = export_chunks(store, tmp_path / "out")
    assert (report.chunks, sorted(report.missing)) == (len(MIXED) - 2, sorted(bad))
    assert sorted(store.verify().quarantined) == sorted(bad)
    assert store.info(MIXED[1][0].key) is None
    assert import_chunks(MemoryStore(), tmp_path / "out") == ImportReport(chunks=len(MIXED) - 2)


def test_a_store_that_was_written_by_format_1_and_is_read_only(tmp_path: Path) -> None:
    chunks = [chunk(n) for n in range(3)]
    write_format_1(tmp_path / "store", chunks)
    FileStore(tmp_path / "store").close()
    damage(tmp_path / "store", chunks[1][0].key.hex)
    store = FileStore(tmp_path / "store", read_only=True)
    report = export_chunks(store, tmp_path / "out")
    assert (report.chunks, report.missing) == (2, [chunks[1][0].key.hex])
    taken = MemoryStore()
    assert import_chunks(taken, tmp_path / "out") == ImportReport(chunks=2)
    assert all(torch.equal(taken.load(info.key), kv) for info, kv in chunks[::2])
    export_chunks(filled(chunk(9)), tmp_path / "other")
    with pytest.raises(StoreError, match="for reading only"):
        import_chunks(store, tmp_path / "other")


class Restless(MemoryStore):
    """Changes a chunk after it was read for the first time, before it is read to be written."""

    def __init__(self, change: Callable[[MemoryStore, ChunkKey], None]) -> None:
        super().__init__()
        self._change: Callable[[MemoryStore, ChunkKey], None] | None = change

    def stored(self, key: ChunkKey) -> Any:
        found = super().stored(key)
        if key == MIXED[1][0].key and self._change:
            change, self._change = self._change, None
            change(self, key)
        return found


def test_a_chunk_that_goes_while_it_is_exported(tmp_path: Path) -> None:
    store = Restless(lambda store, key: store.delete([key]) and None)
    store.put(MIXED)
    report = export_chunks(store, tmp_path / "out")
    assert (report.chunks, report.missing) == (len(MIXED) - 1, [MIXED[1][0].key.hex])
    assert import_chunks(MemoryStore(), tmp_path / "out") == ImportReport(chunks=len(MIXED) - 1)
    alone = Restless(lambda store, key: store.delete([key]) and None)
    alone.put(MIXED[1:2])
    assert export_chunks(alone, tmp_path / "alone").chunks == 0
    assert os.listdir(tmp_path / "alone") == ["index.json"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_chunk_that_is_stored_anew_while_it_is_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    anew = (MIXED[1][0], (MIXED[1][1] + 3).to(dtype))
    store = Restless(lambda store, key: store.put([anew]))
    store.put(MIXED)
    assert export_chunks(store, tmp_path / "out").chunks == len(MIXED)
    taken = MemoryStore()
    assert import_chunks(taken, tmp_path / "out") == ImportReport(chunks=len(MIXED))
    assert torch.equal(taken.load(anew[0].key), store.load(anew[0].key))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    store = filled(*MIXED)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "chunks-00001.safetensors").write_text("mine")
    with pytest.raises(StoreError, match=r"foreign is not empty: give a directory that holds nothing else"):
        export_chunks(store, tmp_path / "foreign")
    assert (tmp_path / "foreign" / "chunks-00001.safetensors").read_text() == "mine"
    assert len(os.listdir(tmp_path / "foreign")) == 1
    export_chunks(store, tmp_path / "whole")
    before = {path: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    with pytest.raises(StoreError, match="whole holds an export already"):
        export_chunks(store, tmp_path / "whole")
    assert before == {path: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="could not be written"):
        export_chunks(store, tmp_path / "file")
    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / "export.lock"), pytest.raises(StoreError, match="another process exports"):
        export_chunks(store, tmp_path / "busy")
    (tmp_path / "busy" / "export.lock").touch()
    (tmp_path / "busy" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not empty"):
        export_chunks(store, tmp_path / "busy")


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def fsync(handle: int) -> None:
        sync(handle)
        stat = os.fstat(handle)
        (path,) = (p for p in [tmp_path / "out", *(tmp_path / "out").iterdir()] if p.stat().st_ino == stat.st_ino)
        done.append(f"sync {path.name} {stat.st_size if path.is_file() else ''}".strip())

    def replace(old: Path, new: Path) -> None:
        rename(old, new)
        done.append(f"rename {new.name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    export_chunks(filled(*MIXED), tmp_path / "out")
    want = []
    for name in ("chunks-00001.safetensors", "index.json"):
        size = (tmp_path / "out" / name).stat().st_size
        want += [f"sync {name}.tmp {size}", f"rename {name}", "sync out"]
    assert done == want


POINTS = ("export.writing", "export.written", "export.renamed")


def small_export(target: Path) -> int:
    return export_chunks(filled(*MIXED), target, file_bytes=3000).chunks


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    seen: list[str] = []
    with faults.install(seen.append):
        small_export(tmp_path_factory.mktemp("passes"))
    return seen


@pytest.mark.parametrize("point", POINTS)
def test_an_error_leaves_nothing(point: str, passes: list[str], tmp_path: Path) -> None:
    for number in range(passes.count(point)):
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            with (
                faults.install(at(point, number, lambda error=error: throw(error))),
                pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt),
            ):
                small_export(tmp_path / "out")
            assert os.listdir(tmp_path / "out") == []
    assert small_export(tmp_path / "out") == len(MIXED)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_whole_files_or_none(point: str, passes: list[str], tmp_path: Path) -> None:
    for number in range(passes.count(point)):
        target = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            try:
                with faults.install(at(point, number, lambda: os._exit(9))):
                    small_export(target)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        files = sorted(target.glob("chunks-*.safetensors"))
        there = {name.partition(".")[0] for file in files for name in load_file(file)}
        whole = (target / "index.json").exists()
        if whole:
            assert json.loads((target / "index.json").read_text())["chunks"] == len(MIXED) == len(there)
        taken = MemoryStore()
        if files:
            report = import_chunks(taken, target)
            assert {info.key.hex for info in taken.entries()} == there
            assert bool(report.problems) != whole
        else:
            with pytest.raises(StoreError, match="is no export"):
                import_chunks(taken, target)
        if not whole:  # one file now, where there may have been several
            assert export_chunks(filled(*MIXED), target).chunks == len(MIXED)
            assert sorted(os.listdir(target)) == ["chunks-00001.safetensors", "index.json"]
        assert import_chunks(MemoryStore(), target) == ImportReport(chunks=len(MIXED))


# -- the store's part ------------------------------------------------------------------------------------------


def test_stored_bytes_of_a_store(store: ChunkStore, tmp_path: Path) -> None:
    store.put(MIXED)
    for info, _ in MIXED:
        found, kept = store.stored(info.key)
        assert found == store.info(info.key)
        assert kept.encoding == found.encoding
        if isinstance(store, FileStore):
            assert b"".join(part.numpy().tobytes() for part in kept.parts) == payloads(store.path)[info.key.hex]
    with pytest.raises(ChunkNotFoundError, match="compile its tokens again"):
        store.stored(chunk(50)[0].key)
    info, kept = store.stored(MIXED[1][0].key)
    with pytest.raises(StoreError, match="cannot be kept as fp8"):
        store.put([(replace(info, encoding="fp8"), kept)])
    cut = replace(kept, encoding="int8", parts=tuple(part[:-1] for part in kept.parts))
    with pytest.raises(StoreError, match="the payload has"):
        store.put([(replace(info, encoding="int8"), cut)])


def test_an_export_counts_as_no_use(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.put(MIXED)
    export_chunks(store, tmp_path / "out")
    store.close()
    with closing(sqlite3.connect(tmp_path / "store" / "catalogue.sqlite")) as db:
        assert db.execute("SELECT DISTINCT uses FROM ranks").fetchall() == [(1,)]
