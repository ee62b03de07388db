"""Grammars of tool calls, in llguidance's Lark syntax."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any

from epic_rag.call_syntax import PYTHON_TAG, CallSyntax
from epic_rag.tokenization import SegmentTokenizer

__all__ = ["call_grammar", "literal", "token_set"]


def literal(text: str) -> str:
    """A pattern that matches just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def token_set(ids: Collection[int]) -> str:
    """A rule item that matches any one of these tokens."""
    runs: list[tuple[int, int]] = []
    for _, run in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        members = [token for _, token in run]
        runs.append((members[0], members[-1]))
    return f"<[{','.join(f'{a}-{b}' if b > a else str(a) for a, b in runs)}]>"


class _Marker:
    """What opens or closes calls, as rule items; a control token in it stands for its own id only."""

    def __init__(self, text: str, tokenizer: SegmentTokenizer, known: Collection[int]) -> None:
        self.control: int | None = None  # the first item, if it is a control token
        self.items: list[str] = []
        ids = tokenizer.encode_template(text)
        for is_control, run in groupby(ids, lambda token: token in tokenizer.control_ids and token in known):
            members = list(run)
            if is_control:
                if not self.items:
                    self.control = members[0]
                self.items += [f"<[{token}]>" for token in members]
            else:
                self.items.append(f"/{literal(tokenizer.decode(members))}/")

    def __str__(self) -> str:
        return " ".join(self.items)


def call_grammar(
    syntax: CallSyntax,
    schemas: Mapping[str, Mapping[str, Any]],
    tokenizer: SegmentTokenizer,
    known: Collection[int],
    free: Collection[int],
    *,
    required: bool,
    parallel: bool,
) -> str:
    """The grammar of an answer that is, or may hold, tool calls.

    Calls end the answer: after one, only further calls may follow.

    Parameters
    ----------
    syntax
        How calls are written.
    schemas
        Tools' names and their parameters, ready for a grammar.
    tokenizer
        Finds control tokens in the syntax's markers.
    known
        Ids that the model can write.
    free
        Control tokens that free text may hold; what opens a call is taken out.
    required, parallel
        Whether there must be a call, and whether there may be several.
    """
    begin = _Marker(syntax.begin, tokenizer, known)
    python_tag = None if syntax.begin else _Marker(PYTHON_TAG, tokenizer, known).control
    end = _Marker(syntax.end, tokenizer, known)
    # A marker without white space at its end is often followed by some in a model's training data.
    gap = "/ ?/" if syntax.begin and not syntax.begin[-1].isspace() else ""
    lines = [f"call: {' | '.join(f'call_{n}' for n in range(len(schemas)))}"]
    for number, (name, schema) in enumerate(schemas.items()):
        key, quoted = json.dumps(syntax.arguments_key), json.dumps(name, ensure_ascii=False)
        head = [literal('{"name":'), literal(f"{quoted},"), literal(f"{key}:")]
        lines.append(f"call_{number}: /{' ?'.join(head)} ?/ %json {json.dumps(schema)} /{literal('}')}/")
    if syntax.as_list:
        more = f"(/{literal(',')} ?/ call)*" if parallel else ""
        first = _joined(gap, f"/{literal('[')}/ call", more, f"/{literal(']')}/", end)
        following = ""
    else:
        first = _joined(gap, "call", end)
        between = literal("\n") if syntax.begin else literal(";") + " ?"
        following = f"(/{between}/ {_joined(begin, gap, 'call', end)})*" if parallel else ""
    lines.append(f"rest: {_joined(first, following)}")
    if required:
        lines.append(f"start: {_joined(begin, _optional(python_tag), 'rest')}")
    elif not syntax.begin:
        lines += _free_until_brace(python_tag, free)
    else:
        lines += _free_until_marker(syntax.begin, begin, frozenset(free) - {begin.control})
    return "\n".join(lines) + "\n"


def _joined(*items: object) -> str:
    return " ".join(text for item in items if (text := str(item)))


def _optional(token: int | None) -> str:
    return "" if token is None else f"<[{token}]>?"


def _without(marker: str) -> str:
    """A terminal for any text in which a marker is not spelled."""
    return f"/(?s:.*)/ & ~/(?s:.*){literal(marker)}(?s:.*)/"


def _free_until_brace(python_tag: int | None, free: Collection[int]) -> list[str]:
    """An answer that is a call if its first character, white space apart, is a brace."""
    others = frozenset(free) - {python_tag}
    tail = f"({token_set(others)} TEXT)*" if others else ""
    return [
        f"start: {_joined(_optional(python_tag), 'rest')} | (FIRST {tail})?",
        rf"FIRST: /\s*[^{{\s](?s:.*)/ & {_without(PYTHON_TAG)}",
        f"TEXT: {_without(PYTHON_TAG)}",
    ]


def _free_until_marker(begin: str, marker: _Marker, free: Collection[int]) -> list[str]:
    """Free text in which the marker, once written, leads to a call."""
    trigger = begin.strip()
    lines = [f"TEXT: {_without(trigger)}"]
    before = f"(TEXT {token_set(free)})*" if free else ""
    if marker.control is not None:
        return [*lines, f"start: {before} TEXT ({marker} rest)?"]
    space = begin[len(begin.rstrip()) :]
    lines.append(f"lead[lazy]: /(?s:.*){literal(trigger)}/")
    return [*lines, f"start: {before} (TEXT | {_joined('lead', space and f'/{literal(space)}/', 'rest')})"]
