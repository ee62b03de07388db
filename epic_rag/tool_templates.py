"""How a chat template takes tools, found by rendering a conversation with a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from epic_rag.errors import RagError
from epic_rag.rendering import render_template
from epic_rag.tool_calls import HERMES, LLAMA3, MISTRAL, CallSyntax, parse_tool_calls

__all__ = ["Render", "ToolTemplate", "detect_syntax", "openai_call", "probe_template"]

_NAME = "epic_probe_7f3a91c2"
_RESULT = "EpicResult7f3a91c2"
_ARGUMENTS = {"where": "EpicArgument7f3a91c2"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Tells the time.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "description": "A place."}},
                "required": ["where"],
            },
        },
    }
]


class Render(Protocol):
    """Renders messages with a chat template; raises RagError where the template refuses them."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render messages, and tools in OpenAI's form."""


@dataclass(frozen=True)
class ToolTemplate:
    """How a chat template takes tools.

    Attributes
    ----------
    native
        Whether it knows tools, calls and results, and writes calls in a syntax that can be read back. Otherwise
        tools go into the system message and everything else into plain turns.
    syntax
        How the model writes calls.
    arguments_as_text
        Whether it wants arguments as a JSON string and not as an object.
    short_ids
        Whether it refuses calls' ids that are not nine letters and digits.
    one_call
        Whether it refuses several calls in one turn.
    """

    native: bool = False
    syntax: CallSyntax = HERMES
    arguments_as_text: bool = False
    short_ids: bool = False
    one_call: bool = False


def openai_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in the form that chat templates take."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def probe_template(render: Render) -> ToolTemplate:
    """Find out how a chat template takes tools."""
    for as_text in (False, True):
        for short_ids in (False, True):
            syntax = _syntax_of(render, as_text, short_ids)
            if syntax is not None:
                several = _turns(as_text, short_ids, 2)
                try:
                    one_call = render(several, True, _TOOLS).count(_RESULT) < 2
                except RagError:
                    one_call = True
                return ToolTemplate(True, syntax, as_text, short_ids, one_call)
    return ToolTemplate()


def detect_syntax(chat_template: str | None, tokenizer: PreTrainedTokenizerBase) -> CallSyntax:
    """How a model writes tool calls, told from its chat template.

    Parameters
    ----------
    chat_template
        Jinja source; None if the model has none.
    tokenizer
        Renders it.

    Returns
    -------
    CallSyntax
        :data:`~epic_rag.tool_calls.HERMES` where the template knows no tools, or writes calls in another way: the
        model is then told about it in the system message.
    """
    if chat_template is None:
        return HERMES

    def render(
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        return render_template(tokenizer, chat_template, messages, add_generation_prompt, tools)

    return probe_template(render).syntax


def _turns(as_text: bool, short_ids: bool, count: int) -> list[dict[str, Any]]:
    arguments = '{"where": "EpicArgument7f3a91c2"}' if as_text else dict(_ARGUMENTS)
    ids = [f"epicCall{n}" if short_ids else f"call_epic_{n}" for n in range(count)]
    return [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [openai_call(i, _NAME, arguments) for i in ids]},
        *({"role": "tool", "content": _RESULT, "tool_call_id": i, "name": _NAME} for i in ids),
    ]


def _syntax_of(render: Render, as_text: bool, short_ids: bool) -> CallSyntax | None:
    """The syntax in which the template writes a call; None if it does not, or not everything about it."""
    turns = _turns(as_text, short_ids, 1)
    try:
        before = render(turns[:1], False, _TOOLS)
        asked = render(turns[:1], True, _TOOLS)
        called = render(turns[:2], False, _TOOLS)
        answered = render(turns, True, _TOOLS)
    except RagError:
        return None
    if _NAME not in asked or _RESULT not in answered:
        return None
    turn = _behind(before, called)
    # Without a mark that opens it, the call is what follows the opening of the assistant's turn.
    answer = _behind(asked, called)
    for syntax, text in ((MISTRAL, turn), (HERMES, turn), (LLAMA3, answer)):
        _, calls, _ = parse_tool_calls(text, syntax, _TOOLS)
        if [(call.name, call.arguments) for call in calls] == [(_NAME, _ARGUMENTS)]:
            key = next((key for key in ("arguments", "parameters") if f'"{key}"' in turn), syntax.arguments_key)
            return replace(syntax, arguments_key=key)
    return None


def _behind(start: str, text: str) -> str:
    """What the text holds behind the beginning that both share."""
    return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, text, strict=False))) :]
