"""Where the engine keeps what it can make again: converted models and results of the correctness gate."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The cache folder: ``$EPIC_RAG_CACHE``, or the user's cache folder. Not made here; safe to delete."""
    chosen = os.environ.get("EPIC_RAG_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    try:
        from platformdirs import user_cache_path
    except ImportError:  # the engine works with torch and transformers alone
        return Path.home() / ".cache" / "epic-rag"
    return user_cache_path("epic-rag")
