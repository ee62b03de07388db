"""Files below a URL: a bucket, a share, a directory, whatever fsspec knows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from epic_engine.errors import ConfigError

__all__ = ["Objects", "within"]

Result = TypeVar("Result")


class Objects:
    """Objects by their names relative to a URL. Errors are those of the file system behind it.

    Parameters
    ----------
    url
        Such as ``"s3://bucket/prefix"`` or ``"file:///mnt/share"``.
    storage_options
        What fsspec hands to the file system: credentials, endpoints.

    Raises
    ------
    ConfigError
        If fsspec, or the package for this kind of URL, is not installed, or the URL or options cannot be used.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        try:
            import fsspec
            from fsspec.implementations.local import LocalFileSystem
        except ImportError as error:
            raise ConfigError("a remote store needs fsspec: pip install 'epic-rag[remote]'") from error
        self.url = url
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
        except Exception as error:  # every file system has errors of its own
            raise ConfigError(
                f"{url!r} cannot be used as a remote store: {error}. Give a URL that fsspec knows and its storage "
                "options, and install the package behind it (s3fs for s3://, gcsfs for gs://)."
            ) from error
        self._root = str(root).rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes of an object from ``start`` to before ``end``; fewer if it ends before that."""
        path = self._path(name)
        try:
            return bytes(self._fs.cat_file(path, start=start, end=end))
        except FileNotFoundError:
            raise
        except Exception:
            # A range behind the end is an error of the server for some, which looks like any other.
            if start and self._fs.info(path)["size"] <= start:
                return b""
            raise

    def read_small(self, name: str, most: int) -> bytes:
        """A whole object.

        Raises
        ------
        ValueError
            If it has more than ``most`` bytes.
        """
        found = self.read(name, 0, most + 1)
        if len(found) > most:
            raise ValueError(f"{name} has more than {most:,} bytes")
        return found

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object in place of the one before; readers see either."""
        path = self._path(name)
        if not self._local:  # object stores replace objects as a whole
            self._making(path, lambda: self._fs.pipe_file(path, data))
            return
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        self._making(path, lambda: self._fs.pipe_file(temporary, data))
        self._fs.mv(temporary, path)

    def upload(self, name: str, file: Path) -> None:
        """Copy a file there.

        Raises
        ------
        OSError
            If it did not arrive whole.
        """
        path = self._path(name)
        self._making(path, lambda: self._fs.put_file(str(file), path))
        self._fs.invalidate_cache()
        found, size = self._fs.info(path)["size"], file.stat().st_size
        if found != size:
            raise OSError(f"{self.url}/{name} has {found:,} bytes where {size:,} were written")

    def _making(self, path: str, write: Callable[[], object]) -> None:
        """Write, and make the directory if the file system has directories and this one is missing."""
        try:
            write()
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder, the folder included."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{path.rstrip('/').rpartition('/')[2]}" for path in found)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects."""
        if names:
            self._fs.rm([self._path(name) for name in names])


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of a call, or what it raised.

    Raises
    ------
    TimeoutError
        If it takes longer; the call goes on by itself, on a thread that nobody waits for.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="epic-remote-call", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None
