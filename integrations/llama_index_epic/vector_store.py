"""A vector store that compiles what is added to it, and forgets what is deleted from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from epic_rag.texts import Drift
from llama_index_epic.llm import EpicLLM
from llama_index_epic.nodes import compile_nodes, reconcile

__all__ = ["EpicVectorStore"]

logger = logging.getLogger(__name__)


class EpicVectorStore(BasePydanticVectorStore):
    """Wraps a vector store, so that the compiled texts of an LLM stay in step with it.

    Whatever is added is compiled first, whatever is deleted loses its KV. Which nodes a document has is kept beside
    the compiled texts, so documents can be deleted from stores that only know nodes, such as
    ``FaissMapVectorStore``. Everything else is the wrapped store's.

    One store directory and namespace of an LLM serve one index: :meth:`clear` and :meth:`reconcile` forget
    whatever else is compiled there.

    Parameters
    ----------
    vector_store
        The store to wrap.
    llm
        Whose prompts will hold the nodes.
    """

    stores_text: bool = False
    is_embedding_query: bool = True

    _wrapped: BasePydanticVectorStore = PrivateAttr()
    _llm: EpicLLM = PrivateAttr()

    def __init__(self, vector_store: BasePydanticVectorStore, llm: EpicLLM) -> None:
        super().__init__(stores_text=vector_store.stores_text, is_embedding_query=vector_store.is_embedding_query)
        self._wrapped = vector_store
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "EpicVectorStore"

    @classmethod
    def from_persist_dir(
        cls, persist_dir: str, kind: type[BasePydanticVectorStore], llm: EpicLLM, **options: Any
    ) -> EpicVectorStore:
        """A store that was persisted, wrapped.

        Parameters
        ----------
        persist_dir
            Where it was persisted.
        kind
            Class of the wrapped store, such as ``SimpleVectorStore``.
        llm
            As for the constructor.
        **options
            For the wrapped class's own ``from_persist_dir``.
        """
        return cls(kind.from_persist_dir(persist_dir, **options), llm)  # type: ignore[attr-defined]

    @property
    def wrapped(self) -> BasePydanticVectorStore:
        """The store that is wrapped."""
        return self._wrapped

    @property
    def client(self) -> Any:
        """The wrapped store's client."""
        return self._wrapped.client

    # -- adding --------------------------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Compile nodes and add them; returns the wrapped store's ids."""
        added = compile_nodes(self._llm, nodes).added
        try:
            return self._wrapped.add(nodes, **kwargs)
        except BaseException:
            self._llm.texts.remove(added)
            raise

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As :meth:`add`; the event loop goes on while the nodes are compiled."""
        report = await asyncio.to_thread(compile_nodes, self._llm, nodes)
        try:
            return await self._wrapped.async_add(nodes, **kwargs)
        except BaseException:
            await asyncio.to_thread(self._llm.texts.remove, report.added)
            raise

    # -- deleting ------------------------------------------------------------------------------------------------

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and their KV.

        Raises
        ------
        NotImplementedError
            If the wrapped store can delete neither documents nor nodes, as ``FaissVectorStore``; nothing is
            deleted then.
        """
        ids = self._llm.texts.group(ref_doc_id)
        try:
            self._wrapped.delete(ref_doc_id, **delete_kwargs)
        except NotImplementedError:
            self._cannot_delete(ids)
        if ids and self._deletes_nodes:
            # Some stores know no documents, and delete nothing without a word.
            self._wrapped.delete_nodes(ids)
        self._llm.texts.remove(ids)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As :meth:`delete`."""
        texts = await asyncio.to_thread(lambda: self._llm.texts)
        ids = await asyncio.to_thread(texts.group, ref_doc_id)
        try:
            await self._wrapped.adelete(ref_doc_id, **delete_kwargs)
        except NotImplementedError:
            self._cannot_delete(ids)
        if ids and self._deletes_nodes:
            await self._wrapped.adelete_nodes(ids)
        await asyncio.to_thread(texts.remove, ids)

    @property
    def _deletes_nodes(self) -> bool:
        return type(self._wrapped).delete_nodes is not BasePydanticVectorStore.delete_nodes

    def _cannot_delete(self, ids: Sequence[str]) -> None:
        """Called in the course of an error, which stands unless nodes can be deleted by their ids."""
        if not self._deletes_nodes:
            raise NotImplementedError(
                f"{type(self._wrapped).__name__} cannot delete: wrap one that can, such as FaissMapVectorStore or "
                "SimpleVectorStore."
            )

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes, and their KV."""
        ids = node_ids if filters is None else self._matching(node_ids, filters)
        self._wrapped.delete_nodes(node_ids, filters, **delete_kwargs)
        self._llm.texts.remove(ids or ())

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As :meth:`delete_nodes`."""
        ids = node_ids if filters is None else await asyncio.to_thread(self._matching, node_ids, filters)
        await self._wrapped.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(lambda: self._llm.texts.remove(ids or ()))

    def _matching(self, node_ids: list[str] | None, filters: MetadataFilters) -> list[str]:
        try:
            return [node.node_id for node in self._wrapped.get_nodes(node_ids, filters)]
        except NotImplementedError:
            logger.warning(
                "%s does not say which nodes a filter deletes, so their KV stays: call reconcile() afterwards",
                type(self._wrapped).__name__,
            )
            return []

    def clear(self) -> None:
        """Delete all nodes, and all compiled texts of the LLM's store and namespace."""
        self._wrapped.clear()
        texts = self._llm.texts
        texts.remove(texts.ids())

    async def aclear(self) -> None:
        """As :meth:`clear`."""
        await self._wrapped.aclear()
        await asyncio.to_thread(lambda: self._llm.texts.remove(self._llm.texts.ids()))

    def reconcile(self, source: BaseIndex[Any] | Iterable[BaseNode]) -> Drift:
        """Bring the compiled texts in step with an index; see :func:`~llama_index_epic.reconcile`.

        Needed after changes that went past this store, or when KV was lost.
        """
        return reconcile(self._llm, source)

    # -- the wrapped store's own ---------------------------------------------------------------------------------

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes, if the wrapped store keeps them."""
        return self._wrapped.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As :meth:`get_nodes`."""
        return await self._wrapped.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Search the wrapped store."""
        return self._wrapped.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As :meth:`query`."""
        return await self._wrapped.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> None:
        """Persist the wrapped store; compiled texts are durable already."""
        self._wrapped.persist(persist_path, fs)
