"""Exports that were cut, flipped or forged: what is intact is imported, and nothing else."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from epic_engine import (
    ChunkKey,
    ImportReport,
    MemoryStore,
    StoreError,
    StoreFormatError,
    export_chunks,
    import_chunks,
)
from epic_engine.chunks import content_digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .test_storage_exchange import HEAD, MIXED, chunk, filled, header_of, small_export

# -- what is no export, or no longer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, bytes]]:
    """A file with all kinds of chunks, and its index."""
    target = tmp_path_factory.mktemp("exported") / "out"
    export_chunks(filled(*MIXED), target)
    return (target / "chunks-00001.safetensors").read_bytes(), {"index.json": (target / "index.json").read_bytes()}


KEPT = {info.key: (info, filled((info, kv)).load(info.key)) for info, kv in MIXED}


def taken_from(path: Path) -> tuple[set[ChunkKey], ImportReport | None]:
    """Import into an empty store: whatever is in it then is what was exported, to the last bit."""
    store = MemoryStore()
    try:
        report = import_chunks(store, path)
    except StoreError:
        report = None
    found = list(store.entries())
    for info in found:
        want, kv = KEPT[info.key]
        assert info == want
        assert store.load(info.key).dtype == kv.dtype
        assert torch.equal(store.load(info.key), kv)
    if report is None:
        assert not found
    else:
        assert report.chunks == len(found)
        assert report.known == report.skipped == 0
        assert report.problems or len(found) == len(MIXED)
    return {info.key for info in found}, report


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_anywhere(data: st.DataObject, exported: tuple[bytes, dict[str, bytes]], tmp_path: Path) -> None:
    raw, index = exported
    begin = 8 + int.from_bytes(raw[:8], "little")
    position = data.draw(st.one_of(st.integers(0, 7), st.integers(8, begin - 1), st.integers(begin, len(raw) - 1)))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != raw[position]))
    file = tmp_path / "chunks-00001.safetensors"
    for name, text in index.items():
        (tmp_path / name).write_bytes(text)
    file.write_bytes(raw[:position] + bytes([byte]) + raw[position + 1 :])
    keys, report = taken_from(tmp_path)
    assert report is not None
    if position >= begin:  # exactly one chunk is lost, and it is named
        tensors, _, _ = header_of(file)
        (hit,) = (
            name.partition(".")[0]
            for name, tensor in tensors.items()
            if tensor["data_offsets"][0] <= position - begin < tensor["data_offsets"][1]
        )
        assert keys == KEPT.keys() - {ChunkKey(hit)}
        assert [name for name, _ in report.problems] == [hit]
    alone, _ = taken_from(file)
    assert alone == keys


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere(data: st.DataObject, exported: tuple[bytes, dict[str, bytes]], tmp_path: Path) -> None:
    raw, index = exported
    begin = 8 + int.from_bytes(raw[:8], "little")
    cut = data.draw(st.one_of(st.integers(0, begin), st.integers(begin, len(raw) - 1)))
    file = tmp_path / "chunks-00001.safetensors"
    for name, text in index.items():
        (tmp_path / name).write_bytes(text)
    file.write_bytes(raw[:cut])
    keys, report = taken_from(tmp_path)
    assert report is not None
    assert file.name in {name for name, _ in report.problems}
    if cut < begin:
        assert not keys
        with pytest.raises(StoreError, match="is no file of an export, or damaged"):
            import_chunks(MemoryStore(), file)
    else:  # what lies wholly inside is there
        (tmp_path / "whole").write_bytes(raw)
        tensors, _, _ = header_of(tmp_path / "whole")
        outside = {name.partition(".")[0] for name, t in tensors.items() if begin + t["data_offsets"][1] > cut}
        assert keys == {key for key in KEPT if key.hex not in outside}
        assert f"{len(outside)} chunks are lost" in str(report.problems)
        assert taken_from(file)[0] == keys


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_index(data: st.DataObject, exported: tuple[bytes, dict[str, bytes]], tmp_path: Path) -> None:
    raw, index = exported
    (tmp_path / "chunks-00001.safetensors").write_bytes(raw)
    text = bytearray(index["index.json"])
    if data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    else:
        text = bytearray(data.draw(st.binary(max_size=40)))
    (tmp_path / "index.json").write_bytes(text)
    assert len(taken_from(tmp_path)[0]) == len(MIXED)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    small_export(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("chunks-*"))
    there = [{ChunkKey(name.partition(".")[0]) for name in load_file(file)} for file in files]
    with open(files[0], "ab") as opened:
        opened.write(b"more")
    files[1].unlink()
    files[2].write_bytes(b"nonsense" * 10)
    (tmp_path / "out" / "notes.txt").write_text("x")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "out" / "chunks-00099.safetensors")
    keys, report = taken_from(tmp_path / "out")
    assert report is not None
    problems = [f"{name}: {reason}" for name, reason in report.problems]
    for want in (
        "chunks-00001.safetensors: it has 4 bytes behind its end",
        "chunks-00002.safetensors: the file is missing",
        "chunks-00003.safetensors: it has no safetensors header, or only a part of it",
    ):
        assert want in problems
    assert keys == there[0].union(*there[3:])
    for what in ("nothing", "out/notes.txt"):
        with pytest.raises(StoreError, match="is no "):
            import_chunks(MemoryStore(), tmp_path / what)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="holds neither"):
        import_chunks(MemoryStore(), tmp_path / "empty")
    save_file({"kv": torch.zeros(3)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match="no export"):
        import_chunks(MemoryStore(), tmp_path / "other.safetensors")


def test_a_file_in_another_ones_place(tmp_path: Path) -> None:
    small_export(tmp_path / "out")
    one, two, *_ = sorted((tmp_path / "out").glob("chunks-*"))
    two.write_bytes(one.read_bytes())
    report = import_chunks(MemoryStore(), tmp_path / "out")
    assert report.known == len({name.partition(".")[0] for name in load_file(one)})
    assert "according to index.json" in dict(report.problems)[two.name]


def test_an_index_that_names_other_places(tmp_path: Path) -> None:
    """Names in an index are compared with what the folder holds, and never become paths."""
    small_export(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    name = "../secret/chunks-00001.safetensors"
    entry = {"name": name, "chunks": 1, "bytes": 1, "xxh3_128": ""}
    index = {"format": "epic-rag chunks", "version": 1, "chunks": 1, "files": [entry]}
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match="is no export"):
        import_chunks(MemoryStore(), tmp_path / "out")


# -- forged ----------------------------------------------------------------------------------------------------


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], str | None]) -> ImportReport:
    """Import a file in which one chunk was changed, with all digests made anew, as somebody could who knows them."""
    info, kv = chunk(2, encoding="int8")
    path.mkdir()
    export_chunks(filled((info, kv), chunk(3)), path / "out")
    file = path / "out" / "chunks-00001.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    key = info.key.hex
    meta = json.loads(metadata.pop(key))
    del metadata[f"{key}.xxh3_128"]
    mine = {name: tensors.pop(f"{key}.{name}") for name in ("scales", "numbers")}
    renamed = change(meta, mine)
    key = renamed or key
    meta["checksums"] = {
        name: xxhash.xxh3_128_hexdigest(t.flatten().view(torch.uint8).numpy().tobytes()) for name, t in mine.items()
    }
    text = json.dumps(meta)
    metadata |= {key: text, f"{key}.xxh3_128": xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))}
    save_file(tensors | {f"{key}.{name}": t for name, t in mine.items()}, file, metadata)
    store = MemoryStore()
    report = import_chunks(store, file)
    assert chunk(3)[0].key in {found.key for found in store.entries()}
    if report.chunks == 1:
        assert len(report.problems) >= 1
        assert {found.key for found in store.entries()} == {chunk(3)[0].key}
    return report


def test_a_file_written_by_somebody_else_is_as_good(tmp_path: Path) -> None:
    """Also with other chunks' tensors between a chunk's own, as the library orders them."""
    assert forged(tmp_path / "same", lambda meta, tensors: None) == ImportReport(chunks=2)

    def keyed(meta: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        meta["chunk"]["namespace"] = "three"
        return chunk(2, encoding="int8", namespace="three")[0].key.hex

    assert forged(tmp_path / "keyed", keyed) == ImportReport(chunks=2)


def _in_chunk(**values: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda meta, tensors: meta["chunk"].update(values)


def _in_meta(**values: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda meta, tensors: meta.update(values)


def _renamed(key: str) -> Callable[[dict[str, Any], dict[str, Tensor]], str]:
    return lambda meta, tensors: key


def _tensors(**values: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, make in values.items():
            tensors[name] = make(tensors[name])

    return change


OTHER = tuple(range(100, 105))


def _neighbours(meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    meta["chunk"].update(depends=[content_digest(OTHER)], context="neighbours:1")
    meta["head"] = "isolated"


def _more_tokens(meta: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    ids = range(2, 8)
    meta["chunk"].update(token_ids=list(ids), content=content_digest(ids))
    return ChunkKey.of("f", "one", HEAD.identity, ids).hex


def _no_scales(meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["scales"]


FORGED: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], str | None]] = {
    "namespace": _in_chunk(namespace="two"),
    "fingerprint": _in_chunk(fingerprint="g"),
    "tokens": _in_chunk(token_ids=OTHER, content=content_digest(OTHER)),
    "tokens without their digest": _in_chunk(token_ids=OTHER),
    "context": _in_chunk(context_ids=(1, 2, 4)),
    "neighbours": _in_chunk(depends=[content_digest(OTHER)]),
    "neighbours behind a head": _neighbours,
    "key": _renamed(chunk(9)[0].key.hex),
    "key of no chunk": _renamed("../../../etc/passwd"),
    "key in capitals": _renamed(chunk(2)[0].key.hex.upper()),
    "encoding": _in_chunk(encoding="fp8"),
    "encoding nobody knows": _in_chunk(encoding="int4"),
    "compression": _in_chunk(encoding="int8+zstd"),
    "bytes": _in_chunk(nbytes=8),
    "token ids that are none": _in_chunk(token_ids=["a"] * 5),
    "more tokens": _more_tokens,
    "too large ids": _in_chunk(context_ids=[2**40]),
    "no time": _in_chunk(created=math.nan),
    "text as a time": _in_chunk(expires="tomorrow"),
    "half a character": _in_chunk(context="\ud800"),
    "another field": _in_chunk(path="/etc/passwd"),
    "shape": _in_meta(shape=[2, 2, 3, 5, 16]),
    "shape that is none": _in_meta(shape=[2, 2, 3, 5, "8"]),
    "gigantic shape": _in_meta(shape=[2**30, 2, 2**30, 5, 2**30]),
    "no shape": _in_meta(shape=7),
    "dtype": _in_meta(dtype="float16"),
    "dtype that is none": _in_meta(dtype=["float32"]),
    "head": _in_meta(head=7),
    "no chunk": _in_meta(chunk=None),
    "no scales": _no_scales,
    "infinite scales": _tensors(scales=lambda t: t * math.inf),
    "numbers of another type": _tensors(numbers=lambda t: t.view(torch.uint8)),
    "numbers of another shape": _tensors(numbers=lambda t: t.flatten()),
    "scales of another type": _tensors(scales=lambda t: t.half()),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_chunk_is_a_problem_and_no_chunk(what: str, tmp_path: Path) -> None:
    report = forged(tmp_path / "x", FORGED[what])
    assert report.chunks == 1, report
    assert report.problems


def with_header(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The file with another header before the same bytes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    found = change(header)
    text = found if isinstance(found, bytes) else json.dumps(header).encode()
    made = file.with_name("made.safetensors")
    made.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return made


def _shift(header: dict[str, Any]) -> None:
    """The second tensor at the place of the first."""
    first, second = (tensor for name, tensor in header.items() if name != "__metadata__")
    second["data_offsets"] = first["data_offsets"]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "overlap": _shift,
    "hole": lambda h: [t.update(data_offsets=[n + 8 for n in t["data_offsets"]]) for k, t in h.items() if k[0] != "_"],
    "backwards": lambda h: [t["data_offsets"].reverse() for k, t in h.items() if k[0] != "_"],
    "negative": lambda h: h.update({"x": {"dtype": "I8", "shape": [8], "data_offsets": [-8, 0]}}),
    "not a number": lambda h: h.update({"x": {"dtype": "I8", "shape": [8], "data_offsets": [0, True]}}),
    "no offsets": lambda h: h.update({"x": {"dtype": "I8", "shape": [8]}}),
    "no tensor": lambda h: h.update({"x": 7}),
    "no metadata": lambda h: h.pop("__metadata__") and None,
    "metadata that are a list": lambda h: h.update(__metadata__=["format"]),
    "metadata that are numbers": lambda h: h["__metadata__"].update(x=7),
    "another format": lambda h: h["__metadata__"].update(format="pt"),
    "a list": lambda h: b"[1, 2, 3]",
    "deep": lambda h: b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "no JSON": lambda h: b"\xff" * 100,
    "a long number": lambda h: b'{"__metadata__": ' + b"1" * 10_000 + b"}",
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_forged_header_is_refused(what: str, tmp_path: Path) -> None:
    export_chunks(filled(chunk(1), chunk(2)), tmp_path / "out")
    made = with_header(tmp_path / "out" / "chunks-00001.safetensors", HEADERS[what])
    store = MemoryStore()
    with pytest.raises(StoreError, match="is no file of an export, or damaged"):
        import_chunks(store, made)
    made.replace(tmp_path / "out" / "chunks-00001.safetensors")
    report = import_chunks(store, tmp_path / "out")
    assert "chunks-00001.safetensors" in {name for name, _ in report.problems}
    assert list(store.entries()) == []


@pytest.mark.parametrize("field", ["created", "cost", "expires", "context", "encoding"])
def test_metadata_that_do_not_fit_their_digest(field: str, tmp_path: Path) -> None:
    """Also where nothing else tells that they were changed."""
    export_chunks(filled(chunk(1, cost=1.5, expires=5e9), chunk(2)), tmp_path / "out")
    key = chunk(1)[0].key.hex

    def change(header: dict[str, Any]) -> None:
        meta = json.loads(header["__metadata__"][key])
        meta["chunk"][field] = 6e9 if field in ("created", "cost", "expires") else "isolated"
        header["__metadata__"][key] = json.dumps(meta)

    store = MemoryStore()
    made = with_header(tmp_path / "out" / "chunks-00001.safetensors", change)
    assert import_chunks(store, made) == ImportReport(chunks=1, problems=[(key, "its metadata are damaged")])
    assert [info.key for info in store.entries()] == [chunk(2)[0].key]


def test_a_header_longer_than_any(tmp_path: Path) -> None:
    """A sparse file: what it says it has is never read."""
    file = tmp_path / "chunks-00001.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 40) + b"{")
    os.truncate(file, 1 << 41)
    begin = time.perf_counter()
    with pytest.raises(StoreError, match="no safetensors header"):
        import_chunks(MemoryStore(), file)
    assert time.perf_counter() - begin < 5


def test_a_newer_version(tmp_path: Path) -> None:
    export_chunks(filled(chunk(1)), tmp_path / "out")
    file = tmp_path / "out" / "chunks-00001.safetensors"
    made = with_header(file, lambda h: h["__metadata__"].update(version="2"))
    with pytest.raises(StoreFormatError, match="has version '2', this one reads 1: upgrade epic-rag"):
        import_chunks(MemoryStore(), made)
    made.replace(file)
    assert "upgrade" in str(import_chunks(MemoryStore(), tmp_path / "out").problems)


def test_tensors_of_no_chunk_are_named(tmp_path: Path) -> None:
    export_chunks(filled(chunk(1)), tmp_path / "out")
    file = tmp_path / "out" / "chunks-00001.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | {"stray": torch.zeros(4)}, file, metadata)
    report = import_chunks(MemoryStore(), file)
    assert report == ImportReport(
        chunks=1, problems=[("stray", "it is in chunks-00001.safetensors and belongs to no chunk")]
    )
