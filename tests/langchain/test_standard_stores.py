"""LangChain's own test suites for vector stores and retrievers, all of them, over two wrapped stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.base import VectorStoreRetriever
from langchain_epic.vector_store import EpicVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from tests.langchain.corpus import Compiled, compiled, faiss_store, ids_in, memory_store
from tests.rag.stack import TEXTS


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Compiled]:
    with compiled(tmp_path / "kv") as made:
        yield made


def in_step(llm: Compiled, store: EpicVectorStore) -> bool:
    """Whatever the suite did: compiled is what the wrapped store holds."""
    held = {d.id: d.page_content for d in store.wrapped.get_by_ids(sorted(ids_in(store.wrapped)))}
    return {i: llm.texts.text(i) for i in llm.texts.ids()} == held


class TestEpicOverFAISS(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, llm: Compiled) -> Iterator[VectorStore]:  # type: ignore[override]
        store = EpicVectorStore(faiss_store(self.get_embeddings()), llm)
        yield store
        assert in_step(llm, store)


class TestEpicOverInMemoryVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, llm: Compiled) -> Iterator[VectorStore]:  # type: ignore[override]
        store = EpicVectorStore(memory_store(self.get_embeddings()), llm)
        yield store
        assert in_step(llm, store)


class _Retriever(VectorStoreRetriever):
    """``as_retriever()`` of a store, made the way the suite makes retrievers: with ``k`` as an argument."""

    def __init__(self, store: EpicVectorStore, k: int = 4, **kwargs: Any) -> None:
        made = store.as_retriever(search_kwargs={"k": k}, **kwargs)
        super().__init__(vectorstore=made.vectorstore, search_kwargs=made.search_kwargs, tags=made.tags)


class TestRetrieverOverEpic(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _filled(self, llm: Compiled) -> None:
        self._store = EpicVectorStore(faiss_store(), llm)
        self._store.add_documents([Document(text) for text in TEXTS.values()])

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return _Retriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self._store}

    @property
    def retriever_query_example(self) -> str:
        return "When does the ferry leave?"
