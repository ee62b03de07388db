"""Calls read out of answers: what models write, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from epic_engine.detokenizer import Detokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from epic_rag.tool_calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    CallSyntax,
    InvalidToolCall,
    ToolCall,
    ToolCallStream,
    new_call_id,
    parse_tool_calls,
    render_calls,
)
from tests.rag.tool_templates_for_tests import QWEN, SEARCH, with_tools

SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3, MISTRAL)}
TOOLS = [SEARCH, {"type": "function", "function": {"name": "now"}}]

strings = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["</tool_call>", "<tool_call>\n", "[TOOL_CALLS]", "\n</tool_call>", '"}', "\\", "<|python_tag|>", "; {"]
    ),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(strings, values, max_size=3)
names = st.from_regex(r"[A-Za-z][\w.\-]{0,20}", fullmatch=True).filter(str.isascii)
calls = st.lists(st.builds(ToolCall, st.just(""), names, arguments), min_size=1, max_size=3)


def numbered() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def read(text: str, syntax: CallSyntax, tools: Any = TOOLS) -> tuple[str, list[tuple[str, Any]], list[str]]:
    content, found, invalid = parse_tool_calls(text, syntax, tools)
    return content, [(call.name, call.arguments) for call in found], [call.text for call in invalid]


def streamed(text: str, cuts: list[int], syntax: CallSyntax) -> tuple[str, list[ToolCall | InvalidToolCall]]:
    stream = ToolCallStream(syntax, TOOLS, new_id=numbered())
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pushed = [stream.push(text[a:b]) for a, b in itertools.pairwise(places)]
    pushed.append(stream.finish())
    return "".join(content for content, _ in pushed), [call for _, made in pushed for call in made]


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=80, deadline=None)
@given(calls=calls, before=st.sampled_from(["", "I look it up.", "Zürich? "]))
def test_what_is_written_is_read_again(name: str, calls: list[ToolCall], before: str) -> None:
    syntax = SYNTAXES[name]
    before = before if syntax.begin else ""
    text = f"{before}\n{render_calls(calls, syntax)}"
    assert read(text, syntax) == (before.rstrip(), [(call.name, call.arguments) for call in calls], [])


def test_calls_are_written_as_the_families_write_them() -> None:
    two = [ToolCall("a", "now", {}), ToolCall("b", "search", {"query": "ü\n"})]
    assert render_calls(two, HERMES) == (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "ü\\n"}}\n</tool_call>'
    )
    assert render_calls(two, LLAMA3) == (
        '{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"query": "ü\\n"}}'
    )
    assert render_calls(two, MISTRAL) == (
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "search", "arguments": {"query": "ü\\n"}}]'
    )


MARKS = ("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
PARTS = (
    '{"name": "now"}',
    '{"a": 1}',
    '{"name": "x", ',
    '"arguments": {"q": 1}}',
    '"name": 3',
    "null",
    "search",
    "text. ",
)
fragments = st.lists(
    st.one_of(
        strings,
        st.sampled_from([*MARKS, *PARTS, *"{}[]\"' \n;", "x" * 170]),
        calls.flatmap(lambda made: st.sampled_from([render_calls(made, syntax) for syntax in SYNTAXES.values()])),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=200, deadline=None)
@given(text=fragments, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_pieces_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    whole = streamed(text, [], SYNTAXES[name])
    assert streamed(text, cuts, SYNTAXES[name]) == whole
    assert streamed(text, list(range(len(text))), SYNTAXES[name]) == whole


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])), data=st.data())
def test_answers_without_calls_come_unchanged(name: str, text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert streamed(text, cuts, SYNTAXES[name]) == (text, [])


@pytest.mark.parametrize("name", SYNTAXES)
def test_text_and_calls_come_as_soon_as_they_are_certain(name: str) -> None:
    syntax = SYNTAXES[name]
    stream = ToolCallStream(syntax, TOOLS)
    if syntax.begin:
        text = "It is 5 < 6 [T and more."
        shown = ""
        for end, character in enumerate(text, 1):
            shown += stream.push(character)[0]
            assert len(shown) >= len(text[:end].rstrip(" <[T"))
        assert shown == text
    written = render_calls([ToolCall("", "search", {"query": "a}b"})], syntax)
    done = written.rindex("}") + 1
    assert stream.push(written[: done - 1]) == ("", [])
    text, (call,) = stream.push(written[done - 1 : done]) if not syntax.as_list else stream.push(written[done - 1 :])
    assert isinstance(call, ToolCall)
    assert (text, call.name, call.arguments) == ("", "search", {"query": "a}b"})
    assert stream.push(written[done:] if not syntax.as_list else "") == ("", [])
    assert stream.finish() == ("", [])


SEARCH_X = ("search", {"query": "x"})
SLOPPY = [
    (HERMES, '<tool_call>{"name":"search","arguments":{"query":"x"}}', "", [SEARCH_X]),
    (HERMES, '<tool_call> {"name": "search", "parameters": "{\\"query\\": \\"x\\"}"} </tool_call>', "", [SEARCH_X]),
    (HERMES, '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}}\n</tool_call>', "", [SEARCH_X]),
    (
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>',
        "",
        [("search", {"query": "a\nb"})],
    ),
    (HERMES, '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', "", [("now", {}), ("now", {})]),
    (HERMES, '<tool_call>{"name": "now"}; {"name": "now"}', "", [("now", {}), ("now", {})]),
    (HERMES, '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', "", [("now", {}), ("now", {})]),
    (HERMES, '<tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    (HERMES, 'A \n<tool_call>{"name": "now"}</tool_call>\n\n B.\n', "A\nB.\n", [("now", {})]),
    (HERMES, '<tool_call>{"name": "now"} So be it.', "So be it.", [("now", {})]),
    (
        HERMES,
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": ""}}</tool_call>',
        "",
        [("now", {})],
    ),
    (HERMES, '<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", {})]),
    (LLAMA3, '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}', "", [SEARCH_X]),
    (LLAMA3, '\n{"name": "search", "arguments": {"query": "x"}};{"name": "now"}', "", [SEARCH_X, ("now", {})]),
    (LLAMA3, '[{"name": "search", "parameters": {"query": "x"}}]', "", [SEARCH_X]),
    (LLAMA3, '{"type": "function", "name": "search", "parameters": {"query": "x"}}', "", [SEARCH_X]),
    (LLAMA3, 'Well.<|python_tag|>{"name": "now"}', "Well.", [("now", {})]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "abcdefghi"}]', "", [SEARCH_X]),
    (MISTRAL, '[TOOL_CALLS]search[ARGS]{"query": "x"}[TOOL_CALLS]now[ARGS]{}', "", [SEARCH_X, ("now", {})]),
    (MISTRAL, '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "x"}', "", [SEARCH_X]),
    (MISTRAL, 'Yes. [TOOL_CALLS]search{"query": "x"} ', "Yes.", [SEARCH_X]),
    (MISTRAL, '[TOOL_CALLS] {"name": "search", "arguments": {"query": "x"}}', "", [SEARCH_X]),
    (MISTRAL, "[TOOL_CALLS] []", "", []),
]


@pytest.mark.parametrize(("syntax", "text", "content", "expected"), SLOPPY)
def test_what_models_get_almost_right(syntax: CallSyntax, text: str, content: str, expected: Any) -> None:
    assert read(text, syntax) == (content, expected, [])


INVALID = [
    (
        HERMES,
        "<tool_call>\n{'name': 'now', 'arguments': {}}\n</tool_call> B",
        "{'name': 'now', 'arguments': {}}",
        "now",
    ),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}</tool_call> B', '{"name": "now", "arguments": {}', "now"),
    (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>B', '{"name": "now", "arguments": [1]}', "now"),
    (HERMES, '<tool_call>{"name": "now", "arguments": "x"}</tool_call>B', '{"name": "now", "arguments": "x"}', "now"),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>B',
        '{"name": "now", "arguments": {"a": NaN}}',
        "now",
    ),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>B', '{"arguments": {}}', None),
    (HERMES, "<tool_call>now()</tool_call>B", "now()", None),
    (HERMES, "<tool_call> </tool_call>B", "<tool_call></tool_call>", None),
    (HERMES, "B<tool_call>\n", "<tool_call>", None),
    (HERMES, 'B<tool_call>{"name": "now", "argum', '{"name": "now", "argum', "now"),
    (MISTRAL, "B[TOOL_CALLS]now", "now", None),
    (MISTRAL, 'B[TOOL_CALLS]now[ARGS]{"a": ', 'now{"a":', "now"),
    (LLAMA3, 'B<|python_tag|>brave.call(query="x")', 'brave.call(query="x")', None),
]


@pytest.mark.parametrize(("syntax", "text", "kept", "name"), INVALID)
def test_broken_calls_are_kept(syntax: CallSyntax, text: str, kept: str, name: str | None) -> None:
    content, found, (invalid,) = parse_tool_calls(text, syntax)
    assert (content.strip(), found) == ("B", [])
    assert (invalid.text, invalid.name) == (kept, name)
    assert invalid.error


def test_a_broken_call_does_not_take_the_name_of_the_one_before() -> None:
    _, _, (invalid,) = parse_tool_calls("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]!", MISTRAL)
    assert (invalid.text, invalid.name) == ("!", None)


@pytest.mark.parametrize(("syntax", "text"), [case[:2] for case in (*SLOPPY, *INVALID)])
def test_every_place_of_a_cut_gives_the_same(syntax: CallSyntax, text: str) -> None:
    whole = streamed(text, [], syntax)
    assert streamed(text, list(range(len(text))), syntax) == whole
    for cut in range(len(text)):
        assert streamed(text, [cut], syntax) == whole


def test_a_call_that_cannot_become_one_is_reported_where_it_ends() -> None:
    stream = ToolCallStream(HERMES)
    _, (broken,) = stream.push('<tool_call>{"name": "now", "arguments": {}</tool_call>')
    assert isinstance(broken, InvalidToolCall)
    assert stream.push(" So.")[0] == "So."


def test_a_broken_call_does_not_swallow_the_next_one() -> None:
    good = '<tool_call>{"name": "now"}</tool_call>'
    for broken in ("<tool_call>{'name': 'now'}</tool_call>", "<tool_call>now()", '<tool_call>{"name": "x", <'):
        content, found, invalid = read(f"{broken}\n{good}", HERMES)
        assert (content, found, len(invalid)) == ("", [("now", {})], 1)


JSON_ANSWERS = ['{"a": 1}', '{"name": "Ines", "age": 40}', '{"name": "Ines", "age": ', "[1] The ferry.", "{'a': 1}"]


@pytest.mark.parametrize(
    "text",
    [
        *JSON_ANSWERS,
        "{{ x }} is Jinja",
        "{" + "x" * 300,
        "[]",
        'See {"name": "now"}',
        "[{'name': 1}]",
        '{"parameters": {}}',
        "{",
    ],
)
def test_answers_in_json_are_no_calls(text: str) -> None:
    assert read(text, LLAMA3) == (text, [], [])


@pytest.mark.parametrize("text", ['{"name": "search", "parameters": {"que', "{'name': 'now', 'parameters': {}}"])
def test_a_bare_call_that_breaks_off_is_invalid(text: str) -> None:
    assert read(text, LLAMA3) == ("", [], [text])


def test_deep_nesting_does_not_crash() -> None:
    deep = "[" * 100_000
    assert read(deep, LLAMA3) == (deep, [], [])
    content, found, (invalid,) = read(f"<tool_call>{deep}{']' * 100_000}</tool_call>", HERMES)
    assert (content, found, len(invalid)) == ("", [], 200_000)


def test_ids_are_nine_letters_and_digits() -> None:
    ids = {new_call_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)


def test_special_tokens_stay_in_the_text_where_asked_for() -> None:
    tokenizer = with_tools(QWEN)
    text = '<|im_start|>Hi.<tool_call>\n{"name": "now"}\n</tool_call><|im_end|>'
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    marks = tuple(tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    plain, marked = Detokenizer(tokenizer), Detokenizer(tokenizer, visible=marks)
    pushed = "".join([*map(marked.push, ids), marked.finish()])
    assert pushed == marked.text == 'Hi.<tool_call>\n{"name": "now"}\n</tool_call>'
    assert "".join([*map(plain.push, ids), plain.finish()]) == 'Hi.\n{"name": "now"}\n'
    assert read(marked.text, HERMES) == ("Hi.", [("now", {})], [])
    assert json.loads(plain.text.removeprefix("Hi.")) == {"name": "now"}
