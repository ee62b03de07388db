"""Tool calls read out of an answer as it grows."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from epic_rag.call_syntax import (
    HERMES,
    LLAMA3,
    MISTRAL,
    PYTHON_TAG,
    CallSyntax,
    InvalidToolCall,
    ToolCall,
    new_call_id,
    render_calls,
)

__all__ = [
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "CallSyntax",
    "InvalidToolCall",
    "ToolCall",
    "ToolCallStream",
    "new_call_id",
    "parse_tool_calls",
    "render_calls",
]

# Mistral's newer form, [TOOL_CALLS]name[ARGS]{…}, with an id between name and arguments in some releases.
_NAMED_CALL = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*[\w\-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME = re.compile(r"""["'](?:name|function)["']\s*:\s*["']?([\w.\-]+)""")
_LOOKAHEAD = 160  # characters in which a call that no mark opens shows itself as one
_JSON_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.whitespace + '+-.{}[],:"')

_State = Literal["text", "open", "value", "after", "junk"]


class ToolCallStream:
    """Reads calls out of an answer as it grows.

    However the text is cut into pieces, the same contents and calls come out. Text is withheld while it may be the
    beginning of a call. White space beside calls is dropped. Tolerated are: several objects in a row, with or
    without ``;`` between; a missing end; closing braces too many; arguments as a JSON string; ``arguments`` and
    ``parameters`` in any family; line breaks in strings. A call of a tool that does not exist is a call: the
    caller knows best what to answer.

    Parameters
    ----------
    syntax
        How the model writes calls.
    tools
        In OpenAI's form. Where no mark opens a call, an object that names one of these and has no arguments is a
        call and not an answer in JSON.
    new_id
        Makes the calls' ids.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._named = syntax.as_list  # such models may write the name before the object
        self._bare = not syntax.begin
        self._begin = syntax.begin.strip() or PYTHON_TAG
        self._end = syntax.end.strip()
        self._tools = {str(tool.get("function", tool).get("name")) for tool in tools}
        self._new_id = new_id
        self._steps: dict[_State, Callable[[bool], bool]] = {
            "text": self._in_text,
            "open": self._at_open,
            "value": self._in_value,
            "after": self._after_value,
            "junk": self._in_junk,
        }
        self._state: _State = "text"
        self._buffer = ""
        self._lead = ""  # white space before a call that no mark opened, which may yet be text
        self._marked = False
        self._name = ""  # stands before the arguments
        self._scanner = _Scanner()
        self._at_start = True
        self._any_text = False
        self._beside_call = False
        self._text = ""
        self._events: list[ToolCall | InvalidToolCall] = []

    def push(self, piece: str) -> tuple[str, list[ToolCall | InvalidToolCall]]:
        """Add a piece of the answer.

        Returns
        -------
        text : str
            Content that is now certain; often empty.
        calls : list of ToolCall or InvalidToolCall
            Calls that are now complete.
        """
        self._buffer += piece
        return self._run(final=False)

    def finish(self) -> tuple[str, list[ToolCall | InvalidToolCall]]:
        """The answer has ended: returns what was withheld, as :meth:`push` does."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> tuple[str, list[ToolCall | InvalidToolCall]]:
        while self._steps[self._state](final):
            pass
        text, events = self._text, self._events
        self._text, self._events = "", []
        return text, events

    # Each step returns whether it got on. What it decides must not depend on where the buffer happens to end.

    def _in_text(self, final: bool) -> bool:
        text = self._buffer
        core = text.lstrip()
        if self._bare and self._at_start and core[:1] in ("{", "["):
            self._lead = text[: len(text) - len(core)]
            self._marked = False
            return self._to_value(core)
        at = text.find(self._begin)
        if at >= 0:
            self._emit(text[:at].rstrip())
            self._marked, self._lead, self._name = True, "", ""
            return self._to("open", text[at + len(self._begin) :])
        keep = 0 if final else self._withheld(text)
        self._emit(text[: len(text) - keep])
        self._buffer = text[len(text) - keep :]
        return False

    def _withheld(self, text: str) -> int:
        """Length of the end of the text that may belong to a call: a begun mark, and white space before it."""
        lengths = range(min(len(self._begin) - 1, len(text)), 0, -1)
        begun = next((n for n in lengths if text.endswith(self._begin[:n])), 0)
        return len(text) - len(text[: len(text) - begun].rstrip())

    def _at_open(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if not text:
            if not final:
                return False
            self._refuse(self._begin, "nothing follows the mark that opens a call")
            return self._to("text", "")
        if text.startswith(self._begin):
            return self._to("open", text[len(self._begin) :])
        if self._end and text.startswith(self._end):
            self._refuse(self._begin + self._end, "the call is empty")
            return self._to("text", text[len(self._end) :])
        if not final and (self._end.startswith(text) or self._begin.startswith(text)):
            return False
        if text[0] in "{[":
            return self._to_value(text)
        if self._named:
            named = _NAMED_CALL.match(text)
            if named:
                return self._to_value(text[named.end() :], named[1])
            if not final and "{" not in text and self._begin not in text:
                return False
        return self._to("junk", text)

    def _in_value(self, final: bool) -> bool:
        end = self._scanner.scan(self._buffer)
        if end is None:
            return (final or self._scanner.broken) and self._to("junk", self._buffer)
        value, self._buffer = self._buffer[:end], self._buffer[end:]
        try:
            parsed = json.loads(value, strict=False, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            if not self._marked and not self._seems_call(value):
                return self._back_to_text(value)
            self._refuse(value, f"the call is not JSON: {error}")
            return self._to("after", self._buffer)
        if self._name:
            parsed = {"name": self._name, "arguments": parsed}
        objects = parsed if isinstance(parsed, list) else [parsed]
        if not self._marked and not (objects and all(map(self._is_call, objects))):
            return self._back_to_text(value)
        for one in objects:
            self._read(one, value if objects == [one] else json.dumps(one, ensure_ascii=False))
        return self._to("after", self._buffer)

    def _after_value(self, final: bool) -> bool:
        text = self._buffer.lstrip(" \t\r\n;,}")
        if self._end and text.startswith(self._end):
            return self._to("text", text[len(self._end) :])
        if not final and self._end.startswith(text):  # also if there is no text yet
            return False
        if not final and not text:
            return False
        return self._to_value(text) if text[:1] == "{" else self._to("text", text)

    def _in_junk(self, final: bool) -> bool:
        text = self._buffer
        if not self._marked:
            if not final and len(text) < _LOOKAHEAD:
                return False
            if not self._seems_call(text):
                return self._back_to_text("")
        ends = [(at, len(mark)) for mark in (self._end, self._begin) if mark and (at := text.find(mark)) >= 0]
        if not ends and not final:
            return False
        at, length = min(ends, default=(len(text), 0))
        self._refuse((self._name + text[:at]).strip() or self._begin, "the call is not JSON, or it was cut short")
        # A mark that opens the next call is left for it.
        return self._to("text", text[at:] if text.startswith(self._begin, at) else text[at + length :])

    def _to(self, state: _State, rest: str) -> bool:
        self._state, self._buffer = state, rest
        return True

    def _to_value(self, text: str, name: str = "") -> bool:
        self._name, self._scanner = name, _Scanner()
        return self._to("value", text)

    def _back_to_text(self, value: str) -> bool:
        """What no mark opened and is no call is text."""
        self._at_start = False
        return self._to("text", self._lead + value + self._buffer)

    def _emit(self, text: str) -> None:
        if self._beside_call:
            text = text.lstrip()
            text = f"\n{text}" if text and self._any_text else text
        if text:
            self._any_text = True
            self._at_start = self._beside_call = False
            self._text += text

    # -- calls -----------------------------------------------------------------------------------------------------

    def _seems_call(self, broken: str) -> bool:
        name = _NAME.search(broken[:_LOOKAHEAD])
        return name is not None and (not self._tools or name[1] in self._tools)

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        name, arguments = _parts(value)
        return isinstance(name, str) and (arguments is not _ABSENT or name in self._tools)

    def _read(self, value: Any, text: str) -> None:
        name, arguments = _parts(value) if isinstance(value, dict) else (None, _ABSENT)
        if not isinstance(name, str) or not name.strip():
            self._refuse(text, "a call must be an object that holds the tool's name")
            return
        try:
            if isinstance(arguments, str) and arguments.strip():
                arguments = json.loads(arguments, strict=False, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            self._refuse(text, f"the arguments are not JSON: {error}", name)
            return
        if arguments is _ABSENT or arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, dict):
            self._refuse(text, f"the arguments must be an object, not {type(arguments).__name__}", name)
            return
        self._note(ToolCall(self._new_id(), name.strip(), arguments))

    def _refuse(self, text: str, error: str, name: str | None = None) -> None:
        found = _NAME.search(text)
        self._note(InvalidToolCall(text, error, name or self._name or (found[1] if found else None)))

    def _note(self, call: ToolCall | InvalidToolCall) -> None:
        self._at_start, self._beside_call = False, True
        self._events.append(call)


_ABSENT = object()


def _parts(value: dict[str, Any]) -> tuple[Any, Any]:
    """Name and arguments of a call, also of one in OpenAI's nested form."""
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    arguments = value.get("arguments", value.get("parameters", _ABSENT))
    return value.get("name"), arguments


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _Scanner:
    """Finds the end of a JSON object or list that grows."""

    def __init__(self) -> None:
        self.broken = False
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> int | None:
        """Where the value ends; None if it has not, or is broken. The text only grows between calls."""
        while self._at < len(text) and not self.broken:
            character = text[self._at]
            self._at += 1
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._at
            else:
                self.broken = character not in _JSON_CHARACTERS
        return None


def parse_tool_calls(
    text: str,
    syntax: CallSyntax,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    new_id: Callable[[], str] = new_call_id,
) -> tuple[str, list[ToolCall], list[InvalidToolCall]]:
    """Read the calls out of a whole answer.

    Parameters
    ----------
    text, syntax, tools, new_id
        The answer; the rest as for :class:`ToolCallStream`.

    Returns
    -------
    content : str
        What the answer holds besides calls.
    calls : list of ToolCall
    invalid : list of InvalidToolCall
    """
    stream = ToolCallStream(syntax, tools, new_id=new_id)
    pushed = [stream.push(text), stream.finish()]
    events = [event for _, found in pushed for event in found]
    return (
        "".join(content for content, _ in pushed),
        [event for event in events if isinstance(event, ToolCall)],
        [event for event in events if isinstance(event, InvalidToolCall)],
    )
