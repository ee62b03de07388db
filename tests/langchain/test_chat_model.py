"""The chat model by itself: four doors, linking, options, usage, copies, life."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError, ContextLengthError, EngineClosedError
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from langchain_epic import ChatEpic, document_block

from epic_rag.errors import RagError
from epic_rag.texts import TextItem
from tests.langchain.chats import TOKENS, engines_own, tiny_chat
from tests.rag.stack import TEXTS, save_model, tokenizer

FERRY, BAKERY = TEXTS["ferry"].strip(), TEXTS["bakery"].strip()
PROMPT = f"Context:\n{FERRY}\n\nWhen does it leave?"
MESSAGES: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage(PROMPT)]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def llm() -> Iterator[ChatEpic]:
    with tiny_chat() as made:
        made.texts.add([TextItem(name, text) for name, text in TEXTS.items()])
        yield made


def whole(chunks: list[Any]) -> Any:
    full = chunks[0]
    for chunk in chunks[1:]:
        full += chunk
    return full


async def test_four_doors_one_answer(llm: ChatEpic) -> None:
    want, length, linked = engines_own(llm.engine, PLAIN)
    chunks = list(llm.stream(MESSAGES))
    achunks = [chunk async for chunk in llm.astream(MESSAGES)]
    messages = [llm.invoke(MESSAGES), await llm.ainvoke(MESSAGES), whole(chunks), whole(achunks)]
    messages += [*llm.batch([MESSAGES, MESSAGES]), *await llm.abatch([MESSAGES])]
    for message in messages:
        assert message.content == message.text == want
        assert message.usage_metadata == {
            "input_tokens": length,
            "output_tokens": TOKENS,
            "total_tokens": length + TOKENS,
            "input_token_details": {"cache_read": linked - 4},
        }
        meta = message.response_metadata
        assert (meta["model_name"], meta["model_provider"], meta["finish_reason"]) == (llm.model, "epic", "length")
        assert (meta["epic"]["policy"], meta["epic"]["reuse"]) == ("legolink:4", "composed")
        assert (meta["epic"]["linked_tokens"], meta["epic"]["recomputed_tokens"]) == (linked, 4)
        assert 0 < meta["epic"]["ttft_s"] <= meta["epic"]["total_s"]
    for some in (chunks, achunks):
        assert len(some) > 2
        assert [c.chunk_position for c in some] == [None] * (len(some) - 1) + ["last"]


def test_blocks_name_compiled_texts_and_compile_those_that_are_not(llm: ChatEpic) -> None:
    short = "Nut."  # too short to be found by itself
    content = ["Facts:", document_block("short", short), document_block("ferry", FERRY), "Is there a nut?"]
    plain = [{"role": "user", "content": f"Facts:\n\n{short}\n\n{FERRY}\n\nIs there a nut?"}]
    assert "short" not in llm.texts
    want, length, linked = engines_own(llm.engine, plain, [short, FERRY])
    message = llm.invoke([HumanMessage(content)])
    assert llm.texts.text("short") == short
    assert message.content == want
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == length
    assert message.response_metadata["epic"]["linked_tokens"] == linked
    # Inline blocks add nothing to the text; a text that changed under its id is computed as it stands.
    inline = [
        {"type": "text", "text": "<"},
        document_block("ferry", FERRY, inline=True),
        document_block("bakery", "Closed.", inline=True),
        ">",
    ]
    message = llm.invoke([HumanMessage(inline)])
    want, length, linked = engines_own(llm.engine, [{"role": "user", "content": f"<{FERRY}Closed.>"}], [FERRY])
    assert (message.content, message.response_metadata["epic"]["linked_tokens"]) == (want, linked)
    assert llm.texts.text("bakery") == BAKERY
    llm.texts.remove(["short"])


def test_roles(llm: ChatEpic) -> None:
    talk: list[BaseMessage] = [
        ChatMessage(role="developer", content="Be brief."),
        HumanMessage([{"type": "text", "text": "Where "}, "is it?"], name="anna"),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Here."}]),
        ChatMessage(role="user", content="Sure?"),
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "Sure?"},
    ]
    assert llm.invoke(talk).content == engines_own(llm.engine, plain)[0]
    for wrong, words in (
        (HumanMessage([{"type": "image", "url": "http://a/b.png"}]), "image"),
        (HumanMessage([{"type": "text-plain", "url": "http://a/b.txt"}]), "no text"),
        (ChatMessage(role="oracle", content="Hm."), "oracle"),
    ):
        with pytest.raises(RagError, match=words):
            llm.invoke([wrong])


def test_options_of_calls_and_of_the_object(llm: ChatEpic) -> None:
    one = engines_own(llm.engine, PLAIN, temperature=0.9, seed=5)[0]
    assert one != engines_own(llm.engine, PLAIN)[0]
    assert llm.invoke(MESSAGES, temperature=0.9, seed=5).content == one
    assert llm.bind(temperature=0.9, seed=5).invoke(MESSAGES).content == one
    hot = llm.model_copy(update={"temperature": 0.9, "seed": 5})
    assert hot.invoke(MESSAGES).content == one
    assert hot.engine is llm.engine
    hot.close()
    assert llm.invoke(MESSAGES, max_tokens=3).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    full = llm.invoke(MESSAGES, policy="full")
    assert full.content == engines_own(llm.engine, PLAIN, policy="full")[0]
    assert full.response_metadata["epic"]["reuse"] == "none"
    text = llm.invoke(MESSAGES).text
    stopped = llm.invoke(MESSAGES, stop=[text[3:5]])
    assert stopped.content == text[: text.index(text[3:5])]
    assert stopped.response_metadata["finish_reason"] == "stop"
    with llm.model_copy(update={"stop": (text[3:5],)}) as ending:
        assert ending.invoke(MESSAGES).content == stopped.content
    for wrong, words in (
        ({"temprature": 1}, "temprature"),
        ({"policy": "magic"}, "magic"),
        ({"model": "other"}, "other"),
        ({"temperature": -1}, "temperature"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"tool_choice": "any"}, "no tools"),
    ):
        with pytest.raises(ConfigError, match=words):
            llm.invoke(MESSAGES, **wrong)
    with pytest.raises(ContextLengthError):
        llm.invoke("word " * 3000)
    with pytest.raises(ConfigError, match="temprature"):
        ChatEpic(temprature=1)
    with pytest.raises(ConfigError, match="magic"):
        ChatEpic(policy="magic")


def test_logprobs_are_the_models_own(llm: ChatEpic) -> None:
    message = llm.invoke([HumanMessage("Where?")], logprobs=True, top_logprobs=3)
    content = message.response_metadata["logprobs"]["content"]
    ids = tokenizer().apply_chat_template([{"role": "user", "content": "Where?"}], add_generation_prompt=True)
    ids = list(ids["input_ids"] if hasattr(ids, "keys") else ids)
    for one in content:
        logprobs = llm.engine.score([ids], [0])[0].log_softmax(-1)
        best = logprobs.topk(3)
        assert [t["token"] for t in one["top_logprobs"]] == [tokenizer().decode([i]) for i in best.indices.tolist()]
        assert [t["logprob"] for t in one["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert (one["token"], one["logprob"]) == (one["top_logprobs"][0]["token"], one["top_logprobs"][0]["logprob"])
        ids.append(int(best.indices[0]))
    assert len(content) == TOKENS
    assert "logprobs" not in llm.invoke("Where?").response_metadata


def test_counts_tokens_with_its_own_tokenizer(llm: ChatEpic) -> None:
    assert llm.get_token_ids("Rye bread") == tokenizer()("Rye bread", add_special_tokens=False)["input_ids"]
    assert llm.get_num_tokens_from_messages(MESSAGES) == engines_own(llm.engine, PLAIN)[1]


def test_timeout_gives_up(llm: ChatEpic) -> None:
    with pytest.raises(TimeoutError, match="timeout"):
        llm.invoke(MESSAGES, timeout=0.0, max_tokens=500)
    assert llm.invoke(MESSAGES, timeout=600).content == engines_own(llm.engine, PLAIN)[0]


async def test_closing_a_stream_or_its_task_stops_the_model(llm: ChatEpic) -> None:
    stream = llm.stream("Tell me more.", max_tokens=1500)
    next(stream)
    stream.close()
    astream = llm.astream("Tell me more.", max_tokens=1500)
    await anext(astream)
    await astream.aclose()
    task = asyncio.create_task(llm.ainvoke("Tell me more.", max_tokens=1500))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline = time.monotonic() + 10
    while any(t.name == "epic-rag stream" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a stream's thread goes on"
        await asyncio.sleep(0.05)


async def test_the_event_loop_goes_on(llm: ChatEpic) -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.001)

    ticker = asyncio.create_task(tick())
    answers = await asyncio.gather(*(llm.ainvoke(MESSAGES, max_tokens=40) for _ in range(4)))
    ticker.cancel()
    assert len({a.content for a in answers}) == 1
    assert len(ticks) > 20


def test_callbacks_usage_cache_and_rate_limit(llm: ChatEpic) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.started = self.ended = 0
            self.params: dict[str, Any] = {}

        def on_chat_model_start(self, *_: Any, **kwargs: Any) -> None:
            self.started += 1
            self.params = kwargs["invocation_params"]

        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            self.tokens.append(token)

        def on_llm_end(self, *_: Any, **__: Any) -> None:
            self.ended += 1

    seen, usage = Tokens(), UsageMetadataCallbackHandler()
    text = "".join(c.text for c in llm.stream(MESSAGES, config={"callbacks": [seen, usage]}))
    assert "".join(seen.tokens) == text
    assert (seen.started, seen.ended) == (1, 1)
    assert seen.params["policy"] == "legolink:4"
    assert usage.usage_metadata[llm.model]["output_tokens"] == TOKENS
    # streaming=True streams to callbacks from invoke(), too.
    seen = Tokens()
    loud = llm.model_copy(update={"streaming": True})
    assert loud.invoke(MESSAGES, config={"callbacks": [seen]}).content == text
    assert len(seen.tokens) > 2
    loud.close()

    cached = llm.model_copy(update={"cache": InMemoryCache()})
    first = cached.invoke(MESSAGES)
    again = cached.invoke(MESSAGES)
    assert again.content == first.content
    assert again.usage_metadata["total_cost"] == 0  # type: ignore[typeddict-item]
    other = cached.invoke(MESSAGES, temperature=0.9, seed=5)
    assert other.content == engines_own(llm.engine, PLAIN, temperature=0.9, seed=5)[0]
    cached.close()

    slow = llm.model_copy(update={"rate_limiter": InMemoryRateLimiter(requests_per_second=4, max_bucket_size=1)})
    begin = time.monotonic()
    for _ in range(3):
        slow.invoke(MESSAGES, max_tokens=1)
    assert time.monotonic() - begin > 0.4
    slow.close()


def test_copies_pickles_and_serialised_forms(tmp_path: Path, llm: ChatEpic) -> None:
    folder = save_model(tmp_path / "model")
    options = {"selftest": False}
    made = ChatEpic(model=folder, store=tmp_path / "store", context="isolated", max_tokens=5, engine_options=options)
    want = made.invoke("Where?").content
    # Newer cores load nothing that is not allowed.
    allowed: dict[str, Any] = {"allowed_objects": [ChatEpic]} if "allowed_objects" in signature(load).parameters else {}
    for other in (
        pickle.loads(pickle.dumps(made)),  # noqa: S301
        copy.copy(made),
        copy.deepcopy(made),
        made.model_copy(),
        load(dumpd(made), valid_namespaces=["langchain_epic"], **allowed),
    ):
        assert other._identifying_params == made._identifying_params
        assert other.engine is made.engine
        assert other.invoke("Where?").content == want
        other.close()
    elsewhere = made.model_copy(update={"store": str(tmp_path / "other")})
    assert elsewhere.engine is not made.engine
    elsewhere.close()
    engine = made.engine
    made.close()
    with pytest.raises(EngineClosedError):
        engine.generate([[1]])
    assert made.invoke("Where?").content == want  # opens again
    made.close()
    with pytest.raises(ConfigError, match="pickled"):
        pickle.dumps(llm)


def test_what_other_chat_models_take(tmp_path: Path) -> None:
    made = ChatEpic(model_name="some-model", max_completion_tokens=7, stop_sequences=["x"], api_key="s", max_retries=2)
    assert (made.model, made.max_tokens, made.stop) == ("some-model", 7, ("x",))
    params = made._get_ls_params(stop=["y"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_max_tokens"]) == ("epic", "some-model", 7)
    assert params["ls_stop"] == ["y"]
    assert "s" not in dumpd(made)["kwargs"].values()
    assert made._llm_type == "epic"
    assert made._identifying_params["policy"] == "auto"


def test_a_tools_result_without_tools_is_prompted(llm: ChatEpic) -> None:
    call = {"name": "search", "args": {"q": "ferry"}, "id": "abc123456", "type": "tool_call"}
    talk = [HumanMessage("When?"), AIMessage("", tool_calls=[call]), ToolMessage(FERRY, tool_call_id="abc123456")]
    message = llm.invoke(talk)
    ids = tokenizer()(FERRY, add_special_tokens=False)["input_ids"]
    assert message.response_metadata["epic"]["linked_tokens"] == len(ids)


def test_documents_of_a_retriever_tool_are_linked_by_their_ids(llm: ChatEpic) -> None:
    class Nuts(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return [Document("Nut.", id="nut"), Document(FERRY, id="ferry")]

    search = create_retriever_tool(Nuts(), "search", "Finds nuts.", response_format="content_and_artifact")
    call = {"name": "search", "args": {"query": "nut"}, "id": "abc123456", "type": "tool_call"}
    result = search.invoke(call)
    assert result.content == f"Nut.\n\n{FERRY}"
    message = llm.bind_tools([search]).invoke([HumanMessage("Nuts?"), AIMessage("", tool_calls=[call]), result])
    ids = [tokenizer()(text, add_special_tokens=False)["input_ids"] for text in ("Nut.", FERRY)]
    assert message.response_metadata["epic"]["linked_tokens"] == sum(map(len, ids))
    llm.texts.remove(["nut"])


def test_priority_reaches_the_engine(llm: ChatEpic, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    engine = llm.texts.engine
    begin = engine.streams

    def stream(*arguments: Any, **options: Any) -> Any:
        asked.append(options["priority"])
        return begin(*arguments, **options)

    monkeypatch.setattr(engine, "streams", stream)
    llm.invoke("Hello?", priority=2)
    llm.bind(priority=1).invoke("Hello?")
    llm.invoke("Hello?")
    assert asked == [2, 1, 0]
