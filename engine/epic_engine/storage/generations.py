"""The published catalogues that were brought here: the newest is looked up in, and it works without the network.

::

    DIR/current.json                       as it was published
    DIR/<generation>-<32 hex>/catalogue.sqlite
    DIR/incoming-<32 hex>/                 being fetched
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from epic_engine.errors import StoreError

from .segments import sync_directory
from .snapshots import CURRENT, MOST_CURRENT, Current, Snapshot, download

__all__ = ["Generations"]

_ABANDONED = 24 * 3600.0


class Generations:
    """Published catalogues in a directory that several processes share.

    Parameters
    ----------
    directory
        Made if absent.

    Raises
    ------
    OSError
        If it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Snapshot | None:
        """The catalogue that was adopted last, by whichever process; None if there is none that can be read."""
        try:
            with open(self._directory / CURRENT, "rb") as file:
                current = Current.of(file.read(MOST_CURRENT))
            return self._opened(current)
        except (OSError, ValueError, StoreError, sqlite3.Error):
            return None

    def adopt(self, text: bytes, read: Callable[[str, int, int], bytes]) -> Snapshot:
        """Fetch the catalogue that a remote ``current.json`` names, unless it is here already.

        Parameters
        ----------
        text
            Of that file.
        read
            Reads bytes of an object.

        Raises
        ------
        ValueError, StoreFormatError
            If it is damaged, forged, or another version's.
        OSError, sqlite3.Error
            If it cannot be kept here; and whatever ``read`` raises.
        """
        current = Current.of(text)
        found: Snapshot | None = None
        with contextlib.suppress(OSError, StoreError, sqlite3.Error):
            found = self._opened(current)
        if found is None:
            self._fetch(current, read)
            found = self._opened(current)
        self._point_to(text)
        self._clean(found.directory)
        return found

    def forget(self, snapshot: Snapshot) -> None:
        """Remove a catalogue that turned out to be damaged here."""
        shutil.rmtree(snapshot.directory, ignore_errors=True)

    def _home(self, current: Current) -> Path:
        return self._directory / current.name.removeprefix("catalogues/").partition(".")[0]

    def _opened(self, current: Current) -> Snapshot:
        return Snapshot(self._home(current), current)

    def _fetch(self, current: Current, read: Callable[[str, int, int], bytes]) -> None:
        home = self._home(current)
        incoming = self._directory / f"incoming-{uuid.uuid4().hex}"
        incoming.mkdir()
        try:
            download(read, current, incoming / "catalogue.sqlite")
            shutil.rmtree(home, ignore_errors=True)  # one that cannot be opened
            with contextlib.suppress(OSError):  # another process was quicker
                os.rename(incoming, home)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _point_to(self, text: bytes) -> None:
        temporary = self._directory / f"{CURRENT}.{uuid.uuid4().hex}.tmp"
        temporary.write_bytes(text)
        os.replace(temporary, self._directory / CURRENT)
        sync_directory(self._directory)

    def _clean(self, keep: Path) -> None:
        """Remove older catalogues, which other processes read on, and what killed ones have left."""
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith("incoming-") or path.name.endswith(".tmp"):
                    if time.time() - path.stat().st_mtime < _ABANDONED:
                        continue
                elif not (path.is_dir() and path.name.partition("-")[0].isdigit()) or path == keep:
                    continue
                shutil.rmtree(path) if path.is_dir() else path.unlink()
