"""What a call asks of the answer's form: tools, a schema, or nothing. In OpenAI's terms, which all frameworks know."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epic_engine import ConfigError, TokenConstraint

from epic_rag.errors import GrammarError, MissingDependencyError
from epic_rag.texts import CompiledTexts
from epic_rag.tool_calls import ToolCallStream

__all__ = ["AnswerForm", "answer_form", "tool_choice_of"]

logger = logging.getLogger(__name__)

Tool = Mapping[str, Any]


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def tool_choice_of(choice: Any, tools: Sequence[Tool]) -> str:
    """``"auto"``, ``"none"``, ``"any"`` or the name of a tool, from any form in which it is given.

    Raises
    ------
    ConfigError
        If it names no tool, or there are none to choose from.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("name") or (choice.get("function") or {}).get("name") or choice.get("type")
    if choice in (None, "auto", False):
        return "auto"
    if choice == "none":
        return "none"
    names = [_name(tool) for tool in tools]
    if choice in (True, "any", "required"):
        if not names:
            raise ConfigError(f"tool_choice={choice!r} asks for a call, and no tools are given.")
        return "any"
    if choice not in names:
        raise ConfigError(f"tool_choice={choice!r} is none of the tools that are given: {', '.join(names) or 'none'}.")
    return str(choice)


@dataclass(frozen=True)
class AnswerForm:
    """The form of one answer.

    Attributes
    ----------
    tools
        What the model is told of, in OpenAI's form.
    choice
        See :func:`tool_choice_of`.
    parallel
        Whether there may be several calls.
    schema
        JSON schema of the answer, ``{}`` for any object; None for free text.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None

    @property
    def instructions(self) -> str:
        """What the model is told of the schema."""
        if self.schema is None:
            return ""
        if not self.schema:
            return "Answer with one JSON object and nothing else."
        return "Answer with one JSON value of this schema and nothing else:\n" + json.dumps(
            self.schema, ensure_ascii=False
        )

    def constraint(self, texts: CompiledTexts) -> Callable[[], TokenConstraint] | None:
        """What holds the answer to its form; None for free text."""
        if self.schema is not None:
            schema = dict(self.schema)
            return lambda: texts.grammars.json_schema(schema) if schema else texts.grammars.json_object()
        if not self.tools or self.choice == "none":
            return None
        named = {_name(t): t["function"].get("parameters") or {} for t in self.tools}
        callable_ = named if self.choice in ("auto", "any") else {self.choice: named[self.choice]}
        required = self.choice != "auto"
        try:
            grammars = texts.grammars
        except (MissingDependencyError, GrammarError) as error:
            if required:
                raise
            logger.warning("calls of tools are not held to their schemas: %s", error)
            return None
        return lambda: grammars.tool_calls(
            texts.composer.call_syntax, callable_, required=required, parallel=self.parallel
        )

    def parser(self, texts: CompiledTexts) -> ToolCallStream | None:
        """What finds calls in the answer; None if there can be none."""
        if not self.tools or self.choice == "none" or self.schema is not None:
            return None
        return ToolCallStream(texts.composer.call_syntax, self.tools)


def answer_form(options: Mapping[str, Any]) -> AnswerForm:
    """The form that a call's options ask for.

    Parameters
    ----------
    options
        ``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format``, each optional and in OpenAI's form.

    Raises
    ------
    ConfigError
        If they contradict each other or are unknown.
    """
    tools = tuple(options.get("tools") or ())
    choice = tool_choice_of(options.get("tool_choice"), tools)
    schema = _schema(options.get("response_format"))
    if schema is not None and tools and choice not in ("auto", "none"):
        raise ConfigError("response_format and tool_choice ask for different answers: give one of them.")
    parallel = options.get("parallel_tool_calls")
    if parallel is None:  # a model that must call would not know when to stop
        parallel = choice == "auto"
    return AnswerForm(tools, choice, bool(parallel), schema)


def _schema(form: Any) -> Mapping[str, Any] | None:
    if form is None:
        return None
    if isinstance(form, Mapping):
        kind = form.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return {}
        if kind == "json_schema" and isinstance(form.get("json_schema"), Mapping):
            found = form["json_schema"].get("schema")
            if isinstance(found, Mapping):
                return found
    raise ConfigError(
        f"response_format={str(form)[:200]} cannot be used: give {{'type': 'json_object'}} or {{'type': 'json_schema', "
        "'json_schema': {'name': …, 'schema': {…}}}."
    )
