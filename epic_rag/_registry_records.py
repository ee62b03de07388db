"""What the registry holds: its records, their checks, and how they lie in the rows of its tables."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from epic_rag.errors import RegistryError

__all__ = [
    "CHUNK_COLUMNS",
    "DOCUMENT_COLUMNS",
    "KEY_FORM",
    "ChunkRecord",
    "DocumentRecord",
    "ListedDocument",
    "check_chunks",
    "check_embeddings",
    "chunk_from_row",
    "chunk_row",
    "document_from_row",
    "document_row",
]

KEY_FORM: Final = re.compile(r"[0-9a-f]+")
CHUNK_COLUMNS: Final = "chunk_id, doc_id, ordinal, text, token_ids, key"
DOCUMENT_COLUMNS: Final = "doc_id, source, content_hash, settings_hash, metadata, added_at"


@dataclass(frozen=True)
class ChunkRecord:
    """A chunk of an ingested document.

    Parameters
    ----------
    chunk_id
        ``f"{doc_id}#{ordinal}"``.
    doc_id
        The document it belongs to.
    ordinal
        Its place in the document, from 0.
    text
        Its text, exactly as compiled.
    token_ids
        Its tokens, exactly as compiled.
    key
        Lower-case hexadecimal name of its compiled KV.

    Raises
    ------
    RegistryError
        If `chunk_id` and `key` are not of these forms.
    """

    chunk_id: str
    doc_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    key: str

    def __post_init__(self) -> None:
        if self.chunk_id != f"{self.doc_id}#{self.ordinal}":
            raise RegistryError(f"chunk_id is {self.chunk_id!r}: it must be '{self.doc_id}#{self.ordinal}'")
        if not KEY_FORM.fullmatch(self.key):
            raise RegistryError(f"chunk {self.chunk_id!r}: key is {self.key!r}: pass lower-case hexadecimal digits")


@dataclass(frozen=True)
class DocumentRecord:
    """An ingested document, without its text.

    Parameters
    ----------
    doc_id
        Its id.
    source
        Where it came from.
    content_hash
        Of its content, see :func:`epic_rag.documents.content_hash`.
    settings_hash
        Of the settings that it was chunked with.
    metadata
        Strings shown beside answers.
    added_at
        When it was ingested, in seconds since the epoch.
    """

    doc_id: str
    source: str
    content_hash: str
    settings_hash: str
    metadata: Mapping[str, str] = field(hash=False)
    added_at: float


@dataclass(frozen=True)
class ListedDocument:
    """A document as it is listed.

    Attributes
    ----------
    document
        The document.
    chunks, tokens
        How many it holds.
    """

    document: DocumentRecord
    chunks: int
    tokens: int


def check_chunks(doc_id: str, chunks: Sequence[ChunkRecord]) -> None:
    """Refuse chunks that are not a document's own, numbered from 0."""
    for place, chunk in enumerate(chunks):
        if (chunk.doc_id, chunk.ordinal) != (doc_id, place):
            raise RegistryError(
                f"chunk {place} of document {doc_id!r} is {chunk.chunk_id!r}: pass its own chunks, "
                "numbered from 0 without gaps"
            )


def check_embeddings(embeddings: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    """Refuse embeddings that are not finite float32 of shape ``(count, dim)``; return them little-endian."""
    if embeddings.ndim != 2 or len(embeddings) != count:
        raise RegistryError(f"embeddings have shape {embeddings.shape}: pass one row a chunk, shape ({count}, dim)")
    if embeddings.dtype != np.float32:
        raise RegistryError(f"embeddings are {embeddings.dtype}: convert them with .astype(np.float32)")
    if not np.isfinite(embeddings).all():
        raise RegistryError("embeddings hold NaN or infinite values: check the embedder's output")
    return np.ascontiguousarray(embeddings, "<f4")


def document_row(document: DocumentRecord) -> tuple[Any, ...]:
    """Return a document's values for :data:`DOCUMENT_COLUMNS`."""
    return (
        document.doc_id,
        document.source,
        document.content_hash,
        document.settings_hash,
        json.dumps(dict(document.metadata), ensure_ascii=False),
        document.added_at,
    )


def document_from_row(row: Sequence[Any]) -> DocumentRecord:
    """Return the document of a row of :data:`DOCUMENT_COLUMNS`."""
    doc_id, source, content_hash, settings_hash, metadata, added_at = row
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RegistryError(f"the metadata of document {doc_id!r} are damaged: add the document again")
    return DocumentRecord(doc_id, source, content_hash, settings_hash, found, added_at)


def chunk_row(chunk: ChunkRecord, embedding: npt.NDArray[np.float32]) -> tuple[Any, ...]:
    """Return a chunk's values for :data:`CHUNK_COLUMNS`, ``token_count`` and ``embedding``."""
    ids = np.asarray(chunk.token_ids, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise RegistryError(f"chunk {chunk.chunk_id!r}: token ids must lie in 0 to 2**31 - 1")
    packed = ids.astype("<i4").tobytes()
    return (
        *(chunk.chunk_id, chunk.doc_id, chunk.ordinal, chunk.text, packed, chunk.key),
        *(ids.size, embedding.tobytes()),
    )


def chunk_from_row(row: Sequence[Any]) -> ChunkRecord:
    """Return the chunk of a row of :data:`CHUNK_COLUMNS`."""
    chunk_id, doc_id, ordinal, text, packed, key = row
    if len(packed) % 4:
        raise RegistryError(f"the token ids of chunk {chunk_id!r} are damaged: add its document again")
    return ChunkRecord(chunk_id, doc_id, ordinal, text, tuple(np.frombuffer(packed, "<i4").tolist()), key)
