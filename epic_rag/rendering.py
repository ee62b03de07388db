"""Rendering of chat templates, with errors that name the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from epic_rag.errors import RagError

__all__ = ["render_template"]


def render_template(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render messages with a chat template.

    Parameters
    ----------
    tokenizer
        Supplies its special tokens to the template.
    template
        Jinja source.
    messages, tools
        As the template takes them.
    add_generation_prompt
        Whether the assistant's turn is opened at the end.
    options
        Passed to the template.

    Raises
    ------
    RagError
        If the template refuses the messages or cannot handle them.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(options or {}),
        )
    # A template that meets what it does not expect, such as arguments that are no string, fails in Python's own ways.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise RagError(
            f"the chat template refuses messages with the roles {roles} ({error}): "
            "reorder the messages, or pass a tokenizer with another chat_template"
        ) from error
    return str(rendered)
