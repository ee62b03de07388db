"""LangChain's and LlamaIndex's own classes for OpenAI, against the engine's own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.llama_index.stack import BagEmbedding
from tests.rag.stack import TEXTS, BagOfWords, tokenizer
from tests.server.oracle import engines_own, plain_ids, rendered
from tests.server.running import MODEL, Running

CHUNKS = {name: text.strip() for name, text in TEXTS.items()}
QUESTION = "When does the ferry leave?"
HELLO = [{"role": "user", "content": "Hello there."}]


class Trip(BaseModel):
    """Where to, and for how long."""

    city: Literal["Oslo", "Rome"]
    nights: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def compiled(shared_gateway: Running) -> Iterator[dict[str, str]]:
    """Ids of the chunks, by their names."""
    with shared_gateway.client() as client:
        made = client.post("/v1/chunks", json={"chunks": [{"text": text} for text in CHUNKS.values()]}).json()["data"]
        yield dict(zip(CHUNKS, (chunk["id"] for chunk in made), strict=True))


def nearest(k: int) -> list[str]:
    """Texts that are most like the question, best first."""
    scores = BagOfWords().embed(list(CHUNKS.values())) @ BagOfWords().embed([QUESTION])[0]
    return [list(CHUNKS.values())[i] for i in np.argsort(-scores, kind="stable")[:k]]


def embeddings(gateway: Running, **options: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(base_url=f"{gateway.base_url}/v1", api_key="any", model=BagOfWords.name, **options)


def lang(gateway: Running, **options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 8, "max_retries": 0, "timeout": 60, **options}
    return ChatOpenAI(model=MODEL, base_url=f"{gateway.base_url}/v1", api_key="any", **options)


def llama(gateway: Running, **options: Any) -> OpenAILike:
    options = {"is_chat_model": True, "temperature": 0, "max_tokens": 8, "max_retries": 0, "timeout": 60, **options}
    return OpenAILike(model=MODEL, api_base=f"{gateway.base_url}/v1", api_key="any", context_window=2048, **options)


# -- LangChain ---------------------------------------------------------------------------------------------------


def test_langchain_gets_the_engines_own_answers(shared_gateway: Running) -> None:
    own = engines_own(shared_gateway, rendered(HELLO))
    chat = lang(shared_gateway, stream_usage=True)
    whole = chat.invoke("Hello there.")
    assert whole.content == own.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_tokens"] == own.stats.prompt
    assert whole.usage_metadata["output_tokens"] == own.stats.generated
    pieces = list(chat.stream("Hello there."))
    assert "".join(str(piece.content) for piece in pieces) == own.text
    assert [p.usage_metadata for p in pieces if p.usage_metadata] == [whole.usage_metadata]
    assert asyncio.run(chat.ainvoke("Hello there.")).content == own.text
    asked = [[SystemMessage("Be short."), HumanMessage(f"Number {n}?")] for n in range(4)]
    answers = chat.batch(asked)  # type: ignore[arg-type]
    for n, answer in enumerate(answers):
        plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Number {n}?"}]
        assert answer.content == engines_own(shared_gateway, rendered(plain)).text


def test_a_chain_of_langchains_finds_compiled_texts(shared_gateway: Running, compiled: dict[str, str]) -> None:
    store = InMemoryVectorStore(embeddings(shared_gateway, check_embedding_ctx_length=False))
    store.add_documents([Document(text) for text in CHUNKS.values()])
    prompt = ChatPromptTemplate.from_messages([("system", "Use these:\n\n{context}"), ("human", "{question}")])
    docs = store.similarity_search(QUESTION, k=2)
    assert [doc.page_content for doc in docs] == nearest(2)
    values = {"context": "\n\n".join(doc.page_content for doc in docs), "question": QUESTION}
    answer = (prompt | lang(shared_gateway)).invoke(values)
    flat = [
        {"role": "system", "content": "Use these:\n\n" + "\n\n".join(nearest(2))},
        {"role": "user", "content": QUESTION},
    ]
    own = engines_own(shared_gateway, rendered(flat), nearest(2))
    assert answer.content == own.text
    assert answer.usage_metadata is not None
    linked = sum(len(plain_ids(text)) for text in nearest(2))
    assert answer.usage_metadata["input_token_details"]["cache_read"] == own.stats.reused == linked > 0
    chain = prompt | lang(shared_gateway) | StrOutputParser()
    assert "".join(chain.stream(values)) == own.text


def test_langchain_passes_chunks_and_options_on(shared_gateway: Running, compiled: dict[str, str]) -> None:
    message = HumanMessage([{"type": "chunk", "id": compiled["bakery"]}, {"type": "text", "text": "Why?"}])
    flat = rendered([{"role": "user", "content": f"{CHUNKS['bakery']}\n\nWhy?"}])
    for policy in ("naive", "full"):
        own = engines_own(shared_gateway, flat, [CHUNKS["bakery"]], policy)
        answer = lang(shared_gateway, extra_body={"epic": {"policy": policy}}).invoke([message])
        assert answer.content == own.text
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] == own.stats.reused


def test_langchain_calls_tools_and_parses_answers(shared_gateway: Running) -> None:
    chat = lang(shared_gateway, max_tokens=200, temperature=1, seed=2)
    asked = chat.bind_tools([Trip], tool_choice="any", parallel_tool_calls=False)
    called = asked.invoke("Book a trip.")
    (call,) = called.tool_calls
    assert call["name"] == "Trip"
    Trip.model_validate(call["args"])
    full: Any = None
    for piece in asked.stream("Book a trip."):
        full = piece if full is None else full + piece
    assert [c["args"] for c in full.tool_calls] == [call["args"]]
    history = [HumanMessage("Book a trip."), called, ToolMessage("Booked.", tool_call_id=call["id"])]
    after = chat.bind_tools([Trip], tool_choice="none").invoke(history, max_tokens=4)
    assert isinstance(after, AIMessage)
    assert not after.tool_calls
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Trip, method=method).invoke("Plan a trip.")
        assert isinstance(found, Trip)


@pytest.mark.parametrize("counted", [False, True])
def test_langchains_embeddings_are_the_embedders_own(shared_gateway: Running, tmp_path: Path, counted: bool) -> None:
    options: dict[str, Any] = {"check_embedding_ctx_length": counted}
    if counted:  # with tiktoken it would send the ids of another tokenizer
        tokenizer().save_pretrained(tmp_path)
        options |= {"tiktoken_enabled": False, "tiktoken_model_name": str(tmp_path)}
    texts = list(CHUNKS.values())
    model = embeddings(shared_gateway, **options)
    np.testing.assert_allclose(model.embed_documents(texts), BagOfWords().embed(texts), atol=1e-6)
    np.testing.assert_allclose(model.embed_query(QUESTION), BagOfWords().embed([QUESTION])[0], atol=1e-6)


# -- LlamaIndex --------------------------------------------------------------------------------------------------


def test_llama_index_gets_the_engines_own_answers(shared_gateway: Running) -> None:
    own = engines_own(shared_gateway, rendered(HELLO)).text
    messages = [ChatMessage(role="user", content="Hello there.")]
    llm = llama(shared_gateway)
    assert llm.chat(messages).message.content == own
    assert "".join(piece.delta or "" for piece in llm.stream_chat(messages)) == own
    assert llm.complete("Hello there.").text == own  # a chat of one message

    async def ask() -> tuple[Any, str]:
        whole = await llm.achat(messages)
        return whole, "".join([piece.delta or "" async for piece in await llm.astream_chat(messages)])

    whole, streamed = asyncio.run(ask())
    assert whole.message.content == streamed == own
    plain = llama(shared_gateway, is_chat_model=False)
    text = engines_own(shared_gateway, "The ferry").text
    assert plain.complete("The ferry").text == text
    assert "".join(piece.delta or "" for piece in plain.stream_complete("The ferry")) == text


def test_llama_index_calls_tools(shared_gateway: Running) -> None:
    def book(by_night: bool) -> str:
        """Book a trip."""
        return f"booked {by_night}"

    llm = llama(
        shared_gateway,
        is_function_calling_model=True,
        temperature=1,
        max_tokens=200,
        additional_kwargs={"seed": 3},
    )
    tool = FunctionTool.from_defaults(book)
    asked = llm.chat_with_tools([tool], user_msg="Book a trip.", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(asked)
    assert call.tool_name == "book"
    assert call.tool_kwargs["by_night"] in (True, False)
    done = llm.predict_and_call([tool], user_msg="Book a trip.", tool_required=True)
    assert str(done) in ("booked True", "booked False")


def test_llama_index_parses_answers(shared_gateway: Running) -> None:
    llm = llama(
        shared_gateway,
        should_use_structured_outputs=True,
        temperature=1,
        max_tokens=100,
        additional_kwargs={"seed": 3},
    )
    found = llm.structured_predict(Trip, PromptTemplate("Plan a trip to {place}."), place="Oslo")
    assert isinstance(found, Trip)


def test_a_query_engine_of_llama_indexs_finds_compiled_texts(shared_gateway: Running, compiled: dict[str, str]) -> None:
    seen: list[Any] = []

    def note(response: httpx.Response) -> None:
        seen.append(json.loads(response.read()))

    with httpx.Client(event_hooks={"response": [note]}) as http:
        llm = llama(shared_gateway, http_client=http)
        nodes = [TextNode(text=text, id_=name) for name, text in CHUNKS.items()]
        index = VectorStoreIndex(nodes, embed_model=BagEmbedding())
        found = index.as_query_engine(llm=llm, similarity_top_k=2).query(QUESTION)
    assert [node.text for node in found.source_nodes] == nearest(2)
    (answer,) = seen
    assert str(found) == answer["choices"][0]["message"]["content"]
    assert answer["epic"]["linked_tokens"] == sum(len(plain_ids(text)) for text in nearest(2))
    ids = {text: compiled[name] for name, text in CHUNKS.items()}
    assert [chunk["id"] for chunk in answer["epic"]["chunks"]] == [ids[text] for text in nearest(2)]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["epic"]["reused_tokens"] > 0
