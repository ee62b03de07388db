"""Fields of OpenAI's requests: which are taken, which are passed over, and which are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from epic_rag.server.schemas.chat import ChatRequest, Message
from tests.rag.stack import TEXTS
from tests.server.oracle import engines_own, rendered
from tests.server.running import MODEL, Running, running

HELLO: list[Any] = [{"role": "user", "content": "Hello there."}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
BOOK: Any = {
    "type": "function",
    "function": {"name": "book", "parameters": {"type": "object", "properties": {"nights": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def client(shared_gateway: Running) -> openai.OpenAI:
    return shared_gateway.openai()


def test_null_is_as_good_as_left_out(shared_gateway: Running, client: openai.OpenAI) -> None:
    own = engines_own(shared_gateway, rendered(HELLO)).text
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"messages", "model", "temperature", "max_tokens"})
    message = {**dict.fromkeys(Message.model_fields), **HELLO[0]}
    answer = client.chat.completions.create(messages=[message], extra_body=nulls, **GREEDY)  # type: ignore[list-item]
    assert answer.choices[0].message.content == own


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "stop": []},
        {"response_format": {"type": "text"}, "tool_choice": "auto"},
        {"stream_options": {"include_usage": True}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"store": True, "metadata": {"a": "b"}, "user": "ann", "service_tier": "auto", "reasoning_effort": "low"},
        {"something_of_next_year": {"a": 1}, "epic": {}},
        {"top_p": 1, "n": 1, "seed": 4},
    ],
)
def test_fields_that_change_nothing_are_accepted(
    shared_gateway: Running, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    answer = client.chat.completions.create(messages=HELLO, extra_body=fields, **GREEDY)
    assert answer.choices[0].message.content == engines_own(shared_gateway, rendered(HELLO)).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [BOOK["function"]]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"tools": [BOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [BOOK], "tool_choice": {"type": "function", "function": "book"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5"),
        ({"logit_bias": {"five": 2}}, "logit_bias"),
        ({"messages": [{"role": "function", "name": "f", "content": "1"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
    ],
)
def test_what_would_change_an_answer_and_is_not_there_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=HELLO, extra_body=fields, **GREEDY)
    assert refused.value.param == param
    assert param.rpartition(".")[2] in refused.value.message


def test_the_lowest_temperatures_are_greedy(shared_gateway: Running, client: openai.OpenAI) -> None:
    own = engines_own(shared_gateway, rendered(HELLO)).text
    for temperature in (0, 5e-324, 1e-300, 1e-30):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=temperature)
        assert answer.choices[0].message.content == own


def test_texts_that_no_tokenizer_takes_are_refused_by_place(shared_gateway: Running) -> None:
    broken = "a" + chr(0xD800)
    with shared_gateway.client() as http:
        # With documents, a question is embedded before it is anything else.
        assert http.post("/v1/documents", json={"documents": [{"id": "ferry", "text": TEXTS["ferry"]}]}).is_success
        for content, more, param in (
            (broken, {}, "messages.0.content"),
            (broken, {"epic": {"retrieve": {"k": 1}}}, "messages.0.content"),
            ([{"type": "text", "text": broken}], {}, "messages.0.content.0.text"),
            ("Why?", {"epic": {"retrieve": {"query": broken}}}, "epic.retrieve.query"),
        ):
            body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more})
            refused = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        for fields in ({"epic": {broken: 1}}, {"logit_bias": {broken: 999}}, {"logit_bias": {broken: 1}}):
            odd = json.dumps({"messages": HELLO, **fields})
            refused = http.post("/v1/chat/completions", content=odd, headers={"content-type": "application/json"})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"]
        assert http.delete("/v1/documents/ferry").is_success


def test_without_a_limit_an_answer_may_be_as_long_as_there_is_room(tmp_path: Path) -> None:
    with running(tmp_path, engine_options={"max_model_len": 64}) as gateway:
        # The gateway's own limit of 512 tokens is more than this model's context.
        answer = gateway.openai().chat.completions.create(model=MODEL, messages=HELLO, seed=1)
        assert answer.usage is not None
        assert answer.usage.total_tokens <= 64
        text = gateway.openai().completions.create(model=MODEL, prompt="Hello", seed=1)
        assert text.usage is not None
        assert text.usage.total_tokens <= 64
        with pytest.raises(openai.BadRequestError) as refused:
            gateway.openai().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=512)
        assert refused.value.code == "context_length_exceeded"
