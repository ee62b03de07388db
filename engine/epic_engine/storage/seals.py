"""Seals of the catalogue's rows: SQLite has no checksums, so a row has one of its own.

A seal is over all that the catalogue says about a chunk but where it lies, names instead of their numbers. Where it
lies needs none: what lies there has a checksum, which is under the seal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ConfigError

from .store import ChunkInfo

__all__ = ["NAMED", "SEALED", "entry_of", "is_whole", "pack_ids", "pack_row", "seal", "unpack_ids", "unpack_row"]

# Text is read as bytes: those of a damaged name may be no UTF-8, for which SQLite's driver fails the whole query.
SEALED = (
    "c.key, CAST(n.name AS BLOB), CAST(f.name AS BLOB), c.content, CAST(x.name AS BLOB), c.token_ids, c.context_ids, "
    "c.nbytes, c.created, c.depends, c.expires, c.cost, CAST(c.encoding AS BLOB), c.shape, CAST(c.dtype AS BLOB), "
    "c.checksum, c.seal"
)
"""What a seal is over, and at last the seal: columns of a query from :data:`NAMED`."""

NAMED = (
    "chunks c LEFT JOIN namespaces n ON n.id = c.namespace LEFT JOIN fingerprints f ON f.id = c.fingerprint "
    "LEFT JOIN contexts x ON x.id = c.context"
)

_HEAD = struct.Struct("<12IqdddB")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as packed int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(raw: bytes) -> tuple[int, ...]:
    """The inverse of :func:`pack_ids`."""
    return tuple(np.frombuffer(raw, dtype="<i4").tolist())


def seal(row: Sequence[Any]) -> bytes:
    """The seal of a row: XXH3-64, 8 bytes.

    Parameters
    ----------
    row
        As :data:`SEALED`, with or without a seal.

    Raises
    ------
    TypeError, struct.error
        If a value has another type than what is entered.
    """
    key, namespace, fingerprint, content, context, ids, context_ids, nbytes, created, depends, expires, cost = row[:12]
    parts = (key, namespace, fingerprint, content, context, ids, context_ids, depends, *row[12:16])
    # The sum makes -0.0 what it is when it comes back from SQLite, and is for numbers alone.
    numbers = (created + 0.0, 0.0 if expires is None else expires + 0.0, 0.0 if cost is None else cost + 0.0)
    there = (expires is not None) | (cost is not None) << 1
    return xxhash.xxh3_64_digest(b"".join((_HEAD.pack(*map(len, parts), nbytes, *numbers, there), *parts)))


def is_whole(row: Sequence[Any]) -> bool:
    """Whether a row, as :data:`SEALED`, is what was entered."""
    try:
        return seal(row) == row[16]
    except (TypeError, struct.error):
        return False


def pack_row(info: ChunkInfo, shape: Sequence[int], dtype: str, checksum: bytes) -> tuple[Any, ...]:
    """A chunk's entry as :data:`SEALED`, without a seal."""
    return (
        bytes.fromhex(info.key.hex),
        info.namespace.encode(),
        info.fingerprint.encode(),
        bytes.fromhex(info.content),
        info.context.encode(),
        pack_ids(info.token_ids),
        pack_ids(info.context_ids),
        info.nbytes,
        info.created,
        b"".join(bytes.fromhex(digest) for digest in info.depends),
        info.expires,
        info.cost,
        info.encoding.encode(),
        pack_ids(shape),
        dtype.encode(),
        checksum,
    )


def unpack_row(row: Sequence[Any]) -> ChunkInfo:
    """The entry that a whole row, as :data:`SEALED`, is of."""
    key, namespace, fingerprint, content, context, ids, context_ids, nbytes, created, depends, expires, cost = row[:12]
    return ChunkInfo(
        ChunkKey(key.hex()),
        namespace.decode(),
        fingerprint.decode(),
        content.hex(),
        context.decode(),
        unpack_ids(ids),
        unpack_ids(context_ids),
        nbytes,
        created,
        tuple(depends[i : i + 32].hex() for i in range(0, len(depends), 32)),
        expires,
        cost,
        row[12].decode(),
    )


def entry_of(row: Sequence[Any]) -> ChunkInfo | None:
    """The entry of a row, as :data:`SEALED`, or None if that is damaged."""
    try:
        return unpack_row(row) if is_whole(row) else None
    except (ValueError, ConfigError):  # a seal is no signature
        return None
