"""Every response mode and chat engine with the plain drop-in LLM: what is linked, and that answers are the engine's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from epic_engine import Engine
from llama_index.core import PromptTemplate, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index_epic import EpicLLM

from epic_rag.texts import TextItem
from tests.llama_index.stack import BagEmbedding, Calls, check_answers, prompted, recorded, text_nodes, tiny_llm

QUESTION = "Who is the harbour master, and what do boats pay?"
NODES = text_nodes()
TEXTS = [prompted(node) for node in NODES]
WHOLE = ["refine", "compact", "tree_summarize", "accumulate", "compact_accumulate"]
STREAMS = ["refine", "compact", "tree_summarize", "generation", "simple_summarize"]


@pytest.fixture(scope="module")
def llm() -> Iterator[EpicLLM]:
    with tiny_llm() as made:
        made.texts.add([TextItem(node.node_id, text) for node, text in zip(NODES, TEXTS, strict=True)])
        yield made


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    return VectorStoreIndex(text_nodes(), embed_model=BagEmbedding())


def check(calls: Calls, oracle: Engine, sources: list[str], linked: bool = True) -> None:
    assert calls.names.count("LLMChatStartEvent") == calls.names.count("LLMChatEndEvent") == len(calls.ended) > 0
    seen = set().union(*check_answers(calls.ended, oracle, TEXTS))
    assert seen == (set(sources) if linked else set())


@pytest.mark.parametrize("mode", [*WHOLE, "simple_summarize", "generation"])
def test_sync(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    with recorded() as calls:
        answer = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3).query(QUESTION)
    check(calls, oracle, [prompted(s.node) for s in answer.source_nodes], mode in WHOLE)
    assert calls.ended[-1][1].message.content.strip() in str(answer)


@pytest.mark.parametrize("mode", [*WHOLE, "simple_summarize", "generation"])
async def test_async(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    with recorded() as calls:
        answer = await index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3).aquery(QUESTION)
    check(calls, oracle, [prompted(s.node) for s in answer.source_nodes], mode in WHOLE)


@pytest.mark.parametrize("mode", STREAMS)
def test_streaming(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    with recorded() as calls:
        engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3, streaming=True)
        answer = engine.query(QUESTION)
        assert isinstance(answer, StreamingResponse)
        text = "".join(answer.response_gen)
    check(calls, oracle, [prompted(s.node) for s in answer.source_nodes], mode in WHOLE)
    assert text == calls.ended[-1][1].message.content


@pytest.mark.parametrize("mode", STREAMS)
async def test_async_streaming(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    with recorded() as calls:
        engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3, streaming=True)
        answer = await engine.aquery(QUESTION)
        assert isinstance(answer, AsyncStreamingResponse)
        text = "".join([piece async for piece in answer.async_response_gen()])
    check(calls, oracle, [prompted(s.node) for s in answer.source_nodes], mode in WHOLE)
    assert text == calls.ended[-1][1].message.content


def test_no_text_asks_nobody(llm: EpicLLM, index: VectorStoreIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)  # this mode looks nowhere else
    with recorded() as calls:
        answer = index.as_query_engine(llm=llm, response_mode="no_text", similarity_top_k=3).query(QUESTION)
    assert calls.names == []
    assert len(answer.source_nodes) == 3


CHATS = ["context", "condense_plus_context"]


@pytest.mark.parametrize("mode", CHATS)
def test_chat(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
    history = [ChatMessage(content="Hello"), ChatMessage(content="Ask!", role="assistant")]
    for earlier in ([], history):
        with recorded() as calls:
            answer = chat.chat(QUESTION, chat_history=list(earlier))
        assert calls.names.count("LLMCompletionEndEvent") == (mode == "condense_plus_context" and bool(earlier))
        check_chat(calls, oracle, [prompted(s.node) for s in answer.source_nodes])
        assert calls.ended[-1][1].message.content == str(answer)


@pytest.mark.parametrize("mode", CHATS)
async def test_async_chat(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
    with recorded() as calls:
        answer = await chat.achat(QUESTION)
    check_chat(calls, oracle, [prompted(s.node) for s in answer.source_nodes])


@pytest.mark.parametrize("mode", CHATS)
def test_streaming_chat(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
    with recorded() as calls:
        answer = chat.stream_chat(QUESTION)
        text = "".join(answer.response_gen)
    check_chat(calls, oracle, [prompted(s.node) for s in answer.source_nodes])
    assert text == calls.ended[-1][1].message.content


@pytest.mark.parametrize("mode", CHATS)
async def test_async_streaming_chat(mode: str, llm: EpicLLM, oracle: Engine, index: VectorStoreIndex) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
    with recorded() as calls:
        answer = await chat.astream_chat(QUESTION)
        text = "".join([piece async for piece in answer.async_response_gen()])
    check_chat(calls, oracle, [prompted(s.node) for s in answer.source_nodes])
    assert text == calls.ended[-1][1].message.content


def check_chat(calls: Calls, oracle: Engine, sources: list[str]) -> None:
    """The answering chat is the last; a condensing completion before it links nothing."""
    check(calls, oracle, sources)
    assert calls.names.count("LLMCompletionStartEvent") == calls.names.count("LLMCompletionEndEvent") <= 1


def test_summary_index_and_templates_of_ones_own(llm: EpicLLM, oracle: Engine) -> None:
    template = PromptTemplate("{query_str}\n\nSources, one after the other:\n\n{context_str}\n\nIn one word:")
    engine = SummaryIndex(text_nodes()).as_query_engine(llm=llm, text_qa_template=template)
    with recorded() as calls:
        engine.query(QUESTION)
    check(calls, oracle, TEXTS)
