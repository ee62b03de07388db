"""Chunks out of a store, as safetensors files that need nothing of ours to be read."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from epic_engine.chunks import ChunkKey
from epic_engine.contexts import CompileContext
from epic_engine.errors import ChunkNotFoundError, ConfigError, StoreError

from . import faults
from .exchange_format import (
    DIGEST,
    FILE_NAME,
    FORMAT,
    INDEX,
    LENGTH,
    LOCK,
    VERSION,
    Exported,
    digest_of,
    expected_key,
    file_name,
    write_metadata,
)
from .locks import release, take
from .payload import encode, joined
from .segments import as_bytes, sync_directory
from .store import ChunkInfo, ChunkStore

__all__ = ["ExportReport", "export_chunks"]

_TEMPORARY = ".tmp"
# A header is made and parsed in memory. Beside its metadata a chunk has at most two tensors and a digest in it.
_HEADER_BYTES = 16 << 20
_TENSOR_ENTRIES = 600


@dataclass
class ExportReport:
    """What was exported.

    Attributes
    ----------
    chunks
        Chunks written.
    files
        Names of the files with them.
    nbytes
        Bytes of these files.
    missing
        Keys that were asked for, or listed by the store, and that it did not have or set aside as damaged.
    """

    chunks: int = 0
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    missing: list[str] = field(default_factory=list)


def export_chunks(
    store: ChunkStore,
    path: str | os.PathLike[str],
    *,
    keys: Iterable[ChunkKey] | None = None,
    namespace: str | None = None,
    file_bytes: int = 2 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write chunks to a directory, from which :func:`import_chunks` or any reader of safetensors gets them back.

    Tensors hold what the store holds, bit for bit and without compression. Memory is needed for one chunk and for a
    file's header. Pins, quotas and counts of uses stay behind.

    Parameters
    ----------
    store
        Where the chunks are.
    path
        Directory; made if absent. Must be empty, or hold an export that was killed, which is removed.
    keys
        Which chunks; None: all that are not expired.
    namespace
        Only chunks of this tenant. Others' keys are missing.
    file_bytes
        What the tensors of one file may take; a chunk that is larger gets its own.
    progress
        Called with chunks written and chunks to write.

    Raises
    ------
    ConfigError
        If ``file_bytes`` is not positive.
    StoreError
        If the directory holds anything else, another process exports to it, or it cannot be written. Nothing of the
        export is left in it then.
    """
    if file_bytes < 1:
        raise ConfigError(f"file_bytes={file_bytes} must be positive.")
    target = Path(path).expanduser().absolute()
    try:
        target.mkdir(parents=True, exist_ok=True)
        _check_vacant(target)
        lock = take(target / LOCK)
        if lock is None:
            raise StoreError(f"another process exports to {target}, or it allows no locks: give another directory.")
        try:
            _check_vacant(target)
            _clear(target)
            return _Export(store, target, namespace, file_bytes, progress).run(keys)
        except BaseException:
            with contextlib.suppress(OSError):
                _clear(target)
            raise
        finally:
            release(lock, remove=True)
    except OSError as error:
        raise StoreError(
            f"the export to {target} could not be written: {error}. Free disk space, or give another directory."
        ) from error


def _check_vacant(target: Path) -> None:
    names = set(os.listdir(target))
    if INDEX in names:
        raise StoreError(f"{target} holds an export already: give another directory, or remove it first.")
    if names and (LOCK not in names or not all(name == LOCK or _is_ours(name) for name in names)):
        raise StoreError(f"{target} is not empty: give a directory that holds nothing else.")


def _is_ours(name: str) -> bool:
    base = name.removesuffix(_TEMPORARY)
    return FILE_NAME.fullmatch(base) is not None or base == INDEX


def _clear(target: Path) -> None:
    for name in os.listdir(target):
        if _is_ours(name):
            (target / name).unlink()


class _Export:
    """One export to a directory that is ours."""

    def __init__(
        self,
        store: ChunkStore,
        target: Path,
        namespace: str | None,
        file_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._store = store
        self._target = target
        self._namespace = namespace
        self._file_bytes = file_bytes
        self._progress = progress
        self._report = ExportReport()
        self._index: list[dict[str, object]] = []
        self._total = 0

    def run(self, keys: Iterable[ChunkKey] | None) -> ExportReport:
        chosen = None if keys is None else list(dict.fromkeys(keys))
        self._total = self._count() if chosen is None else len(chosen)
        batch: list[Exported] = []
        data = header = 0
        for key in self._listed() if chosen is None else chosen:
            chunk = self._checked(key)
            if chunk is None:
                continue
            nbytes = sum(part.nbytes for part in chunk.parts)
            described = len(json.dumps(write_metadata(chunk))) + _TENSOR_ENTRIES
            if batch and (data + nbytes > self._file_bytes or header + described > _HEADER_BYTES):
                self._write_file(batch)
                batch, data, header = [], 0, 0
            batch.append(chunk)
            data += nbytes
            header += described
        if batch:
            self._write_file(batch)
        index = {"format": FORMAT, "version": VERSION, "chunks": self._report.chunks, "files": self._index}
        self._write(INDEX, [json.dumps(index, indent=1).encode()])
        return self._report

    def _count(self) -> int:
        models = self._store.usage().models.items()
        return sum(chunks for (namespace, _), (chunks, _) in models if self._namespace in (None, namespace))

    def _listed(self) -> Iterator[ChunkKey]:
        return (info.key for info in self._store.entries() if self._namespace in (None, info.namespace))

    def _checked(self, key: ChunkKey) -> Exported | None:
        """What is to be said about a chunk; its bytes are read once for that, and again when they are written."""
        try:
            info, kept = self._store.stored(key)
            if self._namespace not in (None, info.namespace):
                raise ChunkNotFoundError(f"chunk {key} is not of namespace {self._namespace!r}.")
            base = kept.encoding.partition("+")[0]
            plain = as_bytes(joined(encode(kept, base)))
        except (ChunkNotFoundError, ValueError):
            self._report.missing.append(key.hex)
            return None
        info = replace(info, encoding=base, nbytes=kept.kv_nbytes)
        chunk = Exported(info, kept.shape, kept.dtype, (), self._head(info))
        begins = [0]
        for part in chunk.parts:
            begins.append(begins[-1] + part.nbytes)
        sums = [digest_of(plain[a:b]) for a, b in itertools.pairwise(begins)]
        return replace(chunk, checksums=tuple(sums))

    def _head(self, info: ChunkInfo) -> str | None:
        """Identity of what stood before the neighbours that a chunk was compiled behind; None if nothing tells."""
        heads = self._heads(info) if info.depends else iter(())
        return next((head for head in heads if expected_key(info, head) == info.key), None)

    def _heads(self, info: ChunkInfo) -> Iterator[str]:
        """What may have stood there: the same as before the chunk's and its neighbours' forms without neighbours."""
        for content in (info.content, *info.depends):
            for form in self._store.forms(info.namespace, info.fingerprint, content):
                yield CompileContext(form.context, form.context_ids).identity
        # Where there is one neighbour, the tokens before it are known, but not where it begins.
        for length in range(len(info.context_ids)):
            yield CompileContext(info.context, info.context_ids[:length]).identity

    def _write_file(self, batch: list[Exported]) -> None:
        """Write these chunks, without those that go meanwhile."""
        # Numbers begin at multiples of their size if the widest come first.
        batch.sort(key=lambda chunk: -chunk.dtype.itemsize if chunk.info.encoding == "raw" else 0)
        name = file_name(len(self._report.files) + 1)
        while batch:
            try:
                nbytes, digest = self._write(name, self._pieces(batch))
            except _Changed as changed:
                anew = self._checked(batch[changed.at].info.key)
                batch[changed.at : changed.at + 1] = [anew] if anew is not None else []
                continue
            self._report.files.append(name)
            self._report.chunks += len(batch)
            self._report.nbytes += nbytes
            self._index.append({"name": name, "chunks": len(batch), "bytes": nbytes, "xxh3_128": digest})
            return
        (self._target / f"{name}{_TEMPORARY}").unlink()  # every chunk of it is gone

    def _pieces(self, batch: list[Exported]) -> Iterator[bytes | memoryview]:
        """The bytes of a file: header, then one chunk after the other.

        Raises
        ------
        _Changed
            If a chunk is no longer what the header says.
        """
        metadata = {"format": FORMAT, "version": str(VERSION)}
        tensors: dict[str, object] = {"__metadata__": metadata}
        at = 0
        for chunk in batch:
            key, text = chunk.info.key.hex, write_metadata(chunk)
            metadata |= {key: text, key + DIGEST: digest_of(text.encode())}
            for part in chunk.parts:
                tensors[f"{key}.{part.name}"] = {
                    "dtype": part.dtype,
                    "shape": part.shape,
                    "data_offsets": [at, at + part.nbytes],
                }
                at += part.nbytes
        header = json.dumps(tensors, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        yield len(header).to_bytes(LENGTH, "little") + header
        for number, chunk in enumerate(batch):
            try:
                _, kept = self._store.stored(chunk.info.key)
                plain = as_bytes(joined(encode(kept, chunk.info.encoding)))
            except (ChunkNotFoundError, ValueError):
                raise _Changed(number) from None
            for part, checksum in zip(chunk.parts, chunk.checksums, strict=True):
                if digest_of(plain[: part.nbytes]) != checksum:
                    raise _Changed(number)
                yield plain[: part.nbytes]
                plain = plain[part.nbytes :]
            if self._progress:
                self._progress(self._report.chunks + number + 1, self._total)

    def _write(self, name: str, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Write a file that is whole and durable, or not there; returns its bytes and their digest."""
        temporary = self._target / f"{name}{_TEMPORARY}"
        digest = xxhash.xxh3_128()
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                faults.point("export.writing")
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        faults.point("export.written")
        os.replace(temporary, self._target / name)
        faults.point("export.renamed")
        sync_directory(self._target)
        return nbytes, digest.hexdigest()


class _Changed(Exception):  # noqa: N818
    """A chunk is gone, or was stored anew, since the header was made."""

    def __init__(self, at: int) -> None:
        self.at = at
