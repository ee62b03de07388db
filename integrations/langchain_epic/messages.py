"""LangChain's messages as plain ones, and which compiled texts they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from epic_rag.call_syntax import ToolCall
from epic_rag.errors import RagError
from epic_rag.texts import TextItem
from langchain_epic.documents import text_items

__all__ = ["INLINE", "PlainChat", "document_block", "plain_chat"]

INLINE = "inline"
"""In a text-plain block's ``extras``: what stands around the block is its own concern, no blank line is put there."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant"}
# Of an earlier answer: calls stand in tool_calls too, and thoughts are not repeated to the model.
_PASSED_OVER = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call", "reasoning", "thinking"}
)


@dataclass
class PlainChat:
    """A conversation as the prompt composer takes it.

    Attributes
    ----------
    messages
        ``{"role", "content"}``, of assistants with ``"tool_calls"``, of tools with ``"tool_call_id"`` and ``"name"``.
    texts
        Texts that the messages name by id, in the order in which they stand there: ``text-plain`` blocks, and documents
        that a tool gave as its message's artifact.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[TextItem] = field(default_factory=list)


def document_block(text_id: str, text: str, *, inline: bool = False) -> dict[str, Any]:
    """A content block that names a compiled text.

    Parameters
    ----------
    text_id
        Its id; :func:`~langchain_epic.text_id` gives a document's.
    text
        As it was compiled; white space at its ends does not count.
    inline
        Whether it stands in running text; otherwise blank lines set it apart.
    """
    block: dict[str, Any] = {"type": "text-plain", "id": text_id, "text": text, "mime_type": "text/plain"}
    return {**block, "extras": {INLINE: True}} if inline else block


def plain_chat(messages: Sequence[BaseMessage]) -> PlainChat:
    """Messages as the prompt composer takes them.

    Raises
    ------
    RagError
        If a message has an unknown role or holds more than text.
    """
    chat = PlainChat()
    for message in messages:
        plain: dict[str, Any] = {"role": _role(message), "content": _text(message.content, chat.texts)}
        if isinstance(message, AIMessage) and message.tool_calls:
            plain["tool_calls"] = [
                ToolCall(call["id"] or "", call["name"], dict(call["args"])) for call in message.tool_calls
            ]
        if isinstance(message, ToolMessage):
            plain |= {"tool_call_id": message.tool_call_id, "name": message.name or _called(messages, message)}
            chat.texts += _found_by_tool(message.artifact, plain["content"])
        chat.messages.append(plain)
    return chat


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, ToolMessage):
        return "tool"
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return _ROLES[message.role]
    if isinstance(message, FunctionMessage):
        raise RagError("a FunctionMessage cannot be prompted: use a ToolMessage with the id of the call it answers.")
    role = getattr(message, "role", message.type)
    raise RagError(f"a message has the role {role!r}: use system, user, assistant or a ToolMessage.")


def _called(messages: Sequence[BaseMessage], answer: ToolMessage) -> str:
    """Name of the tool whose call a message answers."""
    calls = [call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    return next((call["name"] for call in calls if call["id"] == answer.tool_call_id), "")


def _found_by_tool(artifact: Any, content: str) -> list[TextItem]:
    """Documents that a tool returned beside its text, as retriever tools do, where the text holds them."""
    documents = [d for d in artifact if isinstance(d, Document)] if isinstance(artifact, list | tuple) else []
    return [item for item in text_items(documents) if item.text and item.text in content]


def _text(content: str | Sequence[str | Mapping[str, Any]], texts: list[TextItem]) -> str:
    """A message's text; texts that it names are added to ``texts``."""
    if isinstance(content, str):
        return content
    text, apart = "", False
    for block in content:
        piece, named = _piece(block)
        if not piece:
            continue
        stands_apart = named is not None and not named.extras.get(INLINE)
        if text and (apart or stands_apart) and not (text[-1].isspace() or piece[0].isspace()):
            text += "\n\n"
        text, apart = text + piece, stands_apart
        if named is not None and named.text_id:
            texts.append(TextItem(named.text_id, piece))
    return text


@dataclass(frozen=True)
class _Named:
    text_id: str
    extras: Mapping[str, Any]


def _piece(block: str | Mapping[str, Any]) -> tuple[str, _Named | None]:
    if isinstance(block, str):
        return block, None
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text") or ""), None
    if kind == "text-plain":
        if block.get("text") is None:
            raise RagError("a text-plain block has no text: the model reads neither URLs nor files, put the text in.")
        return str(block["text"]), _Named(str(block.get("id") or ""), block.get("extras") or {})
    if kind in _PASSED_OVER:
        return "", None
    raise RagError(f"a message holds a block of type {kind!r}, and the model reads text only: leave it out.")
