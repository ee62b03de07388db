"""Chunks that clients make."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from epic_rag.server.schemas.metadata import Metadata, PlainText

__all__ = ["AddChunks", "ChunkList", "ChunkObject", "DeletedChunk", "NewChunkBody"]

MOST_CHUNKS = 1024
"""In one request."""

_MOST_SECONDS = 10 * 365 * 86_400
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class NewChunkBody(BaseModel):
    """A chunk to compile: a text, or token ids that are compiled as they are."""

    model_config = ConfigDict(extra="forbid")

    text: PlainText | None = Field(default=None, description="White space at its ends does not count.")
    token_ids: list[_TokenId] | None = None
    ttl_seconds: float | None = Field(
        default=None, ge=1, le=_MOST_SECONDS, description="After which it is forgotten; without it it stays."
    )
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")
        return self


class AddChunks(BaseModel):
    """``POST /v1/chunks``: one chunk, or several under ``chunks``."""

    model_config = ConfigDict(extra="forbid")

    text: PlainText | None = None
    token_ids: list[_TokenId] | None = None
    ttl_seconds: float | None = Field(default=None, ge=1, le=_MOST_SECONDS)
    metadata: Metadata | None = None
    chunks: list[NewChunkBody] | None = Field(default=None, min_length=1, max_length=MOST_CHUNKS)
    stream: bool = Field(default=False, description="Whether progress is sent as server-sent events.")

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        single: tuple[Any, ...] = (self.text, self.token_ids, self.ttl_seconds, self.metadata)
        if self.chunks is None:
            if (self.text is None) == (self.token_ids is None):
                raise ValueError("give one of text, token_ids and chunks")
        elif any(value is not None for value in single):
            raise ValueError("with chunks, everything else belongs into each of them")
        return self

    @property
    def each(self) -> list[NewChunkBody]:
        """The chunks."""
        if self.chunks is not None:
            return self.chunks
        own = NewChunkBody(text=self.text, token_ids=self.token_ids, ttl_seconds=self.ttl_seconds)
        own.metadata = self.metadata or {}
        return [own]


class ChunkObject(BaseModel):
    """A compiled chunk."""

    id: str
    object: Literal["chunk"] = "chunk"
    tokens: int
    created_at: int = Field(description="Seconds since the epoch.")
    expires_at: float | None
    metadata: dict[str, JsonValue]


class ChunkList(BaseModel):
    """Some chunks."""

    object: Literal["list"] = "list"
    data: list[ChunkObject]
    has_more: bool = Field(default=False, description="Whether there are more; ask with after=last_id.")
    first_id: str | None = None
    last_id: str | None = None


class DeletedChunk(BaseModel):
    """A chunk that is gone."""

    id: str
    object: Literal["chunk.deleted"] = "chunk.deleted"
    deleted: Literal[True] = True
