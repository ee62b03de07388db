"""Tools and structured output on a random model: decoding is constrained, so everything it writes is well-formed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypedDict

import pytest
from epic_engine import ConfigError
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_epic import ChatEpic
from pydantic import BaseModel, ConfigDict, Field

from tests.langchain.chats import tiny_chat
from tests.rag.stack import TEXTS


class City(BaseModel):
    """A city."""

    name: Literal["Oslo", "你好啊集团", "Gdańsk"]
    size: int = Field(ge=10, le=99)
    ports: list[Literal["north", "south"]] = Field(min_length=1, max_length=2)


class CityDict(TypedDict):
    """A city."""

    name: Literal["Oslo", "Bergen"]


class Forecast(BaseModel):
    """Asks for a forecast."""

    model_config = ConfigDict(title="forecast")
    day: Literal["today", "tomorrow"]


@tool
def weather(place: Literal["Oslo", "你好啊集团"], days: Literal[1, 2]) -> str:
    """Tell the weather."""
    return f"Sun in {place} for {days} days. {TEXTS['ferry']}"


@tool
def now() -> str:
    """Tell the time."""
    return "noon"


@pytest.fixture(scope="module")
def llm() -> Iterator[ChatEpic]:
    with tiny_chat(max_tokens=120) as made:
        yield made


def whole(chunks: Iterator[Any]) -> Any:
    full: Any = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    return full


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "weather", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_forced_call_is_legal_through_every_door(llm: ChatEpic, choice: Any) -> None:
    bound = llm.bind_tools([weather], tool_choice=choice)
    messages = [
        bound.invoke("Weather?"),
        await bound.ainvoke("Weather?"),
        whole(bound.stream("Weather?")),
        whole(iter([chunk async for chunk in bound.astream("Weather?")])),
    ]
    for message in messages:
        (call,) = message.tool_calls
        assert call["name"] == "weather"
        assert call["args"]["place"] in ("Oslo", "你好啊集团")
        assert call["args"]["days"] in (1, 2)
        assert set(call["args"]) == {"place", "days"}
        assert call["id"]
        assert call["type"] == "tool_call"
        assert message.content == ""
        assert message.invalid_tool_calls == []
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert [b["type"] for b in message.content_blocks] == ["tool_call"]
        assert call["args"] == messages[0].tool_calls[0]["args"]


def test_one_tool_of_several_is_chosen_by_name_and_seeds_draw_others(llm: ChatEpic) -> None:
    tools = [weather, now, Forecast, {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]
    assert llm.bind_tools(tools, tool_choice="now").invoke("Time?").tool_calls[0]["args"] == {}
    seen = set()
    for seed in range(12):
        bound = llm.bind_tools(tools, tool_choice="any", temperature=3.0, seed=seed, max_tokens=200)
        seen |= {call["name"] for call in bound.invoke("Hm?").tool_calls}
    assert len(seen) > 1
    assert seen <= {"weather", "now", "forecast", "Forecast", "add"}
    several = llm.bind_tools([now], tool_choice="any", parallel_tool_calls=True, temperature=3.0, max_tokens=200)
    assert max(len(several.bind(seed=seed).invoke("Times?").tool_calls) for seed in range(6)) > 1


def test_a_loop_of_calls_and_results(llm: ChatEpic) -> None:
    llm.texts.add([])  # opens
    question = HumanMessage("Weather?")
    asked = llm.bind_tools([weather], tool_choice="any").invoke([question])
    results = [weather.invoke(call) for call in asked.tool_calls]
    assert all(isinstance(r, ToolMessage) for r in results)
    answer = llm.bind_tools([weather]).invoke([question, asked, *results])
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert asked.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > asked.usage_metadata["input_tokens"]


def test_no_call_without_choice_or_tools(llm: ChatEpic) -> None:
    none = llm.bind_tools([weather], tool_choice="none").invoke("Weather?")
    assert none.tool_calls == []
    with pytest.raises(ConfigError, match=r"rain.*weather"):
        llm.bind_tools([weather], tool_choice="rain")
    with pytest.raises(ConfigError, match="no tools"):
        llm.bind_tools([], tool_choice="any")
    with pytest.raises(ConfigError, match="different answers"):
        llm.bind_tools([now], tool_choice="any").invoke("?", response_format={"type": "json_object"})


def test_a_call_that_is_cut_short_is_invalid_through_every_door(llm: ChatEpic) -> None:
    bound = llm.bind_tools([weather], tool_choice="any", max_tokens=12)
    for message in (bound.invoke("Weather?"), whole(bound.stream("Weather?"))):
        assert message.tool_calls == []
        (bad,) = message.invalid_tool_calls
        assert message.response_metadata["finish_reason"] == "length"
        assert "weather"[:2] in bad["args"] or "name" in bad["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output_of_every_kind_of_schema(llm: ChatEpic, method: Any) -> None:
    chain = llm.with_structured_output(City, method=method)
    city = chain.invoke("A city?")
    assert isinstance(city, City)
    assert await chain.ainvoke("A city?") == city
    assert list(chain.stream("A city?"))[-1] == city
    for schema in (CityDict, _schema()):
        found = llm.with_structured_output(schema, method=method).invoke("A city?")
        assert found["name"] in ("Oslo", "Bergen")
    raw = llm.with_structured_output(City, method=method, include_raw=True).invoke("A city?")
    assert raw["parsed"] == city
    assert raw["parsing_error"] is None
    assert isinstance(raw["raw"], AIMessage)


def _schema() -> dict[str, Any]:
    return {
        "title": "CityForm",
        "description": "A city.",
        "type": "object",
        "properties": {"name": {"enum": ["Oslo", "Bergen"]}},
        "required": ["name"],
    }


def test_dicts_grow_while_they_are_streamed(llm: ChatEpic) -> None:
    schema = {
        "title": "Pair",
        "type": "object",
        "properties": {"a": {"enum": ["one", "two"]}, "b": {"enum": ["three", "four"]}},
        "required": ["a", "b"],
    }
    grown = list(llm.with_structured_output(schema).stream("Two words?"))
    assert len(grown) > 2
    assert set(grown[-1]) == {"a", "b"}
    assert all(set(g) <= {"a", "b"} for g in grown)


def test_response_format_of_a_call(llm: ChatEpic) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": _schema()}}
    assert json.loads(llm.invoke("A city?", response_format=form).text)["name"] in ("Oslo", "Bergen")
    assert llm.invoke("A city?", response_format={"type": "text"}).content == llm.invoke("A city?").content
    told = llm.invoke("A city?", response_format=form).usage_metadata
    plain = llm.invoke("A city?").usage_metadata
    assert told is not None
    assert plain is not None
    assert told["input_tokens"] > plain["input_tokens"]  # the schema stands in the prompt


def test_json_that_is_cut_short_is_a_parsing_error(llm: ChatEpic) -> None:
    with pytest.raises(OutputParserException):
        llm.with_structured_output(City, max_tokens=4).invoke("A city?")
    raw = llm.with_structured_output(City, max_tokens=4, include_raw=True).invoke("A city?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)


def test_what_cannot_work_says_so(llm: ChatEpic) -> None:
    with pytest.raises(ConfigError, match="needs a schema"):
        llm.with_structured_output(None)
    with pytest.raises(ConfigError, match="xml"):
        llm.with_structured_output(City, method="xml")  # type: ignore[arg-type]
