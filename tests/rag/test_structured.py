"""JSON of a schema, patterns and choices: random walks and tables against plain Python checks."""

from __future__ import annotations

import datetime
import enum
import json
import re
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from epic_rag.errors import GrammarError
from tests.rag.grammar_walks import KINDS, accepts, grammars, text_of, tokenizer, walk
from tests.rag.schemas_for_tests import KEYWORDS, SCHEMAS, fits

# -- JSON schemas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
def test_whatever_is_drawn_is_json_of_the_schema(kind: str, schema: dict[str, Any], seed: int) -> None:
    ids, ended = walk(grammars(kind).json_schema(schema), kind, seed)
    if ended:
        text = text_of(ids, kind)
        assert fits(json.loads(text), schema), text
        assert not re.search(r"\s\s|[\n\r\t]", re.sub(r'"(\\.|[^"\\])*"', "", text))


def test_most_walks_end() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {}}}}
    assert sum(walk(grammars("bytes").json_schema(schema), "bytes", seed)[1] for seed in range(20)) >= 15


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str
    zip: str = Field(pattern=r"^[0-9]{5}$")


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=40)
    born: datetime.date
    age: int | None = Field(default=None, ge=0, le=150)
    role: Literal["admin", "user"]
    colour: Colour
    tags: list[str] = Field(min_length=1, max_length=3)
    address: Address
    others: list[Address] = []


class Node(BaseModel):
    value: int
    children: list[Node] = []


PERSON: dict[str, Any] = {
    "name": "Ines Ärger 🎉",
    "born": "2001-02-03",
    "age": 30,
    "role": "admin",
    "colour": "red",
    "tags": ["a", "b"],
    "address": {"street": 'Main "1"\n', "zip": "12345"},
    "others": [],
}
_AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
# Schema, values that fit, values that do not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pydantic": (
        Person.model_json_schema(),
        [PERSON, {**PERSON, "age": None}, {k: v for k, v in PERSON.items() if k not in ("age", "others")}],
        [
            *({**PERSON, key: value} for key, value in (("age", 151), ("role", "root"), ("born", "2001-13-40"))),
            *({**PERSON, key: value} for key, value in (("tags", []), ("tags", list("abcd")), ("name", ""))),
            {**PERSON, "address": {"street": "x", "zip": "1234"}},
            {k: v for k, v in PERSON.items() if k != "name"},
            {**PERSON, "more": 1},
        ],
    ),
    "recursive": (
        Node.model_json_schema(),
        [{"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}],
        [{"value": 1, "children": [{"children": []}]}],
    ),
    "open if it says so": (
        {"properties": _AB, "type": "object", "additionalProperties": True},
        [{"x": 1}],
        [{"a": "x"}],
    ),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"é": 1}], [{"a": "x"}]),
    "pattern properties": (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        [{"x_a": 1}],
        [{"y": 1}, {"x_a": "s"}],
    ),
    "discriminated": (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": t}, "v": {"type": v}}, "required": ["t", "v"]}
                for t, v in (("a", "integer"), ("b", "string"))
            ],
            "discriminator": {"propertyName": "t"},
        },
        [{"t": "a", "v": 1}, {"t": "b", "v": "x"}],
        [{"t": "a", "v": "x"}, {"t": "c", "v": 1}],
    ),
    "all of objects that would contradict each other if closed": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": _AB["a"]}, "required": ["a"]},
                {"type": "object", "properties": {"b": _AB["b"]}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "required without a property": ({"type": "object", "properties": _AB, "required": ["c"]}, [{"c": 1}], [{"a": 1}]),
    "numbers": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5, -1]),
    "multiples": ({"type": "integer", "multipleOf": 5, "minimum": -10}, [10, 0, -5], [7, -15]),
    "tuples": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1, "a"]],
        [[1], ["a", 1], [1, "a", 2]],
    ),
    "lengths count characters": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "äöü🎉"], ["a", "abcde"]),
    "pattern anywhere": ({"type": "string", "pattern": "[0-9]{3}"}, ["a123b"], ["a12b"]),
    "formats": ({"type": "string", "format": "date-time"}, ["2020-01-02T03:04:05Z"], ["2020-01-02", "x"]),
    "a format that is none": ({"type": "string", "format": "path"}, ["/tmp"], [1]),
    "a property named format": (
        {"type": "object", "properties": {"format": {"const": "path"}}, "required": ["format"]},
        [{"format": "path"}],
        [{"format": "x"}, {}],
    ),
    "a const is no schema": (
        {"const": {"format": "path", "properties": {}}},
        [{"format": "path", "properties": {}}],
        [{}, {"format": "path"}],
    ),
    "items need not differ": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False}, [[1, 1]], [[3]]),
    "definitions of old": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "$ref": "#/definitions/n",
        },
        [3],
        ["x"],
    ),
    "true": (True, [1, "a", {"a": [None]}], []),
    "text of a schema": ('{"type": "boolean"}', [True], [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_fits_can_be_written_and_nothing_else(name: str) -> None:
    schema, good, bad = CASES[name]
    for value in good:
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            assert accepts(grammars("bytes").json_schema(schema), text), text
    for value in bad:
        text = json.dumps(value, ensure_ascii=False)
        assert not accepts(grammars("bytes").json_schema(schema), text), text


def test_white_space_is_bounded() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    for text in ("[1,  2]", "[ 1]", "[1 ]", "[1,\n2]", " [1]", "[1] ", "[1]\n"):
        assert not accepts(grammars("bytes").json_schema(schema), text), text


def test_a_schema_cannot_change_the_rules() -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer"},
        "x-guidance": {"whitespace_flexible": True, "lenient": True},
    }
    assert not accepts(grammars("bytes").json_schema(schema), "[1,   2]")
    with pytest.raises(GrammarError, match="contains"):
        grammars("bytes").json_schema({**schema, "contains": {"const": 1}})


@pytest.mark.parametrize("kind", KINDS)
def test_any_json_object(kind: str) -> None:
    for seed in range(10):
        ids, ended = walk(grammars(kind).json_object(), kind, seed)
        if ended:
            assert isinstance(json.loads(text_of(ids, kind)), dict)
    made = grammars(kind).json_object
    assert accepts(made(), '{"a": {"b": [1, null, "\\u0007é"]}}', kind)
    assert not accepts(made(), "[1]", kind)
    assert not accepts(made(), '"a"', kind)


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf.*anyOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "#/$defs/no"}, "/\\$defs/no"),
        ({"$ref": "https://example.org/schema.json"}, "example.org"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
        ({"$ref": "#"}, "requires itself"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "requires itself"),
        ({"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}, "$ref": "#/$defs/a~1b"}, "requires itself"),
        ({"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]}, "requires itself"),
        (False, "unsatisfiable"),
        ("{", "no JSON"),
        ("[1]", "not list"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named_at_once(schema: Any, match: str) -> None:
    with pytest.raises(GrammarError, match=match) as caught:
        grammars("bytes").json_schema(schema)
    assert "coerce_one_of" not in str(caught.value)
    assert "start:" not in str(caught.value)


_junk = st.recursive(
    st.sampled_from(["object", "array", "x", "#", "#/$defs/a", "#/anyOf/3", "\ud800", 1, -1, 2.5, 10**30, True, None]),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYWORDS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(KEYWORDS, _junk, min_size=1, max_size=4))
def test_malformed_schemas_are_told_or_work(schema: dict[str, Any]) -> None:
    try:
        constraint = grammars("bytes").json_schema(schema)
    except GrammarError:
        return
    walk(constraint, "bytes", 1, most=5)


@pytest.mark.parametrize("schema", [{"const": {1, 2}}, {"const": float("nan")}, {"enum": [b"x"]}])
def test_schemas_that_are_no_json_are_told(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="no JSON"):
        grammars("bytes").json_schema(schema)


def test_a_schema_that_nests_without_end_is_told() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(GrammarError, match="no JSON"):
        grammars("bytes").json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_recursion_with_a_way_out_is_fine(schema: dict[str, Any]) -> None:
    assert any(walk(grammars("bytes").json_schema(schema), "bytes", seed)[1] for seed in range(20))


# -- patterns and choices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9]{3}-[a-z]+",
        "(ja|nein)/?",
        "a*",
        "é🎉?",
        r"\$\d{1,3}(\.\d\d)?",
        r"[^\n]{0,9}",
        r"line\nline",
        "",
        r'"\\/#<>',
    ],
)
def test_a_pattern_matches_the_whole_text(kind: str, pattern: str) -> None:
    some = 0
    for seed in range(8):
        ids, ended = walk(grammars(kind).regex(pattern), kind, seed, most=40, push="")
        if ended:
            some += 1
            assert re.fullmatch(pattern, text_of(ids, kind))
    assert some


def test_a_pattern_that_cannot_be_compiled_is_told() -> None:
    for pattern, match in (("(?=a)b", "look-around"), ("[a", "unclosed"), (r"(a)\1", "backreferences")):
        with pytest.raises(GrammarError, match=match):
            grammars("bytes").regex(pattern)


OPTIONS = [
    "yes",
    "no",
    "yes, but",
    'quo"te',
    "back\\slash",
    "/slash/",
    "two\nlines",
    "Ärger",
    "🎉",
    "<|im_end|>",
    "# a",
    " a",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_gives_one_of_the_options(kind: str) -> None:
    seen = set()
    for seed in range(80):
        ids, ended = walk(grammars(kind).choice(OPTIONS), kind, seed, push="")
        assert ended
        assert not set(ids) & tokenizer(kind).added_tokens_decoder.keys()  # spelled, not drawn as control tokens
        seen.add(text_of(ids, kind))
    assert seen <= set(OPTIONS)
    assert len(seen) >= len(OPTIONS) - 2
    for option in OPTIONS:
        assert accepts(grammars(kind).choice(OPTIONS), option, kind)
    assert not accepts(grammars(kind).choice(OPTIONS), "yes, bu", kind)


@pytest.mark.parametrize("options", [[], "yes", ["a", ""], [1], ()])
def test_a_choice_of_nothing_is_refused(options: Any) -> None:
    with pytest.raises(GrammarError, match="list of strings"):
        grammars("bytes").choice(options)
