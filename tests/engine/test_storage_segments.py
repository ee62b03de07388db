"""The segment file: what is appended comes back, whatever a dying writer left between."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from epic_engine.storage import segments
from epic_engine.storage.locks import abandoned, take
from epic_engine.storage.segments import SegmentWriter, as_bytes, map_file, read_header, scan

from tests.engine.test_store import entry

NAME = "0123456789abcdef" * 2


def _writer(folder: Path) -> SegmentWriter:
    lock = take(folder / f"{NAME}.lock")
    assert lock is not None
    return SegmentWriter.create(folder / f"{NAME}.seg", lock)


def _again(folder: Path) -> SegmentWriter:
    lock = take(folder / f"{NAME}.lock")
    assert lock is not None
    return SegmentWriter.resume(folder / f"{NAME}.seg", lock)


def _append(writer: SegmentWriter, number: int) -> segments.Record:
    info, kv = entry(number)
    return writer.append(info, kv.shape, "float32", [as_bytes(kv)])


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    """Read with struct, json and xxhash alone, as docs/store-format.md has it."""
    writer = _writer(tmp_path)
    records = [_append(writer, number) for number in range(3)]
    writer.sync()
    writer.close()
    raw = (tmp_path / f"{NAME}.seg").read_bytes()
    assert struct.unpack_from("<8sII16s24x", raw) == (b"EPICSEG2", 2, 64, bytes.fromhex(NAME))
    assert raw[56:64] == xxhash.xxh3_64_digest(raw[:56])
    at = 64
    for number, record in enumerate(records):
        info, kv = entry(number)
        assert at % 64 == 0
        magic, length, code, dimensions, stored, key, text_sum, sum_ = struct.unpack_from("<8sIBBxxQ32s16s16s", raw, at)
        assert (magic, code, dimensions, stored) == (b"EPICREC2", 0, 5, kv.nbytes)
        assert struct.unpack_from("<6I8x", raw, at + 88) == (*kv.shape, 0)
        assert raw[at + 120 : at + 128] == xxhash.xxh3_64_digest(raw[at : at + 120])
        assert key.hex() == info.key.hex
        text = raw[at + 128 : at + 128 + length]
        assert xxhash.xxh3_128_digest(text) == text_sum
        meta = json.loads(text)
        assert (meta["namespace"], meta["token_ids"], meta["encoding"]) == ("one", list(info.token_ids), "raw")
        offset = -(-(at + 128 + length) // 64) * 64
        payload = raw[offset : offset + stored]
        assert payload == kv.numpy().tobytes()
        assert sum_ == xxhash.xxh3_128_digest(payload) == record.checksum
        assert (record.start, record.offset, record.stored) == (at, offset, stored)
        at = -(-(offset + stored) // 64) * 64
    assert at == len(raw) == writer.end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_everything_about_a_chunk_comes_back(dtype: str, tmp_path: Path) -> None:
    from dataclasses import replace

    writer = _writer(tmp_path)
    info, kv = entry(3)
    kv = kv.to(segments.DTYPES[dtype])
    info = replace(info, namespace='ä"\n', depends=("ab" * 32,), expires=12.5, cost=0.25, nbytes=kv.nbytes)
    writer.append(info, kv.shape, dtype, [as_bytes(kv[:1]), as_bytes(kv[1:])])
    (record,) = scan(tmp_path / f"{NAME}.seg")
    assert (record.info, record.shape, record.dtype) == (info, tuple(kv.shape), dtype)
    raw = map_file(tmp_path / f"{NAME}.seg")
    assert torch.equal(raw[record.offset :][: record.stored].view(kv.dtype).view(kv.shape), kv)


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    info, kv = entry(3)
    for shape, dtype in ((kv.shape, "int64"), ((1,) * 7, "float32")):
        with pytest.raises(ValueError, match="cannot be stored"):
            writer.append(info, shape, dtype, [as_bytes(kv)])
    assert list(scan(writer.path)) == []


def test_a_torn_tail_is_ignored_and_gone_on_behind(tmp_path: Path) -> None:
    """The file ends at every byte of its last record; the next writer appends there."""
    writer = _writer(tmp_path)
    first, last = _append(writer, 1), _append(writer, 2)
    writer.close()
    path = tmp_path / f"{NAME}.seg"
    whole = path.read_bytes()
    for length in range(last.start, last.end):
        path.write_bytes(whole[:length])
        complete = length >= last.offset + last.stored
        found = [record.start for record in scan(path)]
        assert found == [first.start, last.start][: 1 + complete]
        assert (read_header(map_file(path), last.start) is not None) == complete
        if length % 7 == 0 or length > last.end - 70:
            again = _again(tmp_path)
            third = _append(again, 3)
            again.close()
            assert third.start % 64 == 0
            assert third.start >= length
            assert [r.info.key for r in scan(path)] == [entry(n)[0].key for n in ([1, 2, 3] if complete else [1, 3])]


def test_damage_hides_one_record_and_no_other(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    records = [_append(writer, number) for number in range(3)]
    writer.close()
    path = tmp_path / f"{NAME}.seg"
    whole = path.read_bytes()
    for at in range(records[1].start, records[1].offset + records[1].stored, 5):
        raw = bytearray(whole)
        raw[at] ^= 4
        path.write_bytes(raw)
        starts = [record.start for record in scan(path)]
        padding = records[1].start + 128 + struct.unpack_from("<I", whole, records[1].start + 8)[0]
        harmless = padding <= at < records[1].offset
        assert starts == [r.start for r in records if harmless or r is not records[1]]


@pytest.mark.parametrize("at", [0, 8, 12, 16, 40, 56, 63])
def test_a_header_that_is_none(at: int, tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.close()
    raw = bytearray(writer.path.read_bytes())
    raw[at] ^= 1
    writer.path.write_bytes(raw)
    with pytest.raises(ValueError, match="is no segment of format 2"):
        list(scan(writer.path))
    with pytest.raises(ValueError, match="is no segment of format 2"):
        _again(tmp_path)
    assert writer.path.read_bytes() == raw
    other = tmp_path / ("f" * 32 + ".seg")
    raw[at] ^= 1
    other.write_bytes(raw)
    lock = take(tmp_path / "other.lock")
    assert lock is not None
    with pytest.raises(ValueError, match="is no segment"):  # it bears another one's name
        SegmentWriter.resume(other, lock)


def test_a_segment_grows_under_a_readers_map(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    first = _append(writer, 1)
    before = map_file(writer.path)
    held = before[first.offset :][: first.stored].view(torch.float32)
    second = _append(writer, 2)
    assert len(before) == first.end
    after = map_file(writer.path)
    assert len(after) == second.end
    writer.path.unlink()
    writer.close()
    del before
    assert torch.equal(held.view(entry(1)[1].shape), entry(1)[1])
    assert torch.equal(after[second.offset :][: second.stored].view(torch.float32), entry(2)[1].flatten())


def test_somebody_elses_writing_is_noticed(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    _append(writer, 1)
    with open(writer.path, "ab") as file:
        file.write(b"!")
    with pytest.raises(OSError, match="changed by somebody else"):
        _append(writer, 2)


def test_writes_that_stop_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = segments.os.writev, []

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        calls.append(len(buffers))
        return real(descriptor, [buffers[0][: 1 + len(calls) % 50]])

    monkeypatch.setattr(segments.os, "writev", short)
    writer = _writer(tmp_path)
    _append(writer, 1)
    _append(writer, 2)
    assert len(calls) > 100
    assert [r.info for r in scan(writer.path)] == [entry(1)[0], entry(2)[0]]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    lock = tmp_path / f"{NAME}.lock"
    assert take(lock) is None
    assert not abandoned(lock)
    writer.close()
    writer.close()
    assert abandoned(lock)
    assert abandoned(tmp_path / "none.lock")
    assert not (tmp_path / "none.lock").exists()
