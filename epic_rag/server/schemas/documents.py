"""Documents that answers are found in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from epic_rag.server.schemas.metadata import PlainMetadata, PlainText

__all__ = [
    "AddDocuments",
    "AddedDocuments",
    "DeletedDocument",
    "DocumentList",
    "DocumentObject",
    "NewDocument",
    "add_documents_body",
]

MOST_DOCUMENTS = 1024
"""In one request."""

DocumentId = Annotated[PlainText, StringConstraints(min_length=1, max_length=1024)]


class NewDocument(BaseModel):
    """A text to add; one of the same id is replaced."""

    model_config = ConfigDict(extra="forbid")

    id: DocumentId
    text: PlainText
    title: PlainText | None = Field(default=None, max_length=2048, description="Kept as metadata; not prompted.")
    metadata: PlainMetadata = Field(default_factory=dict)


class AddDocuments(BaseModel):
    """``POST /v1/documents`` with texts."""

    model_config = ConfigDict(extra="forbid")

    documents: list[NewDocument] = Field(min_length=1, max_length=MOST_DOCUMENTS)
    stream: bool = Field(default=False, description="Whether progress is sent as server-sent events.")


class AddedDocuments(BaseModel):
    """What was done; ids of documents."""

    object: Literal["epic.documents"] = "epic.documents"
    added: list[str]
    updated: list[str]
    unchanged: list[str]
    chunks: int = Field(description="Of the added and updated documents.")
    tokens: int
    compiled_tokens: int = Field(description="Of these, what was not compiled already.")
    seconds: float


class DocumentObject(BaseModel):
    """A document."""

    id: str
    object: Literal["document"] = "document"
    source: str
    chunks: int
    tokens: int
    added_at: int = Field(description="Seconds since the epoch.")
    metadata: dict[str, str]


class DocumentList(BaseModel):
    """Some documents."""

    object: Literal["list"] = "list"
    data: list[DocumentObject]
    has_more: bool = Field(description="Whether there are more; ask with after=last_id.")
    first_id: str | None
    last_id: str | None


class DeletedDocument(BaseModel):
    """A document that is gone."""

    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: Literal[True] = True


def add_documents_body() -> dict[str, Any]:
    """The two bodies of ``POST /v1/documents``, for the OpenAPI document."""
    schema = AddDocuments.model_json_schema()
    schema["properties"]["documents"]["items"] = schema.pop("$defs")["NewDocument"]
    files = {
        "type": "object",
        "required": ["files"],
        "properties": {
            "files": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1},
            "stream": {"type": "string", "enum": ["true", "false"]},
        },
    }
    return {
        "required": True,
        "content": {"application/json": {"schema": schema}, "multipart/form-data": {"schema": files}},
    }
