"""The chat model: compiled documents are found in every prompt and linked, whoever made the prompt."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any, Self

from epic_engine import ConfigError, SamplingParams, parse_policy
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr, field_validator

from epic_rag.aio import drain, iterate
from epic_rag.answer_form import AnswerForm, answer_form, tool_choice_of
from epic_rag.defaults import AUTO
from epic_rag.engines import EngineUser, LazyLease
from epic_rag.prompt import TextPart
from epic_rag.prompt_stream import PromptStream, chat_stream
from epic_rag.texts import CompiledTexts
from langchain_epic.answers import AnswerChunks
from langchain_epic.messages import plain_chat
from langchain_epic.structured import Method, structured_output

__all__ = ["ChatEpic"]

_SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logprobs"}
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
_CALL = frozenset({"policy", "priority", "text_ids", "tools", "tool_choice", "parallel_tool_calls", "response_format"})
_LOGPROBS = frozenset({"logprobs", "top_logprobs"})
# Wrappers pass these to every model.
_PASSED_OVER = frozenset({"model", "stream", "strict", "timeout", "max_retries"})
_ALIASES = {"model_name": "model", "max_completion_tokens": "max_tokens", "stop_sequences": "stop"}


class ChatEpic(EngineUser, BaseChatModel):
    """A chat model in this process that links the KV of documents compiled beforehand.

    It takes part in anything that takes a chat model. Whatever prompt a chain makes, the compiled documents are found
    in it, and only what the link policy chooses is computed; ``text-plain`` content blocks with an ``id`` name theirs
    (see :func:`~langchain_epic.document_block`), and are compiled at their first use if nothing of that id is.
    Objects with equal settings share one engine, which is opened at the first use.

    Calls, and :meth:`bind`, take ``stop``, ``temperature``, ``max_tokens`` and the other fields of
    :class:`~epic_engine.SamplingParams`, ``logprobs`` and ``top_logprobs``, ``policy``, ``priority`` (higher goes
    first), ``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format``. An answer's ``usage_metadata``
    has the reused tokens as ``input_token_details["cache_read"]``; its ``response_metadata`` has ``model_name``,
    ``model_provider``, ``finish_reason``, ``logprobs`` if asked for, and ``"epic"`` with ``policy``, ``reuse``
    (``"composed"``, ``"exact"`` or ``"none"``), ``linked_tokens``, ``recomputed_tokens``, ``ttft_s`` and ``total_s``
    (seconds).

    Examples
    --------
    >>> llm = ChatEpic(model="smollm2", store="handbook.kv")          # doctest: +SKIP
    >>> llm.invoke("Who pays for a lost key?").content                # doctest: +SKIP
    """

    model: str = Field(default="smollm2", description="Folder, hub id, .gguf file, or 'smollm2'.")
    store: str | None = Field(default=None, description="Directory of compiled texts; None keeps them in memory.")
    policy: str = Field(default=AUTO, description="Link policy; 'auto' is the store's own.")
    context: str = Field(default=AUTO, description="Compile context; 'auto' is the store's own.")
    namespace: str = Field(default="default", description="Tenant: nothing is shared between namespaces.")
    temperature: float = Field(default=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, description="Smallest set of tokens of this probability.")
    top_k: int = Field(default=0, description="Most likely tokens to draw from; 0 is all.")
    min_p: float = Field(default=0.0, description="Drop tokens less likely than this share of the likeliest.")
    repetition_penalty: float = Field(default=1.0, description="Above 1 makes tokens that stand there less likely.")
    seed: int | None = Field(default=None, description="Same seed, same text.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end an answer.")
    max_tokens: int = Field(default=256, description="Most tokens of an answer.")
    timeout: float | None = Field(default=None, description="Seconds after which a call is given up.")
    streaming: bool = Field(default=False, description="Whether invoke() streams to callbacks, too.")
    context_window: int | None = Field(default=None, description="Prompt and answer in tokens; None is the model's.")
    device: str = Field(default="auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")
    dtype: str = Field(default="auto", description="'auto', 'float32', 'bfloat16' or 'float16'.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Further fields of EngineConfig.")

    _loaded: tuple[Any, Any] | None = PrivateAttr(default=None)
    _engine: LazyLease = PrivateAttr()

    @field_validator("model", "store", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    def __init__(self, **settings: Any) -> None:
        for alias, name in _ALIASES.items():
            if alias in settings:
                settings.setdefault(name, settings.pop(alias))
        # What other chat models take and this one has no use for.
        for name in ("api_key", "max_retries", "base_url"):
            settings.pop(name, None)
        unknown = settings.keys() - type(self).model_fields.keys()
        if unknown:
            known = ", ".join(sorted(type(self).model_fields))
            raise ConfigError(f"ChatEpic knows no {', '.join(sorted(unknown))}: use {known}.")
        super().__init__(**settings)
        self._engine = LazyLease(self._acquire)
        self._sampling({}, None)
        if self.policy != AUTO:
            parse_policy(self.policy)

    @classmethod
    def from_loaded(cls, model: Any, tokenizer: Any, **settings: Any) -> Self:
        """A chat model around a Hugging Face model that is loaded already.

        Parameters
        ----------
        model, tokenizer
            A ``transformers`` causal language model and its fast tokenizer.
        **settings
            Fields other than ``model``.
        """
        made = cls(model=getattr(model, "name_or_path", "") or type(model).__name__, **settings)
        made._loaded = (model, tokenizer)
        return made

    # -- what LangChain asks about it ----------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "epic"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", "store", "policy", "context", "namespace", *_FIELDS, "stop")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Settings can be serialised; there are no secrets among them."""
        return True

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or list(self.stop) or None, **kwargs)
        params["ls_provider"] = "epic"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """A text's token ids; LangChain counts tokens with it."""
        return list(self.texts.composer.tokenizer.encode_text(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of a prompt, the chat template's included.

        Parameters
        ----------
        messages
            The conversation.
        tools
            As for :meth:`bind_tools`.
        """
        made = [convert_to_openai_tool(tool) for tool in tools or ()]
        composer = self.texts.composer
        segments = composer.segments(plain_chat(messages).messages, lambda text: [TextPart(text)], tools=made)
        return sum(len(ids) for ids in segments if not isinstance(ids, TextPart))

    # -- calls ---------------------------------------------------------------------------------------------------

    def _sampling(self, options: Mapping[str, Any], stop: Sequence[str] | None) -> SamplingParams:
        unknown = options.keys() - _SAMPLING - _CALL - _LOGPROBS - _PASSED_OVER
        if unknown:
            known = ", ".join(sorted(_SAMPLING | _CALL | _LOGPROBS))
            raise ConfigError(f"ChatEpic calls take no {', '.join(sorted(unknown))}: use {known}.")
        if options.get("model", self.model) != self.model:
            raise ConfigError(
                f"this object runs {self.model!r}, not {options['model']!r}: make another ChatEpic(model=…)."
            )
        chosen: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        chosen["stop"] = self.stop
        chosen |= {name: value for name, value in options.items() if name in _SAMPLING and value is not None}
        if stop is not None:
            chosen["stop"] = tuple(stop)
        if options.get("logprobs") or options.get("top_logprobs"):
            chosen["logprobs"] = int(options.get("top_logprobs") or 0)
        return SamplingParams(**chosen)

    def _prompt(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> tuple[Callable[[], PromptStream], AnswerForm]:
        sampling = self._sampling(options, stop)
        policy = options.get("policy")
        link = None if policy in (None, AUTO) else parse_policy(policy)
        form = answer_form({**options, "tools": [convert_to_openai_tool(tool) for tool in options.get("tools") or ()]})
        chat = plain_chat(messages)
        if form.instructions:
            chat.messages.insert(0, {"role": "system", "content": form.instructions})
        named = tuple(options.get("text_ids") or ())
        priority = int(options.get("priority") or 0)

        def start() -> PromptStream:
            texts = self.texts
            # What was named and never compiled is compiled now; what changed under its id is computed as it is.
            texts.add([item for item in chat.texts if item.text_id not in texts])
            ids = (*(item.text_id for item in chat.texts), *named)
            return chat_stream(
                texts,
                chat.messages,
                sampling,
                policy=link,
                text_ids=ids,
                tools=form.tools,
                constraint=form.constraint(texts),
                priority=priority,
            )

        return start, form

    def _answer(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> Callable[[], AnswerChunks]:
        """What answers; options and messages are checked at once, the rest when it is called."""
        start, form = self._prompt(messages, stop, options)
        decode = bool(options.get("logprobs") or options.get("top_logprobs"))
        timeout = options.get("timeout", self.timeout)

        def begin() -> AnswerChunks:
            texts = self.texts
            return AnswerChunks(
                self.model, start(), form.parser(texts), timeout=timeout, decode=_decoder(texts) if decode else None
            )

        return begin

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._answer(messages, stop, kwargs)()
        for _ in answer:
            pass
        return answer.result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return (await drain(self._answer(messages, stop, kwargs))).result

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._answer(messages, stop, kwargs)()
        try:
            yield from answer
        finally:
            answer.close()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(iterate(self._answer(messages, stop, kwargs))) as chunks:
            async for chunk in chunks:
                yield chunk

    # -- tools and schemas ---------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call tools; its calls always have the form and the schema that a tool asks for.

        Parameters
        ----------
        tools
            Functions, pydantic or TypedDict classes, LangChain tools, JSON schemas, or OpenAI's form.
        tool_choice
            ``"auto"`` (also None), ``"none"``, ``"any"`` (also ``"required"``, True), or the name of the tool to call.
        parallel_tool_calls
            Whether one answer may hold several calls; by default unless a call is forced.
        strict
            Accepted: calls are always strict.
        **kwargs
            Options of calls.

        Raises
        ------
        ConfigError
            If ``tool_choice`` names no tool.
        """
        made = [convert_to_openai_tool(tool) for tool in tools]
        options: dict[str, Any] = {"tools": made, "tool_choice": tool_choice_of(tool_choice, made), **kwargs}
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers are objects of a schema; decoding is held to it.

        Parameters
        ----------
        schema
            A pydantic class (answers are its objects), a TypedDict class, a JSON schema or an OpenAI function
            (answers are dicts); None with ``method="json_mode"`` for any object.
        include_raw
            Whether to give ``{"raw", "parsed", "parsing_error"}`` instead of the object alone.
        method
            ``"json_schema"`` and ``"json_mode"`` answer with JSON, ``"function_calling"`` calls a tool.
        strict
            Accepted: decoding is always strict.
        **kwargs
            Options of calls.

        Raises
        ------
        ConfigError
            If the method is unknown, or there is no schema where one is needed.
        """
        return structured_output(self, schema, method, include_raw, kwargs)

    # -- copies --------------------------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        copy = super().__copy__()
        copy._engine = LazyLease(copy._acquire)
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.__copy__()

    def __getstate__(self) -> dict[Any, Any]:
        # Never the private attributes: they lead to the weights.
        if self._loaded is not None:
            raise ConfigError(
                "a ChatEpic around a loaded model cannot be pickled: give the model's folder or id, ChatEpic(model=…)."
            )
        unpicklable = ("callbacks", "rate_limiter", "cache", "_serialized")
        kept = {name: value for name, value in self.__dict__.items() if name not in unpicklable}
        return {"__dict__": kept, "__pydantic_extra__": None, "__pydantic_fields_set__": self.model_fields_set}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # As the constructor leaves it, private attributes included.
        self.__init__(**{k: v for k, v in state["__dict__"].items() if k in type(self).model_fields})  # type: ignore[misc]


def _decoder(texts: CompiledTexts) -> Callable[[int], str]:
    tokenizer = texts.composer.tokenizer
    return lambda token: tokenizer.decode([token])
