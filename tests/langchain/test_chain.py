"""The documents chain beside LangChain's own: the same prompts, with documents linked by their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from epic_engine import ConfigError
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_epic import ChatEpic, create_epic_documents_chain, text_id

from epic_rag.texts import TextItem
from tests.langchain.chats import engines_own, tiny_chat
from tests.rag.stack import TEXTS

PROMPT = ChatPromptTemplate.from_messages([("system", "Use these:\n\n{context}"), ("human", "{input}")])
DOCUMENTS = [Document(text, id=name, metadata={"name": name}) for name, text in TEXTS.items()]
QUESTION = "What does bread cost?"


class Recorder(BaseCallbackHandler):
    """The chat model's answers, as callbacks see them."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.prompts: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.prompts += messages

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.messages.append(response.generations[0][0].message)  # type: ignore[union-attr]

    def linked(self) -> int:
        return int(self.messages[-1].response_metadata["epic"]["linked_tokens"])


class Fixed(BaseRetriever):
    """Finds the same documents always."""

    found: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.found


@pytest.fixture(scope="module")
def llm() -> Iterator[ChatEpic]:
    with tiny_chat() as made:
        made.texts.add([TextItem(name, text) for name, text in TEXTS.items()])
        yield made


def plain(documents: list[Document], separator: str = "\n\n") -> list[dict[str, str]]:
    context = separator.join(d.page_content for d in documents)
    return [{"role": "system", "content": f"Use these:\n\n{context}"}, {"role": "user", "content": QUESTION}]


def ask(chain: Any, documents: list[Document]) -> tuple[Any, Recorder]:
    seen = Recorder()
    return chain.invoke({"context": documents, "input": QUESTION}, config={"callbacks": [seen]}), seen


async def test_invoke_stream_batch_and_async(llm: ChatEpic) -> None:
    chain = create_epic_documents_chain(llm, PROMPT)
    given = {"context": DOCUMENTS[:2], "input": QUESTION}
    want = engines_own(llm.engine, plain(DOCUMENTS[:2]))[0]
    assert chain.invoke(given) == want
    pieces = list(chain.stream(given))
    assert len(pieces) > 2
    assert "".join(pieces) == want
    assert chain.batch([given, given]) == [want, want]
    assert await chain.ainvoke(given) == want
    assert "".join([piece async for piece in chain.astream(given)]) == want
    assert await chain.abatch([given]) == [want]


def test_the_same_prompt_as_langchains_own(llm: ChatEpic) -> None:
    answer, seen = ask(create_epic_documents_chain(llm, PROMPT), DOCUMENTS)
    stuff, beside = ask(create_stuff_documents_chain(llm, PROMPT), DOCUMENTS)
    _, length, linked = engines_own(llm.engine, plain(DOCUMENTS))
    for recorder in (seen, beside):  # the stock chain's by discovery
        assert recorder.messages[0].usage_metadata["input_tokens"] == length
        assert recorder.linked() == linked
    assert answer == stuff


def test_short_documents_are_linked_by_their_ids_alone(llm: ChatEpic) -> None:
    documents = [Document("Nut.", id="nut"), Document("Fig."), Document("Nut.", id="nut")]
    answer, seen = ask(create_epic_documents_chain(llm, PROMPT), documents)
    want, length, linked = engines_own(llm.engine, plain(documents), ["Nut.", "Fig."])
    assert (answer, seen.linked()) == (want, linked)
    assert {text_id(d) for d in documents} <= set(llm.texts.ids())
    _, beside = ask(create_stuff_documents_chain(llm, PROMPT), documents)
    assert beside.linked() == 0
    assert beside.messages[0].usage_metadata["input_tokens"] == length
    llm.texts.remove({text_id(d) for d in documents})


def test_document_prompt_separator_and_variable(llm: ChatEpic) -> None:
    frame = PromptTemplate.from_template("# {name}\n{page_content}\n(end of {name})")
    prompt = ChatPromptTemplate.from_messages([("human", "{papers}\n\n{input}")])
    options: dict[str, Any] = {
        "document_prompt": frame,
        "document_separator": "\n---\n",
        "document_variable_name": "papers",
    }
    text = "\n---\n".join(f"# {d.metadata['name']}\n{d.page_content}\n(end of {d.metadata['name']})" for d in DOCUMENTS)
    want, length, linked = engines_own(llm.engine, [{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
    for make in (create_epic_documents_chain, create_stuff_documents_chain):
        seen = Recorder()
        answer = make(llm, prompt, **options).invoke(
            {"papers": DOCUMENTS, "input": QUESTION}, config={"callbacks": [seen]}
        )
        assert (answer, seen.linked()) == (want, linked)
        assert seen.messages[0].usage_metadata["input_tokens"] == length


def test_white_space_around_documents_stays(llm: ChatEpic) -> None:
    documents = [Document(f"\n  {TEXTS['bakery']} \n", id="bakery"), Document(TEXTS["ferry"] + "\n", id="ferry")]
    answer, seen = ask(create_epic_documents_chain(llm, PROMPT), documents)
    assert (answer, seen.linked()) == engines_own(llm.engine, plain(documents))[::2]
    assert llm.texts.text("bakery") == TEXTS["bakery"].strip()


def test_history_strings_and_no_documents(llm: ChatEpic) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Use: {context}"), MessagesPlaceholder("talk"), "{input}"])
    talk = [HumanMessage("Hi."), AIMessage("Hello.")]
    chain = create_epic_documents_chain(llm, prompt)
    messages = [
        {"role": "system", "content": f"Use: {TEXTS['ferry']}"},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": QUESTION},
    ]
    given = {"context": [DOCUMENTS[3]], "talk": talk, "input": QUESTION}
    assert chain.invoke(given) == engines_own(llm.engine, messages)[0]
    text = create_epic_documents_chain(llm, PromptTemplate.from_template("{context}\n\n{input}"))
    answer = text.invoke({"context": DOCUMENTS[3:], "input": QUESTION})
    assert answer == engines_own(llm.engine, [{"role": "user", "content": f"{TEXTS['ferry']}\n\n{QUESTION}"}])[0]
    assert (
        text.invoke({"context": [], "input": QUESTION})
        == (engines_own(llm.engine, [{"role": "user", "content": f"\n\n{QUESTION}"}])[0])
    )


async def test_in_a_retrieval_chain_and_in_lcel(llm: ChatEpic) -> None:
    retriever = Fixed(found=DOCUMENTS[1:3])
    want, _, linked = engines_own(llm.engine, plain(DOCUMENTS[1:3]))
    chain = create_retrieval_chain(retriever, create_epic_documents_chain(llm, PROMPT))
    seen = Recorder()
    result = chain.invoke({"input": QUESTION}, config={"callbacks": [seen]})
    assert (result["answer"], result["context"], seen.linked()) == (want, DOCUMENTS[1:3], linked)
    assert "".join(piece.get("answer", "") for piece in chain.stream({"input": QUESTION})) == want
    assert "".join([piece.get("answer", "") async for piece in chain.astream({"input": QUESTION})]) == want
    lcel = {"context": retriever, "input": RunnablePassthrough()} | create_epic_documents_chain(llm, PROMPT)
    assert lcel.invoke(QUESTION) == want
    # The stock chain, by discovery.
    stock = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
    seen = Recorder()
    assert stock.invoke({"input": QUESTION}, config={"callbacks": [seen]})["answer"] == want
    assert seen.linked() == linked


def test_bound_models_parsers_and_others(llm: ChatEpic) -> None:
    class Loud(BaseOutputParser[str]):
        def parse(self, text: str) -> str:
            return text.upper()

    bound = llm.bind(max_tokens=3).with_config(tags=["x"])
    answer, seen = ask(create_epic_documents_chain(bound, PROMPT, output_parser=Loud()), DOCUMENTS)
    want, _, linked = engines_own(llm.engine, plain(DOCUMENTS), max_tokens=3)
    assert (answer, seen.linked()) == (want.upper(), linked)
    other = GenericFakeChatModel(messages=iter(["fine"] * 2))
    answer, seen = ask(create_epic_documents_chain(other, PROMPT), DOCUMENTS[:2])
    assert answer == "fine"
    assert [m.content for m in seen.prompts[0]] == [m["content"] for m in plain(DOCUMENTS[:2])]


def test_what_cannot_work_says_so(llm: ChatEpic) -> None:
    with pytest.raises(ConfigError, match="papers"):
        create_epic_documents_chain(llm, PROMPT, document_variable_name="papers")
    chain = create_epic_documents_chain(llm, PROMPT)
    for wrong in ("text", ["text"]):
        with pytest.raises(ConfigError, match="Document"):
            chain.invoke({"context": wrong, "input": QUESTION})
