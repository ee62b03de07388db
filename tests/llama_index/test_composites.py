"""Engines made of engines: what their LLM calls choose, ask and combine, and that every answering call links."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from epic_engine import Engine
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.query_engine import BaseQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index_epic import EpicLLM, EpicSynthesizer, compile_nodes

from tests.llama_index.stack import (
    BagEmbedding,
    Calls,
    ScriptedLLM,
    check_answers,
    prompted,
    recorded,
    text_nodes,
    tiny_llm,
)

QUESTION = "Which is dearer, a night in the harbour or a rye bread?"
NODES = {node.node_id: node for node in text_nodes()}
TEXTS = [prompted(node) for node in NODES.values()]
TOOLS = {"quay": ("harbour", "ferry"), "town": ("bakery", "library")}
SUB_QUESTIONS = [("quay", "What do boats pay a night?"), ("town", "What does rye bread cost?"), ("quay", "Who pays?")]

# Words of LlamaIndex's own prompts, and what a model that can choose would write.
SELECT, SELECT_SEVERAL = "return the choice that", "return the top choices"
GENERATE = "output a list of relevant sub-questions"
WRITTEN = {
    SELECT: json.dumps([{"choice": 2, "reason": "bread is of the town"}]),
    SELECT_SEVERAL: json.dumps([{"choice": 2, "reason": "bread"}, {"choice": 1, "reason": "boats"}]),
    GENERATE: json.dumps({"items": [{"sub_question": text, "tool_name": tool} for tool, text in SUB_QUESTIONS]}),
}

WAYS: dict[str, Callable[[BaseQueryEngine], Any]] = {
    "sync": lambda engine: engine.query(QUESTION),
    "async": lambda engine: asyncio.run(engine.aquery(QUESTION)),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[EpicLLM]:
    with tiny_llm(kind=ScriptedLLM, script=WRITTEN) as made:
        compile_nodes(made, list(NODES.values()))
        yield made


@pytest.fixture(params=[False, True], ids=["stock", "epic"])
def tools(request: pytest.FixtureRequest, llm: EpicLLM) -> list[QueryEngineTool]:
    """Two indexes with a query engine each, with LlamaIndex's synthesizer or ours."""
    return [
        QueryEngineTool.from_defaults(
            VectorStoreIndex([NODES[i] for i in ids], embed_model=BagEmbedding()).as_query_engine(
                llm=llm, similarity_top_k=2, response_synthesizer=EpicSynthesizer(llm=llm) if request.param else None
            ),
            name=name,
            description=f"all about the {name}",
        )
        for name, ids in TOOLS.items()
    ]


def split(calls: Calls, *markers: str) -> tuple[list[Any], list[tuple[Sequence[ChatMessage], ChatResponse]]]:
    """The calls whose words were given, and the others."""
    assert calls.names.count("LLMChatStartEvent") == calls.names.count("LLMChatEndEvent") == len(calls.ended)
    given = [c for c in calls.ended if any(m in c[0][-1].content for m in markers)]
    for _, response in given:
        assert response.raw["epic"]["reuse"] == "none"
        assert response.raw["usage"]["prompt_tokens"] > 0
    return given, [c for c in calls.ended if c not in given]


def texts_of(tool: str) -> set[str]:
    return {prompted(NODES[i]) for i in TOOLS[tool]}


@pytest.mark.parametrize("way", WAYS)
def test_a_router_whose_llm_chooses_one(way: str, llm: EpicLLM, tools: list[QueryEngineTool], oracle: Engine) -> None:
    router = RouterQueryEngine.from_defaults(tools, llm=llm)
    assert isinstance(router._selector, LLMSingleSelector)  # what it takes for LLMs that call no functions
    with recorded() as calls:
        answer = WAYS[way](router)
    choosing, answering = split(calls, SELECT)
    assert len(choosing) == 1
    assert "all about the town" in choosing[0][0][-1].content
    assert answer.metadata["selector_result"].ind == 1
    assert check_answers(answering, oracle, TEXTS) == [texts_of("town")]
    assert {prompted(s.node) for s in answer.source_nodes} == texts_of("town")
    assert str(answer) == answering[0][1].message.content


@pytest.mark.parametrize("way", WAYS)
def test_a_router_whose_llm_chooses_several_and_combines_their_answers(
    way: str, llm: EpicLLM, tools: list[QueryEngineTool], oracle: Engine
) -> None:
    with recorded() as calls:
        answer = WAYS[way](RouterQueryEngine.from_defaults(tools, llm=llm, select_multi=True))
    choosing, answering = split(calls, SELECT_SEVERAL)
    assert len(choosing) == 1
    *asked, combined = check_answers(answering, oracle, TEXTS)
    assert sorted(asked, key=sorted) == sorted([texts_of("quay"), texts_of("town")], key=sorted)
    assert combined == set()  # answers, which nobody has compiled
    for _, response in answering[:2]:
        assert response.message.content.strip() in answering[2][0][-1].content
    assert str(answer) == answering[2][1].message.content


@pytest.mark.parametrize(("way", "use_async"), [("sync", False), ("sync", True), ("async", True)])
def test_sub_questions_that_an_llm_makes(
    way: str, use_async: bool, llm: EpicLLM, tools: list[QueryEngineTool], oracle: Engine
) -> None:
    engine = SubQuestionQueryEngine.from_defaults(
        tools, llm=llm, question_gen=LLMQuestionGenerator.from_defaults(llm=llm), use_async=use_async, verbose=False
    )
    with recorded() as calls:
        answer = WAYS[way](engine)
    making, answering = split(calls, GENERATE)
    assert len(making) == 1
    assert "all about the quay" in making[0][0][-1].content
    *asked, combined = check_answers(answering, oracle, TEXTS)
    assert sorted(asked, key=sorted) == sorted([texts_of(tool) for tool, _ in SUB_QUESTIONS], key=sorted)
    assert combined == set()
    last = answering[-1][0][-1].content
    for messages, response in answering[:-1]:
        (question,) = [text for _, text in SUB_QUESTIONS if text in messages[-1].content]
        assert f"Sub question: {question}\nResponse: {response.message.content}".strip() in last
    assert str(answer) == answering[-1][1].message.content
    sources = {prompted(s.node) for s in answer.source_nodes} & set(TEXTS)
    assert sources == set(TEXTS)
    assert sorted(llm.texts.ids()) == sorted(NODES)  # nothing was compiled that nobody will ask about again
