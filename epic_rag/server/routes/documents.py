"""``/v1/documents``: what retrieval-augmented answers are found in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from epic_rag.documents import Document
from epic_rag.errors import DocumentNotFoundError
from epic_rag.registry import ListedDocument
from epic_rag.server.errors import ApiError, not_found
from epic_rag.server.events import EventStream, first_of, while_connected
from epic_rag.server.routes.chunks import EVENTS
from epic_rag.server.schemas.documents import (
    MOST_DOCUMENTS,
    AddDocuments,
    AddedDocuments,
    DeletedDocument,
    DocumentList,
    DocumentObject,
    add_documents_body,
)
from epic_rag.server.state import CallerDep
from epic_rag.server.uploads import check_names, read_uploads
from epic_rag.server.working import Report, last_of, reported

__all__ = ["router"]

router = APIRouter(prefix="/v1/documents", tags=["documents"])

_FORM = "multipart/form-data"
_Read = Callable[[Callable[[int, int], None]], Sequence[Document]]


@router.post("", response_model=AddedDocuments, responses=EVENTS, openapi_extra={"requestBody": add_documents_body()})
async def add_documents(request: Request, caller: CallerDep) -> Response:
    """Add or update documents: texts as JSON, or files (PDF, HTML, Markdown, text) as a form."""
    tenant = caller.tenant
    try:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == _FORM:
            read, stream = _of_form(await request.form(max_files=MOST_DOCUMENTS, max_fields=16))
        else:
            read, stream = _of_json(await request.body())
    except ClientDisconnect:
        raise ApiError(499, "the client went away.", code="cancelled") from None

    def work(report: Report) -> Mapping[str, Any]:
        def progress(stage: str, done: int, total: int) -> None:
            report({"object": "epic.progress", "stage": stage, "done": done, "total": total})

        done = tenant.add_documents(read(lambda done, total: progress("read", done, total)), progress)
        return AddedDocuments(
            added=done.added,
            updated=done.updated,
            unchanged=done.unchanged,
            chunks=done.chunks,
            tokens=done.tokens,
            compiled_tokens=done.compiled_tokens,
            seconds=done.seconds,
        ).model_dump()

    news = reported(tenant.document_work, work)
    if stream:
        return EventStream(await while_connected(request, first_of(news)))
    return JSONResponse(await while_connected(request, last_of(news)))


def _of_json(body: bytes) -> tuple[_Read, bool]:
    try:
        asked = AddDocuments.model_validate(json.loads(body))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    except (ValueError, RecursionError):
        raise ApiError(400, f"the body is neither JSON nor {_FORM}.", code="invalid_value") from None

    def read(_: Callable[[int, int], None]) -> list[Document]:
        return [
            Document(d.id, d.text, source=d.id, metadata={**d.metadata, **({"title": d.title} if d.title else {})})
            for d in asked.documents
        ]

    return read, asked.stream


def _of_form(form: FormData) -> tuple[_Read, bool]:
    files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
    unknown = sorted(set(form) - {"files", "stream"})
    if not files or unknown:
        raise ApiError(
            400,
            f"the form holds {', '.join(map(repr, unknown)) or 'no files'}: send files, and stream=true for progress.",
            code="invalid_value",
            param="files",
        )
    check_names(files)
    return (lambda progress: read_uploads(files, progress)), str(form.get("stream", "")).lower() == "true"


@router.get("")
def list_documents(
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=1024, description="The last id of the page before.")] = "",
) -> DocumentList:
    """The documents of the key's namespace, in the order of their ids."""
    tenant = caller.tenant
    found = tenant.corpus.registry.listed(after, limit + 1) if tenant.has_corpus else []
    shown = [_shown(listed) for listed in found[:limit]]
    return DocumentList(
        data=shown,
        has_more=len(found) > limit,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )


@router.delete("/{document_id:path}")
async def delete_document(document_id: str, caller: CallerDep) -> DeletedDocument:
    """Forget a document, and what was computed of it."""
    tenant = caller.tenant

    def delete() -> None:
        if not tenant.has_corpus:
            raise not_found("document", document_id)
        try:
            tenant.corpus.delete(document_id)
        except DocumentNotFoundError:
            raise not_found("document", document_id) from None

    await asyncio.get_running_loop().run_in_executor(tenant.document_work, delete)
    return DeletedDocument(id=document_id)


def _shown(listed: ListedDocument) -> DocumentObject:
    document = listed.document
    return DocumentObject(
        id=document.doc_id,
        source=document.source,
        chunks=listed.chunks,
        tokens=listed.tokens,
        added_at=int(document.added_at),
        metadata=dict(document.metadata),
    )
