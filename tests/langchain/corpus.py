"""Compiled texts on the tiny stack without a chat model, and vector stores to wrap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import pytest
from epic_engine.storage.segments import scan
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from epic_rag.engines import Lease, acquire
from epic_rag.texts import CompiledTexts
from tests.rag.stack import BagOfWords, model, tokenizer

InMemoryDocstore = pytest.importorskip("langchain_community.docstore.in_memory").InMemoryDocstore
FAISS = pytest.importorskip("langchain_community.vectorstores.faiss").FAISS
DIM = 6


class Compiled:
    """Whatever has compiled texts."""

    def __init__(self, lease: Lease, context: str) -> None:
        self.lease = lease
        self._context = context

    @property
    def texts(self) -> CompiledTexts:
        return self.lease.texts(self._context, "naive")


@contextmanager
def compiled(path: Path, context: str = "isolated") -> Iterator[Compiled]:
    """Compiled texts in a directory."""
    with acquire(model(), tokenizer=tokenizer(), store=path, device="cpu", dtype="float32", selftest=False) as lease:
        yield Compiled(lease, context)


class Counting(Embeddings):
    """Bags of words; counts what it embeds and fails when it is told to."""

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.fails = False

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.fails:
            raise OSError("no route to the embedder")
        self.embedded += texts
        return [row.tolist() for row in BagOfWords().embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        return BagOfWords().embed([text])[0].tolist()


def faiss_store(embedding: Embeddings | None = None, dim: int = DIM) -> VectorStore:
    """An empty FAISS."""
    embedding = embedding or DeterministicFakeEmbedding(size=dim)
    return FAISS(embedding, faiss.IndexFlatL2(dim), InMemoryDocstore(), {})


def memory_store(embedding: Embeddings | None = None) -> InMemoryVectorStore:
    """An empty store that replaces documents by itself."""
    return InMemoryVectorStore(embedding or DeterministicFakeEmbedding(size=DIM))


STORES: dict[str, Callable[[], VectorStore]] = {"faiss": faiss_store, "memory": memory_store}


def ids_in(store: VectorStore) -> set[str]:
    """Ids that a wrapped store holds, from its own tables."""
    if isinstance(store, FAISS):
        assert store.index.ntotal == len(store.index_to_docstore_id) == len(store.docstore._dict)
        return set(store.docstore._dict)
    return set(store.store)


def check(llm: Compiled, store: VectorStore, live: dict[str, str]) -> None:
    """Store, compiled texts and KV are those of the live texts by id, and the KV's files no others.

    ``live`` is made by the test itself; tokens are the tokenizer's own.
    """
    assert ids_in(store) == set(live)
    assert {i: llm.texts.text(i) for i in llm.texts.ids()} == {i: text.strip() for i, text in live.items()}
    entries = list(llm.lease.engine.store.entries())
    want = {tuple(tokenizer()(t.strip(), add_special_tokens=False)["input_ids"]) for t in live.values()}
    assert {e.token_ids for e in entries} == want
    assert len(entries) == len(want)
    # What was deleted leaves the files, too, once they are compacted.
    store_of_kv = llm.lease.engine.store
    store_of_kv.compact(live_share=1.0)
    written = [record.info.key for path in store_of_kv.path.glob("segments/*.seg") for record in scan(path)]
    assert sorted(written) == sorted(e.key for e in entries)


def sha_id(document: Document) -> str:
    """An id that the tests can foresee, for ``index(key_encoder=…)``."""
    return hashlib.sha256(f"{document.page_content}|{sorted(document.metadata.items())}".encode()).hexdigest()


def document(text: str, source: str, **metadata: Any) -> Document:
    """A chunk of a source."""
    return Document(text, metadata={"source": source, **metadata})
