"""Answers of a schema: what with_structured_output() puts behind the model."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal

from epic_engine import ConfigError
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["Method", "structured_output"]

Method = Literal["json_schema", "function_calling", "json_mode"]
Parser = BaseOutputParser[Any] | BaseGenerationOutputParser[Any]


def structured_output(
    model: BaseChatModel, schema: Any, method: Method, include_raw: bool, options: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """A model whose answers are objects.

    Parameters
    ----------
    model
        Takes ``response_format``, ``tools`` and ``tool_choice``.
    schema
        A pydantic class, a TypedDict class, a JSON schema or an OpenAI function; None for any object (json_mode).
    method
        How the model is told: ``"json_schema"`` and ``"json_mode"`` answer with JSON, ``"function_calling"`` calls a
        tool. In all of them decoding is held to the schema.
    include_raw
        Whether to give the message and a parsing error back, too.
    options
        For :meth:`bind`.

    Raises
    ------
    ConfigError
        If the method is unknown or there is no schema where one is needed.
    """
    if method not in ("json_schema", "function_calling", "json_mode"):
        raise ConfigError(f"method={method!r} is unknown: use 'json_schema', 'function_calling' or 'json_mode'.")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method={method!r} needs a schema: a pydantic class, a TypedDict class or a JSON schema.")
    bound, parser = _calling(model, schema, options) if method == "function_calling" else _json(model, schema, options)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)  # pydantic's of either version


def _json(model: BaseChatModel, schema: Any, options: dict[str, Any]) -> tuple[Runnable[Any, Any], Parser]:
    if schema is None:
        return model.bind(response_format={"type": "json_object"}, **options), JsonOutputParser()
    made = convert_to_json_schema(schema)
    form = {"type": "json_schema", "json_schema": {"name": made.get("title", "answer"), "schema": made}}
    shown = {"kwargs": {"method": "json_schema"}, "schema": made}
    bound = model.bind(response_format=form, ls_structured_output_format=shown, **options)
    return bound, PydanticOutputParser(pydantic_object=schema) if _is_model(schema) else JsonOutputParser()


def _calling(model: BaseChatModel, schema: Any, options: dict[str, Any]) -> tuple[Runnable[Any, Any], Parser]:
    tool = convert_to_openai_tool(schema)
    name = tool["function"]["name"]
    shown = {"kwargs": {"method": "function_calling"}, "schema": convert_to_json_schema(schema)}
    bound = model.bind_tools([schema], tool_choice=name, ls_structured_output_format=shown, **options)
    if _is_model(schema):
        return bound, PydanticToolsParser(tools=[schema], first_tool_only=True)
    return bound, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
