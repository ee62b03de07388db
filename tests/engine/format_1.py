"""A store of format 1, written by hand: a SQLite catalogue and one safetensors file a chunk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import xxhash
from epic_engine import ChunkInfo
from safetensors.torch import save_file
from torch import Tensor

_SCHEMA = """
CREATE TABLE chunks (
    key TEXT PRIMARY KEY, namespace TEXT NOT NULL, fingerprint TEXT NOT NULL, content TEXT NOT NULL,
    context TEXT NOT NULL, token_ids BLOB NOT NULL, context_ids BLOB NOT NULL, nbytes INTEGER NOT NULL,
    shape TEXT NOT NULL, dtype TEXT NOT NULL, checksum TEXT NOT NULL, created REAL NOT NULL, depends TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX chunks_by_content ON chunks (namespace, content, fingerprint, created);
CREATE TABLE dependencies (
    content TEXT NOT NULL,
    key TEXT NOT NULL REFERENCES chunks (key) ON DELETE CASCADE,
    PRIMARY KEY (content, key)
) WITHOUT ROWID;
CREATE INDEX dependencies_by_key ON dependencies (key);
PRAGMA user_version=1;
"""


def file_of(store: Path, info: ChunkInfo) -> Path:
    """Where a chunk's file lies."""
    return store / "kv" / info.key.hex[:2] / f"{info.key}.safetensors"


def write_format_1(store: Path, chunks: Sequence[tuple[ChunkInfo, Tensor]]) -> None:
    """Write a store as the first version did."""
    (store / "tmp").mkdir(parents=True)
    with closing(sqlite3.connect(store / "catalogue.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(_SCHEMA)
        for info, kv in chunks:
            file = file_of(store, info)
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({"kv": kv}, file, metadata={"format": "epic-rag chunk", "token_ids": json.dumps(info.token_ids)})
            raw = kv.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            ids = [np.asarray(i, dtype="<i4").tobytes() for i in (info.token_ids, info.context_ids)]
            db.execute(
                f"INSERT INTO chunks VALUES ({','.join('?' * 13)})",
                (
                    info.key.hex, info.namespace, info.fingerprint, info.content, info.context, *ids, kv.nbytes,
                    json.dumps(list(kv.shape)), str(kv.dtype), xxhash.xxh3_128_hexdigest(raw), info.created,
                    json.dumps(info.depends),
                ),
            )  # fmt: skip
            db.executemany("INSERT INTO dependencies VALUES (?, ?)", [(c, info.key.hex) for c in info.depends])
