"""The interface of a chunk store, and the simplest one: in memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError

__all__ = ["ChunkInfo", "ChunkStore", "MemoryStore", "VerifyReport"]


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
    """

    checked: int = 0
    corrupt: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.corrupt or self.missing or self.orphans)


class ChunkStore(ABC):
    """Keeps compiled chunks by key. All methods may be called from any thread."""

    @abstractmethod
    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor]]) -> None:
        """Keep chunks; returns when they are durable. Known keys are replaced.

        Parameters
        ----------
        chunks
            Catalogue entries with KV ``(layers, 2, kv_heads, tokens, head_dim)``.
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
    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries, oldest first."""

    @abstractmethod
    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Compare every chunk with what was written; with ``repair`` drop what is damaged or unnamed."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be stored."""

    @abstractmethod
    def close(self) -> None:
        """Release files; the store cannot be used afterwards."""

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which of the keys the store has."""
        return {key for key in keys if self.info(key) is not None}


class MemoryStore(ChunkStore):
    """Keeps chunks in this process; they are gone when it ends."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkKey, tuple[ChunkInfo, Tensor]] = {}
        self._lock = threading.Lock()

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor]]) -> None:
        """Keep chunks."""
        with self._lock:
            for info, kv in chunks:
                self._chunks[info.key] = (info, kv.clone())

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""
        entry = self._chunks.get(key)
        return entry[0] if entry else None

    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk."""
        entry = self._chunks.get(key)
        if entry is None:
            raise ChunkNotFoundError(f"chunk {key} is not in memory: compile its tokens again.")
        return entry[1]

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids."""
        wanted = (namespace, fingerprint, content)
        return [i for i in self.entries() if (i.namespace, i.fingerprint, i.content) == wanted]

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks."""
        with self._lock:
            return sum(self._chunks.pop(key, None) is not None for key in keys)

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids and what was compiled behind them."""
        gone = set(contents)
        mine = [i for i in self.entries() if i.namespace == namespace]
        return self.delete([i.key for i in mine if i.content in gone or not gone.isdisjoint(i.depends)])

    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries."""
        with self._lock:
            infos = [info for info, _ in self._chunks.values()]
        return iter(sorted(infos, key=lambda info: (info.created, info.key)))

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Memory needs no check: counts the chunks."""
        return VerifyReport(checked=len(self._chunks))

    def free_bytes(self) -> int:
        """Free memory of this machine."""
        return available_memory()

    def close(self) -> None:
        """Forget everything."""
        self._chunks.clear()


def available_memory() -> int:
    """Bytes of memory that can be had without swapping; a large number where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
