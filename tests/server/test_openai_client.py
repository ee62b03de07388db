"""The official client, in all that it can ask, against the engine's own answers."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from epic_rag.server.schemas.answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from tests.rag.stack import TEXTS, BagOfWords, tokenizer
from tests.server.oracle import engines_own, plain_ids, rendered
from tests.server.running import MODEL, Running, running

FERRY = TEXTS["ferry"].strip()
HELLO: list[Any] = [{"role": "user", "content": "Hello there."}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}


class Trip(BaseModel):
    """Where to, and for how long."""

    city: Literal["Oslo", "Rome"]
    nights: int = Field(ge=0, le=9)


BOOK: Any = {
    "type": "function",
    "function": {"name": "book", "description": "Book a trip.", "parameters": Trip.model_json_schema()},
}
SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"day": {"enum": ["Monday", "Sunday"]}}, "required": ["day"]},
    },
}


@pytest.fixture(scope="module")
def client(shared_gateway: Running) -> openai.OpenAI:
    return shared_gateway.openai()


def in_loop(gateway: Running, ask: Callable[[openai.AsyncOpenAI], Any]) -> Any:
    """What the client for event loops answers."""

    async def run() -> Any:
        options: Any = {"base_url": f"{gateway.base_url}/v1", "api_key": "any", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(**options) as client:
            return await ask(client)

    return asyncio.run(run())


def waits_until_idle(gateway: Running) -> None:
    end = time.monotonic() + 30
    while gateway.app.state.admission.running and time.monotonic() < end:
        time.sleep(0.01)
    gateway.check_idle()


# -- conversations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "plain"),
    [
        (HELLO, HELLO),
        (
            [{"role": "developer", "content": "Be short."}, {"role": "user", "name": "ann", "content": "Why?"}],
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
        ),
        (
            [*HELLO, {"role": "assistant", "content": "", "refusal": None}, {"role": "user", "content": "So?"}],
            [*HELLO, {"role": "assistant", "content": ""}, {"role": "user", "content": "So?"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there."}]}],
            HELLO,
        ),
    ],
)
def test_greedy_answers_are_the_engines_own(shared_gateway: Running, messages: list[Any], plain: list[Any]) -> None:
    own = engines_own(shared_gateway, rendered(plain))
    client = shared_gateway.openai()
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == own.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == own.stats.prompt == len(plain_ids(rendered(plain)))
    assert answer.usage.completion_tokens == own.stats.generated
    assert answer.usage.total_tokens == own.stats.prompt + own.stats.generated

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, str]:
        stream = await client.chat.completions.create(messages=messages, stream=True, **GREEDY)
        pieces = [piece async for piece in stream]
        return await client.chat.completions.create(messages=messages, **GREEDY), "".join(
            piece.choices[0].delta.content or "" for piece in pieces
        )

    whole, streamed = in_loop(shared_gateway, ask)
    assert whole.choices[0].message.content == streamed == own.text


def test_many_coroutines_get_each_its_own_answer(shared_gateway: Running) -> None:
    asked = [[{"role": "user", "content": f"Number {n}?"}] for n in range(12)]

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        calls = [client.chat.completions.create(messages=messages, **GREEDY) for messages in asked]  # type: ignore[arg-type]
        return await asyncio.gather(*calls)

    for messages, answer in zip(asked, in_loop(shared_gateway, ask), strict=True):
        assert answer.choices[0].message.content == engines_own(shared_gateway, rendered(messages)).text


def test_options_of_the_gateway_go_through_extra_body(shared_gateway: Running, client: openai.OpenAI) -> None:
    made = client.post("/chunks", body={"text": FERRY}, cast_to=dict[str, Any])
    message = {"role": "user", "content": [{"type": "chunk", "id": made["id"]}, {"type": "text", "text": "Why?"}]}
    flat = rendered([{"role": "user", "content": f"{FERRY}\n\nWhy?"}])
    for policy, reused in (("full", 0), ("naive", len(plain_ids(FERRY)))):
        answer: Any = client.chat.completions.create(
            messages=[message],  # type: ignore[list-item]
            extra_body={"epic": {"policy": policy}},
            **GREEDY,
        )
        assert answer.choices[0].message.content == engines_own(shared_gateway, flat, [FERRY], policy).text
        assert answer.epic["policy"] == policy
        assert answer.epic["reused_tokens"] == reused
        assert [chunk["id"] for chunk in answer.epic["chunks"]] == [made["id"]]


# -- streams -----------------------------------------------------------------------------------------------------


def test_the_stream_helper_puts_the_answer_together(shared_gateway: Running, client: openai.OpenAI) -> None:
    stop = engines_own(shared_gateway, rendered(HELLO), max_tokens=24).text[12:14]
    own = engines_own(shared_gateway, rendered(HELLO), max_tokens=24, stop=stop)
    # The helper takes an answer that was cut at its limit for an error.
    options: Any = {"messages": HELLO, "stream_options": {"include_usage": True}, **GREEDY, "max_tokens": 24}
    options["stop"] = stop
    with client.chat.completions.stream(**options) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == own.text
    assert final.usage is not None
    assert final.usage.completion_tokens == own.stats.generated
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Trip, seed=5, max_tokens=100
    ) as shaped:
        parsed = shaped.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Trip)


def test_a_stream_that_is_closed_early_ends_its_answer(shared_gateway: Running, client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1500, "logit_bias": never_ending()}
    with client.chat.completions.create(stream=True, **options) as stream:
        next(iter(stream))
    waits_until_idle(shared_gateway)


def test_a_client_that_gives_up_ends_its_answer(shared_gateway: Running) -> None:
    with pytest.raises(openai.APITimeoutError):
        shared_gateway.openai(timeout=0.3).chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=1900, logit_bias=never_ending()
        )
    waits_until_idle(shared_gateway)


def never_ending() -> dict[str, int]:
    """Bars the tokens that end an answer."""
    hf = tokenizer()
    return {str(hf.convert_tokens_to_ids(token)): -100 for token in ("<|im_end|>", hf.eos_token)}


# -- forms -------------------------------------------------------------------------------------------------------


def test_answers_are_parsed_into_classes(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Trip, seed=seed, max_tokens=100
        )
        assert isinstance(answer.choices[0].message.parsed, Trip)
    called = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Trip)],
        tool_choice="required",
        seed=1,
        max_tokens=200,
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)


def test_a_tool_that_is_chosen_is_called_once(client: openai.OpenAI) -> None:
    for name in ("search", "book"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[BOOK, SEARCH],
            tool_choice={"type": "function", "function": {"name": name}},
            parallel_tool_calls=False,
            seed=3,
            max_tokens=200,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        assert answer.choices[0].message.content is None
        arguments = json.loads(call.function.arguments)
        if name == "book":
            Trip.model_validate(arguments)
        else:
            assert arguments["day"] in ("Monday", "Sunday")


def test_results_of_several_calls_stand_in_the_prompt(shared_gateway: Running, client: openai.OpenAI) -> None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "search", "arguments": json.dumps({"day": day})}}
        for n, day in enumerate(("Monday", "Sunday"))
    ]
    messages: list[Any] = [
        {"role": "user", "content": "Which day?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "Rain on the first day."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sun on the other day."}]},
    ]
    answer = client.chat.completions.create(messages=messages, tools=[SEARCH], tool_choice="none", **GREEDY)
    assert answer.choices[0].message.tool_calls is None
    with shared_gateway.client() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = tokenizer().decode(tokens)
    places = [prompt.find(text) for text in ("Which day?", "Monday", "Sunday", "Rain on the first", "Sun on the other")]
    assert places == sorted(places)
    assert min(places) >= 0


# -- tokens ------------------------------------------------------------------------------------------------------


def test_completions_of_every_kind_of_prompt_are_the_engines_own(
    shared_gateway: Running, client: openai.OpenAI
) -> None:
    ids, other = plain_ids("The ferry"), plain_ids("The bakery")
    done = {key: engines_own(shared_gateway, key) for key in ("The ferry", "The bakery")}
    own = {key: one.text for key, one in done.items()}
    for prompt, texts in (
        ("The ferry", ["The ferry"]),
        (["The ferry", "The bakery"], ["The ferry", "The bakery"]),
        (ids, ["The ferry"]),
        ([ids, other], ["The ferry", "The bakery"]),
    ):
        answer = client.completions.create(prompt=prompt, **GREEDY)  # type: ignore[call-overload]
        assert [choice.text for choice in answer.choices] == [own[text] for text in texts]
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        assert answer.usage.prompt_tokens == sum(len(plain_ids(text)) for text in texts)
    several = client.completions.create(prompt=["The ferry", "The bakery"], n=2, **GREEDY)
    assert [choice.text for choice in several.choices] == [t for t in own.values() for _ in range(2)]
    assert several.usage is not None
    assert several.usage.prompt_tokens == sum(one.stats.prompt for one in done.values())
    assert several.usage.completion_tokens == 2 * sum(one.stats.generated for one in done.values())
    streamed = list(client.completions.create(prompt=["The ferry", "The bakery"], stream=True, **GREEDY))
    for index, text in enumerate(own.values()):
        assert "".join(c.text for piece in streamed for c in piece.choices if c.index == index) == text


def test_logprobs_say_where_each_token_stands(shared_gateway: Running, client: openai.OpenAI) -> None:
    control = {str(token) for token in tokenizer().added_tokens_decoder.values() if token.special}
    found = 0
    for seed in range(6):
        options: Any = {"model": MODEL, "prompt": "The ferry", "max_tokens": 24, "seed": seed, "logprobs": 2}
        choice = client.completions.create(**options).choices[0]
        own = engines_own(shared_gateway, "The ferry", max_tokens=24, temperature=1, seed=seed, logprobs=2)
        shown = choice.logprobs
        assert shown is not None
        assert choice.text == own.text
        assert shown.token_logprobs == pytest.approx([one.logprob for one in own.logprobs or ()], abs=1e-4)
        offsets, tokens = shown.text_offset or [], shown.tokens or []
        assert len(offsets) == len(tokens) == own.stats.generated
        assert offsets == sorted(offsets)
        for before, token, at in zip(["", *tokens], tokens, offsets, strict=False):
            # Where parts of characters are no characters together, it is not said which of them ends where.
            if "\ufffd" not in before + token and token not in control:
                assert choice.text.startswith(token, at)
                found += 1
        pieces = [piece.choices[0].logprobs for piece in client.completions.create(stream=True, **options)]
        assert [at for piece in pieces if piece for at in piece.text_offset or []] == offsets
    assert found > 30


def test_bytes_of_tokens_are_those_of_their_text(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, seed=seed, logprobs=True, top_logprobs=3
        )
        assert answer.choices[0].logprobs is not None
        for token in answer.choices[0].logprobs.content or []:
            for one in (token, *token.top_logprobs):
                assert one.bytes == (None if "\ufffd" in one.token else list(one.token.encode()))
            assert len(token.top_logprobs) == 3


def test_embeddings_are_the_embedders_own(client: openai.OpenAI) -> None:
    texts = ["The ferry leaves at noon.", "Rye bread"]
    truth = BagOfWords().embed(texts)
    default = client.embeddings.create(model=BagOfWords.name, input=texts)  # the client asks for base64 and decodes it
    plain = client.embeddings.create(model=BagOfWords.name, input=texts, encoding_format="float")
    for answer in (default, plain):
        np.testing.assert_array_equal(np.array([one.embedding for one in answer.data], np.float32), truth)
        assert [one.index for one in answer.data] == [0, 1]
    coded: Any = client.embeddings.create(model=BagOfWords.name, input=texts[0], encoding_format="base64").data[0]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded.embedding), "<f4"), truth[0])
    assert plain.usage.prompt_tokens == sum(len(plain_ids(text)) for text in texts)
    by_ids = client.embeddings.create(model=BagOfWords.name, input=[plain_ids(text) for text in texts])
    np.testing.assert_array_equal(np.array([one.embedding for one in by_ids.data], np.float32), truth)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {MODEL, BagOfWords.name}
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


# -- what goes wrong, and what stands around an answer -----------------------------------------------------------


def test_refusals_are_the_clients_own_exceptions(tmp_path: Path, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(messages=HELLO, **{**GREEDY, "temperature": 9})
    assert bad.value.param == "temperature"
    missing: Any = {"role": "user", "content": "x", "chunk_references": [{"id": "chunk-none"}]}
    with pytest.raises(openai.NotFoundError) as gone:
        client.chat.completions.create(messages=[missing], **GREEDY)
    assert gone.value.code == "chunk_not_found"
    assert "chunk-none" in gone.value.message
    with running(tmp_path, keys={"ann": {"requests_per_minute": 2}}) as gateway:
        with pytest.raises(openai.AuthenticationError):
            gateway.openai("eve").models.list()
        ann = gateway.openai("ann")
        ann.models.list()
        ann.models.list()
        with pytest.raises(openai.RateLimitError) as fast:
            ann.models.list()
        assert 1 <= int(fast.value.response.headers["retry-after"]) <= 31


def test_every_response_has_an_id_for_the_log(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(messages=HELLO, **GREEDY)
    assert raw.headers["x-request-id"].startswith("req-")
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=[], **GREEDY)
    assert refused.value.request_id is not None


def test_responses_are_what_the_openapi_document_says(shared_gateway: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "seed": 1, "logprobs": True, "top_logprobs": 1, "n": 2}
    cases: list[dict[str, Any]] = [
        {"messages": HELLO, **fields},
        {"messages": HELLO, "tools": [BOOK], "tool_choice": "required", "seed": 1, "max_tokens": 200},
        {"messages": HELLO, "epic": {"retrieve": {"k": 2}}, "max_tokens": 4},
    ]
    prints = set()
    with shared_gateway.client() as http:
        added = http.post("/v1/documents", json={"documents": [{"id": "ferry", "text": FERRY}]})
        assert added.is_success, added.text
        for case in cases:
            whole = http.post("/v1/chat/completions", json=case)
            prints.add(ChatCompletion.model_validate_json(whole.text, strict=True).system_fingerprint)
            asked = {**case, "stream": True, "stream_options": {"include_usage": True}}
            lines = [line for line in http.post("/v1/chat/completions", json=asked).text.split("\n\n") if line]
            assert lines.pop() == "data: [DONE]"
            for line in lines:
                ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
        for body in ({"prompt": "a", "logprobs": 1}, {"prompt": ["a", "b"]}):
            whole = http.post("/v1/completions", json={**body, "max_tokens": 4})
            prints.add(TextCompletion.model_validate_json(whole.text, strict=True).system_fingerprint)
        assert http.delete("/v1/documents/ferry").is_success
    assert len(prints) == 1
