"""LangChain's FAISS, adding and deleting as other vector stores do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from epic_rag.errors import MissingDependencyError

__all__ = ["ReplacingFaiss", "empty_faiss"]


def empty_faiss(embedding: Embeddings) -> VectorStore:
    """An empty FAISS in memory.

    Raises
    ------
    MissingDependencyError
        If it is not installed.
    """
    try:
        import faiss
        from langchain_community.docstore.in_memory import InMemoryDocstore
        from langchain_community.vectorstores.faiss import FAISS
    except ImportError as error:
        raise MissingDependencyError(
            f"the default vector store is missing ({error}): pip install langchain-community faiss-cpu, or pass "
            "vector_store=…."
        ) from error
    return FAISS(embedding, faiss.IndexFlatL2(len(embedding.embed_query("a"))), InMemoryDocstore(), {})


class ReplacingFaiss:
    """Adds to a FAISS in place of what has the same ids, and passes over ids to delete that it does not have.

    FAISS itself takes vectors before it looks at ids: an add with a known id raises and leaves an index in which
    vectors and ids do not match. It raises for unknown ids, too.

    Parameters
    ----------
    store
        A ``langchain_community.vectorstores.FAISS``.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        # Vectors and ids change one after the other.
        self._lock = threading.Lock()

    @classmethod
    def of(cls, store: VectorStore) -> ReplacingFaiss | None:
        """For a store that is a FAISS; None for any other."""
        module = sys.modules.get("langchain_community.vectorstores.faiss")
        return cls(store) if module is not None and isinstance(store, module.FAISS) else None

    def add(self, documents: Sequence[Document], ids: list[str], vectors: list[list[float]] | None) -> list[str]:
        """Add documents; if that fails, those that they would have replaced are there as before.

        Parameters
        ----------
        documents, ids
            One id a document.
        vectors
            Their embeddings; None if FAISS has no embeddings object but a function.
        """
        with self._lock:
            known = self._known(ids)
            old = self._store.get_by_ids(known)
            # Embedded before anything goes, so that putting back cannot fail for that.
            old_vectors = None if vectors is None or not old else self._embed(old)
            if old:
                self._store.delete(known)
            try:
                return self._add(documents, ids, vectors)
            except BaseException:
                if old:
                    self._add(old, known, old_vectors)
                raise

    def delete(self, ids: list[str], **options: Any) -> bool | None:
        """Delete documents, whichever of them are there."""
        with self._lock:
            known = self._known(ids)
            done: bool | None = self._store.delete(known, **options) if known else True
            return done

    def _known(self, ids: Sequence[str]) -> list[str]:
        known = set(self._store.index_to_docstore_id.values())
        return [name for name in dict.fromkeys(ids) if name in known]

    def _embed(self, documents: Sequence[Document]) -> list[list[float]]:
        vectors: list[list[float]] = self._store.embeddings.embed_documents([d.page_content for d in documents])
        return vectors

    def _add(self, documents: Sequence[Document], ids: list[str], vectors: list[list[float]] | None) -> list[str]:
        if vectors is None:
            added: list[str] = self._store.add_documents(documents, ids=ids)
        else:
            pairs = zip([d.page_content for d in documents], vectors, strict=True)
            added = self._store.add_embeddings(pairs, [d.metadata for d in documents], ids)
        return added
