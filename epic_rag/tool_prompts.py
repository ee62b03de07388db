"""Conversations with tools, rendered so that nothing but the chat template yields control tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epic_rag.call_syntax import HERMES, ToolCall
from epic_rag.errors import RagError
from epic_rag.slots import Piece, Slots, spells_slot
from epic_rag.tokenization import SegmentTokenizer
from epic_rag.tool_templates import Render, ToolTemplate, openai_call, probe_template

__all__ = ["ToolPrompts", "has_tools"]

_INSTRUCTIONS = """You can call tools. Each line between these tags describes one of them:
<tools>
{tools}
</tools>

To call a tool, write a JSON object that holds its name and its arguments between these tags:
<tool_call>
{{"name": "name of the tool", "arguments": {{"name of an argument": "value"}}}}
</tool_call>

Write such a block for each call and then stop; the results follow between <tool_response> and </tool_response>. \
If no tool is needed, answer without these tags."""

# Templates look at such words of a tool's definition, and they spell nothing that a template could take for its own.
_WORDS = re.compile(r"[A-Za-z0-9_.$#/ -]*")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class _Turn:
    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


def has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages hold calls of tools or their results."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


class ToolPrompts:
    """Renders conversations with tools.

    Where the template knows tools, it gets definitions, calls and results as it wants them. Where it does not, or
    writes calls in a syntax that cannot be read back, tools are described in the system message, calls are written
    as Hermes models write them, and results are turns of the user. Several calls in a turn become turns of one call
    each where the template insists on it.

    Every text of messages, calls and definitions stands behind a placeholder while the template is rendered, save
    plain words of definitions and names, which templates look at. What a template drops of definitions, and of
    what the assistant said beside a call, stays dropped; everything else must come out once.

    Parameters
    ----------
    render
        Renders the chat template.
    tokenizer
        Knows the control tokens.
    """

    def __init__(self, render: Render, tokenizer: SegmentTokenizer) -> None:
        self._render = render
        self._tokenizer = tokenizer
        self.template: ToolTemplate = probe_template(render)

    def pieces(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system_prompt: str
    ) -> list[Piece]:
        """Render a conversation.

        Parameters
        ----------
        messages
            As for :meth:`PromptComposer.segments <epic_rag.prompt.PromptComposer.segments>`.
        tools
            Definitions in OpenAI's form.
        system_prompt
            Used where the messages hold no system turn.

        Raises
        ------
        RagError
            If messages or tools are malformed, or the template refuses or mangles them.
        """
        system, turns = _read(messages)
        system = system or system_prompt
        definitions = [_checked(tool) for tool in tools]
        if self.template.one_call:
            turns = _unrolled(turns)
        problem: RagError | None = None
        # Some templates refuse system turns, and some drop them when a tool's result comes last.
        for folded in (False, True):
            layout = _Layout(self.template, self._tokenizer)
            conversation = layout.conversation(system, turns, definitions, folded=folded)
            try:
                rendered = self._render(conversation, True, layout.definitions(definitions))
            except RagError as error:
                problem = error
                continue
            pieces, numbers = layout.slots.pieces(rendered)
            counts = Counter(numbers)
            if all(counts[number] == 1 for number in layout.required):
                return pieces
        raise problem or RagError(
            "the chat template drops, repeats or rewrites a message's content or a call's arguments, so the prompt "
            "cannot be split into segments: pass a tokenizer with another chat_template"
        )


@dataclass
class _Layout:
    """One rendering: messages as the template takes them, their texts behind placeholders."""

    template: ToolTemplate
    tokenizer: SegmentTokenizer
    slots: Slots = field(default_factory=Slots)
    required: set[int] = field(default_factory=set)

    def conversation(
        self, system: str, turns: Sequence[_Turn], definitions: Sequence[Mapping[str, Any]], *, folded: bool
    ) -> list[dict[str, Any]]:
        head = [self._content(system)] if system else []
        if definitions and not self.template.native:
            head.append(_INSTRUCTIONS.format(tools="\n".join(self._hide(json_text(tool)) for tool in definitions)))
        lead = "\n\n".join(head)
        made = [self._native(turn) for turn in turns] if self.template.native else self._plain(turns)
        if lead and folded:
            for message in made:
                if message["role"] == "user":
                    message["content"] = f"{lead}\n\n{message['content']}"
                    break
        elif lead:
            made.insert(0, {"role": "system", "content": lead})
        return made

    def definitions(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Tools as a template takes them that knows tools."""
        return [self._words_or_hidden(tool) for tool in tools] if tools and self.template.native else None

    # -- turns -----------------------------------------------------------------------------------------------------

    def _native(self, turn: _Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role}
        if turn.role == "tool":
            message["content"] = self._content(turn.content, may_be_json=True)
            message["tool_call_id"] = self._id(turn.call_id)
            if turn.name:
                message["name"] = self._words_or_hidden(turn.name)
        elif turn.calls:
            # Several families drop what was said beside calls.
            message["content"] = self.slots.hide(turn.content)
            message["tool_calls"] = [self._call(call) for call in turn.calls]
        else:
            message["content"] = self._content(turn.content)
        return message

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = self._hidden(call.arguments)
        if self.template.arguments_as_text:
            arguments = json_text(arguments)
        return openai_call(self._id(call.call_id), self._words_or_hidden(call.name), arguments)

    def _id(self, call_id: str) -> Any:
        if self.template.short_ids and not (_SHORT_ID.fullmatch(call_id) and self._is_words(call_id)):
            return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        return self._words_or_hidden(call_id)

    def _plain(self, turns: Sequence[_Turn]) -> list[dict[str, Any]]:
        """Turns for a template that knows no tools; those of one role in a row are merged."""
        made: list[dict[str, Any]] = []
        previous = ""
        for turn in turns:
            role, content = turn.role, self._content(turn.content)
            if turn.calls:
                begin, end = HERMES.begin, HERMES.end
                calls = "\n".join(f"{begin}{self._hide(_call_text(call))}{end}" for call in turn.calls)
                content = f"{content}\n{calls}" if turn.content.strip() else calls
            elif role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if made and made[-1]["role"] == role:
                between = "\n" if previous == turn.role == "tool" else "\n\n"
                made[-1]["content"] += between + content
            else:
                made.append({"role": role, "content": content})
            previous = turn.role
        return made

    # -- texts -----------------------------------------------------------------------------------------------------

    def _content(self, text: str, *, may_be_json: bool = False) -> str:
        return self._require(self.slots.hide(text, may_be_json=may_be_json), text)

    def _hide(self, text: str, *, may_be_json: bool = False) -> str:
        return self._require(self.slots.hide(text, may_be_json=may_be_json, content=False), text)

    def _require(self, hidden: str, text: str) -> str:
        if hidden != text:
            self.required.add(len(self.slots.texts) - 1)
        return hidden

    def _hidden(self, value: Any) -> Any:
        """A JSON value with all its strings behind placeholders."""
        if isinstance(value, str):
            return self._hide(value, may_be_json=True)
        if isinstance(value, Mapping):
            return {self._hide(key, may_be_json=True): self._hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(inner) for inner in value]
        return value

    def _words_or_hidden(self, value: Any) -> Any:
        """A JSON value with strings behind placeholders that are not plain words."""
        if isinstance(value, str):
            return value if self._is_words(value) else self.slots.hide(value, may_be_json=True, content=False)
        if isinstance(value, Mapping):
            return {self._words_or_hidden(key): self._words_or_hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._words_or_hidden(inner) for inner in value]
        return value

    def _is_words(self, text: str) -> bool:
        if not _WORDS.fullmatch(text) or spells_slot(text):
            return False
        return self.tokenizer.control_ids.isdisjoint(self.tokenizer.encode_template(text))


def json_text(value: Any) -> str:
    """JSON as the templates' own filter writes it."""
    return json.dumps(value, ensure_ascii=False)


def _call_text(call: ToolCall) -> str:
    return json_text({"name": call.name, HERMES.arguments_key: call.arguments})


def _checked(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RagError(
            "a tool must be given in OpenAI's form, "
            '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
        )
    _check_json(tool, f"the tool {function['name']!r}")
    return tool


def _check_json(value: Any, what: str) -> None:
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return
        problem = "it holds keys that are not strings, or tuples"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise RagError(f"{what} must be JSON ({problem}): use strings, numbers, booleans, None, lists and dicts")


def _read(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[_Turn]]:
    """Check messages, gather the system turns, and merge turns of one role in a row save those of tools."""
    system: list[str] = []
    turns: list[_Turn] = []
    open_calls: list[ToolCall] = []
    for message in messages:
        turn = _turn(message)
        if turn.role == "system":
            system.append(turn.content)
            continue
        if turn.role == "tool":
            turn, open_calls = _matched(turn, open_calls, turns)
        else:
            open_calls = list(turn.calls)
        before = turns[-1] if turns else None
        if before is not None and before.role == turn.role != "tool" and not before.calls:
            joined = "\n\n".join(text for text in (before.content, turn.content) if text or not turn.calls)
            turns[-1] = replace(turn, content=joined)
        else:
            turns.append(turn)
    if (
        not turns
        or turns[-1].role not in ("user", "tool")
        or not (turns[-1].role == "tool" or turns[-1].content.strip())
    ):
        raise RagError(
            "there is nothing to answer: the last message must be the user's and hold a text, or a tool's result"
        )
    return "\n\n".join(system), turns


def _turn(message: Mapping[str, Any]) -> _Turn:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    if role not in ("system", "user", "assistant", "tool"):
        raise RagError(f"unknown role {role!r}: use system, user, assistant or tool")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RagError(
            f"the content of a message must be a string, not {type(content).__name__}: "
            "join the text parts of the message first"
        )
    if calls and role != "assistant":
        raise RagError(f"only the assistant calls tools, not the {role}: move tool_calls to a message of the assistant")
    for call in calls:
        if not isinstance(call, ToolCall):
            raise RagError(f"tool_calls must hold ToolCall objects, not {type(call).__name__}")
        _check_json(call.arguments, f"the arguments of the call {call.call_id!r}")
    return _Turn(role, content, tuple(calls), str(message.get("tool_call_id") or ""), str(message.get("name") or ""))


def _matched(turn: _Turn, open_calls: list[ToolCall], turns: Sequence[_Turn]) -> tuple[_Turn, list[ToolCall]]:
    """A tool's result with the id and name of its call, and the calls that still have none."""
    if not turns or not open_calls:
        raise RagError(
            "a tool's result must follow the assistant's message with the call: "
            'put {"role": "assistant", "content": …, "tool_calls": [ToolCall(…)]} before it'
        )
    call = next((call for call in open_calls if call.call_id == turn.call_id or not turn.call_id), None)
    if call is None:
        known = ", ".join(repr(call.call_id) for call in open_calls)
        raise RagError(f"a tool's result is for the call {turn.call_id!r}, but the calls without one are {known}")
    left = list(open_calls)
    left.remove(call)
    return replace(turn, call_id=call.call_id, name=turn.name or call.name), left


def _unrolled(turns: Sequence[_Turn]) -> list[_Turn]:
    """Turns with one call each, every call followed by its result."""
    made: list[_Turn] = []
    rest = list(turns)
    while rest:
        turn = rest.pop(0)
        if len(turn.calls) < 2:
            made.append(turn)
            continue
        results: list[_Turn] = []
        while rest and rest[0].role == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(turn.calls):
            made.append(replace(turn, content="" if number else turn.content, calls=(call,)))
            mine = next((result for result in results if result.call_id == call.call_id), None)
            if mine is not None:
                results.remove(mine)
                made.append(mine)
    return made
