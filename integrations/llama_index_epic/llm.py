"""The LLM: compiled texts are found in every prompt and linked, whoever made the prompt."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any, Self, TypeVar

from epic_engine import ConfigError, LinkPolicy, SamplingParams, parse_policy
from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from epic_rag.aio import Opening, drain, iterate
from epic_rag.defaults import AUTO
from epic_rag.engines import EngineUser, LazyLease
from epic_rag.prompt_stream import PromptStream, chat_stream, text_stream
from llama_index_epic.responses import chat_response, completion_response, plain_messages

__all__ = ["EpicLLM", "use_tokenizer"]

R = TypeVar("R")

_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_OWN = ("policy", "priority", "text_ids")
_FIELDS = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens")


class EpicLLM(EngineUser, LLM):
    """A language model in this process that links the KV of texts compiled beforehand.

    It takes part in anything that takes an LLM. Whatever prompt LlamaIndex makes, the texts of compiled nodes are
    found in it, and only what the link policy chooses is computed. LLM objects with equal settings share one
    engine, which is opened at the first use.

    Every call takes ``temperature``, ``max_tokens`` and the other fields of
    :class:`~epic_engine.SamplingParams`, ``policy``, ``priority`` (higher goes first), and ``text_ids`` (ids of
    compiled nodes that the prompt holds, in order: only needed for texts too short to be found). The last response of
    a call has ``raw["usage"]`` with ``prompt_tokens``, ``completion_tokens``, ``total_tokens``, ``linked_tokens``,
    ``recomputed_tokens`` and ``reused_tokens``, and ``raw["epic"]`` with ``reuse``, ``policy``, ``ttft_s``,
    ``total_s`` (seconds) and ``finish_reason``.

    Examples
    --------
    >>> llm = EpicLLM(model="smollm2", store="handbook.kv")          # doctest: +SKIP
    >>> index.as_query_engine(llm=llm).query("Who pays for a lost key?")   # doctest: +SKIP
    """

    model: str = Field(default="smollm2", description="Folder, hub id, .gguf file, or 'smollm2'.")
    store: str | None = Field(default=None, description="Directory of compiled texts; None keeps them in memory.")
    policy: str = Field(default=AUTO, description="Link policy; 'auto' is the store's own.")
    context: str = Field(default=AUTO, description="Compile context; 'auto' is the store's own.")
    namespace: str = Field(default="default", description="Tenant: nothing is shared between namespaces.")
    temperature: float = Field(default=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, description="Smallest set of tokens of this probability.")
    top_k: int = Field(default=0, description="Most likely tokens to draw from; 0 is all.")
    seed: int | None = Field(default=None, description="Same seed, same text.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end an answer.")
    max_tokens: int = Field(default=256, description="Most tokens of an answer.")
    context_window: int | None = Field(default=None, description="Prompt and answer in tokens; None is the model's.")
    device: str = Field(default="auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")
    dtype: str = Field(default="auto", description="'auto', 'float32', 'bfloat16' or 'float16'.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Further fields of EngineConfig.")

    @field_validator("model", "store", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    _loaded: tuple[Any, Any] | None = PrivateAttr(default=None)
    _engine: LazyLease = PrivateAttr()

    def __init__(self, **settings: Any) -> None:
        unknown = settings.keys() - type(self).model_fields.keys() - {"class_name"}
        if unknown:
            known = ", ".join(sorted(type(self).model_fields))
            raise ConfigError(f"EpicLLM knows no {', '.join(sorted(unknown))}: use {known}.")
        super().__init__(**settings)
        self._engine = LazyLease(self._acquire)
        self._sampling({})
        if self.policy != AUTO:
            parse_policy(self.policy)

    @classmethod
    def from_loaded(cls, model: Any, tokenizer: Any, **settings: Any) -> Self:
        """An LLM around a Hugging Face model that is loaded already.

        It can be serialised by its name only, and not pickled.

        Parameters
        ----------
        model, tokenizer
            A ``transformers`` causal language model and its fast tokenizer.
        **settings
            Fields other than ``model``.
        """
        llm = cls(model=getattr(model, "name_or_path", "") or type(model).__name__, **settings)
        llm._loaded = (model, tokenizer)
        return llm

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "EpicLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with. Loads the model, unless ``context_window`` is given."""
        window = self.context_window
        if window is None or self._engine.taken:
            window = self.engine.max_model_len
        return LLMMetadata(
            context_window=window,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say about this LLM; unlike :attr:`metadata` it never loads the model."""
        return {
            "class_name": self.class_name(),
            "model_name": self.model,
            "context_window": self.context_window,
            "num_output": self.max_tokens,
            "is_chat_model": True,
            "is_function_calling_model": False,
        }

    # -- copies --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Never the private attributes: they lead to the weights.
        if self._loaded is not None:
            raise ConfigError(
                "an EpicLLM around a loaded model cannot be pickled: give the model's folder or id, EpicLLM(model=…)."
            )
        kept = {
            name: value for name, value in self.__dict__.items() if name not in ("callback_manager", "rate_limiter")
        }
        return {
            "__dict__": kept,
            "__pydantic_extra__": None,
            "__pydantic_fields_set__": set(kept),
            "__pydantic_private__": None,
        }

    def __copy__(self) -> Self:
        copy = super().__copy__()
        copy._engine = LazyLease(copy._acquire)
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.__copy__()

    # -- calls ---------------------------------------------------------------------------------------------------

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        unknown = options.keys() - _SAMPLING - set(_OWN)
        if unknown:
            known = ", ".join(sorted(_SAMPLING | set(_OWN)))
            raise ConfigError(f"EpicLLM calls take no {', '.join(sorted(unknown))}: use {known}.")
        own = {name: getattr(self, name) for name in _FIELDS}
        return SamplingParams(**{**own, **{k: v for k, v in options.items() if k in _SAMPLING and v is not None}})

    def _policy(self, options: dict[str, Any]) -> LinkPolicy | None:
        policy = options.get("policy")
        return None if policy in (None, AUTO) else parse_policy(policy)

    def _chat(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Callable[[], PromptStream]:
        """What answers a chat; options and messages are checked at once."""
        sampling, policy, plain = self._sampling(options), self._policy(options), plain_messages(messages)
        ids, priority = tuple(options.get("text_ids") or ()), int(options.get("priority") or 0)
        return lambda: chat_stream(self.texts, plain, sampling, policy=policy, text_ids=ids, priority=priority)

    def _completion(self, prompt: str, formatted: bool, options: dict[str, Any]) -> Callable[[], PromptStream]:
        if not formatted:
            return self._chat([ChatMessage(content=prompt)], options)
        sampling, policy = self._sampling(options), self._policy(options)
        ids, priority = tuple(options.get("text_ids") or ()), int(options.get("priority") or 0)
        return lambda: text_stream(self.texts, prompt, sampling, policy=policy, text_ids=ids, priority=priority)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _whole(self._chat(messages, kwargs)(), chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a user's message, or go on with a prompt that carries its chat template (``formatted``)."""
        return _whole(self._completion(prompt, formatted, kwargs)(), completion_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As :meth:`chat`, but yields the answer as it grows."""
        return _growing(self._chat(messages, kwargs)(), chat_response)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As :meth:`complete`, but yields the answer as it grows."""
        return _growing(self._completion(prompt, formatted, kwargs)(), completion_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As :meth:`chat`; the event loop goes on, and cancelling the task cancels the answer."""
        return _whole(await drain(self._chat(messages, kwargs)), chat_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As :meth:`complete`; the event loop goes on, and cancelling the task cancels the answer."""
        return _whole(await drain(self._completion(prompt, formatted, kwargs)), completion_response)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As :meth:`stream_chat`, asynchronously; closing the generator cancels the answer."""
        return _agrowing(self._chat(messages, kwargs), chat_response)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As :meth:`stream_complete`, asynchronously; closing the generator cancels the answer."""
        return _agrowing(self._completion(prompt, formatted, kwargs), completion_response)


def _whole(stream: PromptStream, make: Callable[..., R]) -> R:
    for _ in stream:
        pass
    return make(stream.completion.text, None, stream.completion)


def _growing(stream: PromptStream, make: Callable[..., R]) -> Generator[R]:
    text = ""
    try:
        for piece in stream:
            text += piece
            yield make(text, piece, None)
    finally:
        stream.close()
    yield make(text, "", stream.completion)


async def _agrowing(start: Callable[[], PromptStream], make: Callable[..., R]) -> AsyncGenerator[R]:
    text = ""
    opening = Opening(start)
    async with aclosing(iterate(opening)) as pieces:
        async for piece in pieces:
            text += piece
            yield make(text, piece, None)
    yield make(text, "", opening.stream.completion)


def use_tokenizer(llm: EpicLLM) -> None:
    """Make LlamaIndex count tokens as this model does, everywhere in the process.

    Without it LlamaIndex counts with a tokenizer of its own, and may cut nodes that would fit, or fill a prompt
    with more than fits.
    """
    Settings.tokenizer = llm.texts.composer.tokenizer.encode_text
