"""Answers, whole and in pieces: OpenAI's objects, and what the gateway adds to them under ``epic``."""

from __future__ import annotations

from typing import Literal

from epic_engine import StageTimes
from pydantic import BaseModel, ConfigDict, Field

from epic_rag.answers import Source
from epic_rag.server.schemas.models import FoundChunk

__all__ = ["ChatCompletion", "ChatCompletionChunk", "EpicAnswer", "TextCompletion", "Usage"]

FinishReason = Literal["stop", "length", "tool_calls"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Body):
    """What the prompt's tokens were."""

    cached_tokens: int = Field(description="Whose KV was there already: of linked chunks, and of earlier prompts.")


class Usage(_Body):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = Field(description="Of all its answers.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EpicAnswer(_Body):
    """How an answer came about; of several answers the first."""

    policy: str = Field(description="Link policy.")
    reuse: Literal["exact", "composed", "none"]
    linked_tokens: int = Field(description="Tokens of compiled chunks in the prompt.")
    recomputed_tokens: int = Field(description="Of these, what was computed anew.")
    reused_tokens: int = Field(description="Of these, what was not.")
    reused_spans: list[tuple[int, int]] = Field(description="Where the reused tokens stand: first, and one past last.")
    rows: int = Field(description="Rows that the model computed for the prompt.")
    timed_out: bool = Field(description="Whether the gateway's time limit ended an answer.")
    times: StageTimes = Field(description="Seconds.")
    chunks: list[FoundChunk] = Field(description="Compiled chunks in the prompt, in order.")
    sources: list[Source] = Field(description="What was retrieved, in the prompt's order.")


class TokenAlternative(_Body):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="Null for a part of a character.")


class ChatToken(TokenAlternative):
    """A generated token."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(_Body):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]


class TextLogprobs(_Body):
    """Log-probabilities as completions have them."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Characters of the answer before each token.")


class CalledFunction(_Body):
    """What is called."""

    name: str
    arguments: str = Field(description="A JSON object.")


class FunctionCall(_Body):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionCallPiece(FunctionCall):
    """A call of a tool in a stream; always whole."""

    index: int


class AnswerMessage(_Body):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[FunctionCall] = Field(default_factory=list)


class Delta(_Body):
    """What a piece adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[FunctionCallPiece] = Field(default_factory=list)


class ChatChoice(_Body):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None


class ChatChoicePiece(_Body):
    """A piece of an answer."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None


class TextChoice(_Body):
    """One continuation, or a piece of one."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None


class _Head(_Body):
    id: str
    created: int = Field(description="Seconds since the epoch.")
    model: str
    system_fingerprint: str = Field(description="Of the model's weights: the same, the same answers for a seed.")


class ChatCompletion(_Head):
    """``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    epic: EpicAnswer


class ChatCompletionChunk(_Head):
    """The same in pieces; sources come with the first, everything else of ``epic`` with usage in the last."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoicePiece]
    usage: Usage | None = None
    epic: EpicAnswer | dict[Literal["sources"], list[Source]] | None = None


class TextCompletion(_Head):
    """``POST /v1/completions``, whole or in pieces."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None
    epic: EpicAnswer | None = None
