"""Requests for answers. Null is as good as left out; fields of OpenAI's that change nothing here are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from epic_rag.server.schemas.metadata import PlainText

__all__ = [
    "AnswerRequest",
    "ChatRequest",
    "ChunkReference",
    "CompletionRequest",
    "ContentPart",
    "EpicOptions",
    "FunctionTool",
    "Message",
    "Retrieve",
    "StreamOptions",
]

Id = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class ChunkReference(BaseModel):
    """A compiled chunk that stands in a prompt."""

    model_config = ConfigDict(extra="forbid")

    id: Id
    offset: int | None = Field(default=None, ge=0, description="Tokens that must stand before it in the prompt.")


class ContentPart(BaseModel):
    """A piece of a message: text, or a compiled chunk."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: PlainText | None = None
    id: Id | None = None
    offset: int | None = Field(default=None, ge=0)


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: PlainText | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    chunk_references: list[ChunkReference] | None = Field(
        default=None, description="Chunks that stand before the message's text, in this order."
    )


class Retrieve(BaseModel):
    """Documents of the server's that are put before the last question."""

    model_config = ConfigDict(extra="forbid")

    k: int = Field(default=6, ge=1, le=256, description="Chunks to retrieve.")
    query: PlainText | None = Field(default=None, description="What to look for; by default the last message.")


class EpicOptions(BaseModel):
    """What the gateway adds to a request."""

    model_config = ConfigDict(extra="forbid")

    policy: str | None = Field(default=None, description="Link policy, such as legolink:16, full or auto.")
    retrieve: Retrieve | None = None
    priority: int = Field(default=0, ge=-100, le=100, description="Higher goes first.")


class StreamOptions(BaseModel):
    """OpenAI's."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None


class ToolFunction(BaseModel):
    """What a tool is called, does and takes."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of an object.")


class FunctionTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class AnswerRequest(BaseModel):
    """What chats and completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(default="", description="Accepted if it is this gateway's; empty is.")
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    epic: EpicOptions | None = None

    @property
    def options(self) -> EpicOptions:
        """What is asked beyond OpenAI's fields."""
        return self.epic or EpicOptions()


class ChatRequest(AnswerRequest):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(AnswerRequest):
    """``POST /v1/completions``: a prompt that carries its chat template already, if any."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    suffix: str | None = None
