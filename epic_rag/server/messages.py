"""A request's messages as the prompt composer takes them, its chunks marked where they stand."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epic_rag.call_syntax import ToolCall
from epic_rag.prompt import TextPart
from epic_rag.server.chunks import ChunkShelf
from epic_rag.server.errors import ApiError
from epic_rag.server.schemas.chat import ChunkReference, ContentPart, Message
from epic_rag.server.tenant_texts import TenantTexts

__all__ = ["Marks", "PlainChat", "plain_chat"]


@dataclass(frozen=True)
class Named:
    """A chunk that a request names.

    Attributes
    ----------
    name
        Of its text, see :class:`~epic_rag.server.tenant_texts.TenantTexts`.
    shown
        Its id, as the client knows it.
    offset
        Tokens that must stand before it; None if that was not asked.
    """

    name: str
    shown: str
    offset: int | None = None


class Marks:
    """Stand-ins for chunks in the texts of messages; nobody else's text can spell one.

    Parameters
    ----------
    texts
        Find everything that is not marked.
    """

    def __init__(self, texts: TenantTexts) -> None:
        self._texts = texts
        self._nonce = secrets.token_hex(16)
        self._pattern = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")
        self.named: list[Named] = []

    def mark(self, chunk: Named) -> str:
        """What stands for a chunk."""
        self.named.append(chunk)
        return f"\ue000{self._nonce}:{len(self.named) - 1}\ue001"

    def cut(self, text: str) -> list[TextPart]:
        """A message's text cut into compiled texts, marked or found, and what stands between them."""
        parts: list[TextPart] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += self._texts.find(text[at : match.start()])
            chunk = self.named[int(match[1])]
            part = self._texts.part(chunk.name)
            if part is None:
                raise ApiError(404, f"the chunk {chunk.shown!r} was deleted meanwhile.", code="chunk_not_found")
            parts.append(part)
            at = match.end()
        return parts + self._texts.find(text[at:])


@dataclass
class PlainChat:
    """A conversation as the prompt composer takes it, and what cuts its texts.

    Attributes
    ----------
    marks
        Cuts the messages' texts.
    messages
        ``{"role", "content"}``, of assistants with ``"tool_calls"``, of tools with ``"tool_call_id"`` and ``"name"``.
    """

    marks: Marks
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def question(self) -> str:
        """The last message of the user, without what is marked in it."""
        last = next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")
        return self.marks._pattern.sub("", last).strip()


def plain_chat(messages: Sequence[Message], texts: TenantTexts, shelf: ChunkShelf) -> PlainChat:
    """Messages as the prompt composer takes them.

    Parameters
    ----------
    messages
        Of the request.
    texts
        What may be found in them.
    shelf
        Knows the chunks that they name.

    Raises
    ------
    ApiError
        If a message names a chunk that is not there, or holds what the model cannot read.
    """
    chat = PlainChat(Marks(texts))
    for place, message in enumerate(messages):
        content = _content(message, chat.marks, shelf, f"messages.{place}")
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": role, "content": content}
        if message.tool_calls:
            if role != "assistant":
                raise _bad(f"messages.{place}.tool_calls", "only the assistant's messages hold calls of tools.")
            plain["tool_calls"] = [_call(call, f"messages.{place}.tool_calls") for call in message.tool_calls]
        if role == "tool":
            plain |= {"tool_call_id": message.tool_call_id or "", "name": message.name or _called(messages, message)}
        chat.messages.append(plain)
    return chat


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def _named(reference: ChunkReference | ContentPart, shelf: ChunkShelf, where: str) -> Named:
    if reference.id is None:
        raise _bad(where, "a content part of type chunk needs the id of a chunk.")
    return Named(shelf.name_of(reference.id, param=where), reference.id, reference.offset)


def _content(message: Message, marks: Marks, shelf: ChunkShelf, where: str) -> str:
    pieces: list[tuple[str, bool]] = []
    for at, reference in enumerate(message.chunk_references or ()):
        pieces.append((marks.mark(_named(reference, shelf, f"{where}.chunk_references.{at}")), True))
    if isinstance(message.content, str):
        pieces.append((message.content, False))
    for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
        place = f"{where}.content.{at}"
        if part.type == "chunk":
            pieces.append((marks.mark(_named(part, shelf, place)), True))
        elif part.type in ("text", "input_text", "output_text", "refusal"):
            pieces.append((part.text or (part.model_extra or {}).get("refusal") or "", False))
        else:
            raise _bad(place, f"a content part of type {part.type[:80]!r} cannot be used: the model reads text only.")
    return _joined(pieces)


def _joined(pieces: Sequence[tuple[str, bool]]) -> str:
    """Texts behind each other; chunks are set apart by blank lines where no white space does it."""
    text, apart = "", False
    for piece, is_chunk in pieces:
        if not piece:
            continue
        if text and (apart or is_chunk) and not (text[-1].isspace() or piece[0].isspace()):
            text += "\n\n"
        text, apart = text + piece, is_chunk
    return text


def _call(call: Mapping[str, Any], where: str) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(where, "a call of a tool holds {'function': {'name': …, 'arguments': …}}.")
    arguments = function.get("arguments") or "{}"
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise _bad(where, f"the arguments of the call of {function['name'][:80]!r} are no JSON.") from None
    if not isinstance(found, dict):
        raise _bad(where, f"the arguments of the call of {function['name'][:80]!r} are no JSON object.")
    return ToolCall(str(call.get("id") or ""), function["name"], found)


def _called(messages: Sequence[Message], answer: Message) -> str:
    """Name of the tool whose call a message answers."""
    for message in messages:
        for call in message.tool_calls or ():
            function = call.get("function")
            if call.get("id") == answer.tool_call_id and isinstance(function, Mapping):
                return str(function.get("name") or "")
    return ""
