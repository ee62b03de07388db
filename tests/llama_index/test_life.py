"""The life of an index: after every step the store holds exactly the live chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError
from llama_index.core import (
    Document,
    SimpleKeywordTableIndex,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index_epic import EpicCompile, EpicLLM, EpicVectorStore, compile_nodes, reconcile

from epic_rag.errors import RagError
from epic_rag.texts import Drift
from tests.llama_index.stack import BagEmbedding, prompted, text_nodes, tiny_llm
from tests.rag.stack import TEXTS, save_model, tokenizer

SPLITTER = SentenceSplitter(chunk_size=30, chunk_overlap=0)
NEW = "The lighthouse keeper is Greta. She lights the lamp at dusk. Visitors may climb the tower on Sundays."


def documents(texts: dict[str, str]) -> list[Document]:
    return [Document(text=text, doc_id=name, metadata={"page": name}) for name, text in texts.items()]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[EpicLLM]:
    with tiny_llm(tmp_path / "kv") as made:
        yield made


def check(llm: EpicLLM, live: dict[str, str]) -> None:
    """Chunks, groups and KV are those of the live documents, split anew."""
    want: dict[str, list[str]] = {name: [] for name in live}
    for node in SPLITTER.get_nodes_from_documents(documents(live)):
        want[node.ref_doc_id].append(prompted(node))
    texts = llm.texts
    assert Counter(map(texts.text, texts.ids())) == Counter(t for own in want.values() for t in own)
    for name, own in want.items():
        assert sorted(map(texts.text, texts.group(name))) == sorted(own)
    held = {tuple(entry.token_ids) for entry in llm.engine.store.entries()}
    assert held == {tuple(tokenizer()(t, add_special_tokens=False)["input_ids"]) for own in want.values() for t in own}


def build(llm: EpicLLM, live: dict[str, str], vector_store: Any = None, **options: Any) -> VectorStoreIndex:
    store = EpicVectorStore(vector_store or SimpleVectorStore(), llm)
    return VectorStoreIndex.from_documents(
        documents(live),
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SPLITTER],
        embed_model=BagEmbedding(),
        **options,
    )


def test_insert_update_refresh_delete_persist_and_reload(llm: EpicLLM, tmp_path: Path) -> None:
    live = {name: TEXTS[name] for name in ("harbour", "bakery")}
    index = build(llm, live)
    check(llm, live)

    live["ferry"] = TEXTS["ferry"]
    index.insert(documents({"ferry": live["ferry"]})[0])
    check(llm, live)

    live["bakery"] = "The bakery burned down last year. Olaf moved to the city and bakes cakes there."
    index.update_ref_doc(documents({"bakery": live["bakery"]})[0])
    check(llm, live)

    live |= {"harbour": NEW, "library": TEXTS["library"]}
    assert index.refresh_ref_docs(documents(live)) == [True, False, False, True]
    check(llm, live)

    index.delete_ref_doc("ferry", delete_from_docstore=True)
    del live["ferry"]
    check(llm, live)

    index.storage_context.persist(tmp_path / "index")
    before = set(llm.texts.ids())
    llm.close()
    store = EpicVectorStore.from_persist_dir(str(tmp_path / "index"), SimpleVectorStore, llm, namespace="default")
    context = StorageContext.from_defaults(persist_dir=str(tmp_path / "index"), vector_store=store)
    index = load_index_from_storage(context, embed_model=BagEmbedding())
    assert set(llm.texts.ids()) == before
    assert not store.reconcile(index)
    check(llm, live)

    answer = index.as_query_engine(llm=llm, similarity_top_k=2).query("Who keeps the lighthouse?")
    assert {s.node.node_id for s in answer.source_nodes} <= before
    last = llm.complete("\n\n".join(prompted(s.node) for s in answer.source_nodes)).raw
    assert last["epic"]["reuse"] == "composed"

    index.delete_nodes(llm.texts.group("library"), delete_from_docstore=True)
    del live["library"]
    check(llm, live)

    store.clear()
    check(llm, {})


async def test_the_same_asynchronously(llm: EpicLLM) -> None:
    live = {name: TEXTS[name] for name in ("harbour", "bakery")}
    index = build(llm, live, use_async=False)
    live["ferry"] = TEXTS["ferry"]
    await index.ainsert(documents({"ferry": live["ferry"]})[0])
    check(llm, live)
    await index.aupdate_ref_doc(documents({"bakery": NEW})[0])
    live["bakery"] = NEW
    check(llm, live)
    await index.adelete_ref_doc("harbour", delete_from_docstore=True)
    del live["harbour"]
    check(llm, live)
    await index.vector_store.adelete_nodes(llm.texts.group("ferry"))
    del live["ferry"]
    check(llm, live)
    await index.vector_store.aclear()
    check(llm, {})


def test_faiss_deletes_by_nodes_and_keeps_kv_where_it_cannot(llm: EpicLLM) -> None:
    faiss = pytest.importorskip("faiss")
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    live = {name: TEXTS[name] for name in ("harbour", "bakery", "ferry")}
    inner = stores.FaissMapVectorStore(faiss.IndexIDMap2(faiss.IndexFlatIP(64)))
    index = build(llm, live, inner)
    check(llm, live)
    answer = index.as_query_engine(llm=llm, similarity_top_k=2).query("It carries forty people and six bicycles.")
    assert answer.source_nodes[0].node.ref_doc_id == "ferry"
    vectors = inner.client.ntotal
    gone = len(llm.texts.group("bakery"))
    index.delete_ref_doc("bakery", delete_from_docstore=True)
    del live["bakery"]
    check(llm, live)
    assert inner.client.ntotal == vectors - gone
    plain = EpicVectorStore(stores.FaissVectorStore(faiss.IndexFlatIP(64)), llm)
    with pytest.raises(NotImplementedError, match="FaissMapVectorStore"):
        plain.delete("harbour")
    check(llm, live)


def test_what_went_past_the_store_is_reported_and_mended(llm: EpicLLM) -> None:
    live = {name: TEXTS[name] for name in ("harbour", "bakery")}
    index = build(llm, live)
    store = index.vector_store
    lost, changed = llm.texts.group("harbour")[0], llm.texts.group("bakery")[0]
    llm.engine.forget([llm.texts.key_of(lost)])
    node = index.docstore.get_node(changed)
    node.set_content("The bakery is closed.")
    index.docstore.add_documents([node])
    compile_nodes(llm, [TextNode(id_="stale", text=NEW)])
    extra = TextNode(id_="missing", text=TEXTS["library"], embedding=[0.1] * 64)
    index.docstore.add_documents([extra])
    store.wrapped.add([extra])
    index.index_struct.add_node(extra, text_id="missing")
    want = Drift(missing=("missing",), stale=("stale",), changed=(changed,), lost=(lost,))
    assert store.reconcile(index) == want
    assert not store.reconcile(index)
    nodes = index.docstore.get_nodes(list(index.index_struct.nodes_dict.values()))
    assert {i: llm.texts.text(i) for i in llm.texts.ids()} == {n.node_id: prompted(n) for n in nodes}
    assert not reconcile(llm, nodes)


def test_a_summary_index_is_reconciled_from_its_nodes(llm: EpicLLM) -> None:
    index = SummaryIndex(text_nodes())
    drift = reconcile(llm, index)
    assert sorted(drift.missing) == sorted(TEXTS)
    assert {i: llm.texts.text(i) for i in llm.texts.ids()} == {n.node_id: prompted(n) for n in text_nodes()}
    with pytest.raises(RagError, match="all of them"):
        reconcile(llm, SimpleKeywordTableIndex([], llm=llm))


def test_a_store_that_fails_leaves_no_kv(llm: EpicLLM) -> None:
    store = EpicVectorStore(SimpleVectorStore(), llm)
    with pytest.raises(ValueError, match="embedding not set"):
        store.add(text_nodes())
    assert llm.texts.ids() == []


def test_deleting_by_filter(llm: EpicLLM, caplog: pytest.LogCaptureFixture) -> None:
    index = build(llm, {name: TEXTS[name] for name in ("harbour", "bakery")})
    index.vector_store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="page", value="bakery")]))
    assert "call reconcile()" in caplog.text  # this store cannot say which
    assert set(index.vector_store.wrapped.data.text_id_to_ref_doc_id.values()) == {"harbour"}


def pipeline(llm: EpicLLM, **options: Any) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[SPLITTER, BagEmbedding(), EpicCompile(llm=llm)],
        docstore=SimpleDocumentStore(),
        vector_store=EpicVectorStore(SimpleVectorStore(), llm),
        **options,
    )


def test_pipeline_upserts_with_cache_and_docstore(llm: EpicLLM, tmp_path: Path) -> None:
    live = {name: TEXTS[name] for name in ("harbour", "bakery", "ferry")}
    pipe = pipeline(llm, cache=IngestionCache(), docstore_strategy=DocstoreStrategy.UPSERTS)
    pipe.run(documents=documents(live))
    check(llm, live)
    assert pipe.run(documents=documents(live)) == []
    check(llm, live)
    live["bakery"] = NEW
    pipe.run(documents=documents(live))
    check(llm, live)

    # The same texts again, for an index of its own: the cache answers, and the vector store sees the nodes.
    with tiny_llm(tmp_path / "other") as other:
        again = pipeline(other, cache=pipe.cache)
        again.transformations = [SPLITTER, BagEmbedding()]
        again.run(documents=documents(live))
        check(other, live)

    # An older state of a document is a cache hit, and compiled all the same.
    live["bakery"] = TEXTS["bakery"]
    pipe.run(documents=documents(live))
    check(llm, live)
    del live["harbour"]
    pipe.docstore_strategy = DocstoreStrategy.UPSERTS_AND_DELETE
    pipe.run(documents=documents(live))
    check(llm, live)


async def test_an_asynchronous_pipeline(llm: EpicLLM) -> None:
    live = {name: TEXTS[name] for name in ("harbour", "bakery")}
    pipe = pipeline(llm)
    await pipe.arun(documents=documents(live))
    live["harbour"] = NEW
    await pipe.arun(documents=documents(live))
    check(llm, live)


def test_nodes_pass_unchanged_and_are_compiled_without_a_vector_store(llm: EpicLLM) -> None:
    nodes = text_nodes()
    assert EpicCompile(llm=llm)(nodes) is nodes
    assert [n.to_dict() for n in nodes] == [n.to_dict() for n in text_nodes()]
    assert {i: llm.texts.text(i) for i in llm.texts.ids()} == {n.node_id: prompted(n) for n in nodes}


def test_two_workers_compile_into_one_store(tmp_path: Path) -> None:
    with EpicLLM(
        model=save_model(tmp_path / "model"), store=tmp_path / "kv", context="isolated", policy="naive",
        device="cpu", dtype="float32", engine_options={"selftest": False},
    ) as llm:  # fmt: skip
        pipe = pipeline(llm)
        pipe.run(documents=documents(TEXTS), num_workers=2)
        check(llm, TEXTS)
        assert not llm.texts.compare({i: llm.texts.text(i) for i in llm.texts.ids()})
        live = {**TEXTS, "ferry": NEW}
        pipe.run(documents=documents(live))
        check(llm, live)


def test_workers_need_a_store_and_a_model_by_name(tmp_path: Path) -> None:
    with tiny_llm() as memory, tiny_llm(tmp_path / "kv") as loaded:
        with pytest.raises(ConfigError, match="store="):
            EpicCompile(llm=memory).__getstate__()
        with pytest.raises(ConfigError, match="folder"):
            pipeline(loaded).run(documents=documents(TEXTS), num_workers=2)
    assert EpicCompile.from_dict(EpicCompile(llm=EpicLLM(model="a", store="b")).to_dict()).llm.store == "b"
