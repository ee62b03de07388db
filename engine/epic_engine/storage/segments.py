"""The segment file: a header, then records of one chunk each, appended and never changed.

::

    header    64 bytes: magic, version, its own length, id, checksum
    record    at a multiple of 64: header of 128 bytes, metadata (JSON), padding, payload, padding

A record holds everything that the catalogue knows about its chunk. A writer that dies leaves a torn record at most;
the next one goes on behind it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
import xxhash
from filelock import FileLock
from torch import Tensor

from epic_engine.chunks import ChunkKey

from . import faults
from .locks import release
from .store import ChunkInfo

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "RECORD_HEADER",
    "SEGMENT_HEADER",
    "Record",
    "RecordHeader",
    "SegmentWriter",
    "as_bytes",
    "checksum_of",
    "info_from",
    "map_file",
    "metadata",
    "pack",
    "padded",
    "read_header",
    "read_record",
    "salvage",
    "scan",
    "sync_directory",
    "unpack_header",
]

ALIGNMENT = 64
SEGMENT_HEADER = 64
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}

_VERSION = 2
_SEGMENT_MAGIC = b"EPICSEG2"
_SEGMENT = struct.Struct("<8sII16s24x")
_RECORD_MAGIC = b"EPICREC2"
_MOST_DIMENSIONS = 6
_RECORD = struct.Struct(f"<8sIBBxxQ32s16s16s{_MOST_DIMENSIONS}I8x")
RECORD_HEADER = _RECORD.size + 8
_DTYPE_NAMES = list(DTYPES)
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_MOST_BUFFERS = 64
# What a catalogue can hold.
_MOST_INT = 2**31 - 1
_MOST_NUMBER = 2**62

Buffer = bytes | memoryview


@dataclass(frozen=True)
class Record:
    """A chunk as it lies in a segment.

    Attributes
    ----------
    info
        Everything about the chunk but its payload.
    shape, dtype
        Of the KV; the dtype as a name such as ``"bfloat16"``.
    checksum
        XXH3-128 of the payload, 16 bytes.
    start, offset, stored, end
        Where the record and its payload begin, bytes of payload, and where the record ends, padding included.
    """

    info: ChunkInfo
    shape: tuple[int, ...]
    dtype: str
    checksum: bytes
    start: int
    offset: int
    stored: int

    @property
    def end(self) -> int:
        """Where the next record may begin."""
        return padded(self.offset + self.stored)


def padded(count: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and in host memory."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def checksum_of(parts: Sequence[Buffer]) -> bytes:
    """XXH3-128 of bytes given in parts, 16 bytes."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(body)


def _intact(raw: bytes) -> bool:
    return xxhash.xxh3_64_digest(raw[:-8]) == raw[-8:]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    if os.name == "nt":  # a directory cannot be opened there, and a new name is durable without it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- records ---------------------------------------------------------------------------------------------------


def pack(
    info: ChunkInfo, shape: Sequence[int], dtype: str, parts: Sequence[Buffer], checksum: bytes | None = None
) -> tuple[bytes, bytes, int]:
    """Everything of a record but its payload.

    Parameters
    ----------
    info
        The chunk.
    shape, dtype
        Of its KV.
    parts
        Payload, in parts that are written behind each other.
    checksum
        Of the payload, where it is known.

    Returns
    -------
    tuple
        Record header with metadata and padding, the payload's checksum, and its bytes.

    Raises
    ------
    ValueError
        If the dtype or the number of dimensions cannot be stored.
    """
    if dtype not in _DTYPE_CODES or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"KV of {dtype} and shape {list(shape)} cannot be stored: use one of {', '.join(DTYPES)}.")
    text = metadata(info)
    stored = sum(len(p) for p in parts)
    found = checksum_of(parts) if checksum is None else checksum
    header = _RECORD.pack(
        _RECORD_MAGIC,
        len(text),
        _DTYPE_CODES[dtype],
        len(shape),
        stored,
        bytes.fromhex(info.key.hex),
        xxhash.xxh3_128_digest(text),
        found,
        *shape,
        *(0,) * (_MOST_DIMENSIONS - len(shape)),
    )
    head = _sealed(header) + text
    return head + bytes(-len(head) % ALIGNMENT), found, stored


def metadata(info: ChunkInfo) -> bytes:
    """A record's metadata: JSON with all of a chunk's entry but its key."""
    names = ("namespace", "fingerprint", "content", "context", "token_ids", "context_ids", "nbytes", "created")
    meta: dict[str, Any] = {name: getattr(info, name) for name in names}
    meta |= {n: getattr(info, n) for n in ("depends", "expires", "cost", "encoding")}
    return json.dumps(meta, separators=(",", ":")).encode()


class RecordHeader(NamedTuple):
    """The first 128 bytes of a record.

    Attributes
    ----------
    metadata_bytes, metadata_sum
        Bytes of the metadata that follow, and their XXH3-128.
    dtype, shape
        Of the KV.
    stored, checksum
        Bytes of the payload, and their XXH3-128.
    key
        Of the chunk.
    """

    metadata_bytes: int
    dtype: str
    stored: int
    key: bytes
    metadata_sum: bytes
    checksum: bytes
    shape: tuple[int, ...]

    def offset(self, start: int) -> int:
        """Where the payload of a record lies that begins at ``start``."""
        return padded(start + RECORD_HEADER + self.metadata_bytes)


def unpack_header(head: bytes) -> RecordHeader | None:
    """A record's header, None if these are not the 128 bytes of one or it is damaged."""
    if len(head) != RECORD_HEADER or not head.startswith(_RECORD_MAGIC) or not _intact(head):
        return None
    _, length, code, dimensions, stored, key, text_sum, payload_sum, *shape = _RECORD.unpack(head[:-8])
    if code >= len(DTYPES) or dimensions > _MOST_DIMENSIONS or max(shape) > _MOST_INT:
        return None
    return RecordHeader(length, _DTYPE_NAMES[code], stored, key, text_sum, payload_sum, tuple(shape[:dimensions]))


def read_record(file: BinaryIO, start: int) -> Record | None:
    """The record that begins at a place of an open segment, as :func:`read_header` has it."""
    size = os.fstat(file.fileno()).st_size
    file.seek(start)
    header = unpack_header(file.read(RECORD_HEADER))
    if header is None or header.offset(start) + header.stored > size:
        return None
    return _record(header, file.read(header.metadata_bytes), start)


def _record(header: RecordHeader, text: bytes, start: int) -> Record | None:
    if xxhash.xxh3_128_digest(text) != header.metadata_sum:
        return None
    info = info_from(header.key, text)
    if info is None:
        return None
    return Record(info, header.shape, header.dtype, header.checksum, start, header.offset(start), header.stored)


def read_header(raw: Tensor, start: int) -> Record | None:
    """The record that begins at a place of a segment, without a look at its payload; None if there is no whole one.

    Parameters
    ----------
    raw
        The segment's bytes, uint8.
    start
        A multiple of the alignment.
    """
    header = unpack_header(bytes(as_bytes(raw[start : start + RECORD_HEADER])))
    if header is None or header.offset(start) + header.stored > len(raw):
        return None
    return _record(header, bytes(as_bytes(raw[start + RECORD_HEADER :][: header.metadata_bytes])), start)


def info_from(key: bytes, text: bytes) -> ChunkInfo | None:
    """What metadata say about a chunk; None if something else wrote them, that knows the checksums."""
    try:
        meta = json.loads(text)
        for name in ("token_ids", "context_ids", "depends"):
            meta[name] = tuple(meta[name])
        info = ChunkInfo(ChunkKey(key.hex()), **meta)
        ids = info.token_ids + info.context_ids
        "".join((info.namespace, info.fingerprint, info.context, info.encoding)).encode()
        digests = (info.content, *info.depends)
        numbers = (info.nbytes, info.created, *(n for n in (info.expires, info.cost) if n is not None))
        fits = (
            all(len(bytes.fromhex(digest)) == len(key) for digest in digests)
            and set(map(type, ids)) <= {int}
            and min(ids, default=0) >= -1
            and max(ids, default=0) <= _MOST_INT
            and type(info.nbytes) is int
            and info.nbytes >= 0
            and max(map(abs, numbers)) < _MOST_NUMBER
            and not any(map(math.isnan, numbers))
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return info if fits else None


def scan(path: Path) -> Iterator[Record]:
    """Every record of a segment whose bytes are what was written, in the order of the file.

    Raises
    ------
    ValueError
        If it has no segment's header.
    OSError
        If it cannot be read.
    """
    raw = map_file(path)
    if _segment_name(bytes(as_bytes(raw[:SEGMENT_HEADER]))) is None:
        raise ValueError(f"{path} is no segment of format {_VERSION}")
    yield from _records(raw)


def salvage(path: Path) -> Iterator[Record]:
    """The same of a file whose header may be damaged: every record has checksums of its own."""
    yield from _records(map_file(path))


def _records(raw: Tensor) -> Iterator[Record]:
    at = SEGMENT_HEADER
    while at + RECORD_HEADER <= len(raw):
        record = read_header(raw, at)
        if record is not None:
            payload = as_bytes(raw[record.offset : record.offset + record.stored])
            if checksum_of([payload]) == record.checksum:
                yield record
                at = record.end
                continue
        at += ALIGNMENT  # what a killed writer left; the next one's records begin at some multiple


def map_file(path: Path) -> Tensor:
    """A file as uint8, mapped privately; no handle stays open, and the map lives as long as tensors on it.

    Raises
    ------
    OSError
        If it cannot be opened or mapped.
    """
    with open(path, "rb") as file:  # torch says neither that a file is absent nor that handles are short
        size = os.fstat(file.fileno()).st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be mapped: {error}") from error


# -- writing ---------------------------------------------------------------------------------------------------


def _segment_name(header: bytes) -> str | None:
    if len(header) < SEGMENT_HEADER or not _intact(header):
        return None
    magic, version, length, name = _SEGMENT.unpack(header[:-8])
    return name.hex() if (magic, version, length) == (_SEGMENT_MAGIC, _VERSION, SEGMENT_HEADER) else None


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers behind each other in as few calls as there can be."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    while views:
        if hasattr(os, "writev"):
            done = os.writev(descriptor, views[:_MOST_BUFFERS])
        else:
            done = os.write(descriptor, views[0][: 1 << 30])
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


class SegmentWriter:
    """Appends records to one segment. Holds its lock; for one thread at a time.

    Attributes
    ----------
    ident
        The catalogue's number of the segment.
    end
        Bytes of the file.
    """

    def __init__(self, path: Path, lock: FileLock, descriptor: int) -> None:
        self.path = path
        self.ident = -1
        self.end = os.fstat(descriptor).st_size
        self._lock: FileLock | None = lock
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, lock: FileLock) -> Self:
        """A new segment, durable with its name.

        Parameters
        ----------
        path
            Ends in 32 hexadecimal digits and ``.seg``; must not exist.
        lock
            Held by the caller, and by the writer from then on.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, 0o644)
        try:
            body = _SEGMENT.pack(_SEGMENT_MAGIC, _VERSION, SEGMENT_HEADER, bytes.fromhex(path.stem))
            _write_all(descriptor, [_sealed(body)])
            os.fsync(descriptor)
            sync_directory(path.parent)
            return cls(path, lock, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def resume(cls, path: Path, lock: FileLock) -> Self:
        """Go on in a segment whose writer is gone.

        Raises
        ------
        ValueError
            If it has no segment's header.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
        try:
            with open(path, "rb") as file:
                if _segment_name(file.read(SEGMENT_HEADER)) != path.stem:
                    raise ValueError(f"{path} is no segment of format {_VERSION}")
            return cls(path, lock, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, info: ChunkInfo, shape: Sequence[int], dtype: str, parts: Sequence[Buffer]) -> Record:
        """Append one record; :meth:`sync` makes it durable.

        Raises
        ------
        OSError
            If it cannot be written, or somebody else writes to the file. The writer must not be used again.
        ValueError
            If the dtype or shape cannot be stored.
        """
        head, checksum, stored = pack(info, shape, dtype, parts)
        start = padded(self.end)
        record = Record(info, tuple(shape), dtype, checksum, start, start + len(head), stored)
        faults.point("put.appending")
        before = bytes(start - self.end)
        _write_all(self._descriptor, [before, head, *parts, bytes(record.end - record.offset - stored)])
        self.end = record.end
        if os.fstat(self._descriptor).st_size != self.end:
            raise OSError(f"{self.path} was changed by somebody else")
        faults.point("put.appended")
        return record

    def sync(self) -> None:
        """Return when everything appended is durable."""
        getattr(os, "fdatasync", os.fsync)(self._descriptor)

    def close(self) -> None:
        """Let others go on in this segment. Closing twice is fine."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(self._descriptor)
            release(lock)
