"""What a compiled chunk is, and the name that says everything its KV depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .errors import ConfigError

__all__ = ["FORMAT_VERSION", "ChunkKey", "CompiledChunk", "content_digest"]

# Raise when the meaning of stored KV changes (layout, rotation, order of dimensions): old chunks become misses.
FORMAT_VERSION = 1


def content_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 of exact token ids, in hex."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True, order=True)
class ChunkKey:
    """Content address of a compiled chunk.

    Attributes
    ----------
    hex
        SHA-256 in hex over format version, model fingerprint, namespace, compile context and token ids. Change any
        of them and it is another key, so a stale chunk is a miss and never a wrong hit.
    """

    hex: str

    def __post_init__(self) -> None:
        """Refuse what is no SHA-256, before it becomes part of a path."""
        if len(self.hex) != 64 or set(self.hex) - set("0123456789abcdef"):
            raise ConfigError(f"{self.hex[:80]!r} is no chunk key: 64 lower-case hexadecimal digits are expected.")

    def __str__(self) -> str:
        """The hex digest."""
        return self.hex

    @classmethod
    def of(cls, fingerprint: str, namespace: str, context: str, token_ids: Sequence[int]) -> ChunkKey:
        """Key of the given tokens.

        Parameters
        ----------
        fingerprint
            :func:`~epic_engine.model.fingerprint.model_fingerprint` of the model.
        namespace
            Tenant.
        context
            Identity of the compile context (:attr:`~epic_engine.contexts.CompileContext.identity`).
        token_ids
            The chunk's exact tokens.
        """
        return cls.of_content(fingerprint, namespace, context, content_digest(token_ids))

    @classmethod
    def of_content(cls, fingerprint: str, namespace: str, context: str, content: str) -> ChunkKey:
        """Key of the tokens with this :func:`content_digest`; otherwise as :meth:`of`."""
        digest = hashlib.sha256()
        for part in (str(FORMAT_VERSION), fingerprint, namespace, context, content):
            raw = part.encode()
            digest.update(struct.pack("<q", len(raw)) + raw)
        return cls(digest.hexdigest())


@dataclass(frozen=True, eq=False)
class CompiledChunk:
    """Immutable, relocatable KV of a piece of text.

    Attributes
    ----------
    key
        Its name.
    token_ids
        The tokens it was compiled from.
    context_ids
        The tokens that stood before it while it was compiled; their KV was dropped. Where a prompt's prefix equals
        them, the chunk's KV is exact.
    kv
        ``(layers, 2, kv_heads, tokens, head_dim)``: keys in canonical order rotated at slots 0 … n - 1, and values.
        May be a view of a file on disk.
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    kv: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return self.kv.nbytes
