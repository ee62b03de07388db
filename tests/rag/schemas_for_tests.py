"""Random JSON schemas, and a plain check of values against them that owes nothing to any grammar."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ["id", "name", "größe", 'qu"ote', "back\\slash", "a b", "línea\nnueva", "🎉"]
# Alike in Python's and in Rust's syntax, and anchored, so that search and full match agree.
PATTERNS = ["^[0-9]{2,4}$", "^(ja|nein|vielleicht)$", "^[A-Z][a-z]*-[0-9]+$", '^"[^"]*"$', "^é+$"]
_TYPES: dict[str, Any] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def fits(value: Any, schema: Schema | bool, root: Schema | None = None) -> bool:
    """Whether a value fits a schema (draft 2020-12, the keywords that are used here)."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        if not fits(value, target, root):
            return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return False
    kinds = schema.get("type")
    if kinds is not None and not any(_TYPES[k](value) for k in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "anyOf" in schema and not any(fits(value, s, root) for s in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(fits(value, s, root) for s in schema["oneOf"]) != 1:
        return False
    if not all(fits(value, s, root) for s in schema.get("allOf", ())):
        return False
    if isinstance(value, str):
        return _string_fits(value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, list):
        items = schema.get("items", True)
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
            fits(v, items, root) for v in value
        )
    if isinstance(value, dict):
        named = schema.get("properties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            fits(v, named.get(k, schema.get("additionalProperties", True)), root) for k, v in value.items()
        )
    return True


def _string_fits(value: str, schema: Schema) -> bool:
    pattern = schema.get("pattern")
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)) and (
        pattern is None or re.search(pattern, value) is not None
    )


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _sized(low: str, high: str, most: int) -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda p: {low: min(p), high: max(p)})


_scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "string"}),
    st.just({"type": "number"}),
    st.just({"type": ["integer", "null"]}),
    _sized("minLength", "maxLength", 6).map(lambda s: {"type": "string", **s}),
    st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p}),
    st.tuples(st.integers(-50, 50), st.integers(0, 300)).map(
        lambda p: {"type": "integer", "minimum": p[0], "maximum": p[0] + p[1]}
    ),
    st.lists(st.sampled_from([*NAMES, 7, None, True, 2.5]), min_size=1, max_size=4).map(lambda e: {"enum": e}),
    st.sampled_from(NAMES).map(lambda c: {"const": c}),
    st.just({"type": "string", "format": "date"}),
    st.just({"$ref": "#/$defs/tree"}),
)


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(items, _sized("minItems", "maxItems", 3)).map(lambda p: {"type": "array", "items": p[0], **p[1]})


def _objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def made(pair: tuple[dict[str, Schema], list[bool], Any]) -> Schema:
        properties, needed, extra = pair
        required = [name for name, keep in zip(properties, needed, strict=False) if keep]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        return schema if extra is None else {**schema, "additionalProperties": extra}

    properties = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)
    extra = st.one_of(st.none(), st.just(False), st.just({"type": "integer"}))
    return st.tuples(properties, st.lists(st.booleans(), min_size=4, max_size=4), extra).map(made)


def _choices(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(values, min_size=1, max_size=3).map(lambda s: {"anyOf": s})


TREE: Schema = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "down": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["leaf"],
    "additionalProperties": False,
}
_bodies = st.recursive(
    _scalars, lambda inner: st.one_of(_arrays(inner), _objects(inner), _choices(inner)), max_leaves=6
)
SCHEMAS = _bodies.map(lambda body: {**body, "$defs": {"tree": TREE}})

KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "format", "pattern", "minLength"),
        *("maxLength", "minimum", "maximum", "multipleOf", "items", "prefixItems", "minItems", "maxItems", "required"),
        *("uniqueItems", "properties", "additionalProperties", "patternProperties", "minProperties", "$schema", "$id"),
    ]
)
