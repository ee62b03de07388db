"""A vector store that compiles what is added to it, and forgets what is deleted from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from epic_engine import ConfigError
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from epic_rag.aio import to_the_end
from epic_rag.texts import CompiledTexts, Drift
from langchain_epic.documents import HasTexts, documents_of, ids_of, reconcile, text_items, with_ids
from langchain_epic.faiss_store import ReplacingFaiss, empty_faiss

__all__ = ["EpicVectorStore"]

logger = logging.getLogger(__name__)

Scored = list[tuple[Document, float]]


class EpicVectorStore(VectorStore):
    """Wraps a vector store, so that the compiled texts of a model stay in step with it.

    Whatever is added is compiled first, whatever is deleted loses its KV. Everything else is the wrapped store's, its
    way of being saved and loaded too: wrap what was loaded; the compiled texts are durable already. Methods that only
    the wrapped store has are called on :attr:`wrapped`; what they add or delete is mended by :meth:`reconcile`.

    Adding a known id replaces its document, with LangChain's FAISS too, which refuses it otherwise. If an add fails,
    documents and KV are as before.

    Compile contexts that look for similar chunks need embeddings. With FAISS a chunk is embedded once, for both; other
    stores embed for themselves once more, which costs nothing if their embeddings are ``CacheBackedEmbeddings``.

    One store directory and namespace of a model serve one vector store: ``delete()`` without ids and :meth:`reconcile`
    forget whatever else is compiled there.

    Parameters
    ----------
    vector_store
        The store to wrap.
    llm
        Whose prompts will hold the documents.
    """

    def __init__(self, vector_store: VectorStore, llm: HasTexts) -> None:
        self._wrapped = vector_store
        self._llm = llm
        self._faiss = ReplacingFaiss.of(vector_store)

    @property
    def wrapped(self) -> VectorStore:
        """The store that is wrapped."""
        return self._wrapped

    @property
    def embeddings(self) -> Embeddings | None:
        """The wrapped store's embeddings."""
        return self._wrapped.embeddings

    # -- making ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: HasTexts | None = None,
        vector_store: VectorStore | None = None,
        **kwargs: Any,
    ) -> Self:
        """A store that holds texts.

        Parameters
        ----------
        texts, metadatas, ids
            As for :meth:`add_texts`.
        embedding
            For the default store; a store that is given has its own.
        llm
            As for the constructor; must be given.
        vector_store
            The store to wrap; by default an empty FAISS in memory.
        **kwargs
            For the wrapped store's ``add_documents``.

        Raises
        ------
        ConfigError
            If there is no ``llm``.
        MissingDependencyError
            If FAISS is wanted and not installed.
        """
        made = cls._made(embedding, llm, vector_store)
        made.add_texts(texts, metadatas, ids=ids, **kwargs)
        return made

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: HasTexts | None = None,
        vector_store: VectorStore | None = None,
        **kwargs: Any,
    ) -> Self:
        """As :meth:`from_texts`."""
        made = await asyncio.to_thread(cls._made, embedding, llm, vector_store)
        await made.aadd_texts(texts, metadatas, ids=ids, **kwargs)
        return made

    @classmethod
    def _made(cls, embedding: Embeddings, llm: HasTexts | None, vector_store: VectorStore | None) -> Self:
        if llm is None:
            raise ConfigError("a model is needed, whose prompts will hold the documents: pass llm=….")
        return cls(empty_faiss(embedding) if vector_store is None else vector_store, llm)

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Compile documents and add them; returns the wrapped store's ids.

        Parameters
        ----------
        documents
            As they will be prompted.
        **kwargs
            ``ids``, which go before the documents' own, and whatever the wrapped store takes. Documents without an id
            get a random one.

        Raises
        ------
        ConfigError
            If there are more or fewer ids than documents.
        ContextLengthError
            If a document is longer than the model's context; nothing is added then.
        """
        named = with_ids(documents, kwargs.pop("ids", None))
        if not named:
            return []
        texts = self._llm.texts
        embeddings = self._embedder(texts)
        vectors = None if embeddings is None else embeddings.embed_documents([d.page_content for d in named])
        try:
            self._compile(named, vectors)
            if self._faiss is not None:
                ids = self._faiss.add(named, ids_of(named), vectors)
            else:
                ids = self._wrapped.add_documents(named, ids=ids_of(named), **kwargs)
        except BaseException:
            self._put_back(ids_of(named), self._held(ids_of(named)))
            raise
        self._rename(named, vectors, ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """As :meth:`add_documents`; the event loop goes on while documents are compiled.

        A cancelled call returns when what it compiles has ended, and adds nothing.
        """
        named = with_ids(documents, kwargs.pop("ids", None))
        if not named:
            return []
        texts = await to_the_end(lambda: self._llm.texts)
        embeddings = self._embedder(texts)
        vectors = None if embeddings is None else await embeddings.aembed_documents([d.page_content for d in named])
        try:
            await to_the_end(self._compile, named, vectors)
            if self._faiss is not None:
                ids = await to_the_end(self._faiss.add, named, ids_of(named), vectors)
            else:
                ids = await self._wrapped.aadd_documents(named, ids=ids_of(named), **kwargs)
        except BaseException:
            await to_the_end(self._put_back, ids_of(named), await self._aheld(ids_of(named)))
            raise
        await to_the_end(self._rename, named, vectors, ids)
        return ids

    # The inherited ones lose texts that come from a generator.
    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Compile texts and add them; as :meth:`add_documents`."""
        return self.add_documents(documents_of(texts, metadatas), ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As :meth:`add_texts`."""
        return await self.aadd_documents(documents_of(texts, metadatas), ids=ids, **kwargs)

    def _embedder(self, texts: CompiledTexts) -> Embeddings | None:
        """Embeds here, before the wrapped store would; None leaves it to that."""
        return self._wrapped.embeddings if self._faiss is not None or texts.compiler.wants_neighbours else None

    def _compile(self, documents: Iterable[Document], vectors: Sequence[Sequence[float]] | None = None) -> None:
        self._llm.texts.add(text_items(documents, vectors))

    def _held(self, ids: Sequence[str]) -> list[Document] | None:
        """The documents of these ids that the wrapped store has; None if it does not say."""
        try:
            return self._wrapped.get_by_ids(ids)
        except Exception:  # cannot do it at all, or is out of reach
            return None

    async def _aheld(self, ids: Sequence[str]) -> list[Document] | None:
        try:
            return await self._wrapped.aget_by_ids(ids)
        except Exception:
            return None

    def _put_back(self, ids: Sequence[str], held: list[Document] | None) -> None:
        """After an add that failed: compiled is of these ids what the store holds; nothing where it does not say.

        Text without KV costs time, KV of another text than the store's would be dead weight.
        """
        held = held or []
        self._compile(held)
        self._llm.texts.remove(set(ids).difference(ids_of(held)))

    def _rename(self, documents: list[Document], vectors: list[list[float]] | None, ids: list[str]) -> None:
        """Know texts by the ids that the store gave them, where it did not take the given ones."""
        given = ids_of(documents)
        if ids == given:
            return
        if len(ids) != len(given):
            logger.warning(
                "%s returned %d ids for %d documents: call reconcile() after it deletes any, or they stay compiled",
                type(self._wrapped).__name__, len(ids), len(given),
            )  # fmt: skip
            return
        self._compile(with_ids(documents, ids), vectors)
        self._llm.texts.remove(set(given).difference(ids))

    # -- deleting --------------------------------------------------------------------------------------------------

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, and their KV; returns what the wrapped store returns.

        Parameters
        ----------
        ids
            Unknown ones are passed over. None leaves it to the wrapped store what goes: everything, nothing, or what
            its own ``kwargs`` say.
        **kwargs
            For the wrapped store.
        """
        if ids is None:
            done = self._wrapped.delete(None, **kwargs)
            self._forget_missing(done, self._held(self._llm.texts.ids()), everything=not kwargs)
            return done
        store = self._wrapped if self._faiss is None else self._faiss
        done = store.delete(ids, **kwargs) if ids else True
        if done is not False:
            self._llm.texts.remove(ids)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """As :meth:`delete`; a cancelled call may have deleted documents whose KV stays."""
        if self._faiss is not None:
            return await to_the_end(self.delete, ids, **kwargs)
        if ids is None:
            done = await self._wrapped.adelete(None, **kwargs)
            known = await to_the_end(lambda: self._llm.texts.ids())
            await to_the_end(self._forget_missing, done, await self._aheld(known), everything=not kwargs)
            return done
        done = await self._wrapped.adelete(ids, **kwargs) if ids else True
        if done is not False:
            await to_the_end(lambda: self._llm.texts.remove(ids))
        return done

    def _forget_missing(self, done: bool | None, held: list[Document] | None, *, everything: bool) -> None:
        """After a delete without ids: forget what the store does not hold any more."""
        if done is False:
            return
        if held is None and not everything:
            logger.warning(
                "%s does not say what it deleted, so its KV stays: call reconcile() with all documents",
                type(self._wrapped).__name__,
            )
            return
        texts = self._llm.texts
        texts.remove(set(texts.ids()).difference(ids_of(held or [])))

    def reconcile(self, documents: Iterable[Document] | None = None) -> Drift:
        """Bring the compiled texts in step with the wrapped store; see :func:`~langchain_epic.reconcile`.

        Parameters
        ----------
        documents
            All of the store's documents, with their ids; needed for stores that cannot list them.
        """
        return reconcile(self._llm, self._wrapped if documents is None else documents)

    # -- the wrapped store's own -----------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents of the wrapped store."""
        return self._wrapped.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """As :meth:`get_by_ids`."""
        return await self._wrapped.aget_by_ids(ids)

    # Arguments are handed on as they come, so that defaults are the wrapped store's.
    def similarity_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        """Search the wrapped store."""
        return self._wrapped.similarity_search(query, *args, **kwargs)

    async def asimilarity_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        """As :meth:`similarity_search`."""
        return await self._wrapped.asimilarity_search(query, *args, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> Scored:
        """Search the wrapped store, with its own scores."""
        return self._wrapped.similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> Scored:
        """As :meth:`similarity_search_with_score`."""
        return await self._wrapped.asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_with_relevance_scores(self, query: str, *args: Any, **kwargs: Any) -> Scored:
        """Search the wrapped store, with scores from 0 to 1."""
        return self._wrapped.similarity_search_with_relevance_scores(query, *args, **kwargs)

    async def asimilarity_search_with_relevance_scores(self, query: str, *args: Any, **kwargs: Any) -> Scored:
        """As :meth:`similarity_search_with_relevance_scores`."""
        return await self._wrapped.asimilarity_search_with_relevance_scores(query, *args, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self._wrapped._select_relevance_score_fn()

    def similarity_search_by_vector(self, embedding: list[float], *args: Any, **kwargs: Any) -> list[Document]:
        """Search the wrapped store by an embedding."""
        return self._wrapped.similarity_search_by_vector(embedding, *args, **kwargs)

    async def asimilarity_search_by_vector(self, embedding: list[float], *args: Any, **kwargs: Any) -> list[Document]:
        """As :meth:`similarity_search_by_vector`."""
        return await self._wrapped.asimilarity_search_by_vector(embedding, *args, **kwargs)

    def max_marginal_relevance_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        """Search the wrapped store for documents that are like the query and unlike each other."""
        return self._wrapped.max_marginal_relevance_search(query, *args, **kwargs)

    async def amax_marginal_relevance_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
        """As :meth:`max_marginal_relevance_search`."""
        return await self._wrapped.amax_marginal_relevance_search(query, *args, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], *args: Any, **kwargs: Any
    ) -> list[Document]:
        """As :meth:`max_marginal_relevance_search`, by an embedding."""
        return self._wrapped.max_marginal_relevance_search_by_vector(embedding, *args, **kwargs)

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], *args: Any, **kwargs: Any
    ) -> list[Document]:
        """As :meth:`max_marginal_relevance_search_by_vector`."""
        return await self._wrapped.amax_marginal_relevance_search_by_vector(embedding, *args, **kwargs)
