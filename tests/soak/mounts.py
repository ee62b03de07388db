"""Disks of a process's own, where it may mount any: small ones, and ones that cannot be written."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["read_only", "tmpfs"]

_NEW_MOUNTS, _READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    text = [part.encode() for part in (source, target, kind)]
    _call("mount", *text, ctypes.c_ulong(flags), options.encode())


def _private() -> bool:
    """Have mounts that nobody else sees and that end with this process; whether that is allowed here."""
    if sys.platform != "linux":
        return False
    try:
        _call("unshare", _NEW_MOUNTS)
        _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    except OSError:
        return False
    return True


def tmpfs(folder: Path, nbytes: int) -> Callable[[int], None] | None:
    """Mount a disk of some bytes on a folder; returns what gives it another size, None where that is not allowed."""
    if not _private():
        return None
    _mount("none", str(folder), "tmpfs", 0, f"size={nbytes}")
    return lambda size: _mount("none", str(folder), "tmpfs", _REMOUNT, f"size={size}")


def read_only(folder: Path) -> Callable[[bool], None] | None:
    """Mount a folder on itself; returns what forbids or allows writing, None where that is not allowed."""
    if not _private():
        return None
    _mount(str(folder), str(folder), "", _BIND)
    return lambda forbidden: _mount("none", str(folder), "", _REMOUNT | _BIND | (_READ_ONLY if forbidden else 0))
