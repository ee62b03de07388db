"""A file system in memory that breaks when a test says so, registered with fsspec as ``faulty``."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyFileSystem(MemoryFileSystem):
    """All instances share one set of files and one set of switches; :meth:`reset` before each test."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    reads: ClassVar[list[str]] = []
    writes: ClassVar[int] = 0
    fail_at: ClassVar[int | None] = None
    """Number of the change that fails; every one after it, too: the process is dead."""
    torn: ClassVar[bool] = False
    """The failing change leaves half of what it writes."""
    down: ClassVar[bool] = False
    slow: ClassVar[float] = 0.0
    reading: ClassVar[int] = 0
    most_at_once: ClassVar[int] = 0
    _count: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.reads.clear()
        cls.writes, cls.fail_at, cls.torn, cls.down, cls.slow, cls.most_at_once = 0, None, False, False, 0.0, 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "/", 1))

    @classmethod
    def files(cls) -> dict[str, bytes]:
        """Everything that is there."""
        return {name: file.getvalue() for name, file in cls.store.items()}

    @classmethod
    def replace(cls, name: str, data: bytes) -> None:
        """Write a file behind everybody's back."""
        MemoryFileSystem.pipe_file(cls(), name, data)

    def _changes(self) -> bool:
        """Count a change; whether it fails."""
        cls = type(self)
        cls.writes += 1
        return cls.fail_at is not None and cls.writes >= cls.fail_at

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        cls = type(self)
        with cls._count:
            cls.reading += 1
            cls.most_at_once = max(cls.most_at_once, cls.reading)
        if cls.slow:
            time.sleep(cls.slow)
        with cls._count:
            cls.reading -= 1
        if cls.down:
            raise ConnectionError("no route to host")
        with cls._count:
            cls.reads.append(path)
        return super().cat_file(path, start=start, end=end, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if self._changes():
            raise ConnectionResetError("killed")
        super().pipe_file(path, value, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if self._changes():
            if self.torn:
                with open(lpath, "rb") as file:
                    data = file.read()
                super().pipe_file(rpath, data[: len(data) // 2])
            raise ConnectionResetError("killed")
        super().put_file(lpath, rpath, **options)

    def rm_file(self, path: str) -> None:
        if self._changes():
            raise ConnectionResetError("killed")
        super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for one in [path] if isinstance(path, str) else path:
            self.rm_file(one)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
