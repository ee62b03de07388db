"""What a gateway answers to whatever is sent: never what its OpenAPI document does not say, and no failures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

__all__ = ["HOSTILE", "VALID", "check_answer", "conform", "mutated"]

# What is not installed, does not fit or is shutting down is no failure of the gateway.
_HONEST = frozenset({501, 503, 507})
_SECONDS = 30.0
"""Longest that an answer may take; what takes longer hangs."""
_CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


def conform(base_url: str, *, examples: int, number: int = 0) -> Counter[tuple[str, int]]:
    """Send what schemathesis makes of the gateway's own OpenAPI document, valid and not, and check the answers.

    Parameters
    ----------
    base_url
        Of a gateway that asks nobody for a key.
    examples
        Requests of each operation and kind.
    number
        Seed.

    Returns
    -------
    Counter
        Requests by operation and status.
    """
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    seen: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in GenerationMode:
                if mode is GenerationMode.POSITIVE or operation.body or operation.query:  # else nothing can be wrong
                    _check_cases(operation.as_strategy(generation_mode=mode), session, seen, examples, number)
    return seen


def _check_cases(
    cases: st.SearchStrategy[Any],
    session: requests.Session,
    seen: Counter[tuple[str, int]],
    examples: int,
    number: int,
) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body and isinstance(case.body["model"], str):
            case.body["model"] = ""  # any other is not found, and the rest not looked at
        response = case.call(session=session, timeout=_SECONDS)
        seen[case.operation.label, response.status_code] += 1
        assert response.status_code < 500 or response.status_code in _HONEST, (
            case.operation.label,
            response.text[:500],
        )
        case.validate_response(response, checks=_CHECKS)

    check()


VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Why?"}], "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "nine", "tool_call_id": "c"},
            {"role": "user", "content": "So?", "chunk_references": []},
        ],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 1,
        "n": 2,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": False,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "Looks.",
                    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
                },
            }
        ],
        "tool_choice": "auto",
        "epic": {"policy": "naive", "retrieve": {"k": 2, "query": "why"}, "priority": 1},
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "temperature": 0, "epic": {}},
    "/v1/chunks": {"chunks": [{"text": "some text", "ttl_seconds": 60, "metadata": {"a": [1, {"b": None}]}}]},
    "/v1/documents": {"documents": [{"id": "a", "text": "some text", "title": "t", "metadata": {"k": "v"}}]},
    "/v1/embeddings": {"input": ["a", "b"], "model": "", "encoding_format": "float"},
    "/tokenize": {"messages": [{"role": "user", "content": "Why?"}]},
}
"""A good body of each path."""


def _deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


_LONG = "1" + "0" * 5000
_CHAT = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":2'
_PARAMETERS = ',"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
_SCHEMA = ',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":%s}}}'

HOSTILE: list[tuple[str, bytes]] = [
    *(
        ("/v1/chat/completions", body)
        for body in (
            b"",
            b"\x00",
            b"nul",
            b'"text"',
            b"[]",
            b"\xff\xfe{}",
            b'{"messages":"\xff"}',
            b"\xef\xbb\xbf{}",
            b"[" * 200_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"messages":[],"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"max_tokens":1}',
        )
    ),
    *(
        ("/v1/chat/completions", (_CHAT + rest).encode())
        for rest in (
            *(_PARAMETERS % _deep(depth) for depth in (100, 300, 900, 100_000)),
            *(_SCHEMA % _deep(depth) for depth in (100, 300, 900)),
            f',"metadata":{_deep(900)}}}',
            *(
                _SCHEMA % schema
                for schema in (
                    '{"$ref":"#"}',
                    '{"$ref":"http://127.0.0.1:1/"}',
                    '{"enum":["\\ud800"]}',
                    '{"type":"integer","minimum":1e400}',
                    '{"type":"string","minLength":1000000000}',
                    '{"type":"string","pattern":"((((("}',
                    '{"type":"string","pattern":"(a+)+$"}',
                )
            ),
            *(
                f',"{name}":{value}}}'
                for name in ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "seed", "n", "max_tokens")
                for value in (
                    "NaN",
                    "Infinity",
                    "-1",
                    "0",
                    "1e-320",
                    "1e-30",
                    "1e308",
                    "1e400",
                    "9223372036854775807",
                    _LONG,
                    "true",
                )
            ),
            *(
                f',"logit_bias":{{"{token}":{bias}}},"logprobs":true,"top_logprobs":20,"temperature":1}}'
                for token in ("1", "-1", "x", "9" * 30, "9" * 5000)
                for bias in ("NaN", "1e400", "-1e400", "1e308", "-1e308")
            ),
            *(f',"stop":{value}}}' for value in ('""', '["",""]', "[]", '"\\ud800"', '["\\u0000"]')),
            *(
                f',"epic":{value}}}'
                for value in (
                    '{"\\ud800":1}',
                    '{"policy":"\\ud800"}',
                    '{"policy":"legolink:' + "9" * 30 + '"}',
                    '{"policy":"legolink:' + "9" * 5000 + '"}',
                    '{"policy":"query_aware:nan"}',
                    '{"retrieve":{"query":"\\ud800"}}',
                    '{"retrieve":{"query":""}}',
                )
            ),
            ',"seed":9223372036854775807,"n":3}',
            ',"model":"\\ud800"}',
            ',"user":"\\ud800"}',
            ',"tools":[{}]}',
            ',"tool_choice":"required"}',
            ',"tool_choice":{"type":"function"}}',
            ',"tool_choice":{"type":"function","function":{"name":"\\ud800"}},"tools":[{"function":{"name":"\\ud800"}}]}',
        )
    ),
    *(
        ("/v1/chat/completions", ('{"messages":[' + message + '],"max_tokens":2}').encode())
        for message in (
            '{"role":"user"}',
            '{"role":"user","content":"\\ud800"}',
            '{"role":"user","content":"\\u0000"}',
            '{"role":"user","content":[{"type":"\\ud800"}]}',
            '{"role":"user","content":[{"type":"text","text":"\\udfff"}]}',
            '{"role":"user","content":"a","chunk_references":[{"id":"\\ud800"}]}',
            '{"role":"user","content":"a","chunk_references":[{"id":"x","offset":' + _LONG + "}]}",
            '{"role":"tool","content":"x"}',
            '{"role":"assistant","tool_calls":[]}',
            *(
                '{"role":"assistant","tool_calls":[{"id":{"a":1},"function":{"name":"f","arguments":' + value + "}}]}"
                for value in ('"' + "[" * 100_000 + '"', '{"a":NaN}', '{"a":' + _deep(900) + "}", '"\\ud800"', "[]")
            ),
        )
    ),
    *(
        ("/v1/completions", ('{"max_tokens":2,"prompt":' + prompt + "}").encode())
        for prompt in (
            '"\\ud800"',
            '""',
            "[]",
            "[[]]",
            "[[1],[]]",
            f"[{_LONG}]",
            "[1" + "0" * 30 + "]",
            "[-1]",
            "[true]",
        )
    ),
    *(
        ("/v1/chunks", body.encode())
        for body in (
            '{"text":"\\ud800"}',
            '{"text":"\\u0000"}',
            '{"text":" "}',
            '{"text":"a","ttl_seconds":NaN}',
            '{"text":"a","ttl_seconds":1e400}',
            '{"text":"a","metadata":{"a":NaN}}',
            '{"text":"a","metadata":{"a":1e400}}',
            '{"text":"a","metadata":{"\\ud800":1}}',
            '{"text":"a","metadata":{"a":1' + "0" * 4200 + "}}",
            '{"text":"a","metadata":' + _deep(300) + "}",
            '{"text":"a","metadata":' + _deep(2000) + "}",
            '{"token_ids":[2147483647]}',
            '{"token_ids":[' + "1," * 5000 + "1]}",
        )
    ),
    *(
        ("/v1/documents", body.encode())
        for body in (
            '{"documents":[{"id":"\\ud800","text":"a"}]}',
            '{"documents":[{"id":"a\\u0000b","text":"a"}]}',
            '{"documents":[{"id":"a","text":"\\u0000"}]}',
            '{"documents":[{"id":"a","text":""}]}',
            '{"documents":[{"id":"a","text":"x"},{"id":"a","text":"y"}]}',
            '{"documents":[{"id":"a","text":"a","metadata":{"a":"\\ud800"}}]}',
            '{"documents":[{"id":"a","\\ud800":"a"}]}',
            '{"documents":' + "[" * 100_000,
        )
    ),
    *(
        ("/v1/embeddings", ('{"input":' + value + "}").encode())
        for value in ('"\\ud800"', f"[{_LONG}]", "[1" + "0" * 30 + "]", '"a","dimensions":1' + "0" * 30)
    ),
    *(("/tokenize", ('{"text":' + value + "}").encode()) for value in ('"\\ud800"', '"\\u0000"', '""')),
]
"""Bodies that have broken servers: by depth, size, range and encoding."""

_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.sampled_from(["\ud800", "\x00", "", " ", "\ue000" + "0" * 32 + ":0\ue001", "<|im_end|>", "chunk-" + "0" * 40]),
    st.lists(st.none() | st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=3), max_size=3),
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a good body of it in which something was replaced, removed, doubled or cut off."""
    path = draw(st.sampled_from(sorted(VALID)))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, body)
    text = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return path, text


def _mutate(draw: st.DrawFn, body: Any) -> None:
    while True:
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if isinstance(body[key], dict | list) and draw(st.integers(0, 3)):
            body = body[key]
            continue
        what = draw(st.sampled_from(("replace", "replace", "remove", "double", "add")))
        if what == "replace":
            body[key] = draw(_ODD)
        elif what == "remove":
            del body[key]
        elif what == "double":
            if isinstance(body, list):
                body += [body[key]] * draw(st.integers(1, 5))
        elif isinstance(body, dict):
            body[draw(st.text(max_size=8))] = draw(_ODD)
        return


def check_answer(answer: httpx.Response) -> None:
    """An answer is no failure, is JSON without NaN or a complete stream, and if it is an error of OpenAI's shape."""
    assert answer.status_code < 500 or answer.status_code in _HONEST, answer.text[:500]
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], answer.text[-500:]
        for event in events[:-2]:
            found = _strict(event.removeprefix("data: "))
            assert found.get("error", {}).get("type") != "server_error", found
        return
    body = _strict(answer.text)
    if answer.is_error:
        error = body["error"]
        assert error["message"]
        assert error["type"]
        assert set(error) == {"message", "type", "param", "code"}


def _strict(text: str) -> Mapping[str, Any]:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)  # type: ignore[no-any-return]
