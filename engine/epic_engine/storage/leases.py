"""Who compiles what: rights to a chunk that end with a time or with the process that holds them."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from epic_engine.chunks import ChunkKey

from .catalogue import Catalogue
from .locks import abandoned, release, take

__all__ = ["Leases"]

_OWNER = re.compile("[0-9a-f]{32}")


class Leases:
    """Leases of one store object.

    A lease holds until it is given back, its time is over, or the lock of its owner can be taken, which means that
    the owner's process has ended.

    Parameters
    ----------
    catalogue
        Where leases stand.
    directory
        Where owners keep their locks.
    """

    def __init__(self, catalogue: Catalogue, directory: Path) -> None:
        self._catalogue = catalogue
        self._directory = directory
        self._owner = uuid.uuid4().hex
        self._lock: FileLock | None = None

    def _file(self, owner: str) -> Path:
        return self._directory / f"{owner}.lock"

    def _is_gone(self, owner: object) -> bool:
        # Locking makes a file, or empties it, so that nothing else may be taken for a lock.
        named = isinstance(owner, str) and _OWNER.fullmatch(owner) is not None
        return not named or abandoned(self._file(str(owner)))

    def take(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Take or prolong leases; returns the chunks that nobody else holds."""
        granted: set[ChunkKey] = set()
        alive: dict[str, bool] = {self._owner: True}
        with self._catalogue.transaction(durable=False) as db:
            if self._lock is None:
                self._directory.mkdir(exist_ok=True)
                self._lock = take(self._file(self._owner))
            now = time.time()
            for key in dict.fromkeys(keys):
                raw = bytes.fromhex(key.hex)
                row = db.execute("SELECT owner, seconds, expires FROM leases WHERE key = ?", (raw,)).fetchone()
                if row is not None and row[0] != self._owner:
                    owner, lasts, expires = row
                    # More than it lasts lies before its end if the clock was set back since: nobody can tell then.
                    if now < expires <= now + lasts:
                        if owner not in alive:
                            alive[owner] = not self._is_gone(owner)
                        if alive[owner]:
                            continue
                db.execute(
                    "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", (raw, self._owner, seconds, now + seconds)
                )
                granted.add(key)
        return granted

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Give leases back; others' stay."""
        rows = [(bytes.fromhex(key.hex), self._owner) for key in keys]
        with self._catalogue.transaction(durable=False) as db:
            db.executemany("DELETE FROM leases WHERE key = ? AND owner = ?", rows)

    def collect(self) -> int:
        """Drop the leases that nobody holds any more, and the locks of owners that are gone; returns how many."""
        names = {path.stem for path in self._directory.glob("*.lock")}
        gone = {name for name in names if name != self._owner and abandoned(self._file(name))}
        with self._catalogue.transaction(durable=False) as db:
            now = time.time()
            count = 0
            for key, owner, lasts, expires in db.execute("SELECT key, owner, seconds, expires FROM leases").fetchall():
                if owner in gone or not self._file(owner).exists() or not now < expires <= now + lasts:
                    count += db.execute("DELETE FROM leases WHERE key = ?", (key,)).rowcount
        for name in gone:
            lock = take(self._file(name))
            if lock is not None:
                release(lock, remove=True)
        return count

    def close(self) -> None:
        """Give every lease back."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if self._catalogue.writable:
                with self._catalogue.transaction(durable=False) as db:
                    db.execute("DELETE FROM leases WHERE owner = ?", (self._owner,))
            release(lock, remove=os.name != "nt")
