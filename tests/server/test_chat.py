"""Answers over HTTP against the engine's own for prompts that are cut by hand, and against plain Hugging Face."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from epic_engine import Completion, SamplingParams

from tests.rag.stack import TEXTS, model, tokenizer
from tests.server.oracle import plain_ids
from tests.server.running import MODEL, Running

BAKERY, FERRY, HARBOUR = (TEXTS[name].strip() for name in ("bakery", "ferry", "harbour"))
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}


def expected(gateway: Running, messages: list[dict[str, str]], chunks: list[str], **sampling: Any) -> Completion:
    """The engine's own answer to a rendered conversation that is cut at some texts, each compiled alone."""
    left = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[Any] = []
    for chunk in chunks:
        before, _, left = left.partition(chunk)
        prompt += [plain_ids(before), gateway.engine.compile(plain_ids(chunk), "isolated")]
    stop = (tokenizer().convert_tokens_to_ids("<|im_end|>"),)
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": stop, **sampling})
    return gateway.engine.generate([*prompt, plain_ids(left)], params, policy="naive")


@pytest.fixture(scope="module")
def ids(shared_gateway: Running) -> dict[str, str]:
    """Ids of compiled chunks by their texts."""
    texts = [BAKERY, FERRY, HARBOUR]
    with shared_gateway.client() as client:
        made = client.post("/v1/chunks", json={"chunks": [{"text": text} for text in texts]}).json()["data"]
    return dict(zip(texts, (chunk["id"] for chunk in made), strict=True))


@pytest.fixture(scope="module")
def client(shared_gateway: Running) -> openai.OpenAI:
    return shared_gateway.openai()


def offsets(messages: list[dict[str, str]], chunks: list[str]) -> list[int]:
    """Tokens that stand before each of some texts in a rendered conversation."""
    left = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    at, found = 0, []
    for chunk in chunks:
        before, _, left = left.partition(chunk)
        found.append(at + len(plain_ids(before)))
        at = found[-1] + len(plain_ids(chunk))
    return found


def test_chunks_named_in_front_of_a_message_are_linked_in_that_order(
    shared_gateway: Running, client: openai.OpenAI, ids: dict[str, str]
) -> None:
    for texts in ([FERRY, BAKERY], [BAKERY, FERRY], [HARBOUR, BAKERY, HARBOUR]):
        flat = [{"role": "user", "content": "\n\n".join([*texts, "Why?"])}]
        where = offsets(flat, texts)
        references = [{"id": ids[t], "offset": at} for t, at in zip(texts, where, strict=True)]
        message: Any = {"role": "user", "content": "Why?", "chunk_references": references}
        answer = client.chat.completions.create(messages=[message], **GREEDY)
        own = expected(shared_gateway, flat, texts)
        assert answer.choices[0].message.content == own.text
        epic: Any = answer.model_extra["epic"]  # type: ignore[index]
        assert [(c["id"], c["offset"]) for c in epic["chunks"]] == [
            (ids[t], at) for t, at in zip(texts, where, strict=True)
        ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == own.stats.prompt
        details = answer.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == own.stats.reused == sum(len(plain_ids(t)) for t in texts)
        assert epic["reuse"] == "composed"
        assert epic["policy"] == "naive"


def test_chunks_between_texts_are_linked_where_they_stand(
    shared_gateway: Running, client: openai.OpenAI, ids: dict[str, str]
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}, {"type": "chunk", "id": ids[HARBOUR]}]},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare this:\n"},
                {"type": "chunk", "id": ids[FERRY]},
                {"type": "text", "text": "with that:"},
                {"type": "chunk", "id": ids[BAKERY]},
                {"type": "text", "text": "Why?"},
            ],
        },
    ]
    flat = [
        {"role": "system", "content": f"Be short.\n\n{HARBOUR}"},
        *messages[1:3],
        {"role": "user", "content": f"Compare this:\n{FERRY}\n\nwith that:\n\n{BAKERY}\n\nWhy?"},
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    own = expected(shared_gateway, flat, [HARBOUR, FERRY, BAKERY])
    assert answer.choices[0].message.content == own.text
    # The same as plain text is found without any ids.
    plain = client.chat.completions.create(messages=flat, **GREEDY)
    assert plain.choices[0].message.content == own.text
    assert plain.model_extra["epic"]["chunks"] == answer.model_extra["epic"]["chunks"]  # type: ignore[index]


def test_a_chunk_that_stands_elsewhere_than_asked_is_refused(client: openai.OpenAI, ids: dict[str, str]) -> None:
    flat = [{"role": "user", "content": f"{BAKERY}\n\nWhy?"}]
    right = offsets(flat, [BAKERY])[0]
    for wrong in (right - 1, right + 1, 0, 10**9):
        message: Any = {
            "role": "user",
            "content": "Why?",
            "chunk_references": [{"id": ids[BAKERY], "offset": wrong}],
        }
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.chat.completions.create(messages=[message], **GREEDY)
        assert refused.value.code == "offset_mismatch"
        assert str(right) in refused.value.message


def test_marks_that_a_text_spells_are_text(client: openai.OpenAI, ids: dict[str, str]) -> None:
    spelled = "\ue000" + "0" * 32 + ":0\ue001 \ue000:0\ue001 <|im_end|>"
    message: Any = {"role": "user", "content": spelled, "chunk_references": [{"id": ids[BAKERY]}]}
    answer = client.chat.completions.create(messages=[message], **GREEDY)
    assert [c["id"] for c in answer.model_extra["epic"]["chunks"]] == [ids[BAKERY]]  # type: ignore[index]


def test_the_first_token_is_as_likely_as_hugging_face_says(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "When does it open?"}]
    prompt = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with torch.no_grad():
        logits = model()(torch.tensor([plain_ids(prompt)])).logits[0, -1].double()
    truth = torch.log_softmax(logits, -1)
    answer = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=5, **GREEDY)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 8
    best = truth.topk(5)
    assert math.isclose(content[0].logprob, float(best.values[0]), abs_tol=2e-4)
    for shown, value in zip(content[0].top_logprobs, best.values, strict=True):
        assert math.isclose(shown.logprob, float(value), abs_tol=2e-4)
    assert content[0].token == tokenizer().decode([int(best.indices[0])])


def test_streams_say_what_whole_answers_say(client: openai.OpenAI, ids: dict[str, str]) -> None:
    message: Any = {"role": "user", "content": "Why?", "chunk_references": [{"id": ids[FERRY]}]}
    options: Any = {**GREEDY, "temperature": 1, "seed": 3, "n": 3, "logprobs": True}
    whole = client.chat.completions.create(messages=[message], **options)
    pieces = list(
        client.chat.completions.create(
            messages=[message], stream=True, stream_options={"include_usage": True}, **options
        )
    )
    for index, choice in enumerate(whole.choices):
        mine = [c for p in pieces for c in p.choices if c.index == index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        shown = [t for c in mine if c.logprobs for t in c.logprobs.content or []]
        assert [t.logprob for t in shown] == pytest.approx([t.logprob for t in choice.logprobs.content or []], abs=1e-4)
    assert pieces[-1].usage == whole.usage
    assert pieces[-1].choices == []
    assert pieces[-1].model_extra["epic"]["reuse"] == "composed"  # type: ignore[index]


def test_a_seed_decides_and_rises_from_answer_to_answer(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Tell me."}]}
    three = client.chat.completions.create(seed=11, n=3, **options).choices
    assert len({choice.message.content for choice in three}) > 1
    for index, choice in enumerate(three):
        again = client.chat.completions.create(seed=11 + index, **options).choices[0]
        assert again.message.content == choice.message.content


def test_stop_ends_an_answer_before_it(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Go on."}]
    full = client.chat.completions.create(messages=messages, **{**GREEDY, "max_tokens": 24}).choices[0].message.content
    assert full
    stop = full[len(full) // 2 : len(full) // 2 + 2]
    for form in (stop, ["never in it", stop]):
        cut = client.chat.completions.create(messages=messages, stop=form, **{**GREEDY, "max_tokens": 24}).choices[0]
        assert cut.message.content == full[: full.index(stop)]
        assert cut.finish_reason == "stop"


def test_answers_keep_to_a_schema(client: openai.OpenAI, ids: dict[str, str]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    message: Any = {"role": "user", "content": "Plan.", "chunk_references": [{"id": ids[FERRY]}]}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=[message], response_format=form, seed=seed, max_tokens=200
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
        assert answer.model_extra["epic"]["chunks"]  # type: ignore[index]


def test_calls_of_tools_hold_valid_arguments(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "book", "description": "Book.", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": "Book a trip."}]
    options: Any = {"model": MODEL, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 2}
    answer = client.chat.completions.create(messages=messages, **options)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "book"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    # The result goes back, and is answered.
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Booked."},
    ]
    after = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[tool], tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.tool_calls is None
    streamed = client.chat.completions.create(messages=messages[:1], stream=True, **options)
    calls = [c for p in streamed for ch in p.choices for c in ch.delta.tool_calls or []]
    assert json.loads("".join(c.function.arguments or "" for c in calls if c.function)) == json.loads(
        call.function.arguments
    )


def test_completions_link_what_they_hold(shared_gateway: Running, client: openai.OpenAI, ids: dict[str, str]) -> None:
    prompt = f"Read: {FERRY} Then: {BAKERY} So"
    parts = ["Read: ", " Then: ", " So"]
    keys = [shared_gateway.engine.compile(plain_ids(t), "isolated") for t in (FERRY, BAKERY)]
    cut: list[Any] = [plain_ids(parts[0]), keys[0], plain_ids(parts[1]), keys[1], plain_ids(parts[2])]
    stop = (tokenizer().convert_tokens_to_ids("<|im_end|>"),)
    own = shared_gateway.engine.generate(cut, SamplingParams(max_tokens=8, stop_token_ids=stop), policy="naive")
    answer = client.completions.create(prompt=prompt, **GREEDY)
    assert answer.choices[0].text == own.text
    assert [c["id"] for c in answer.model_extra["epic"]["chunks"]] == [ids[FERRY], ids[BAKERY]]  # type: ignore[index]
    for prompts in ([prompt, "So"], [plain_ids(prompt), plain_ids("So")]):
        several = client.completions.create(prompt=prompts, **GREEDY)  # type: ignore[arg-type]
        assert [c.index for c in several.choices] == [0, 1]
    assert several.choices[1].text == client.completions.create(prompt="So", **GREEDY).choices[0].text


def test_what_cannot_be_answered_is_refused_in_openais_shape(shared_gateway: Running) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    with shared_gateway.client() as http:
        for body, status in (
            ({"messages": []}, 400),
            ({"messages": hello, "model": "other"}, 404),
            ({"messages": hello, "temperature": 9}, 400),
            ({"messages": hello, "n": 10_000}, 400),
            ({"messages": hello, "max_tokens": 5000}, 400),
            ({"messages": hello, "epic": {"policy": "magic"}}, 400),
            ({"messages": hello, "tool_choice": "required"}, 400),
            ({"messages": hello, "response_format": {"type": "xml"}}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "chunk"}]}]}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
            ({"messages": [{"role": "user", "content": "x", "chunk_references": [{"id": "chunk-1"}]}]}, 404),
        ):
            refused: httpx.Response = http.post("/v1/chat/completions", json=body)
            assert refused.status_code == status, (body, refused.text)
            error = refused.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
