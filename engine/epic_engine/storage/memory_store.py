"""The simplest chunk store: in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, StoreError
from epic_engine.memory.budget import available_memory

from .eviction import no_room, victims, weight
from .payload import Encoded, decode, encode, joined
from .store import ChunkInfo, ChunkStore, GcReport, StoreUsage, VerifyReport

__all__ = ["MemoryStore"]


@dataclass
class _Entry:
    info: ChunkInfo
    kept: Encoded
    uses: int
    priority: float


class MemoryStore(ChunkStore):
    """Keeps chunks in this process; they are gone when it ends."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkKey, _Entry] = {}
        self._pinned: set[ChunkKey] = set()
        self._quotas: dict[str, int] = {}
        self._clock = 0.0
        self._lock = threading.RLock()

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor | Encoded]]) -> None:
        """Keep chunks."""
        try:
            new = {info.key: (info, _kept(info, kv)) for info, kv in chunks}
        except ValueError as error:
            raise StoreError(f"{len(chunks)} chunks could not be kept: {error}") from error
        with self._lock:
            gone: set[ChunkKey] = set()
            clock = self._clock
            for namespace in {info.namespace for info, _ in new.values()}:
                chosen, reached = self._make_room(namespace, new)
                gone.update(chosen)
                clock = max(clock, reached)
            self._clock = clock
            for key in gone:
                del self._chunks[key]
            for key, (info, kept) in new.items():
                self._chunks[key] = _Entry(info, kept, 1, self._clock + weight(info, kept.nbytes))

    def _make_room(
        self, namespace: str, new: dict[ChunkKey, tuple[ChunkInfo, Encoded]]
    ) -> tuple[list[ChunkKey], float]:
        quota = self._quotas.get(namespace)
        if quota is None:
            return [], self._clock
        others = [e for k, e in self._chunks.items() if e.info.namespace == namespace and k not in new]
        wanted = sum(kept.nbytes for info, kept in new.values() if info.namespace == namespace)
        now = time.time()
        ranked = sorted(
            ((e.info.key, e.kept.nbytes, e.priority) for e in others if e.info.key not in self._pinned),
            key=lambda r: (not _expired(self._chunks[r[0]].info, now), r[2], r[0]),
        )
        found = victims(ranked, sum(e.kept.nbytes for e in others) + wanted - quota)
        if found is None:
            pinned = sum(e.kept.nbytes for e in others if e.info.key in self._pinned)
            raise no_room(f"namespace {namespace!r}", quota, wanted, pinned)
        return found

    def _entry(self, key: ChunkKey) -> _Entry | None:
        entry = self._chunks.get(key)
        return None if entry is None or _expired(entry.info) else entry

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""
        entry = self._entry(key)
        return entry.info if entry else None

    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk."""
        with self._lock:
            entry = self._entry(key)
            if entry is None:
                raise ChunkNotFoundError(f"chunk {key} is not in memory: compile its tokens again.")
            entry.uses += 1
            kept = entry.kept
            entry.priority = self._clock + entry.uses * weight(entry.info, kept.nbytes)
        return decode(joined(kept), kept.encoding, kept.shape, kept.dtype)

    def stored(self, key: ChunkKey) -> tuple[ChunkInfo, Encoded]:
        """Entry of a chunk with its KV as it is kept."""
        with self._lock:
            entry = self._entry(key)
            if entry is None:
                raise ChunkNotFoundError(f"chunk {key} is not in memory: compile its tokens again.")
            return entry.info, entry.kept

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids."""
        wanted = (namespace, fingerprint, content)
        return [i for i in self.entries() if (i.namespace, i.fingerprint, i.content) == wanted]

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks."""
        with self._lock:
            self._pinned.difference_update(keys)
            return sum(self._chunks.pop(key, None) is not None for key in keys)

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids and what was compiled behind them."""
        gone = set(contents)
        with self._lock:
            mine = [e.info for e in self._chunks.values() if e.info.namespace == namespace]
            return self.delete([i.key for i in mine if i.content in gone or not gone.isdisjoint(i.depends)])

    def erase_namespace(self, namespace: str) -> int:
        """Forget every chunk of a tenant, and its quota."""
        with self._lock:
            self._quotas.pop(namespace, None)
            return self.delete([k for k, e in self._chunks.items() if e.info.namespace == namespace])

    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries."""
        with self._lock:
            infos = [entry.info for entry in self._chunks.values() if not _expired(entry.info)]
        return iter(sorted(infos, key=lambda info: (info.created, info.key)))

    def verify(self, *, repair: bool = False, quick: bool = False) -> VerifyReport:
        """Memory needs no check: counts the chunks."""
        return VerifyReport(checked=len(self._chunks))

    def free_bytes(self) -> int:
        """Free memory of this machine."""
        return available_memory()

    def close(self) -> None:
        """Forget everything."""
        self._chunks.clear()

    def pin(self, keys: Sequence[ChunkKey]) -> int:
        """Never evict these chunks for lack of room."""
        with self._lock:
            found = self.known(keys)
            self._pinned |= found
            return len(found)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """Let pinned chunks be evicted again."""
        with self._lock:
            self._pinned.difference_update(keys)
            return len(self.known(keys))

    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit what a tenant may take."""
        with self._lock:
            self._quotas.pop(namespace, None)
            if nbytes is not None:
                self._quotas[namespace] = nbytes

    def usage(self) -> StoreUsage:
        """Chunks and bytes by namespace and model."""
        models: dict[tuple[str, str], tuple[int, int]] = {}
        with self._lock:
            for entry in self._chunks.values():
                name = entry.info.namespace, entry.info.fingerprint
                chunks, nbytes = models.get(name, (0, 0))
                models[name] = chunks + 1, nbytes + entry.kept.nbytes
        return StoreUsage(models)

    def gc(self) -> GcReport:
        """Remove what is expired."""
        with self._lock:
            return GcReport(expired=self.delete([k for k, e in self._chunks.items() if _expired(e.info)]))

    def compact(self, *, live_share: float = 0.5) -> int:
        """Nothing is to be done: memory of deleted chunks is free."""
        return 0

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Everything is granted: no other process sees this store."""
        return set(keys)

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing is held."""


def _kept(info: ChunkInfo, kv: Tensor | Encoded) -> Encoded:
    # The payload of what is kept as it is would share the caller's memory.
    return encode(kv.clone() if info.encoding == "raw" and isinstance(kv, Tensor) else kv, info.encoding)


def _expired(info: ChunkInfo, now: float | None = None) -> bool:
    # Most chunks never expire, and asking the time of the system is dearer than this look-up.
    return info.expires is not None and info.expires <= (time.time() if now is None else now)
