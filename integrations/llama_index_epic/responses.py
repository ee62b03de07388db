"""Between LlamaIndex's messages and responses and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epic_engine import Completion, RequestStats
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock

from epic_rag.errors import RagError

__all__ = ["chat_response", "completion_response", "plain_messages", "usage"]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as ``{"role", "content"}``.

    Raises
    ------
    RagError
        If a message is a tool's or holds more than text.
    """
    plain = []
    for message in messages:
        role = _ROLES.get(message.role)
        if role is None:
            raise RagError(
                f"a message has the role {message.role.value!r}, and the model calls no tools: use an agent that "
                "writes tools into the prompt, such as ReActAgent."
            )
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise RagError(
                    f"a message holds a {type(block).__name__}, and the model reads text only: leave it out."
                )
        plain.append({"role": role, "content": message.content or ""})
    return plain


def usage(stats: RequestStats) -> dict[str, int]:
    """Token counts under the names that LlamaIndex's counters know, and what was reused."""
    return {
        "prompt_tokens": stats.prompt,
        "completion_tokens": stats.generated,
        "total_tokens": stats.prompt + stats.generated,
        "reused_tokens": stats.reused,
        "linked_tokens": stats.linked,
        "recomputed_tokens": stats.recomputed,
    }


def _cost(done: Completion | None) -> dict[str, Any]:
    """The fields of a response that are known at the end."""
    if done is None:
        return {}
    stats, counts = done.stats, usage(done.stats)
    raw = {
        "usage": counts,
        "epic": {
            "policy": stats.policy,
            "reuse": stats.reuse,
            "ttft_s": stats.times.first_token,
            "total_s": stats.times.total,
            "finish_reason": done.finish_reason,
        },
    }
    tokens = {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"raw": raw, "additional_kwargs": tokens}


def chat_response(text: str, delta: str | None, done: Completion | None) -> ChatResponse:
    """A chat's response: so far, or at its end with what it cost."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, **_cost(done))


def completion_response(text: str, delta: str | None, done: Completion | None) -> CompletionResponse:
    """As :func:`chat_response`, for completions."""
    return CompletionResponse(text=text, delta=delta, **_cost(done))
