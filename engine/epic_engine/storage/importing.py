"""Chunks into a store, from safetensors files that anybody may have written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ConfigError, StoreError, StoreFormatError

from .exchange_format import (
    DIGEST,
    FILE_NAME,
    FORMAT,
    INDEX,
    LENGTH,
    MOST_HEADER,
    VERSION,
    Exported,
    digest_of,
    read_metadata,
)
from .payload import Encoded, decode
from .segments import as_bytes
from .store import ChunkInfo, ChunkStore

__all__ = ["ImportReport", "import_chunks"]

_BATCH_BYTES = 64 << 20
_BATCH_CHUNKS = 256
_MOST_INDEX = 16 << 20

_Tensor = tuple[str, tuple[int, ...], tuple[int, int]]  # dtype, shape, where it begins and ends


@dataclass
class ImportReport:
    """What was imported.

    Attributes
    ----------
    chunks
        Chunks that are new in the store.
    known
        Chunks that it had already, and that were left as they are.
    skipped
        Chunks of other namespaces than the one asked for, and expired ones.
    problems
        Files and chunks that could not be imported, or not all of them, by name or key, and why.
    """

    chunks: int = 0
    known: int = 0
    skipped: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)


def import_chunks(
    store: ChunkStore,
    path: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Put what :func:`export_chunks` wrote into a store.

    A file is believed nothing that can be checked: every chunk's bytes are compared with their checksums, its token
    ids with its digest, and its key with what a key is made of, so that it cannot take the place of other tokens, of
    another namespace or model. What cannot be checked is that the KV is what the model makes of the tokens: import only
    what comes from somebody who may compile for you.

    Chunks are put in batches. A call that was interrupted goes on where it stopped when it is repeated.

    Parameters
    ----------
    store
        Where the chunks go. It compresses them if it compresses what it is given; nothing is rounded again.
    path
        Directory of an export, or one of its files. Of a damaged export all that is intact is imported.
    namespace
        Only chunks of this tenant.
    progress
        Called with chunks done, whatever became of them, and chunks to do as far as that is known.

    Raises
    ------
    StoreFormatError
        If ``path`` is a file that a newer version wrote.
    StoreError
        If this is no export, or the store has no room; what was put before stays.
    """
    source = Path(path).expanduser().absolute()
    run = _Import(store, namespace, progress)
    try:
        if source.is_dir():
            run.directory(source)
        else:
            run.single(source)
    except OSError as error:
        raise StoreError(f"{source} cannot be read: {error}. Give an export's directory or a file from it.") from error
    return run.report


class _Import:
    def __init__(self, store: ChunkStore, namespace: str | None, progress: Callable[[int, int], None] | None) -> None:
        self.report = ImportReport()
        self._store = store
        self._namespace = namespace
        self._progress = progress
        self._done = self._total = 0

    def directory(self, source: Path) -> None:
        """Import all files of an export."""
        present = sorted(path.name for path in source.iterdir() if FILE_NAME.fullmatch(path.name) and path.is_file())
        index = _read_index(source / INDEX)
        if index is None:
            if not present:
                raise StoreError(f"{source} is no export: it holds neither {INDEX} nor chunks-00001.safetensors.")
            self._problem(INDEX, "absent or damaged: whether files are missing is not known")
        else:
            self._total = sum(chunks for chunks, _ in index.values())
            for name in sorted(index.keys() - set(present)):
                self._problem(name, "the file is missing")
        for name in present:
            try:
                with open(source / name, "rb") as file:
                    self._file(file, name, index[name][1] if index and name in index else None)
            except (OSError, ValueError, StoreFormatError) as error:
                self._problem(name, str(error))

    def single(self, source: Path) -> None:
        """Import one file."""
        if not source.is_file():
            raise StoreError(f"{source} is no export: give the directory that was exported to, or a file from it.")
        with open(source, "rb") as file:
            try:
                self._file(file, source.name, None)
            except ValueError as error:
                raise StoreError(f"{source} is no file of an export, or damaged: {error}.") from error

    def _problem(self, name: str, reason: str) -> None:
        self.report.problems.append((name[:80], reason))

    def _file(self, file: BinaryIO, name: str, expected: int | None) -> None:
        """Import the chunks of a file.

        Raises
        ------
        StoreFormatError
            If a newer version wrote it.
        ValueError
            If it has no header that can be read.
        OSError
            If it cannot be read.
        """
        size = os.fstat(file.fileno()).st_size
        header = _Header(file, size)
        self._total = max(self._total, self._done + len(header.keys))
        if expected not in (None, size):
            self._problem(name, f"it has {size} bytes, {expected} according to {INDEX}")
        for stray in header.strays:
            self._problem(stray, f"it is in {name} and belongs to no chunk")
        known = self._store.known(header.keys)
        batch: list[tuple[ChunkInfo, Encoded]] = []
        waiting = lost = 0
        for key in header.keys:
            try:
                chunk = header.chunk(key)
                info = chunk.info
                expired = info.expires is not None and info.expires <= time.time()
                if expired or self._namespace not in (None, info.namespace):
                    self.report.skipped += 1
                elif key in known:
                    self.report.known += 1
                elif header.end_of(chunk) > size:
                    lost += 1
                else:
                    kept = header.payload(chunk)
                    batch.append((info, kept))
                    waiting += kept.nbytes
            except (OSError, ValueError) as error:
                self._problem(key.hex, str(error))
            if waiting >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
                self._put(batch)
                waiting = 0
            self._done += 1
            if self._progress:
                self._progress(self._done, self._total)
        self._put(batch)
        if header.end > size:
            self._problem(name, f"it was cut: of {header.end} bytes it has {size}, and {lost} chunks are lost")
        elif header.end < size:
            self._problem(name, f"it has {size - header.end} bytes behind its end")

    def _put(self, batch: list[tuple[ChunkInfo, Encoded]]) -> None:
        if batch:
            self._store.put(batch)
        self.report.chunks += len(batch)
        batch.clear()


class _Header:
    """A file's header, and the tensors that it describes.

    Attributes
    ----------
    keys
        Chunks, in the order in which they are named.
    strays
        Names of tensors and metadata that belong to no chunk.
    end
        Bytes that the file should have.

    Raises
    ------
    StoreFormatError
        If a newer version wrote it.
    ValueError
        If it is no export's, or damaged.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(size - LENGTH, MOST_HEADER):
            raise ValueError("it has no safetensors header, or only a part of it")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            found, version = metadata.pop("format"), metadata.pop("version")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError("its header is damaged, or it is no export") from error
        if found != FORMAT or not all(isinstance(text, str) for text in (version, *metadata.values())):
            raise ValueError("its header is damaged, or it is no export")
        if version != str(VERSION):
            raise StoreFormatError(
                f"the export has version {version[:20]!r}, this one reads {VERSION}: upgrade epic-rag."
            )
        self._file = file
        self._metadata: dict[str, str] = metadata
        self._begin = LENGTH + length
        self._tensors = {name: _tensor(entry) for name, entry in header.items()}
        at = 0
        for _, _, (begin, end) in sorted(self._tensors.values(), key=lambda tensor: tensor[2]):
            if begin != at or end < begin:  # so that no byte is two chunks'
                raise ValueError("its header is damaged: tensors overlap, or something lies between them")
            at = end
        self.end = self._begin + at
        self.keys: list[ChunkKey] = []
        self.strays: list[str] = []
        for name in metadata:
            try:
                self.keys.append(ChunkKey(name.removesuffix(DIGEST)))
            except ConfigError:
                self.strays.append(name)
        self.keys = list(dict.fromkeys(self.keys))
        known = {key.hex for key in self.keys}
        self.strays += [name for name in self._tensors if name.rpartition(".")[0] not in known]

    def chunk(self, key: ChunkKey) -> Exported:
        """What the file says about a chunk; ValueError if that cannot be."""
        text = self._metadata.get(key.hex, "")
        if digest_of(text.encode()) != self._metadata.get(key.hex + DIGEST):
            raise ValueError("its metadata are damaged")
        chunk = read_metadata(key, text)
        for part in chunk.parts:
            dtype, shape, (begin, end) = self._tensors.get(f"{key}.{part.name}", ("", (), (0, 0)))
            if (dtype, shape, end - begin) != (part.dtype, part.shape, part.nbytes):
                raise ValueError(f"its tensor {part.name} is missing or does not fit")
        return chunk

    def end_of(self, chunk: Exported) -> int:
        """Bytes that the file needs to hold a chunk."""
        return self._begin + max(self._tensors[f"{chunk.info.key}.{part.name}"][2][1] for part in chunk.parts)

    def payload(self, chunk: Exported) -> Encoded:
        """A chunk's bytes; ValueError if they are not what was exported."""
        raw = torch.empty(sum(part.nbytes for part in chunk.parts), dtype=torch.uint8)
        rest = as_bytes(raw)
        for part, checksum in zip(chunk.parts, chunk.checksums, strict=True):
            piece, rest = rest[: part.nbytes], rest[part.nbytes :]
            self._file.seek(self._begin + self._tensors[f"{chunk.info.key}.{part.name}"][2][0])
            if self._file.readinto(piece) != len(piece) or digest_of(piece) != checksum:  # type: ignore[attr-defined]
                raise ValueError(f"the bytes of its tensor {part.name} differ from what was exported")
        decode(raw, chunk.info.encoding, chunk.shape, chunk.dtype)
        return Encoded((raw,), chunk.info.encoding, chunk.shape, chunk.dtype)


def _tensor(entry: Any) -> _Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("its header is damaged") from error
    if not isinstance(dtype, str) or any(type(number) is not int for number in (*shape, begin, end)):
        raise ValueError("its header is damaged")
    return dtype, shape, (begin, end)


def _read_index(path: Path) -> dict[str, tuple[int, int]] | None:
    """Chunks and bytes of each file that an index names; None if there is no index, or it cannot be trusted."""
    try:
        with open(path, "rb") as file:
            index = json.loads(file.read(_MOST_INDEX))
        files = {entry["name"]: (entry["chunks"], entry["bytes"]) for entry in index["files"]}
        fits = (index["format"], index["version"]) == (FORMAT, VERSION) and all(
            FILE_NAME.fullmatch(name) and all(type(number) is int for number in numbers)
            for name, numbers in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return files if fits else None
