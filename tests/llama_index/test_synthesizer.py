"""Nodes that keep their ids up to the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from epic_engine import ContextLengthError, Engine
from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_epic import (
    EpicCondensePlusContextChatEngine,
    EpicContextChatEngine,
    EpicLLM,
    EpicSynthesizer,
    compile_nodes,
)

from tests.llama_index.stack import BagEmbedding, expected, prompted, recorded, text_nodes, tiny_llm
from tests.rag.stack import tokenizer

QUESTION = "Who is the harbour master?"
TEXTS = [prompted(node) for node in text_nodes()]


@pytest.fixture
def llm() -> Iterator[EpicLLM]:
    with tiny_llm() as made:
        yield made


def index() -> VectorStoreIndex:
    return VectorStoreIndex(text_nodes(), embed_model=BagEmbedding())


def check(calls: Any, oracle: Engine, sources: list[NodeWithScore]) -> None:
    ((messages, response),) = calls.ended
    text, found, tokens = expected(oracle, messages, TEXTS)
    assert sorted(found) == sorted(prompted(s.node) for s in sources)
    assert response.message.content == text
    assert response.raw["usage"]["linked_tokens"] == tokens
    assert response.raw["epic"]["reuse"] == "composed"


@pytest.mark.parametrize("streaming", [False, True])
def test_nodes_are_compiled_on_a_miss_and_linked(llm: EpicLLM, oracle: Engine, streaming: bool) -> None:
    synthesizer = EpicSynthesizer(llm=llm, streaming=streaming)
    engine = index().as_query_engine(llm=llm, similarity_top_k=2, response_synthesizer=synthesizer)
    with recorded() as calls:
        answer = engine.query(QUESTION)
        text = "".join(answer.response_gen) if streaming else str(answer)
    check(calls, oracle, answer.source_nodes)
    assert text == calls.ended[0][1].message.content
    assert sorted(llm.texts.ids()) == sorted(s.node.node_id for s in answer.source_nodes)


@pytest.mark.parametrize("streaming", [False, True])
async def test_asynchronously(llm: EpicLLM, oracle: Engine, streaming: bool) -> None:
    synthesizer = EpicSynthesizer(llm=llm, streaming=streaming)
    engine = index().as_query_engine(llm=llm, similarity_top_k=2, response_synthesizer=synthesizer)
    with recorded() as calls:
        answer = await engine.aquery(QUESTION)
        text = "".join([t async for t in answer.async_response_gen()]) if streaming else str(answer)
    check(calls, oracle, answer.source_nodes)
    assert text == calls.ended[0][1].message.content


def test_short_nodes_and_overlapping_ones_are_linked_too(llm: EpicLLM) -> None:
    nodes = [TextNode(id_=str(i), text=t) for i, t in enumerate(["Aye.", "Nay.", "The votes: Aye. Nay. Aye."])]
    with recorded() as calls:
        SummaryIndex(nodes).as_query_engine(llm=llm, response_synthesizer=EpicSynthesizer(llm=llm)).query("How many?")
    want = sum(len(tokenizer()(node.text, add_special_tokens=False)["input_ids"]) for node in nodes)
    assert calls.ended[0][1].raw["usage"]["linked_tokens"] == want


def test_overflow_leaves_out_the_worst_nodes_whole_and_names_them(
    llm: EpicLLM, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {name: " ".join(f"{name} tells {n} boats." for n in range(40)) for name in "abcd"}
    scores = {"a": 0.1, "b": 0.9, "c": None, "d": 0.5}
    nodes = [NodeWithScore(node=TextNode(id_=n, text=t), score=scores[n]) for n, t in texts.items()]
    lengths = {n: len(tokenizer()(t, add_special_tokens=False)["input_ids"]) for n, t in texts.items()}
    assert 2 * max(lengths.values()) < 2048 - 400 < 3 * min(lengths.values())  # two fit, three do not
    with recorded() as calls:
        answer = EpicSynthesizer(llm=llm).synthesize("Which?", nodes)
    assert [s.node.node_id for s in answer.source_nodes] == ["b", "d"]
    assert "left out: a, c" in caplog.text
    assert calls.ended[0][1].raw["usage"]["linked_tokens"] == lengths["b"] + lengths["d"]
    assert sorted(llm.texts.ids()) == ["b", "d"]
    huge = NodeWithScore(node=TextNode(id_="huge", text=" ".join(texts.values())), score=1.0)
    with pytest.raises(ContextLengthError, match=r"the node huge makes a prompt of \d+ tokens.*smaller nodes"):
        EpicSynthesizer(llm=llm).synthesize("Which?", [huge])


def test_another_llm_gets_what_compact_and_refine_does(llm: EpicLLM) -> None:
    nodes = [NodeWithScore(node=n, score=1.0) for n in text_nodes()]
    other = MockLLM()
    assert str(EpicSynthesizer(llm=other).synthesize(QUESTION, nodes)) == str(
        CompactAndRefine(llm=other).synthesize(QUESTION, nodes)
    )
    assert str(EpicSynthesizer(llm=llm).synthesize(QUESTION, [])) == "Empty Response"


@pytest.mark.parametrize("kind", [EpicContextChatEngine, EpicCondensePlusContextChatEngine])
async def test_chat_engines(kind: Any, llm: EpicLLM, oracle: Engine) -> None:
    nodes = index().as_retriever(similarity_top_k=2)
    compile_nodes(llm, text_nodes())

    def chat() -> Any:
        return kind.from_defaults(retriever=nodes, llm=llm)

    with recorded() as calls:
        first = chat().chat(QUESTION)
    check(calls, oracle, first.source_nodes)
    with recorded() as calls:
        assert (await chat().achat(QUESTION)).response == first.response
    check(calls, oracle, first.source_nodes)
    with recorded() as calls:
        assert "".join(chat().stream_chat(QUESTION).response_gen) == first.response
    check(calls, oracle, first.source_nodes)
    with recorded() as calls:
        stream = await chat().astream_chat(QUESTION)
        assert "".join([t async for t in stream.async_response_gen()]) == first.response
    check(calls, oracle, first.source_nodes)
