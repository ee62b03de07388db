"""When the wrapped store, the compiler or the task fails: documents and KV are as before, or as the store says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ContextLengthError
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_epic.vector_store import EpicVectorStore

from epic_rag.texts import CompiledTexts
from tests.langchain.corpus import STORES, Compiled, Counting, check, compiled, faiss_store, memory_store
from tests.rag.stack import TEXTS, BagOfWords

NEW = "The lighthouse keeper is Greta. She lights the lamp at dusk."
CHANGED = [Document(NEW, id="ferry"), Document("The mill grinds rye.", id="mill")]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Compiled]:
    with compiled(tmp_path / "kv") as made:
        yield made


def filled(llm: Compiled, store: Any) -> EpicVectorStore:
    made = EpicVectorStore(store, llm)
    made.add_texts(TEXTS.values(), ids=list(TEXTS))
    return made


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError("no route to the store")


async def arefuse(*_: Any, **__: Any) -> Any:
    refuse()


async def add(store: EpicVectorStore, documents: list[Document], asynchronous: bool) -> list[str]:
    return await store.aadd_documents(documents) if asynchronous else store.add_documents(documents)


BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@BOTH
@pytest.mark.parametrize("kind", STORES)
async def test_a_store_that_refuses_an_add(llm: Compiled, monkeypatch: Any, kind: str, asynchronous: bool) -> None:
    store = filled(llm, STORES[kind]())
    with monkeypatch.context() as patched:
        if kind == "memory":
            patched.setattr(store.wrapped, "add_documents", refuse)
            patched.setattr(store.wrapped, "aadd_documents", arefuse)
        else:  # once, when the old document is out already
            held = store.wrapped.index_to_docstore_id
            refusing = _refusing(store.wrapped.add_embeddings, lambda: store.wrapped.index_to_docstore_id != held)
            patched.setattr(store.wrapped, "add_embeddings", refusing)
        with pytest.raises(OSError, match="no route"):
            await add(store, CHANGED, asynchronous)
    check(llm, store.wrapped, TEXTS)
    assert store.similarity_search(TEXTS["ferry"], k=1)[0].id == "ferry"
    await add(store, CHANGED, asynchronous)
    check(llm, store.wrapped, {**TEXTS, "ferry": NEW, "mill": "The mill grinds rye."})


def _refusing(function: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    """Fails once, when it is called in a certain state."""
    left = [1]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left and when():
            left.pop()
            refuse()
        return function(*args, **kwargs)

    return call


def test_faiss_keeps_the_old_where_the_new_do_not_fit(llm: Compiled) -> None:
    class Growing(Counting):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [row + [0.0] * texts.count(NEW) for row in super().embed_documents(texts)]

    store = filled(llm, faiss_store(Growing(), BagOfWords.dim))
    with pytest.raises(AssertionError):
        store.add_documents([Document(NEW, id="ferry")])
    check(llm, store.wrapped, TEXTS)
    with pytest.raises(ValueError, match="Duplicate ids"):
        store.add_documents([Document("x", id="ferry"), Document("y", id="ferry")])
    check(llm, store.wrapped, TEXTS)
    assert store.similarity_search(TEXTS["ferry"], k=1)[0].page_content == TEXTS["ferry"]


@BOTH
@pytest.mark.parametrize("kind", STORES)
async def test_an_embedder_that_fails(llm: Compiled, kind: str, asynchronous: bool) -> None:
    embeddings = Counting()
    store = filled(llm, faiss_store(embeddings, BagOfWords.dim) if kind == "faiss" else memory_store(embeddings))
    embeddings.fails = True
    with pytest.raises(OSError, match="no route to the embedder"):
        await add(store, CHANGED, asynchronous)
    check(llm, store.wrapped, TEXTS)


@BOTH
@pytest.mark.parametrize("kind", STORES)
async def test_a_document_longer_than_the_model(llm: Compiled, kind: str, asynchronous: bool) -> None:
    store = filled(llm, STORES[kind]())
    long = Document("crane " * 3000, id="ferry")
    with pytest.raises(ContextLengthError, match="max_model_len"):
        await add(store, [CHANGED[1], long], asynchronous)
    check(llm, store.wrapped, TEXTS)


@BOTH
async def test_a_store_that_fails_halfway(llm: Compiled, asynchronous: bool) -> None:
    class Halfway(InMemoryVectorStore):
        def add_documents(self, documents: list[Document], ids: Any = None, **kwargs: Any) -> list[str]:
            super().add_documents(documents[:1], ids[:1])
            if len(documents) == 2:
                refuse()
            return super().add_documents(documents, ids)

        async def aadd_documents(self, documents: list[Document], ids: Any = None, **kwargs: Any) -> list[str]:
            return self.add_documents(documents, ids)

    store = filled(llm, Halfway(Counting()))
    with pytest.raises(OSError, match="no route"):
        await add(store, CHANGED, asynchronous)
    check(llm, store.wrapped, {**TEXTS, "ferry": NEW})


@BOTH
async def test_a_store_out_of_reach_costs_kv_and_no_truth(llm: Compiled, monkeypatch: Any, asynchronous: bool) -> None:
    store = filled(llm, memory_store())
    with monkeypatch.context() as patched:
        for name in ("add_documents", "get_by_ids"):
            patched.setattr(store.wrapped, name, refuse)
            patched.setattr(store.wrapped, f"a{name}", arefuse)
        with pytest.raises(OSError, match="no route"):
            await add(store, CHANGED, asynchronous)
    assert sorted(llm.texts.ids()) == sorted(set(TEXTS) - {"ferry"})
    assert store.reconcile().missing == ("ferry",)
    check(llm, store.wrapped, TEXTS)


@BOTH
@pytest.mark.parametrize("kind", STORES)
async def test_a_store_that_does_not_delete(llm: Compiled, monkeypatch: Any, kind: str, asynchronous: bool) -> None:
    store = filled(llm, STORES[kind]())

    async def delete() -> bool | None:
        return await store.adelete(["ferry"]) if asynchronous else store.delete(["ferry"])

    with monkeypatch.context() as patched:
        patched.setattr(store.wrapped, "delete", refuse)
        patched.setattr(store.wrapped, "adelete", arefuse)
        with pytest.raises(OSError, match="no route"):
            await delete()
    check(llm, store.wrapped, TEXTS)

    async def no(*_: Any, **__: Any) -> bool:
        return False

    with monkeypatch.context() as patched:
        patched.setattr(store.wrapped, "delete", lambda *_, **__: False)
        patched.setattr(store.wrapped, "adelete", no)
        assert await delete() is False
    check(llm, store.wrapped, TEXTS)
    assert await delete() is not False
    check(llm, store.wrapped, {i: t for i, t in TEXTS.items() if i != "ferry"})


# -- the event loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
async def test_the_event_loop_goes_on(llm: Compiled, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    threads: set[int] = set()
    for name in ("add", "remove"):
        monkeypatch.setattr(CompiledTexts, name, _noting(getattr(CompiledTexts, name), threads))
    store = EpicVectorStore(STORES[kind](), llm)
    texts = [f"Text {i}: {TEXTS['ferry'][:60]}" for i in range(120)]
    waits: list[float] = []
    for work in (
        store.aadd_texts(texts, ids=[str(i) for i in range(120)]),
        store.adelete([str(i) for i in range(120)]),
    ):
        task = asyncio.ensure_future(work)
        while not task.done():
            start = time.monotonic()
            await asyncio.sleep(0.005)
            waits.append(time.monotonic() - start)
        await task
    assert threading.get_ident() not in threads
    assert threads
    assert len(waits) > 5
    assert sorted(waits)[len(waits) // 2] < 0.1
    check(llm, store.wrapped, {})


def _noting(method: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        return method(*args, **kwargs)

    return call


@pytest.mark.parametrize("kind", STORES)
async def test_a_cancelled_add_leaves_nothing(llm: Compiled, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store = filled(llm, STORES[kind]())
    begun, ended = threading.Event(), threading.Event()
    real = CompiledTexts.add

    def slow(*args: Any, **kwargs: Any) -> Any:
        if begun.is_set():
            return real(*args, **kwargs)
        begun.set()
        time.sleep(0.3)
        report = real(*args, **kwargs)
        ended.set()
        return report

    monkeypatch.setattr(CompiledTexts, "add", slow)
    task = asyncio.ensure_future(store.aadd_documents(CHANGED))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()  # nothing comes after the call has returned
    check(llm, store.wrapped, TEXTS)


async def test_an_add_cancelled_while_the_store_waits(llm: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(llm, memory_store())
    waiting = asyncio.Event()

    async def never(*_: Any, **__: Any) -> list[str]:
        waiting.set()
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(store.wrapped, "aadd_documents", never)
    task = asyncio.ensure_future(store.aadd_documents(CHANGED))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    check(llm, store.wrapped, TEXTS)


async def test_concurrent_adds_and_deletes(llm: Compiled) -> None:
    store = EpicVectorStore(faiss_store(), llm)
    texts = {str(i): f"Text {i}: {TEXTS['ferry'][:40]}" for i in range(40)}
    await asyncio.gather(*(store.aadd_documents([Document(t, id=i)]) for i, t in texts.items()))
    check(llm, store.wrapped, texts)
    await asyncio.gather(
        *(store.adelete([str(i)]) for i in range(0, 40, 2)),
        *(store.aadd_documents([Document(NEW, id=str(i))]) for i in range(1, 40, 2)),
    )
    check(llm, store.wrapped, {str(i): NEW for i in range(1, 40, 2)})
