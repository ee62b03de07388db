"""The chunk store: segments, payloads, catalogues, files of format 1."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from epic_engine import ChunkInfo, FileStore
from epic_engine.storage.locks import take
from epic_engine.storage.payload import decode, encode, joined, rounded
from epic_engine.storage.rebuild import rebuild
from epic_engine.storage.segments import Record, SegmentWriter, as_bytes, map_file, read_header, scan
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.format_1 import write_format_1
from tests.engine.test_store import entry

from .bounds import clean
from .damage import any_json, mutated, numbers

__all__ = ["PROPERTIES"]

NAME = "0123456789abcdef" * 2
COUNT = 4


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="epic-rag-fuzz-") as name:
        yield Path(name)


def _entries() -> list[tuple[ChunkInfo, Tensor]]:
    return [entry(number) for number in range(COUNT)]


@cache
def _segment() -> bytes:
    with folder() as path:
        lock = take(path / "lock")
        assert lock is not None
        writer = SegmentWriter.create(path / f"{NAME}.seg", lock)
        for info, kv in _entries():
            writer.append(info, kv.shape, "float32", [as_bytes(kv)])
        writer.close()
        return (path / f"{NAME}.seg").read_bytes()


@cache
def _store() -> dict[str, bytes]:
    """A closed store, as files."""
    with folder() as path:
        with closing(FileStore(path)) as store:
            store.put(_entries()[:2])
            store.put(_entries()[2:])
            store.lease([entry(9)[0].key], 60)
        return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def _laid(path: Path, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(raw)


def _was_written(record: Record, raw: bytes) -> bool:
    payload = raw[record.offset : record.offset + record.stored]
    return any(
        (record.info, record.shape, payload) == (info, tuple(kv.shape), bytes(as_bytes(kv))) for info, kv in _entries()
    )


def _only_what_was_written(store: FileStore) -> None:
    """Use every road into a store: what comes back is what was put, or nothing."""
    for info, kv in _entries():
        with clean():
            found = store.info(info.key)
            assert found is None or found == info
        with clean():
            assert torch.equal(store.load(info.key), kv)
        with clean():
            assert all(form == info for form in store.forms("one", "f", info.content))
    written = {info.key: info for info, _ in _entries()}
    with clean():
        assert all(found == written[found.key] for found in store.entries())
    for use in (store.usage, store.verify, lambda: store.verify(quick=True), lambda: store.lease(list(written), 1.0)):
        with clean():
            use()
    for change in (lambda: store.verify(repair=True), lambda: store.put([entry(7)]), store.gc, store.compact):
        with clean():
            change()


# -- segments ----------------------------------------------------------------------------------------------------


def segment_of_any_bytes(data: st.DataObject) -> None:
    raw = _segment()[: data.draw(st.sampled_from((0, 64)))] + data.draw(st.binary(max_size=600))
    with folder() as path:
        file = path / f"{NAME}.seg"
        file.write_bytes(raw)
        with clean(ValueError, OSError):
            assert not list(scan(file))
        for start in range(0, len(raw), 64):
            assert read_header(map_file(file), start) is None


def damaged_segment(data: st.DataObject) -> None:
    whole = _segment()
    raw = mutated(data, whole, before=data.draw(st.sampled_from((64, 64 + 128, len(whole)))))
    with folder() as path:
        file = path / f"{NAME}.seg"
        file.write_bytes(raw)
        found: list[Record] = []
        with clean(ValueError, OSError):
            found = list(scan(file))
            if len(raw) == len(whole) and raw[:64] == whole[:64]:  # whose bytes are as they were, must be found
                file.write_bytes(whole)
                intact = [r.start for r in scan(file) if raw[r.start : r.end] == whole[r.start : r.end]]
                assert set(intact) <= {r.start for r in found}
                file.write_bytes(raw)
        assert all(_was_written(record, raw) for record in found)
        lock = take(path / "lock")
        assert lock is not None
        with clean(ValueError, OSError):
            writer = SegmentWriter.resume(file, lock)
            info, kv = entry(8)
            record = writer.append(info, kv.shape, "float32", [as_bytes(kv)])
            writer.close()
            assert record.start >= len(raw)
            assert list(scan(file))[-1] == record
        lock.release()


def _hostile_record(data: st.DataObject, at: int) -> bytes:
    """A record whose checksums are right, and whose fields are anything."""
    meta: Any = json.loads(_segment()[64 + 128 :][: struct.unpack_from("<I", _segment(), 72)[0]])
    for _ in range(data.draw(st.integers(0, 2))):
        meta[data.draw(st.sampled_from(sorted(meta)))] = data.draw(
            any_json() | st.sampled_from(("", "raw+zstd", "a" * 64, "\ud800", [2**31], [-2], math.nan, 10**400))
        )
    if data.draw(st.integers(0, 9)) == 0:
        meta = data.draw(any_json())
    text = json.dumps(meta).encode()
    if data.draw(st.integers(0, 9)) == 0:
        text = b"[" * 100_000
    payload = bytes(data.draw(st.integers(0, 2000)))
    lengths = data.draw(st.just((len(text), len(payload))) | st.tuples(numbers(), numbers()))
    shape = data.draw(st.just((2, 2, 3, 5, 8, 0)) | st.tuples(*[numbers()] * 6))
    header = struct.pack(
        "<8sIBBxxQ32s16s16s6I8x", b"EPICREC2", lengths[0] % 2**32, data.draw(st.integers(0, 5)),
        data.draw(st.integers(4, 7)), lengths[1], data.draw(st.binary(min_size=32, max_size=32)),
        xxhash.xxh3_128_digest(text), xxhash.xxh3_128_digest(payload), *(n % 2**32 for n in shape),
    )  # fmt: skip
    head = header + xxhash.xxh3_64_digest(header) + text
    head += bytes(-len(head) % 64)
    return head + payload + bytes(-len(payload) % 64)


def hostile_records(data: st.DataObject) -> None:
    """Whoever knows the checksums can make no catalogue that the store stumbles over."""
    raw = _segment()
    for _ in range(data.draw(st.integers(1, 3))):
        raw += _hostile_record(data, len(raw))
    with folder() as path:
        _laid(path, {f"segments/{NAME}.seg": raw})
        with clean():
            assert rebuild(path) >= COUNT
            with closing(FileStore(path)) as store:
                for info, kv in _entries():
                    assert torch.equal(store.load(info.key), kv)
                for info in list(store.entries()):
                    with clean():
                        store.load(info.key)
                assert not store.verify().missing
                store.compact(live_share=1.0)


# -- payloads ----------------------------------------------------------------------------------------------------

_DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool))
_ENCODINGS = st.sampled_from([base + end for base in ("raw", "bf16", "int8", "fp8") for end in ("", "+zstd")])


def damaged_payload(data: st.DataObject) -> None:
    kv = torch.randn(2, 2, 1, 3, 8, generator=torch.Generator().manual_seed(1))
    encoding = data.draw(_ENCODINGS)
    whole = bytes(as_bytes(joined(encode(kv, encoding))))
    raw = data.draw(st.just(whole) | st.binary(max_size=200)) if data.draw(st.booleans()) else mutated(data, whole)
    shape = data.draw(st.just(tuple(kv.shape)) | st.lists(numbers() | st.just(2), max_size=6).map(tuple))
    dtype = data.draw(st.just(kv.dtype) | _DTYPES)
    if raw == whole and (shape, dtype) == (kv.shape, kv.dtype):
        base = encoding.removesuffix("+zstd")
        assert torch.equal(decode(_tensor(raw), encoding, shape, dtype), rounded(kv, base))
    wanted = data.draw(st.just(encoding) | _ENCODINGS | st.text(max_size=8))
    with clean(ValueError):
        found = decode(_tensor(raw), wanted, shape, dtype)
        assert (tuple(found.shape), found.dtype) == (shape, dtype)


def lying_frames(data: st.DataObject) -> None:
    """A zstd frame yields as many bytes as the shape says and its header claims, or an error; and none is huge."""
    import zstandard

    size = data.draw(st.sampled_from((64, 256, 1 << 16)))
    content = bytes(data.draw(st.sampled_from((size, size - 1, 2 * size, 0, 64 << 20))))
    frame = zstandard.ZstdCompressor(write_content_size=data.draw(st.booleans())).compress(content)
    match data.draw(st.sampled_from(("as it is", "twice", "claims", "mutated"))):
        case "twice":
            frame += frame
        case "claims":  # a header with eight bytes for the size of the content
            claimed = data.draw(st.just(size) | numbers())
            frame = frame[:4] + b"\xe0" + struct.pack("<Q", claimed) + frame[6:]
        case "mutated":
            frame = mutated(data, frame)
    dims = data.draw(st.just((1, 2, 1, 1, size // 8)) | st.just((2**20, 2, 2**20, 1, 1)) | st.just((1, 2, 1, 1, 2**39)))
    encoding = data.draw(st.sampled_from(("raw+zstd", "int8+zstd", "fp8+zstd")))
    with clean(ValueError):
        found = decode(_tensor(frame), encoding, dims, torch.float32)
        assert encoding != "raw+zstd" or bytes(as_bytes(found)) == content


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


# -- catalogues --------------------------------------------------------------------------------------------------


def damaged_catalogue(data: st.DataObject) -> None:
    files = dict(_store())
    whole = files["catalogue.sqlite"]
    files["catalogue.sqlite"] = data.draw(st.binary(max_size=300)) if not data.draw(st.integers(0, 7)) else mutated(
        data, whole, before=data.draw(st.sampled_from((100, len(whole))))
    )  # fmt: skip
    with folder() as path, clean():
        _laid(path, files)
        with closing(FileStore(path, read_only=data.draw(st.booleans()))) as store:
            _only_what_was_written(store)


_TABLES = ("chunks", "segments", "namespaces", "fingerprints", "contexts", "ranks", "tallies", "leases", "settings")


def _values() -> st.SearchStrategy[Any]:
    paths = st.sampled_from(("../../x", "/etc/passwd", "..", "a\0b", "x" * 5000))
    digests = st.sampled_from((b"\0" * 32, "0" * 64, b""))
    small = st.text(max_size=5) | st.binary(max_size=5)
    return st.integers(-(2**63), 2**63 - 1) | st.floats() | small | paths | digests


def _change_a_row(data: st.DataObject, file: Path, tables: tuple[str, ...]) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        table = data.draw(st.sampled_from(tables))
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = data.draw(st.sampled_from(columns))
        try:
            where = "" if data.draw(st.booleans()) else "WHERE rowid % 2"
            db.execute(f"UPDATE {table} SET {column} = ? {where}", (data.draw(_values()),))
        except (sqlite3.Error, UnicodeEncodeError):  # what even SQLite refuses
            return


def forged_rows(data: st.DataObject) -> None:
    """Whatever somebody writes into a catalogue, errors are clean and no payload is taken for another chunk's."""
    with folder() as path, clean():
        _laid(path, _store())
        for _ in range(data.draw(st.integers(1, 2))):
            _change_a_row(data, path / "catalogue.sqlite", _TABLES)
        with closing(FileStore(path)) as store:
            for info, kv in _entries():
                with clean():
                    assert torch.equal(store.load(info.key), kv)
            for use in (lambda: list(store.entries()), store.usage, store.verify, lambda: store.put([entry(7)])):
                with clean():
                    use()
            for change in (store.gc, lambda: store.compact(live_share=1.0), lambda: store.verify(repair=True)):
                with clean():
                    change()


def damaged_format_1(data: st.DataObject) -> None:
    with folder() as path, clean():
        write_format_1(path, _entries())
        files = sorted(path.glob("kv/*/*.safetensors"))
        if data.draw(st.booleans()):
            file = data.draw(st.sampled_from(files))
            file.write_bytes(mutated(data, file.read_bytes(), before=data.draw(st.sampled_from((8, 200)))))
        else:
            _change_a_row(data, path / "catalogue.sqlite", ("chunks",))
        with closing(FileStore(path)) as store:
            for info, kv in _entries():
                with clean():
                    assert torch.equal(store.load(info.key), kv)


PROPERTIES = {
    check.__name__: check
    for check in (
        segment_of_any_bytes,
        damaged_segment,
        hostile_records,
        damaged_payload,
        lying_frames,
        damaged_catalogue,
        forged_rows,
        damaged_format_1,
    )
}
