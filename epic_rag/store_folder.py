"""A store's directory as the command line sees it: its documents or texts, and its compiled chunks.

::

    DIR/registry.sqlite                    documents, of :class:`~epic_rag.pipeline.EpicRAG`
    DIR/texts/<namespace>/texts.sqlite     texts of an application, of :mod:`epic_rag.engines`
    DIR/chunks/                            compiled chunks of both

Any of them may be absent, and DIR may be the directory of an engine's own chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from epic_engine.errors import StoreError, StoreFormatError

from epic_rag.errors import RagError
from epic_rag.registry import Registry

if TYPE_CHECKING:
    from epic_engine import ChunkInfo, ChunkKey, FileStore
    from epic_engine.storage.stored_format import StoredFormat

    from epic_rag.registry import ChunkRecord, DocumentRecord

__all__ = ["Documents", "StoreFolder"]


@dataclass(frozen=True)
class Documents:
    """One registry of a store.

    Attributes
    ----------
    namespace
        Of its documents or texts; None where an older version did not write it down.
    registry
        Open.
    """

    namespace: str | None
    registry: Registry

    def ids_of(self, given: str) -> list[str]:
        """Ids that somebody means: one of them, the path of a file, or the source or group that they belong to."""
        # Files are known by their absolute paths; a relative one means the same file.
        for doc_id in (given, Path(given).absolute().as_posix()):
            if doc_id in self.registry:
                return [doc_id]
        return self.registry.ids_of_source(given)


class StoreFolder:
    """One directory; what is in it is opened when it is asked for, and closed with it.

    Parameters
    ----------
    path
        The directory.
    write
        Whether compiled chunks will be changed. An older format of theirs is brought up to date then.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        self._write = write
        own = (path / "catalogue.sqlite").is_file() or (path / "segments").is_dir()
        self.chunks_path = path if own else path / "chunks"
        self._registries: list[Documents] | None = None
        self._chunks: FileStore | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    @property
    def is_store(self) -> bool:
        """Whether anything of a store is there."""
        return self.chunks_path.is_dir() or next(self._registry_files(), None) is not None

    # -- documents and texts -----------------------------------------------------------------------------------

    def _registry_files(self) -> Iterator[Path]:
        if (self.path / "registry.sqlite").is_file():
            yield self.path / "registry.sqlite"
        yield from sorted((self.path / "texts").glob("*/texts.sqlite"))

    def registries(self, namespace: str | None = None) -> list[Documents]:
        """Its documents and texts; with a namespace those of that one alone."""
        if self._registries is None:
            opened = [self._opened.enter_context(Registry.open(file)) for file in self._registry_files()]
            self._registries = [Documents(registry.get_setting("namespace"), registry) for registry in opened]
        return [d for d in self._registries if namespace in (None, d.namespace)]

    def documents(self, namespace: str | None = None) -> Iterator[dict[str, Any]]:
        """Every document or text, as it is listed."""
        for found in self.registries(namespace):
            sizes = found.registry.sizes()
            for document in found.registry.documents():
                yield _document_row(found.namespace, document, sizes.get(document.doc_id, (0, 0)))

    def find(self, given: str, namespace: str | None = None) -> list[tuple[Documents, list[str]]]:
        """The documents or texts that are meant, by registry.

        Raises
        ------
        DocumentNotFoundError
            If there are none; names close matches.
        RagError
            If the store knows no documents at all.
        """
        registries = self.registries(namespace)
        found = [(documents, ids) for documents in registries if (ids := documents.ids_of(given))]
        if not found:
            for documents in registries:
                documents.registry.get_document(given)
            where = "" if namespace is None else f" of namespace {namespace!r}"
            raise RagError(f"{self.path} holds no documents or texts{where}: look with `epic-rag store ls`.")
        return found

    # -- chunks ------------------------------------------------------------------------------------------------

    def format(self) -> StoredFormat:
        """The format of its chunks.

        Raises
        ------
        StoreError
            If there are none, or the catalogue was lost or cannot be read.
        """
        from epic_engine.storage.stored_format import stored_format

        found = stored_format(self.chunks_path)
        if found is None:
            if any((self.chunks_path / "segments").glob("*.seg")):
                raise StoreError(
                    f"{self.chunks_path} has lost its catalogue.sqlite: bring it back, or make a new one from what "
                    f"is left with `epic-rag store rebuild --store {self.path}`."
                )
            raise StoreError(f"{self.path} holds no compiled chunks yet: ingest documents or import chunks first.")
        return found

    def chunks(self) -> FileStore:
        """Its compiled chunks.

        Raises
        ------
        StoreFormatError
            If the format is an older one and they are only read, or a newer one.
        StoreError
            If there are none, or they cannot be opened.
        """
        if self._chunks is None:
            kept = self.format()
            if kept.version < kept.newest and not self._write:
                raise StoreFormatError(
                    f"{self.chunks_path} has format {kept.version}, this version reads {kept.newest}: bring it up to "
                    f"date with `epic-rag store migrate --store {self.path}`."
                )
            self._chunks = self._open_chunks()
        return self._chunks

    def new_chunks(self) -> FileStore:
        """As :meth:`chunks`, made if there are none."""
        if self._chunks is None and not self.chunks_path.exists():
            self._chunks = self._open_chunks()
        return self.chunks()

    def _open_chunks(self) -> FileStore:
        from epic_engine import FileStore

        store = FileStore(self.chunks_path, read_only=not self._write)
        self._opened.callback(store.close)
        return store

    def forms(self, given: str, namespace: str | None = None) -> list[ChunkKey]:
        """Keys of everything that was compiled of a document or text, for all models."""
        chunks = self.chunks()
        models = list(chunks.usage().models)
        keys: dict[ChunkKey, None] = {}
        for documents, ids in self.find(given, namespace):
            owners = [m for m in models if documents.namespace in (None, m[0])]
            for content in {_content(r) for doc_id in ids for r in documents.registry.chunks(doc_id)}:
                for owner, fingerprint in owners:
                    keys.update(dict.fromkeys(f.key for f in chunks.forms(owner, fingerprint, content)))
        return list(keys)

    def not_compiled(self) -> list[str]:
        """Keys that documents or texts name and that are no chunks; they are compiled when they are next used."""
        from epic_engine import ChunkKey

        named = {key for documents in self.registries() for key in documents.registry.all_keys()}
        held = self.chunks().known([ChunkKey(key) for key in named])
        return sorted(named - {key.hex for key in held})

    def listed_chunks(self, limit: int, namespace: str | None = None) -> list[dict[str, Any]]:
        """The first compiled chunks, oldest first, as they are listed."""
        entries: Iterable[ChunkInfo] = self.chunks().entries()
        mine = (info for info in entries if namespace in (None, info.namespace))
        return [_chunk_row(info) for info in islice(mine, limit)]

    # -- changes -----------------------------------------------------------------------------------------------

    def forget(self, documents: Documents, doc_id: str) -> int:
        """Forget a document or text and the KV that no other shares; returns how many compiled chunks that were."""
        records = documents.registry.chunks(doc_id)
        freed = documents.registry.delete_document(doc_id)
        return self._erase(documents, records, freed)

    def forget_all(self, namespace: str) -> int:
        """Forget the documents and texts of a namespace, not their KV; returns how many there were."""
        count = 0
        for documents in self.registries(namespace):
            ids = [d.doc_id for d in documents.registry.documents()]
            documents.registry.delete_documents(ids)
            count += len(ids)
        return count

    def _erase(self, documents: Documents, records: Iterable[ChunkRecord], freed: Iterable[str]) -> int:
        chunks = self.chunks()
        gone = {key for key in freed if not documents.registry.reference_count(key)}
        # What was compiled behind the text that goes must go, too.
        contents = [_content(r) for r in records if r.key in gone]
        owners = {namespace for namespace, _ in chunks.usage().models}
        if documents.namespace is not None:
            owners &= {documents.namespace}
        return sum(chunks.erase(namespace, contents) for namespace in owners)

    # -- the whole ---------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Everything that ``store stats`` says."""
        chunks = self.chunks()
        summary, usage = chunks.summary(), chunks.usage()
        groups = [asdict(group) for group in summary.groups]
        counts = [documents.registry.counts() for documents in self.registries()]
        names = sorted({*summary.quotas, *(name for name, _ in usage.models)})
        return {
            **{name: sum(c[name] for c in counts) for name in ("documents", "chunks", "tokens")},
            "compiled_chunks": sum(g.chunks for g in summary.groups),
            "compiled_tokens": sum(g.tokens for g in summary.groups),
            "kv_bytes": sum(g.kv_bytes for g in summary.groups),
            "stored_bytes": usage.nbytes,
            "dead_bytes": usage.dead_bytes,
            "disk_bytes": _disk_bytes(self.chunks_path),
            "budget_bytes": summary.budget,
            "pinned_chunks": summary.pinned,
            "pinned_bytes": summary.pinned_bytes,
            "expired_chunks": summary.expired,
            "quarantined_chunks": usage.quarantined,
            "format": self.format().version,
            "models": len({g.fingerprint for g in summary.groups}),
            "namespaces": [
                {
                    "namespace": name,
                    "chunks": sum(c for (n, _), (c, _) in usage.models.items() if n == name),
                    "stored_bytes": sum(b for (n, _), (_, b) in usage.models.items() if n == name),
                    "quota_bytes": summary.quotas.get(name),
                }
                for name in names
            ],
            "groups": groups,
        }


def _disk_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _content(record: ChunkRecord) -> str:
    from epic_engine.chunks import content_digest

    return content_digest(record.token_ids)


def _document_row(namespace: str | None, document: DocumentRecord, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "doc_id": document.doc_id,
        "source": document.source,
        "namespace": namespace,
        "chunks": size[0],
        "tokens": size[1],
        "added_at": document.added_at,
    }


def _chunk_row(info: ChunkInfo) -> dict[str, Any]:
    return {
        "key": info.key.hex,
        "namespace": info.namespace,
        "model": info.fingerprint,
        "context": info.context,
        "encoding": info.encoding,
        "tokens": len(info.token_ids),
        "kv_bytes": info.nbytes,
        "created": info.created,
        "expires": info.expires,
        "seconds": info.cost,
    }
