"""The store that an engine is given, in whichever form."""

from __future__ import annotations

import os
from pathlib import Path

from .memory_store import MemoryStore
from .store import ChunkStore

__all__ = ["open_store"]


def open_store(store: str | os.PathLike[str] | ChunkStore | None) -> ChunkStore:
    """A store from its directory; None keeps chunks in memory.

    Raises
    ------
    StoreError
        If it cannot be opened.
    """
    if store is None:
        return MemoryStore()
    if isinstance(store, ChunkStore):
        return store
    from .file_store import FileStore  # needs packages that an engine without files does not

    return FileStore(Path(store))
