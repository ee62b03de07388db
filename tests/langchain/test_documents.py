"""Documents without a vector store, and what brings compiled texts back in step with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from epic_engine import ChunkKey
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import VectorStore
from langchain_epic.documents import compile_documents, reconcile, text_id
from langchain_epic.vector_store import EpicVectorStore

from epic_rag.errors import RagError
from epic_rag.texts import Drift
from tests.langchain.corpus import STORES, Compiled, Counting, check, compiled, faiss_store
from tests.rag.stack import TEXTS, BagOfWords

NEW = "The lighthouse keeper is Greta. She lights the lamp at dusk."


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Compiled]:
    with compiled(tmp_path / "kv") as made:
        yield made


def test_ids_are_made_from_the_content_alone() -> None:
    # printf '%s' "$NEW" | sha256sum
    digest = "39de8655f2d6b8064a3f924e4d17d6793e08bf7dcf8c78b411860db9d4f9733b"
    for document in (Document(NEW), Document(f"  {NEW}\n", metadata={"page": 1})):
        assert text_id(document) == f"text-{digest}"
    assert text_id(Document(NEW, id="own")) == "own"
    assert text_id(Document("a")) != text_id(Document("b"))
    assert text_id(Document("\ud800"))  # half a pair, as broken files give it


def test_what_is_compiled_is_what_is_prompted(llm: Compiled) -> None:
    documents = [Document(f"\n {text} ", id=name) for name, text in TEXTS.items()]
    assert compile_documents(llm, documents).added == list(TEXTS)
    assert compile_documents(llm, iter(documents)).unchanged == list(TEXTS)
    assert {i: llm.texts.text(i) for i in llm.texts.ids()} == {i: text.strip() for i, text in TEXTS.items()}
    report = compile_documents(llm, [Document(NEW), Document(NEW, metadata={"page": 2}), Document(" ")])
    assert report.added == [text_id(Document(NEW))]
    prompt = "Use these:\n\n" + "\n\n".join(d.page_content for d in documents) + f"\n\n{NEW}\n\nQuestion: why?"
    assert [p.text for p in llm.texts.find(prompt) if p.name] == [*(text.strip() for text in TEXTS.values()), NEW]


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_what_retriever_tools_answer_is_found_in_prompts(llm: Compiled, response_format: str) -> None:
    store = EpicVectorStore(faiss_store(Counting(), BagOfWords.dim), llm)
    store.add_documents([Document(f"{text}\n", id=name) for name, text in TEXTS.items()])
    retriever: BaseRetriever = store.as_retriever(search_kwargs={"k": 2})
    tool = create_retriever_tool(retriever, "handbook", "Searches it.", response_format=response_format)  # type: ignore[arg-type]
    message = tool.invoke({"type": "tool_call", "name": "handbook", "id": "1", "args": {"query": TEXTS["ferry"]}})
    found = [p.name for p in llm.texts.find(message.content) if p.name]
    assert found == [d.id for d in retriever.invoke(TEXTS["ferry"])]
    assert found[0] == "ferry"
    assert [d.id for d in message.artifact or []] == (found if response_format == "content_and_artifact" else [])


# -- reconciling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_what_went_past_the_store_is_reported_and_mended(llm: Compiled, kind: str) -> None:
    store = EpicVectorStore(STORES[kind](), llm)
    store.add_texts(TEXTS.values(), ids=list(TEXTS))
    llm.lease.engine.forget([llm.texts.key_of("harbour")])
    store.wrapped.delete(["bakery", "library"])
    store.wrapped.add_documents([Document(NEW, id="library"), Document("The mill grinds rye.", id="mill")])
    want = Drift(missing=("mill",), stale=("bakery",), changed=("library",), lost=("harbour",))
    assert store.reconcile() == want
    assert not store.reconcile()
    live = {"harbour": TEXTS["harbour"], "ferry": TEXTS["ferry"], "library": NEW, "mill": "The mill grinds rye."}
    check(llm, store.wrapped, live)
    assert not reconcile(llm, store)
    assert not reconcile(llm, store.get_by_ids(list(live)))
    assert reconcile(llm, [Document(NEW)]).missing == (text_id(Document(NEW)),)
    assert llm.texts.ids() == [text_id(Document(NEW))]


def test_what_is_compiled_late_has_its_vector_too(tmp_path: Path) -> None:
    with compiled(tmp_path, "neighbours:2") as llm:
        embeddings = Counting()
        store = EpicVectorStore(faiss_store(embeddings, BagOfWords.dim), llm)
        store.add_texts([TEXTS["harbour"]], ids=["harbour"])
        store.wrapped.add_texts([TEXTS["ferry"]], ids=["ferry"])
        embeddings.embedded.clear()
        assert store.reconcile().missing == ("ferry",)
        assert embeddings.embedded == [TEXTS["ferry"]]
        ids, vectors = llm.texts.registry.embeddings()
        assert ids == ["ferry#0", "harbour#0"]
        np.testing.assert_allclose(vectors, BagOfWords().embed([TEXTS["ferry"], TEXTS["harbour"]]), atol=1e-6)
        assert all(llm.lease.engine.has(ChunkKey(r.key)) for r in llm.texts.registry.all_chunks())


def test_a_store_that_cannot_list_is_given_its_documents(llm: Compiled) -> None:
    class Opaque(VectorStore):
        def similarity_search(self, query: str, k: int = 4, **kwargs: object) -> list[Document]:
            return []

        @classmethod
        def from_texts(cls, *args: object, **kwargs: object) -> Opaque:  # type: ignore[override]
            return cls()

    store = EpicVectorStore(Opaque(), llm)
    with pytest.raises(RagError, match="Opaque cannot list its documents"):
        store.reconcile()
    assert store.reconcile([Document(NEW, id="a")]).missing == ("a",)
    assert llm.texts.ids() == ["a"]
