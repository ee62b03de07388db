"""JSON schemas made ready for a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from epic_rag.errors import GrammarError

__all__ = ["check_satisfiable", "prepared"]

Schema = Any  # a mapping, or True or False

# Formats are annotations in JSON Schema; these are enforced, and the others are left to the application.
_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
# Next to these, "properties" are not all that an object may have.
_OPENING = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", *_LISTED[:3]))


def prepared(schema: Schema, *, closed: bool) -> Schema:
    """A copy of a schema without what says nothing to a grammar: formats it does not know, and uniqueItems: false.

    Parameters
    ----------
    schema
        A JSON schema.
    closed
        Give objects that name their properties no others. What fits the result also fits the schema, and a small
        model is kept from inventing keys until its tokens run out.
    """
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: prepared(child, closed=closed) for name, child in value.items()}
        elif key in (*_LISTED, "items") and isinstance(value, list):
            made[key] = [prepared(child, closed=closed) for child in value]
        elif key in _SINGLE:
            made[key] = prepared(value, closed=closed)
        elif not _says_nothing(key, value):
            made[key] = value
    if closed and "properties" in made and not _OPENING & made.keys():
        made["additionalProperties"] = False
    return made


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "uniqueItems" and value is False


def check_satisfiable(schema: Schema) -> None:
    """Refuse a schema that only endless values fit: one that requires itself inside itself.

    Parameters
    ----------
    schema
        A JSON schema; other contradictions are found when it is compiled.

    Raises
    ------
    GrammarError
        If no finite value fits.
    """
    finite: set[int] = set()
    nodes: list[tuple[int, Mapping[str, Any]]] = []
    _collect(schema, nodes, set())
    # Least fixed point: a node is finite once all that it requires is.
    grown = True
    while grown:
        grown = False
        for key, node in nodes:
            if key not in finite and _is_finite(node, schema, finite):
                finite.add(key)
                grown = True
    if isinstance(schema, Mapping) and id(schema) not in finite:
        raise GrammarError(
            "the schema is unsatisfiable: it requires itself inside itself, so only an endless value would fit. Make "
            "the property or item that recurs optional."
        )


def _collect(schema: Schema, nodes: list[tuple[int, Mapping[str, Any]]], seen: set[int]) -> None:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    nodes.append((id(schema), schema))
    for key, value in schema.items():
        for child in _schemas_under(key, value):
            _collect(child, nodes, seen)


def _is_finite(node: Mapping[str, Any], root: Schema, finite: set[int]) -> bool:
    def known(child: Schema) -> bool:
        return not isinstance(child, Mapping) or id(child) in finite

    if "$ref" in node and not known(_target(node["$ref"], root)):
        return False
    for key in ("anyOf", "oneOf"):
        options = _list(node.get(key))
        if options and not any(map(known, options)):
            return False
    if not all(map(known, _list(node.get("allOf")))):
        return False
    implied = "object" if "required" in node else "array" if "minItems" in node else "any"
    kinds = node.get("type", implied)
    kinds = {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}
    needs: list[list[Schema]] = []
    if "object" in kinds:
        given = node.get("properties")
        properties = given if isinstance(given, Mapping) else {}
        required = [name for name in _list(node.get("required")) if isinstance(name, str)]
        needs.append([properties[name] for name in required if name in properties])
    if "array" in kinds:
        count = node.get("minItems", 0)
        count = count if isinstance(count, int) else 0
        prefix = _list(node.get("prefixItems"))
        needs.append([*prefix[:count], *([node["items"]] if count > len(prefix) and "items" in node else [])])
    # Another type than object and array needs nothing.
    return len(needs) < len(kinds) or any(all(map(known, need)) for need in needs)


def _schemas_under(key: str, value: Any) -> list[Schema]:
    if key in _NAMED and isinstance(value, Mapping):
        return list(value.values())
    if key in (*_LISTED, "items") and isinstance(value, list):
        return value
    return [value] if key in _SINGLE else []


def _list(value: Any) -> list[Any]:
    """A keyword's list; what is malformed is the compiler's affair."""
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Schema) -> Schema:
    """What a reference of this document means; None for one that only the compiler can look up."""
    found = root
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found
