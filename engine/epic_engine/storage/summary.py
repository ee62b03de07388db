"""What a store holds, for people who look after it: counted in the catalogue, no chunk is read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .catalogue import Catalogue

__all__ = ["ChunkGroup", "StoreSummary", "summarise"]


@dataclass(frozen=True)
class ChunkGroup:
    """Chunks of one namespace, model, compile context and encoding.

    Attributes
    ----------
    namespace, fingerprint, context, encoding
        What they have in common.
    chunks, tokens
        How many there are.
    kv_bytes, stored_bytes
        Bytes of their KV, and of what lies on disk for it.
    """

    namespace: str
    fingerprint: str
    context: str
    encoding: str
    chunks: int
    tokens: int
    kv_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class StoreSummary:
    """What a store holds.

    Attributes
    ----------
    groups
        Its chunks, by what they have in common.
    quotas
        Bytes that a namespace may take.
    budget
        Bytes that all chunks may take; None: no limit.
    pinned, pinned_bytes
        Chunks that are never evicted, and what they take.
    expired
        Chunks whose time is over.
    """

    groups: tuple[ChunkGroup, ...]
    quotas: dict[str, int]
    budget: int | None
    pinned: int
    pinned_bytes: int
    expired: int


def summarise(catalogue: Catalogue) -> StoreSummary:
    """Count what a catalogue has, the expired chunks included."""
    groups = catalogue.query(
        "SELECT n.name, f.name, x.name, g.encoding, g.chunks, g.tokens, g.nbytes, g.stored FROM ("
        "SELECT namespace, fingerprint, context, encoding, count(*) chunks, sum(length(token_ids)) / 4 tokens, "
        "sum(nbytes) nbytes, sum(span) stored FROM chunks GROUP BY namespace, fingerprint, context, encoding) g "
        "JOIN namespaces n ON n.id = g.namespace JOIN fingerprints f ON f.id = g.fingerprint "
        "JOIN contexts x ON x.id = g.context ORDER BY 1, 2, 3, 4"
    )
    quotas = catalogue.query("SELECT name, quota FROM namespaces WHERE quota IS NOT NULL ORDER BY name")
    pinned, pinned_bytes = catalogue.query("SELECT count(*), coalesce(sum(span), 0) FROM ranks WHERE pinned")[0]
    expired = catalogue.query("SELECT count(*) FROM chunks WHERE expires <= ?", (time.time(),))[0][0]
    budget = catalogue.setting("max_bytes")
    return StoreSummary(
        tuple(ChunkGroup(*row) for row in groups),
        dict(quotas),
        None if budget is None else int(budget),
        pinned,
        pinned_bytes,
        expired,
    )
