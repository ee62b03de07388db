"""Tool calls that a grammar lets a model write, in every syntax, read by a parser of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from epic_engine import TokenConstraint

from epic_rag._token_bytes import token_bytes
from epic_rag.call_syntax import HERMES, LLAMA3, MISTRAL, CallSyntax
from epic_rag.errors import GrammarError
from epic_rag.structured import Grammars
from tests.rag.grammar_walks import KINDS, accepts, end_ids, grammars, legal, text_of, tokenizer, walk
from tests.rag.schemas_for_tests import fits
from tests.rag.tokenizers_for_tests import byte_level

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city"],
        "$defs": {"City": {"enum": ["Köln", "Ulm"]}},
    },
    'odd "name"/é': {"properties": {"on": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "boolean"}}},
    "now": {"type": "object", "properties": {}},
}
# Of some vocabularies these are tokens, of others plain text.
SYNTAXES = [HERMES, MISTRAL, LLAMA3, CallSyntax("angles", "<call>", "</call>", as_list=False, arguments_key="args")]


def calls_in(text: str, syntax: CallSyntax) -> list[dict[str, Any]]:
    """The calls of a text that is nothing but calls."""
    if syntax.as_list:
        assert text.startswith(syntax.begin)
        found = json.loads(text.removeprefix(syntax.begin).removesuffix(syntax.end))
        assert isinstance(found, list)
        return found
    between = syntax.end + "\n" + syntax.begin if syntax.begin else "; "
    parts = text.removeprefix(syntax.begin).removesuffix(syntax.end).split(between)
    assert between.join(parts).join((syntax.begin, syntax.end)) == text
    return [json.loads(part) for part in parts]


def check_calls(text: str, syntax: CallSyntax, parallel: bool) -> int:
    calls = calls_in(text.replace(";{", "; {"), syntax)
    for call in calls:
        assert list(call) == ["name", syntax.arguments_key]
        assert isinstance(call[syntax.arguments_key], dict)
        assert fits(call[syntax.arguments_key], TOOLS[call["name"]])
    assert calls
    assert parallel or len(calls) == 1
    return len(calls)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: s.name)
def test_required_calls_are_calls_and_nothing_else(syntax: CallSyntax, parallel: bool, kind: str) -> None:
    counts = []
    for seed in range(12):
        constraint = grammars(kind).tool_calls(syntax, TOOLS, required=True, parallel=parallel)
        ids, ended = walk(constraint, kind, seed, push=",;\n", most=600)
        if ended:
            counts.append(check_calls(text_of(ids, kind), syntax, parallel))
    assert len(counts) >= 8
    assert (max(counts) > 1) == parallel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("syntax", [s for s in SYNTAXES if s.begin], ids=lambda s: s.name)
def test_free_text_may_lead_to_calls_and_what_opens_one_always_does(
    syntax: CallSyntax, parallel: bool, kind: str
) -> None:
    mark = syntax.begin.strip()
    control = tokenizer(kind).convert_tokens_to_ids(mark)
    is_control = kind == "bytes" and control is not None and mark in ("<tool_call>", "[TOOL_CALLS]")
    opening = [control] if is_control else tokenizer(kind)(mark, add_special_tokens=False)["input_ids"]
    hello = tokenizer(kind)("Hello { ", add_special_tokens=False)["input_ids"]
    for seed in range(6):
        constraint = grammars(kind).tool_calls(syntax, TOOLS, required=False, parallel=parallel)
        for token in hello:
            assert token in legal(constraint, kind)
            constraint.advance(token)
        assert legal(constraint, kind) >= set(end_ids(kind))  # it may stay free text
        assert not constraint.finished
        for token in opening:
            assert token in legal(constraint, kind)
            constraint.advance(token)
        assert not legal(constraint, kind) & set(end_ids(kind))
        ids, ended = walk(constraint, kind, seed, push=",\n", most=600)
        assert not ended or check_calls(mark + text_of(ids, kind), syntax, parallel)
    # Spelled in plain characters it is no way out either: forbidden, or a call as well.
    ids, ended = walk(grammars(kind).tool_calls(syntax, TOOLS, required=False, parallel=parallel), kind, 1, push=mark)
    _, found, after = text_of(ids, kind).partition(mark)
    assert not (found and ended) or check_calls(mark + after, syntax, parallel)
    if is_control:
        constraint = grammars(kind).tool_calls(syntax, TOOLS, required=False, parallel=parallel)
        assert not accepts_plain(constraint, mark)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_may_be_spaced_as_models_write_them(kind: str) -> None:
    mark = tokenizer(kind).convert_tokens_to_ids("[TOOL_CALLS]")
    for text in (
        '[{"name": "now", "arguments": {}}]',
        ' [{"name":"now","arguments":{}}, {"name": "now","arguments": {}},{"name":"now", "arguments":{}}]',
    ):
        constraint = grammars(kind).tool_calls(MISTRAL, TOOLS, required=True, parallel=True)
        if kind == "bytes":
            constraint.advance(mark)
            assert accepts(constraint, text, kind)
        else:
            assert accepts(constraint, "[TOOL_CALLS]" + text, kind)
    constraint = grammars(kind).tool_calls(MISTRAL, TOOLS, required=True, parallel=True)
    assert not accepts(constraint, '[TOOL_CALLS]  [{"name": "now", "arguments": {}}]', kind)


def accepts_plain(constraint: TokenConstraint, text: str) -> bool:
    """Whether a text can be written byte for byte, without control tokens."""
    single = {text: i for i, text in token_bytes(tokenizer("bytes")).items() if len(text) == 1}
    for byte in text.encode():
        if single[bytes([byte])] not in legal(constraint, "bytes"):
            return False
        constraint.advance(single[bytes([byte])])
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_in_llama_3s_syntax_a_brace_at_the_start_is_a_call(kind: str) -> None:
    def free() -> TokenConstraint:
        return grammars(kind).tool_calls(LLAMA3, TOOLS, required=False, parallel=False)

    assert accepts(free(), "", kind)
    assert accepts(free(), " Use {braces} later.", kind)
    assert accepts(free(), '{"name": "now", "parameters": {}}', kind)
    for text in ("{}", " {", "\n\n{x", '{"name": "x", "parameters": {}}', "<|python_tag|>x", "a <|python_tag|>"):
        assert not accepts(free(), text, kind), text


def test_llama_3s_tag_may_stand_before_a_call() -> None:
    tagged = byte_level()
    tagged.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    tag = tagged.convert_tokens_to_ids("<|python_tag|>")
    made = Grammars(tagged, len(tagged), [2])
    call = tagged('{"name": "now", "parameters": {}}', add_special_tokens=False)["input_ids"]
    for required in (True, False):
        for before in ([], [tag]):
            constraint = made.tool_calls(LLAMA3, TOOLS, required=required, parallel=False)
            for token in [*before, *call]:
                assert constraint.mask(torch.zeros(len(tagged)))[token] == 0
                constraint.advance(token)
            assert constraint.finished
    constraint = made.tool_calls(LLAMA3, TOOLS, required=False, parallel=False)
    constraint.advance(tagged("x")["input_ids"][0])
    assert constraint.mask(torch.zeros(len(tagged)))[tag] == -torch.inf


def test_free_text_may_hold_other_marks_and_calls_may_not() -> None:
    constraint = grammars("bytes").tool_calls(HERMES, TOOLS, required=False, parallel=False)
    think, done, call, end = tokenizer("bytes").convert_tokens_to_ids(
        ["<think>", "</think>", "<tool_call>", "<|im_end|>"]
    )
    for token in (think, done, call):
        assert token in legal(constraint, "bytes")
        constraint.advance(token)
    assert not legal(constraint, "bytes") & {think, done, call, end}
    strings = grammars("bytes").json_schema({"type": "string"})
    strings.advance(tokenizer("bytes").convert_tokens_to_ids('"'))
    assert not legal(strings, "bytes") & {think, done, call, end}


def test_tools_that_cannot_be_called_are_named() -> None:
    def make(tools: Mapping[str, Any]) -> None:
        grammars("bytes").tool_calls(HERMES, tools, required=True, parallel=True)

    with pytest.raises(GrammarError, match="no tools"):
        make({})
    with pytest.raises(GrammarError, match=r"'second'.*uniqueItems"):
        make({"first": {}, "second": {"properties": {"x": {"type": "array", "uniqueItems": True}}}})
    for wrong in ({"type": "array"}, True, None):
        with pytest.raises(GrammarError, match=r"'it' must be .* object"):
            make({"it": wrong})
