"""Locks that say whether a process is alive: the system frees them when it ends, however it ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["abandoned", "release", "take"]


def take(path: Path) -> FileLock | None:
    """Lock a file, made if absent; None if somebody holds it or this directory knows no locks."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return None
    return lock


def release(lock: FileLock, *, remove: bool = False) -> None:
    """Give a lock free, with ``remove`` together with its file, whose name must never be used again."""
    if remove:  # while it is held: whoever locks the unlinked file finds that what it stood for is gone
        try:
            Path(lock.lock_file).unlink(missing_ok=True)
        except OSError:  # an open file cannot be removed on Windows
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def abandoned(path: Path) -> bool:
    """Whether nobody holds a lock any more."""
    if not path.exists():
        return True
    lock = take(path)
    if lock is None:
        return False
    lock.release()
    return True
