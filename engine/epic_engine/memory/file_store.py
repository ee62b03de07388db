"""A chunk store in one directory: KV in safetensors files, a SQLite catalogue beside them.

::

    DIR/catalogue.sqlite            one row a chunk; what is not in here does not exist
    DIR/kv/ab/abcd….safetensors     one file a chunk, named by its key, mapped into memory when it is linked
    DIR/tmp/<writer>/               files being written; swept when their writer is gone

A chunk is written to ``tmp``, flushed to disk, renamed into ``kv`` and only then entered into the catalogue. A
process that dies in between leaves at most a file that nothing names; the next writer of the same key replaces it.
Files appear in ``kv`` and leave it inside a catalogue transaction only, so no process removes what another one is
about to enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, StoreError, StoreFormatError

from .store import ChunkInfo, ChunkStore, VerifyReport

__all__ = ["FileStore"]

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE chunks (
    key TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    content TEXT NOT NULL,
    context TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    context_ids BLOB NOT NULL,
    nbytes INTEGER NOT NULL,
    shape TEXT NOT NULL,
    dtype TEXT NOT NULL,
    checksum TEXT NOT NULL,
    created REAL NOT NULL,
    depends TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX chunks_by_content ON chunks (namespace, content, fingerprint, created);
CREATE TABLE dependencies (
    content TEXT NOT NULL,
    key TEXT NOT NULL REFERENCES chunks (key) ON DELETE CASCADE,
    PRIMARY KEY (content, key)
) WITHOUT ROWID;
CREATE INDEX dependencies_by_key ON dependencies (key);
"""
_COLUMNS = "key, namespace, fingerprint, content, context, token_ids, context_ids, nbytes, created, depends"


def _checksum(kv: Tensor) -> str:
    flat = kv.detach().contiguous().cpu().flatten()
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else "empty"


def _pack(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _unpack(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, dtype="<i4").tolist())


def _row(info: ChunkInfo, kv: Tensor) -> tuple[object, ...]:
    """A chunk as the catalogue keeps it, in the order of the schema."""
    return (
        info.key.hex,
        info.namespace,
        info.fingerprint,
        info.content,
        info.context,
        _pack(info.token_ids),
        _pack(info.context_ids),
        kv.nbytes,
        json.dumps(list(kv.shape)),
        str(kv.dtype),
        _checksum(kv),
        info.created,
        json.dumps(info.depends),
    )


def _fsync_directory(path: Path) -> None:
    if os.name == "nt":  # a directory cannot be opened there, and a rename is durable without it
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileStore(ChunkStore):
    """Chunks in one directory, shared by any number of threads and processes.

    Parameters
    ----------
    path
        Directory; made if absent.

    Raises
    ------
    StoreFormatError
        If it was written by a newer version.
    StoreError
        If it cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock = threading.RLock()
        # A map is open for as long as somebody reads it: how many are is for them to say.
        self._maps: WeakValueDictionary[ChunkKey, Tensor] = WeakValueDictionary()
        self._writer: tuple[Path, FileLock] | None = None
        try:
            (self.path / "kv").mkdir(parents=True, exist_ok=True)
            (self.path / "tmp").mkdir(exist_ok=True)
            self._db = sqlite3.connect(
                self.path / "catalogue.sqlite", timeout=60, isolation_level=None, check_same_thread=False
            )
            self._open_catalogue()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the chunk store {self.path} cannot be opened: {error}. Give a directory that can be written, or "
                "move the damaged catalogue.sqlite away and ingest again."
            ) from error
        self._sweep()

    def _open_catalogue(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA foreign_keys=ON")
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.strip().split(";"):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
            elif version != _SCHEMA_VERSION:
                raise StoreFormatError(
                    f"the chunk store {self.path} has format {version}, this version reads {_SCHEMA_VERSION}: "
                    "upgrade epic-rag, or ingest into a new directory."
                )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors, such as a full disk, have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def _sweep(self) -> None:
        """Remove what writers left that are gone: their lock can be taken."""
        for lock_path in (self.path / "tmp").glob("*.lock"):
            lock = FileLock(lock_path)
            try:
                lock.acquire(timeout=0)
            except (Timeout, OSError):
                continue
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            # Unlinked while held: a new writer never reuses a name, so nobody waits for this file.
            lock_path.unlink(missing_ok=True)
            lock.release()

    def _scratch(self) -> Path:
        if self._writer is None:
            directory = self.path / "tmp" / uuid.uuid4().hex
            lock = FileLock(directory.with_suffix(".lock"))
            lock.acquire()
            directory.mkdir()
            self._writer = directory, lock
        return self._writer[0]

    def _file(self, key: ChunkKey) -> Path:
        return self.path / "kv" / key.hex[:2] / f"{key.hex}.safetensors"

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor]]) -> None:
        """Keep chunks; returns when they are durable."""
        with self._lock:
            self._check_open()
            scratch = self._scratch()
            written: list[tuple[Path, Path]] = []
            rows = []
            try:
                for info, kv in chunks:
                    kv = kv.detach().contiguous().cpu()
                    target = self._file(info.key)
                    written.append((scratch / target.name, target))
                    self._write(written[-1][0], info, kv)
                    rows.append(_row(info, kv))
                with self._transaction():
                    self._publish(written)
                    self._db.executemany(f"INSERT OR REPLACE INTO chunks VALUES ({','.join('?' * 13)})", rows)
                    self._db.executemany(
                        "INSERT OR REPLACE INTO dependencies VALUES (?, ?)",
                        [(content, info.key.hex) for info, _ in chunks for content in info.depends],
                    )
            except (OSError, SafetensorError, sqlite3.Error) as error:
                for temporary, _ in written:
                    temporary.unlink(missing_ok=True)
                raise StoreError(f"{len(chunks)} chunks could not be written to {self.path}: {error}") from error
            for info, _ in chunks:
                self._maps.pop(info.key, None)

    def _write(self, file: Path, info: ChunkInfo, kv: Tensor) -> None:
        metadata = {
            "format": "epic-rag chunk",
            "key": info.key.hex,
            "fingerprint": info.fingerprint,
            "context": info.context,
            "token_ids": json.dumps(info.token_ids),
        }
        save_file({"kv": kv}, file, metadata=metadata)
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())

    def _publish(self, written: Sequence[tuple[Path, Path]]) -> None:
        """Rename finished files to their places, durably."""
        directories = {target.parent for _, target in written}
        for directory in directories:
            if not directory.exists():
                directory.mkdir(exist_ok=True)
                _fsync_directory(directory.parent)
        for temporary, target in dict.fromkeys(written):
            os.replace(temporary, target)
        for directory in directories:
            _fsync_directory(directory)

    def _info(self, row: tuple[object, ...]) -> ChunkInfo:
        key, namespace, fingerprint, content, context, token_ids, context_ids, nbytes, created, depends = row
        return ChunkInfo(
            ChunkKey(str(key)),
            str(namespace),
            str(fingerprint),
            str(content),
            str(context),
            _unpack(token_ids),  # type: ignore[arg-type]
            _unpack(context_ids),  # type: ignore[arg-type]
            int(nbytes),  # type: ignore[call-overload]
            float(created),  # type: ignore[arg-type]
            tuple(json.loads(str(depends))),
        )

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""
        with self._lock:
            self._check_open()
            row = self._db.execute(f"SELECT {_COLUMNS} FROM chunks WHERE key=?", (key.hex,)).fetchone()
        return self._info(row) if row else None

    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk as a memory map, compared with its checksum when this process first opens it.

        Raises
        ------
        ChunkNotFoundError
            If it is not stored, or was damaged: then it is taken out of the catalogue, so that it is compiled again.
        """
        with self._lock:
            self._check_open()
            row = self._db.execute("SELECT shape, dtype, checksum FROM chunks WHERE key=?", (key.hex,)).fetchone()
            if row is None:
                self._maps.pop(key, None)
                raise ChunkNotFoundError(f"chunk {key} is not in {self.path}: compile its tokens again.")
            mapped = self._maps.get(key)
            if mapped is not None:
                return mapped
            try:
                kv = self._map(key)
                intact = json.loads(row[0]) == list(kv.shape) and row[1] == str(kv.dtype) and row[2] == _checksum(kv)
                reason = "its bytes differ from what was written"
            except (FileNotFoundError, SafetensorError, ValueError) as error:
                intact, reason = False, str(error)
            except OSError as error:  # says nothing about the chunk: too many open files, no permission, …
                raise StoreError(f"chunk {key} could not be read from {self.path}: {error}") from error
            if not intact:
                self.delete([key])
                raise ChunkNotFoundError(f"chunk {key} was set aside ({reason}): compile its tokens again.")
            self._maps[key] = kv
            return kv

    def _map(self, key: ChunkKey) -> Tensor:
        path = self._file(key)
        with open(path, "rb"):  # tells why a file cannot be opened; safetensors says "no such file" to everything
            pass
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("kv")

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids, oldest first."""
        with self._lock:
            self._check_open()
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM chunks WHERE namespace=? AND fingerprint=? AND content=? "
                "ORDER BY created, key",
                (namespace, fingerprint, content),
            ).fetchall()
        return [self._info(row) for row in rows]

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids and what was compiled behind them."""
        found: dict[str, None] = {}
        with self._lock:
            self._check_open()
            for content in contents:
                for (key,) in self._db.execute(
                    "SELECT key FROM chunks WHERE namespace=? AND content=? UNION "
                    "SELECT c.key FROM dependencies d JOIN chunks c ON c.key = d.key "
                    "WHERE d.content=? AND c.namespace=?",
                    (namespace, content, content, namespace),
                ):
                    found[key] = None
        return self.delete([ChunkKey(key) for key in found])

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the catalogue entry goes first, then the file."""
        with self._transaction():
            count = 0
            for key in keys:
                count += self._db.execute("DELETE FROM chunks WHERE key=?", (key.hex,)).rowcount
        with self._transaction():
            for key in keys:
                self._maps.pop(key, None)
                if not self._named(key.hex):  # another process may have stored it again
                    with contextlib.suppress(OSError):
                        self._file(key).unlink(missing_ok=True)
        return count

    def _named(self, hexadecimal: str) -> bool:
        return self._db.execute("SELECT 1 FROM chunks WHERE key=?", (hexadecimal,)).fetchone() is not None

    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries, oldest first."""
        with self._lock:
            self._check_open()
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM chunks ORDER BY created, key").fetchall()
        return (self._info(row) for row in rows)

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Read every chunk and compare it with its checksum; look for files that nothing names."""
        report = VerifyReport()
        # Files are listed first: one that is written meanwhile must not look like an orphan.
        files = {p.stem: p for p in (self.path / "kv").glob("*/*.safetensors")}
        with self._lock:
            self._check_open()
            rows = self._db.execute("SELECT key, shape, dtype, checksum FROM chunks").fetchall()
        for hexadecimal, shape, dtype, checksum in rows:
            report.checked += 1
            files.pop(hexadecimal, None)
            key = ChunkKey(hexadecimal)
            try:
                kv = self._map(key)
                if json.loads(shape) != list(kv.shape) or dtype != str(kv.dtype) or checksum != _checksum(kv):
                    report.corrupt.append(hexadecimal)
            except FileNotFoundError:
                report.missing.append(hexadecimal)
            except (SafetensorError, ValueError):
                report.corrupt.append(hexadecimal)
            except OSError as error:
                raise StoreError(f"chunk {key} could not be read from {self.path}: {error}") from error
        if repair:
            self.delete([ChunkKey(k) for k in report.corrupt + report.missing])
        with self._transaction():
            orphans = sorted(path for stem, path in files.items() if not self._named(stem))
            if repair:
                for path in orphans:
                    path.unlink(missing_ok=True)
        report.orphans = [str(path.relative_to(self.path)) for path in orphans]
        return report

    def free_bytes(self) -> int:
        """Free bytes on the disk."""
        return shutil.disk_usage(self.path).free

    def _check_open(self) -> None:
        if self._db is None:
            raise StoreError(f"the chunk store {self.path} was closed: open it again.")

    def close(self) -> None:
        """Close the catalogue and remove this writer's scratch folder."""
        with self._lock:
            if self._db is None:
                return
            self._maps.clear()
            self._db.close()
            self._db = None  # type: ignore[assignment]
            if self._writer is not None:
                directory, lock = self._writer
                shutil.rmtree(directory, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()
                self._writer = None
