"""The wrapping vector store: what it adds to the wrapped one, and that it takes nothing away."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epic_engine import ConfigError
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_core.documents import Document
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_epic.vector_store import EpicVectorStore

from epic_rag.errors import MissingDependencyError
from tests.langchain.corpus import STORES, Compiled, Counting, check, compiled, faiss_store, memory_store
from tests.rag.stack import TEXTS, BagOfWords

NEW = "The lighthouse keeper is Greta. She lights the lamp at dusk."


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Compiled]:
    with compiled(tmp_path / "kv") as made:
        yield made


def filled(llm: Compiled, kind: str) -> EpicVectorStore:
    store = EpicVectorStore(STORES[kind](), llm)
    assert store.add_texts(TEXTS.values(), [{"name": name} for name in TEXTS], ids=list(TEXTS)) == list(TEXTS)
    return store


# -- adding and deleting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", STORES)
async def test_any_life_leaves_exactly_what_is_live(llm: Compiled, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    store = EpicVectorStore(STORES[kind](), llm)
    live: dict[str, str] = {}
    for _ in range(25):
        texts = [" ".join(rng.choices(TEXTS["harbour"].split(), k=rng.randint(0, 4))) for _ in range(3)]
        texts[2] = rng.choice([*live.values(), texts[2]])  # sometimes a copy
        names = rng.sample("abcdefgh", 3)
        action = rng.choice(["add", "aadd", "texts", "atexts", "delete", "adelete"])
        if action == "add":
            store.add_documents([Document(t, id=i) for i, t in zip(names, texts, strict=True)])
        elif action == "aadd":
            await store.aadd_documents([Document(t, id="other") for t in texts], ids=names)
        elif action == "texts":
            store.add_texts((t for t in texts), ids=names)
        elif action == "atexts":
            await store.aadd_texts((t for t in texts), [{}, {}, {}], ids=names)
        elif action == "delete":
            store.delete([*names, names[0], "unknown"])
        else:
            await store.adelete([*names, names[0], "unknown"])
        if "delete" in action:
            live = {i: t for i, t in live.items() if i not in names}
        else:
            live |= dict(zip(names, texts, strict=True))
        assert {i: d.page_content for i in live for d in store.get_by_ids([i])} == live
        blank = {i for i, t in live.items() if not t}
        store.delete(sorted(blank))  # blank documents are stored and not compiled
        live = {i: t for i, t in live.items() if t}
        check(llm, store.wrapped, live)


def test_a_blank_document_takes_the_place_of_a_compiled_one(llm: Compiled) -> None:
    store = filled(llm, "memory")
    store.add_documents([Document(" \n", id="ferry")])
    assert store.get_by_ids(["ferry"])[0].page_content == " \n"
    assert sorted(llm.texts.ids()) == sorted(set(TEXTS) - {"ferry"})


@pytest.mark.parametrize("kind", STORES)
def test_documents_without_ids_are_all_kept_even_copies(llm: Compiled, kind: str) -> None:
    store = EpicVectorStore(STORES[kind](), llm)
    given = [Document(NEW, metadata={"n": 1}), Document(NEW, metadata={"n": 2}), Document(NEW, id="own")]
    ids = store.add_documents(given)
    assert ids[2] == "own"
    check(llm, store.wrapped, dict.fromkeys(ids, NEW))
    assert [d.id for d in given] == [None, None, "own"]
    assert len(list(llm.lease.engine.store.entries())) == 1
    store.delete([ids[0]])
    check(llm, store.wrapped, dict.fromkeys(ids[1:], NEW))


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_ids_that_the_store_makes_itself_are_known(llm: Compiled, asynchronous: bool) -> None:
    class Numbering(InMemoryVectorStore):
        def add_documents(self, documents: list[Document], ids: Any = None, **kwargs: Any) -> list[str]:
            numbers = [str(len(self.store) + i) for i in range(len(documents))]
            return super().add_documents(documents, numbers, **kwargs)

        async def aadd_documents(self, documents: list[Document], ids: Any = None, **kwargs: Any) -> list[str]:
            return self.add_documents(documents, **kwargs)

    store = EpicVectorStore(Numbering(Counting()), llm)
    documents = [Document(text, id=name) for name, text in TEXTS.items()]
    ids = await store.aadd_documents(documents) if asynchronous else store.add_documents(documents)
    assert ids == ["0", "1", "2", "3"]
    check(llm, store.wrapped, dict(zip(ids, TEXTS.values(), strict=True)))


def test_a_store_that_names_too_few_is_told_of(llm: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(InMemoryVectorStore):
        def add_documents(self, *args: Any, **kwargs: Any) -> list[str]:
            super().add_documents(*args, **kwargs)
            return []

    store = EpicVectorStore(Silent(Counting()), llm)
    assert store.add_documents([Document(NEW, id="a")]) == []
    assert "0 ids for 1 documents" in caplog.text
    check(llm, store.wrapped, {"a": NEW})


def test_what_does_not_belong_together_is_refused(llm: Compiled) -> None:
    store = EpicVectorStore(faiss_store(), llm)
    with pytest.raises(ConfigError, match="2 documents but 1 ids"):
        store.add_documents([Document("a"), Document("b")], ids=["1"])
    with pytest.raises(ConfigError, match="1 texts but 2 metadatas"):
        store.add_texts(["a"], [{}, {}])
    assert store.add_documents([]) == store.add_texts(iter(())) == []
    assert store.delete([])
    check(llm, store.wrapped, {})


async def test_deleting_without_ids_forgets_what_the_store_deleted(llm: Compiled, monkeypatch: Any) -> None:
    class Deleting(InMemoryVectorStore):
        def delete(self, ids: Any = None, *, name: str | None = None, **kwargs: Any) -> None:
            gone = [i for i, d in self.store.items() if name in (None, d["metadata"].get("name"))]
            super().delete(gone if ids is None else ids)

        async def adelete(self, ids: Any = None, **kwargs: Any) -> None:
            self.delete(ids, **kwargs)

    store = EpicVectorStore(Deleting(Counting()), llm)
    live = dict(TEXTS)
    for delete in (store.delete, store.adelete):
        store.add_texts(live.values(), [{"name": name} for name in live], ids=list(live))
        for name in ("ferry", None):
            options = {"name": name} if name else {}
            done = delete(None, **options)
            if inspect.isawaitable(done):
                await done
            check(llm, store.wrapped, {i: t for i, t in live.items() if i != "ferry"} if name else {})

    kept = filled(llm, "memory")
    monkeypatch.setattr(kept.wrapped, "get_by_ids", lambda ids: [])
    monkeypatch.setattr(kept.wrapped, "delete", lambda ids: False)
    assert kept.delete() is False
    assert sorted(llm.texts.ids()) == sorted(TEXTS)
    monkeypatch.undo()
    kept.delete()  # that store deletes nothing then
    check(llm, kept.wrapped, TEXTS)
    with pytest.raises(ValueError, match="No ids provided"):
        EpicVectorStore(faiss_store(), llm).delete()
    check(llm, kept.wrapped, TEXTS)


def test_deleting_without_ids_from_a_store_that_does_not_say(llm: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    class Mute(InMemoryVectorStore):
        def get_by_ids(self, ids: Any, /) -> list[Document]:
            raise NotImplementedError

        def delete(self, ids: Any = None, **kwargs: Any) -> None:
            self.store.clear()

    store = EpicVectorStore(Mute(Counting()), llm)
    store.add_texts([NEW], ids=["a"])
    store.delete(filter="all")
    assert "call reconcile()" in caplog.text
    assert llm.texts.ids() == ["a"]
    store.delete()
    check(llm, store.wrapped, {})


# -- embeddings -------------------------------------------------------------------------------------------------------


async def test_each_chunk_is_embedded_once_and_its_vector_kept(tmp_path: Path) -> None:
    def memory(embeddings: Counting) -> VectorStore:
        cached = CacheBackedEmbeddings.from_bytes_store(embeddings, InMemoryByteStore(), key_encoder="sha256")
        return memory_store(cached)

    def faiss(embeddings: Counting) -> VectorStore:
        return faiss_store(embeddings, BagOfWords.dim)

    for number, (make, context) in enumerate([(faiss, "neighbours:2"), (faiss, "isolated"), (memory, "neighbours:2")]):
        with compiled(tmp_path / str(number), context) as llm:
            embeddings = Counting()
            store = EpicVectorStore(make(embeddings), llm)
            names, texts = list(TEXTS), list(TEXTS.values())
            store.add_texts(texts[:2], ids=names[:2])
            await store.aadd_texts(texts[2:], ids=names[2:])
            assert embeddings.embedded == texts
            ids, vectors = llm.texts.registry.embeddings()
            want = dict(zip(names, BagOfWords().embed(texts), strict=True))
            np.testing.assert_allclose(vectors, [want[i.removesuffix("#0")] for i in ids], atol=1e-6)
            if context != "isolated":
                forms = {e.context for e in llm.lease.engine.store.entries()}
                assert any(form.startswith("neighbours") for form in forms)


def test_other_stores_embed_alone_where_no_context_asks(llm: Compiled) -> None:
    embeddings = Counting()
    store = EpicVectorStore(memory_store(embeddings), llm)
    store.add_texts(TEXTS.values(), ids=list(TEXTS))
    assert embeddings.embedded == list(TEXTS.values())
    assert llm.texts.registry.dimension() == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_faiss_with_an_embedding_function_is_served(llm: Compiled) -> None:
    store = faiss_store()
    store.embedding_function = store.embedding_function.embed_query
    epic = EpicVectorStore(store, llm)
    for text in (NEW, TEXTS["ferry"]):
        epic.add_texts([text], ids=["a"])
        check(llm, store, {"a": text})
    assert epic.similarity_search(TEXTS["ferry"], k=1)[0].id == "a"


# -- making -----------------------------------------------------------------------------------------------------------


async def test_made_from_texts_and_documents(llm: Compiled) -> None:
    texts, names = list(TEXTS.values()), list(TEXTS)
    metadatas = [{"name": name} for name in names]
    documents = [Document(t, metadata=m, id=i) for t, m, i in zip(texts, metadatas, names, strict=True)]
    for made in (
        EpicVectorStore.from_texts(texts, Counting(), metadatas, ids=names, llm=llm),
        await EpicVectorStore.afrom_texts(texts, Counting(), metadatas, ids=names, llm=llm),
        EpicVectorStore.from_documents(documents, Counting(), llm=llm),
        await EpicVectorStore.afrom_documents(documents, Counting(), llm=llm),
        EpicVectorStore.from_documents(documents, Counting(), llm=llm, vector_store=memory_store()),
    ):
        check(llm, made.wrapped, TEXTS)
        assert made.similarity_search(TEXTS["bakery"], k=1) == [documents[1]]
    # Some have ids, the others get some.
    mixed = EpicVectorStore.from_documents([documents[0], Document(NEW)], Counting(), llm=llm)
    own = next(i for i in mixed.wrapped.docstore._dict if i != "harbour")
    assert llm.texts.text(own) == NEW


def test_what_is_missing_is_named(llm: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="llm="):
        EpicVectorStore.from_texts([NEW], Counting())
    monkeypatch.setitem(sys.modules, "langchain_community.docstore.in_memory", None)
    with pytest.raises(MissingDependencyError, match="pip install langchain-community faiss-cpu"):
        EpicVectorStore.from_texts([NEW], Counting(), llm=llm)


# -- everything else is the wrapped store's ---------------------------------------------------------------------------

QUERY = "When does the ferry leave?"
VECTOR = [0.3, -0.2, 0.9, 0.1, -0.5, 0.4]
SEARCHES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("similarity_search", [QUERY], {"k": 2}),
    ("similarity_search", [QUERY, 3], {}),
    ("similarity_search", [QUERY], {}),
    ("similarity_search_with_score", [QUERY], {"k": 2}),
    ("similarity_search_with_relevance_scores", [QUERY], {"k": 3, "score_threshold": -9.0}),
    ("similarity_search_by_vector", [VECTOR], {"k": 2}),
    ("max_marginal_relevance_search", [QUERY], {"k": 2, "fetch_k": 4, "lambda_mult": 0.1}),
    ("max_marginal_relevance_search_by_vector", [VECTOR], {"k": 2}),
    ("get_by_ids", [["ferry", "harbour", "unknown"]], {}),
    ("search", [QUERY, "mmr"], {"k": 2}),
    ("search", [QUERY, "similarity_score_threshold"], {"k": 2}),
]


@pytest.mark.filterwarnings("ignore:Relevance scores")
@pytest.mark.parametrize(("method", "args", "options"), SEARCHES)
async def test_searches_are_the_wrapped_stores(llm: Compiled, method: str, args: list[Any], options: Any) -> None:
    store = filled(llm, "faiss")
    want = getattr(store.wrapped, method)(*args, **options)
    assert want
    assert getattr(store, method)(*args, **options) == want
    assert await getattr(store, f"a{method}")(*args, **options) == want


def test_filters_retrievers_and_embeddings_go_through(llm: Compiled) -> None:
    store = filled(llm, "faiss")
    assert [d.id for d in store.similarity_search(QUERY, filter={"name": "library"})] == ["library"]
    assert store.embeddings is store.wrapped.embedding_function
    assert store._select_relevance_score_fn() == store.wrapped._select_relevance_score_fn()
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2})
    assert retriever.tags == ["EpicVectorStore", "DeterministicFakeEmbedding"]
    assert retriever.invoke(QUERY) == store.wrapped.max_marginal_relevance_search(QUERY, k=2)
    retriever.add_documents([Document(NEW, id="light")])
    check(llm, store.wrapped, {**TEXTS, "light": NEW})


def test_every_public_method_is_thought_of() -> None:
    # These call others of this class, and the wrapped store is asked in the end.
    inherited = {"search", "asearch", "as_retriever", "from_documents", "afrom_documents"}
    public = {name for name, _ in inspect.getmembers(VectorStore, callable) if not name.startswith("_")}
    assert {name for name in public if name not in vars(EpicVectorStore)} == inherited


def test_saved_and_loaded_the_wrapped_stores_own_way(llm: Compiled, tmp_path: Path) -> None:
    store = filled(llm, "memory")
    store.wrapped.dump(str(tmp_path / "vectors.json"))
    again = EpicVectorStore(InMemoryVectorStore.load(str(tmp_path / "vectors.json"), store.embeddings), llm)
    assert not again.reconcile()
    again.delete(["ferry"])
    check(llm, again.wrapped, {i: t for i, t in TEXTS.items() if i != "ferry"})
