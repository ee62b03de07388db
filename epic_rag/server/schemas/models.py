"""Models, embeddings, tokens, health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from epic_rag.server.schemas.chat import Message

__all__ = [
    "Embedding",
    "EmbeddingList",
    "EmbeddingRequest",
    "EmbeddingUsage",
    "FoundChunk",
    "Health",
    "ModelList",
    "ModelObject",
    "TokenizeRequest",
    "Tokens",
]


class ModelObject(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "epic-rag"


class ModelList(BaseModel):
    """All models: the one that answers, and the embedder if there is one."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class EmbeddingRequest(BaseModel):
    """``POST /v1/embeddings``. Token ids are those of the model that answers, see ``/tokenize``."""

    model_config = ConfigDict(extra="allow")

    input: str | list[str] | list[int] | list[list[int]]
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, description="Accepted if it is the embedder's own.")
    user: str | None = None


class Embedding(BaseModel):
    """One vector of length 1; in base64 little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens, as the model that answers would read the texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Vectors in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: a prompt as for ``/v1/completions``, or messages as for ``/v1/chat/completions``."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    model: str = ""


class FoundChunk(BaseModel):
    """A compiled chunk in a prompt."""

    id: str
    offset: int = Field(description="Tokens before it.")
    tokens: int


class Tokens(BaseModel):
    """What a prompt is to the model."""

    object: Literal["epic.tokens"] = "epic.tokens"
    tokens: list[int]
    count: int
    max_model_len: int
    chunks: list[FoundChunk]


class Health(BaseModel):
    """Whether the gateway takes requests."""

    status: Literal["ok", "draining"]
    model: str
    version: str
