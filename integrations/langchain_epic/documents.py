"""Documents as compiled texts: what of a document is compiled is exactly what stands in prompts."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from epic_engine import ConfigError
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from epic_rag.errors import RagError
from epic_rag.texts import AddReport, CompiledTexts, Drift, TextItem

__all__ = [
    "HasTexts",
    "compile_documents",
    "documents_of",
    "ids_of",
    "prompted_text",
    "reconcile",
    "text_id",
    "text_items",
    "with_ids",
]


class HasTexts(Protocol):
    """Whatever has compiled texts, such as a chat model of ours."""

    @property
    def texts(self) -> CompiledTexts:
        """The compiled texts that its prompts link."""


def prompted_text(document: Document) -> str:
    """What of a document stands in a prompt: its content, without white space at the ends."""
    return document.page_content.strip()


def text_id(document: Document) -> str:
    """A document's id; one made from its content, the same in every process, if it has none."""
    if document.id:
        return document.id
    return "text-" + hashlib.sha256(prompted_text(document).encode("utf-8", "surrogatepass")).hexdigest()


def text_items(documents: Iterable[Document], vectors: Sequence[Sequence[float]] | None = None) -> list[TextItem]:
    """Documents as the items that :meth:`CompiledTexts.add <epic_rag.texts.CompiledTexts.add>` takes.

    Parameters
    ----------
    documents
        As they will be prompted.
    vectors
        Their embeddings, one a document; None without.
    """
    items = [TextItem(text_id(d), prompted_text(d)) for d in documents]
    if vectors is None:
        return items
    return [TextItem(i.text_id, i.text, vector=vector) for i, vector in zip(items, vectors, strict=True)]


def ids_of(documents: Iterable[Document]) -> list[str]:
    """The ids of documents that have one."""
    return [document.id for document in documents if document.id]


def with_ids(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Documents that all have ids: the given ones, else their own, else random ones, as vector stores make them.

    Raises
    ------
    ConfigError
        If there are more or fewer ids than documents.
    """
    if ids is None:
        ids = [None] * len(documents)
    if len(ids) != len(documents):
        raise ConfigError(f"{len(documents)} documents but {len(ids)} ids: give one for each, or none at all.")
    named = [own or d.id or str(uuid.uuid4()) for d, own in zip(documents, ids, strict=True)]
    return [d.model_copy(update={"id": own}) for d, own in zip(documents, named, strict=True)]


def documents_of(texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None) -> list[Document]:
    """Texts as documents without ids.

    Raises
    ------
    ConfigError
        If there are more or fewer metadatas than texts.
    """
    texts = list(texts)
    if not metadatas:
        return [Document(text) for text in texts]
    if len(metadatas) != len(texts):
        raise ConfigError(f"{len(texts)} texts but {len(metadatas)} metadatas: give one for each, or none at all.")
    return [Document(text, metadata=own) for text, own in zip(texts, metadatas, strict=True)]


def compile_documents(llm: HasTexts, documents: Iterable[Document]) -> AddReport:
    """Compile documents, or what changed of them; returns when they are durable.

    For chains without a vector store, such as those over keyword retrievers. It sees no deletes:
    :class:`~langchain_epic.EpicVectorStore` does, and :func:`reconcile` mends.

    Parameters
    ----------
    llm
        Compiles, and finds them in its prompts from now on.
    documents
        As they will be prompted: the chunks, not the files. Those without an id get one from their content.

    Raises
    ------
    ContextLengthError
        If one is longer than the model's context.
    InsufficientResourcesError
        If their KV would not fit; before anything is compiled.
    """
    return llm.texts.add(text_items(documents))


def reconcile(llm: HasTexts, source: VectorStore | Iterable[Document]) -> Drift:
    """Bring the compiled texts in step with a vector store: compile what is missing, forget what it has no more.

    Needed after changes that went past :class:`~langchain_epic.EpicVectorStore`, after an interrupted one, and when KV
    was lost: a record manager of LangChain's indexing skips what it has seen, compiled or not.

    Parameters
    ----------
    llm
        Whose compiled texts they are. Its store and namespace must serve this vector store alone: whatever else is
        compiled there is forgotten.
    source
        A vector store that can list its documents, or all the documents of any, with the ids that they have there.

    Returns
    -------
    Drift
        What was wrong.

    Raises
    ------
    RagError
        If the vector store cannot list its documents.
    """
    texts = llm.texts
    if not isinstance(source, VectorStore):
        return texts.reconcile(text_items(source))
    documents = _listed(source)
    items = text_items(documents)
    embeddings = source.embeddings
    if texts.compiler.wants_neighbours and embeddings is not None:
        drift = texts.compare({item.text_id: item.text for item in items})
        new = [d for d in documents if text_id(d) in {*drift.missing, *drift.changed}]
        if new:
            items += text_items(new, embeddings.embed_documents([d.page_content for d in new]))
    return texts.reconcile(items)


def _listed(store: VectorStore) -> list[Document]:
    """All documents of a store. LangChain has no method for it, so the stores that say their ids are known here."""
    wrapped = getattr(store, "wrapped", None)
    if isinstance(wrapped, VectorStore):
        return _listed(wrapped)
    if isinstance(store, InMemoryVectorStore):
        return store.get_by_ids(list(store.store))
    ids = getattr(store, "index_to_docstore_id", None)
    if isinstance(ids, dict):  # FAISS
        return store.get_by_ids(list(ids.values()))
    raise RagError(f"{type(store).__name__} cannot list its documents: call reconcile() with all of them.")
