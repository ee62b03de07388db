"""The interface of a chunk store: what every kind of store can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from epic_engine.chunks import ChunkKey

from .payload import Encoded

__all__ = ["ChunkInfo", "ChunkStore", "GcReport", "StoreUsage", "VerifyReport"]


@dataclass(frozen=True)
class ChunkInfo:
    """What a catalogue knows about a chunk without touching its KV.

    Attributes
    ----------
    key
        Content address.
    namespace, fingerprint
        Tenant and model it belongs to.
    content
        :func:`~epic_engine.chunks.content_digest` of the token ids.
    context
        Name of the compile context, such as ``"head"``.
    token_ids, context_ids
        The chunk's tokens, and those that stood before it while it was compiled.
    nbytes
        Bytes of KV.
    created
        Seconds since the epoch.
    depends
        :func:`~epic_engine.chunks.content_digest` of the neighbours it was compiled behind: it must not outlive them.
    expires
        Seconds since the epoch from which it is a miss; None: never.
    cost
        Seconds that compiling it took; None where that is unknown. Decides which chunks are worth their bytes.
    encoding
        How its KV is kept, see :mod:`epic_engine.storage.payload`. The fingerprint says whether it was rounded, too: a
        store may compress it, and never rounds it by itself.
    """

    key: ChunkKey
    namespace: str
    fingerprint: str
    content: str
    context: str
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    nbytes: int
    created: float
    depends: tuple[str, ...] = ()
    expires: float | None = None
    cost: float | None = None
    encoding: str = "raw"


@dataclass
class VerifyReport:
    """What a check of the whole store found.

    Attributes
    ----------
    checked
        Chunks looked at.
    corrupt, missing
        Keys whose bytes differ from what was written, or are gone. Both are misses until compiled again.
    orphans
        Files that no catalogue entry names (left by a process that was killed between two steps).
    quarantined
        Keys that were set aside before, because their bytes were damaged; harmless.
    strays
        Entries of the catalogue's indices that lead to no chunk, left where damaged rows were mended; harmless.
    """

    checked: int = 0
    corrupt: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    strays: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.corrupt or self.missing or self.orphans)


@dataclass(frozen=True)
class StoreUsage:
    """What a store holds.

    Attributes
    ----------
    models
        ``(chunks, bytes)`` by ``(namespace, fingerprint)``; bytes as stored, with what the store adds.
    dead_bytes
        Bytes that deleted and replaced chunks still take.
    quarantined
        Chunks that were set aside.
    """

    models: dict[tuple[str, str], tuple[int, int]]
    dead_bytes: int = 0
    quarantined: int = 0

    @property
    def chunks(self) -> int:
        """Chunks of all namespaces and models."""
        return sum(chunks for chunks, _ in self.models.values())

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(nbytes for _, nbytes in self.models.values())


@dataclass
class GcReport:
    """What a garbage collection removed.

    Attributes
    ----------
    expired
        Chunks whose time was over.
    files
        Files, relative to the store.
    nbytes
        Bytes of these files.
    quarantined
        Chunks that had been set aside and whose bytes are gone.
    leases
        Leases that nobody holds any more.
    """

    expired: int = 0
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    quarantined: int = 0
    leases: int = 0


class ChunkStore(ABC):
    """Keeps compiled chunks by key. All methods may be called from any thread."""

    @abstractmethod
    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor | Encoded]]) -> None:
        """Keep chunks, all of them or none; returns when they are durable. Known keys are replaced.

        Parameters
        ----------
        chunks
            Catalogue entries with KV ``(layers, 2, kv_heads, tokens, head_dim)``, or with what :meth:`stored` gave,
            of which no number is rounded again.

        Raises
        ------
        StoreError
            If they cannot be written, or a quota or the store's budget has no room for them.
        """

    @abstractmethod
    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""

    @abstractmethod
    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk, without a copy where it can be mapped.

        Raises
        ------
        ChunkNotFoundError
            If the store does not have it, or had to set it aside because its bytes were damaged.
        """

    @abstractmethod
    def stored(self, key: ChunkKey) -> tuple[ChunkInfo, Encoded]:
        """Entry of a chunk with its KV as it is kept, not decoded, its bytes checked; counts as no use.

        Raises
        ------
        ChunkNotFoundError
            As :meth:`load`.
        """

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to bring chunks near that are about to be loaded, where they are far; returns at once."""
        return

    @abstractmethod
    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids, oldest first."""

    @abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; returns how many there were. KV in use stays readable until it is released."""

    @abstractmethod
    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids, for all models, and every chunk compiled behind one of them.

        Parameters
        ----------
        namespace
            Tenant; others' chunks stay.
        contents
            :func:`~epic_engine.chunks.content_digest` of the token ids.

        Returns
        -------
        int
            Chunks forgotten.
        """

    @abstractmethod
    def erase_namespace(self, namespace: str) -> int:
        """Forget every chunk of a tenant, and its quota; returns how many chunks there were."""

    @abstractmethod
    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries, oldest first."""

    @abstractmethod
    def verify(self, *, repair: bool = False, quick: bool = False) -> VerifyReport:
        """Compare every chunk with what was written.

        Parameters
        ----------
        repair
            Drop what is damaged or unnamed.
        quick
            Compare sizes and headers with the catalogue, without reading KV.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be stored."""

    @abstractmethod
    def close(self) -> None:
        """Release files; the store cannot be used afterwards."""

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which of the keys the store has."""
        return {key for key in keys if self.info(key) is not None}

    # -- what stays and what goes ------------------------------------------------------------------------------

    @abstractmethod
    def pin(self, keys: Sequence[ChunkKey]) -> int:
        """Never evict these chunks for lack of room; returns how many of them there are. They can be deleted."""

    @abstractmethod
    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """Let pinned chunks be evicted again; returns how many of them there are."""

    @abstractmethod
    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit what a tenant may take; None: no limit. Holds from the next put on.

        A put beyond it evicts the tenant's own least worthy chunks.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Chunks and bytes by namespace and model, and what could be given back."""

    @abstractmethod
    def gc(self) -> GcReport:
        """Remove what is expired, and files and entries that nothing needs."""

    @abstractmethod
    def compact(self, *, live_share: float = 0.5) -> int:
        """Give the bytes of deleted chunks back to the disk.

        Parameters
        ----------
        live_share
            Rewrite files of which a smaller share than this is still needed; 1.0: all with anything deleted in them,
            after which nothing of a deleted chunk is left but in files that another process writes to.

        Returns
        -------
        int
            Bytes given back.
        """

    # -- who compiles what -------------------------------------------------------------------------------------

    @abstractmethod
    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Take the right to compile chunks, which other processes then wait for.

        Parameters
        ----------
        keys
            Chunks, stored or not.
        seconds
            How long it lasts unless it is released or this process ends; a second call prolongs it.

        Returns
        -------
        set of ChunkKey
            Those that nobody else holds.
        """

    @abstractmethod
    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Give leases back; others' stay."""
