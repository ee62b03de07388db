"""Tool calls as models write them."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "PYTHON_TAG",
    "CallSyntax",
    "InvalidToolCall",
    "ToolCall",
    "marker_texts",
    "new_call_id",
    "render_calls",
]

# Llama 3 puts it before some calls.
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallSyntax:
    """How a model family writes tool calls.

    Attributes
    ----------
    name
        ``hermes``, ``llama3`` or ``mistral``.
    begin
        What opens a call, or all calls; empty where an answer that is a JSON object is a call.
    end
        What closes it; may be empty.
    as_list
        Whether one JSON list of calls stands between begin and end; otherwise each call has its own.
    arguments_key
        The key of the arguments: ``arguments`` or ``parameters``.
    """

    name: str
    begin: str
    end: str
    as_list: bool
    arguments_key: str


HERMES = CallSyntax("hermes", "<tool_call>\n", "\n</tool_call>", as_list=False, arguments_key="arguments")
LLAMA3 = CallSyntax("llama3", "", "", as_list=False, arguments_key="parameters")
MISTRAL = CallSyntax("mistral", "[TOOL_CALLS]", "", as_list=True, arguments_key="arguments")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes
    ----------
    call_id
        Names the call, so that the result can refer to it.
    name
        The tool's name.
    arguments
        By their names; JSON values.
    """

    call_id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InvalidToolCall:
    """What a model wrote for a call and is none.

    Attributes
    ----------
    text
        What it wrote.
    error
        What is wrong with it.
    name
        The tool's name, if it can be told.
    """

    text: str
    error: str
    name: str | None = None


def new_call_id() -> str:
    """Nine random letters and digits: the form that Mistral's templates insist on, and fine for all others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def marker_texts(syntax: CallSyntax) -> tuple[str, ...]:
    """What may be a special token in a syntax, and must stay in the text for calls to be found in it."""
    if not syntax.begin:
        return (PYTHON_TAG,)
    newer = ("[ARGS]", "[CALL_ID]") if syntax.as_list else ()
    return tuple(marker for marker in (syntax.begin.strip(), syntax.end.strip(), *newer) if marker)


def render_calls(calls: Sequence[ToolCall], syntax: CallSyntax) -> str:
    """Calls as a model of that family writes them."""
    objects = [
        json.dumps({"name": call.name, syntax.arguments_key: call.arguments}, ensure_ascii=False) for call in calls
    ]
    if syntax.as_list:
        return f"{syntax.begin}[{', '.join(objects)}]{syntax.end}"
    between = "\n" if syntax.begin else "; "
    return between.join(f"{syntax.begin}{one}{syntax.end}" for one in objects)
