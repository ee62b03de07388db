"""LangChain's indexing: after every run, store and KV hold exactly the live chunks, whatever the cleanup mode."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import VectorStore
from langchain_epic.vector_store import EpicVectorStore

from tests.langchain.corpus import STORES, Compiled, check, compiled, document, faiss_store, sha_id
from tests.rag.stack import TEXTS

MODES = ["full", "incremental", "scoped_full", None]
# For a longer run, with times: EPIC_TEST_DOCUMENTS=10000 pytest -s -k leaves_nothing tests/langchain/test_indexing.py
DOCUMENTS = int(os.environ.get("EPIC_TEST_DOCUMENTS", "1000"))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Compiled]:
    with compiled(tmp_path / "kv") as made:
        yield made


class Indexing:
    """Runs of an indexing, and what they ought to leave: a plain table of chunks by their ids."""

    def __init__(self, llm: Compiled, store: VectorStore, mode: Any, *, asynchronous: bool) -> None:
        self.llm = llm
        self.store = store
        self.mode = mode
        self.asynchronous = asynchronous
        self.live: dict[str, Document] = {}
        self._records = InMemoryRecordManager("test")
        self._target = EpicVectorStore(store, llm)

    async def run(self, documents: Sequence[Document], **options: Any) -> dict[str, int]:
        """Index documents, check what is left; returns what LangChain counted."""
        options = {
            "cleanup": self.mode, "source_id_key": "source", "key_encoder": sha_id, "batch_size": 2, **options,
        }  # fmt: skip
        if self.asynchronous:
            result = await aindex(documents, self._records, self._target, **options)
        else:
            result = index(documents, self._records, self._target, **options)
        new = {sha_id(d): d for d in documents}
        seen = {d.metadata["source"] for d in documents}
        for name, known in list(self.live.items()):
            replaced = self.mode in ("incremental", "scoped_full") and known.metadata["source"] in seen
            if name not in new and (replaced or self.mode == "full"):
                del self.live[name]
        self.live |= new
        check(self.llm, self.store, {i: d.page_content for i, d in self.live.items()})
        return dict(result)


def chunks(source: str, *texts: str) -> list[Document]:
    return [document(text, source) for text in texts]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["index", "aindex"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STORES)
async def test_the_life_of_an_index(llm: Compiled, kind: str, mode: str | None, asynchronous: bool) -> None:
    indexing = Indexing(llm, STORES[kind](), mode, asynchronous=asynchronous)
    harbour = chunks("harbour", "The harbour master is Ines.", "Boats pay nine crowns.", "The crane lifts four tonnes.")
    bakery = chunks("bakery", TEXTS["bakery"])
    ferry = chunks("ferry", "The ferry leaves at noon.", "It carries forty people.")
    everything = [*harbour, *bakery, *ferry]

    counted = await indexing.run(everything)
    assert (counted["num_added"], counted["num_deleted"]) == (6, 0)
    counted = await indexing.run(everything)
    # In small batches the incremental mode deletes what a later batch of the same source brings back.
    assert counted["num_skipped"] == (6 if mode != "incremental" else counted["num_skipped"])

    # One chunk changes, one goes, one source is new, and one text stands in two sources.
    harbour = chunks("harbour", "The harbour master is Ines.", "Boats pay ten crowns.")
    library = chunks("library", "The library lends books for a month.", "Boats pay ten crowns.")
    await indexing.run([*harbour, *bakery, *ferry, *library])
    # A source is gone from the loader, and so is one of the two copies.
    await indexing.run([*bakery, *ferry, *library[:1]])
    # A source's metadata change, which gives its chunks new ids though not new texts.
    await indexing.run([*bakery, *[document(d.page_content, "ferry", page=1) for d in ferry]])
    # An older state comes back; then all is compiled anew, though nothing changed.
    await indexing.run(everything)
    counted = await indexing.run(everything, force_update=True, batch_size=100)
    assert counted["num_updated"] == 6
    await indexing.run([])
    assert indexing.live == {} or mode != "full"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["index", "aindex"])
async def test_a_run_that_failed_is_made_up_for_by_the_next(
    llm: Compiled, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    store = faiss_store(dim=6)
    indexing = Indexing(llm, store, "full", asynchronous=asynchronous)
    documents = [document(text, name) for name, text in TEXTS.items()]
    await indexing.run(documents[:1])
    with monkeypatch.context() as patched:
        patched.setattr(store, "add_embeddings", _refuse)
        with pytest.raises(OSError, match="no route"):
            await indexing.run(documents)
        check(llm, store, {sha_id(d): d.page_content for d in documents[:1]})
    await indexing.run(documents)
    with monkeypatch.context() as patched:
        patched.setattr(store, "delete", _refuse)
        with pytest.raises(OSError, match="no route"):
            await indexing.run(documents[:2])
        check(llm, store, {sha_id(d): d.page_content for d in documents})
    await indexing.run(documents[:2])


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("no route to the store")


@pytest.mark.slow
def test_a_life_of_many_documents_leaves_nothing_behind(llm: Compiled) -> None:
    words = TEXTS["harbour"].split() + TEXTS["ferry"].split()

    def state(number: int, version: int) -> Document:
        drawn = random.Random(f"{number} {version}").choices(words, k=3)
        return document(f"Item {number} state {version}: {' '.join(drawn)}", f"source {number // 10}")

    store = faiss_store()
    target, records = EpicVectorStore(store, llm), InMemoryRecordManager("test")

    def run(documents: list[Document]) -> dict[str, int]:
        options = {"cleanup": "full", "source_id_key": "source", "key_encoder": sha_id, "batch_size": 500}
        start = time.monotonic()
        counted = index(documents, records, target, **options)
        print(f"{len(documents)} documents, {time.monotonic() - start:.1f} s: {counted}")
        check(llm, store, {sha_id(d): d.page_content for d in documents})
        return dict(counted)

    first = [state(i, 0) for i in range(DOCUMENTS)]
    assert run(first)["num_added"] == DOCUMENTS
    second = [state(i, i % 2) for i in range(DOCUMENTS)]
    counted = run(second)
    assert counted["num_added"] == counted["num_deleted"] == DOCUMENTS // 2
    assert run(second)["num_skipped"] == DOCUMENTS
    assert run([])["num_deleted"] == DOCUMENTS
    assert llm.texts.registry.counts() == {"documents": 0, "chunks": 0, "tokens": 0}
    assert not llm.lease.engine.store.verify().orphans
