"""What each namespace has: an engine of its own chunks, its documents, and what its prompts may hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from epic_engine import ConfigError, Engine, parse_policy

from epic_rag.answers import Source
from epic_rag.defaults import AUTO
from epic_rag.documents import Document
from epic_rag.engines import folder_name
from epic_rag.errors import MissingDependencyError
from epic_rag.ingest import IngestReport, Progress
from epic_rag.pipeline import EpicRAG
from epic_rag.retrieval import Embedder
from epic_rag.server.chunks import ChunkShelf
from epic_rag.server.tenant_texts import CompiledSource, RegistryIndex, TenantTexts
from epic_rag.texts import CompiledTexts

__all__ = ["Tenant", "Tenants"]

logger = logging.getLogger(__name__)

_DOCUMENTS = "d:"
# Calls that add chunks take turns, batch by batch.
_CHUNK_THREADS = 4
_EMBEDDING_THREADS = 2

DEFAULT = "default"
"""The namespace whose documents lie at the top of a store, where ``epic-rag ingest`` puts them."""


class Tenant:
    """One namespace; made by :class:`Tenants`.

    Attributes
    ----------
    namespace
        Its name.
    engine
        The gateway's engine, for this namespace.
    compiled
        Chunks that clients made.
    shelf
        The same, as clients see them.
    texts
        All that prompts may hold.
    chunk_work, document_work
        Threads that compile: whoever waits for another's work holds none of those that answer. Documents are added and
        deleted one call at a time.
    """

    def __init__(
        self,
        namespace: str,
        engine: Engine,
        store: Path,
        *,
        policy: str,
        context: str,
        embedder: Callable[[], Embedder],
    ) -> None:
        self.namespace = namespace
        self.engine = engine
        self._embedder = embedder
        self._context, self._policy = context, policy
        self._home = store if namespace == DEFAULT else store / "corpora" / folder_name(namespace)
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._corpus: EpicRAG | None = None
        self.compiled = CompiledTexts(store / "texts" / folder_name(namespace), engine, context=context, policy=policy)
        self._open.callback(self.compiled.close)
        self.chunk_work = ThreadPoolExecutor(_CHUNK_THREADS, thread_name_prefix="chunks")
        self.document_work = ThreadPoolExecutor(1, thread_name_prefix="documents")
        self.texts = TenantTexts(self.compiled, self.compiled.policy)
        self.shelf = ChunkShelf(self.compiled, self.texts.clients.prefix)
        self._looking = True
        try:
            self.look()
            # Whoever asks first should not wait for the texts to be indexed.
            self.texts.find("")
        except BaseException:
            self._open.close()
            raise

    def look(self) -> None:
        """Open the documents if there are any, which another process may have added first; costs next to nothing.

        Raises
        ------
        RegistryError
            If they cannot be used; they are not tried again.
        """
        if not self._looking or not (self._home / "registry.sqlite").is_file():
            return
        self._looking = False
        try:
            _ = self.corpus
        except MissingDependencyError as error:
            logger.warning("the documents of %s are not served: %s", self.namespace, error)

    @property
    def corpus(self) -> EpicRAG:
        """The documents; opened at the first use.

        Raises
        ------
        MissingDependencyError
            If no embedder is installed.
        """
        with self._lock:
            if self._corpus is None:
                corpus = EpicRAG.open(
                    self._home, self.engine, embedder=self._embedder(), context=self._context, policy=self._policy
                )
                self._open.callback(corpus.close)
                # Documents' chunks are encoded in the frame that sets them apart.
                source = CompiledSource(
                    _DOCUMENTS,
                    corpus.registry,
                    corpus.compiler,
                    RegistryIndex(corpus.registry).synced,
                    ending=corpus.composer.frame(""),
                )
                self.texts.add_source(source)
                # What was tuned for the documents holds for prompts with them.
                self.texts.policy = corpus.policy
                self._corpus = corpus
                self._looking = False
            return self._corpus

    @property
    def has_corpus(self) -> bool:
        """Whether there are documents, or were."""
        return self._corpus is not None

    def add_documents(self, documents: Sequence[Document], progress: Progress) -> IngestReport:
        """Add or update documents, as :meth:`EpicRAG.add <epic_rag.pipeline.EpicRAG.add>` does; one call at a time.

        Metadata of documents whose text is known are changed, too.
        """
        corpus = self.corpus
        report = corpus.add(documents, progress=progress)
        known = set(report.unchanged)
        described = {d.doc_id: d.metadata for d in documents if d.doc_id in known}
        registry = corpus.registry
        changed = {i: m for i, m in described.items() if registry.get_document(i).metadata != m}
        if changed:
            registry.set_metadata(changed)
        return report

    def retrieve(self, query: str, k: int) -> list[Source]:
        """The chunks of documents that are nearest to a question, in the order of a prompt; none without documents."""
        return self.corpus.retrieve(query, k) if self.has_corpus else []

    def document_name(self, chunk_id: str) -> str:
        """The name of a document's chunk for prompts."""
        return _DOCUMENTS + chunk_id

    def shown_id(self, name: str) -> str:
        """What clients call a text of a prompt."""
        if name.startswith(_DOCUMENTS):
            return name.removeprefix(_DOCUMENTS)
        return name.removeprefix(self.texts.clients.prefix).rpartition("#")[0]

    def close(self) -> None:
        """End what is being added and close the registries; the engine is the gateway's."""
        for work in (self.chunk_work, self.document_work):
            work.shutdown(cancel_futures=True)
        self._open.close()


class Tenants:
    """All namespaces of a gateway; each is opened at its first use.

    Parameters
    ----------
    engine
        Serves all of them.
    store
        Directory; as ``epic-rag ingest`` makes it.
    policy, context
        Of requests that name none; ``"auto"`` is what a namespace was tuned for.
    embedder
        Makes the embedder, once; it may raise MissingDependencyError.

    Attributes
    ----------
    embedding_work
        Threads for whoever wants nothing but vectors.
    """

    def __init__(
        self,
        engine: Engine,
        store: Path,
        *,
        policy: str = AUTO,
        context: str = AUTO,
        embedder: Callable[[], Embedder],
    ) -> None:
        if policy != AUTO:
            parse_policy(policy)
        self.engine = engine
        self._store = store
        self._policy, self._context = policy, context
        self._make_embedder = embedder
        self._embedder: Embedder | None = None
        self._tenants: dict[str, Tenant] = {}
        self._lock = threading.Lock()
        self._embedding = threading.Lock()
        self.embedding_work = ThreadPoolExecutor(_EMBEDDING_THREADS, thread_name_prefix="embeddings")
        self._closed = False

    def embedder(self) -> Embedder:
        """The embedder; raises MissingDependencyError where none is installed."""
        with self._embedding:
            if self._embedder is None:
                self._embedder = self._make_embedder()
            return self._embedder

    def get(self, namespace: str) -> Tenant:
        """A namespace; blocks while it is opened.

        Raises
        ------
        ConfigError
            If the gateway was closed, or the name cannot be used.
        RegistryError
            As :meth:`Tenant.look`.
        """
        with self._lock:
            if self._closed:
                raise ConfigError("the gateway was closed.")
            if namespace not in self._tenants:
                self._tenants[namespace] = Tenant(
                    namespace,
                    self.engine.for_namespace(namespace),
                    self._store,
                    policy=self._policy,
                    context=self._context,
                    embedder=self.embedder,
                )
            tenant = self._tenants[namespace]
        tenant.look()
        return tenant

    def opened(self) -> list[Tenant]:
        """The namespaces that are open now."""
        with self._lock:
            return list(self._tenants.values())

    def close(self) -> None:
        """Close all of them. Closing twice is fine."""
        with self._lock:
            self._closed = True
            tenants, self._tenants = list(self._tenants.values()), {}
        self.embedding_work.shutdown(cancel_futures=True)
        for tenant in tenants:
            tenant.close()
