"""``/v1/chunks``: context that clients compile once and name in their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from epic_rag.server.chunks import Chunk, NewChunk
from epic_rag.server.events import EventStream, first_of, while_connected
from epic_rag.server.schemas.chunks import AddChunks, ChunkList, ChunkObject, DeletedChunk
from epic_rag.server.state import CallerDep
from epic_rag.server.working import Report, last_of, reported

__all__ = ["router"]

router = APIRouter(prefix="/v1/chunks", tags=["chunks"])

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "What was made; progress before it with stream."}
}


@router.post("", response_model=ChunkObject | ChunkList, responses=EVENTS)
async def add_chunks(body: AddChunks, request: Request, caller: CallerDep) -> Response:
    """Compile one chunk or several; what is compiled already costs nothing, and gets the new end and metadata."""
    shelf = caller.tenant.shelf

    def work(report: Report) -> Mapping[str, Any]:
        def progress(done: int, total: int) -> None:
            report({"object": "epic.progress", "stage": "compile", "done": done, "total": total})

        new = [
            NewChunk(c.text or "", None if c.token_ids is None else tuple(c.token_ids), c.ttl_seconds, c.metadata)
            for c in body.each
        ]
        made = [_shown(chunk) for chunk in shelf.add(new, progress)]
        return (made[0] if body.chunks is None else _listed(made)).model_dump()

    news = reported(caller.tenant.chunk_work, work)
    if body.stream:
        return EventStream(await while_connected(request, first_of(news)))
    return JSONResponse(await while_connected(request, last_of(news)))


@router.get("")
def list_chunks(
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=512, description="The last id of the page before.")] = "",
) -> ChunkList:
    """The chunks of the key's namespace, in the order of their ids."""
    found = caller.tenant.shelf.list(after, limit + 1)
    return _listed([_shown(chunk) for chunk in found[:limit]], more=len(found) > limit)


@router.get("/{chunk_id}")
def get_chunk(chunk_id: str, caller: CallerDep) -> ChunkObject:
    """One chunk."""
    return _shown(caller.tenant.shelf.get(chunk_id))


@router.delete("/{chunk_id}")
def delete_chunk(chunk_id: str, caller: CallerDep) -> DeletedChunk:
    """Forget a chunk, and what was computed of it."""
    caller.tenant.shelf.delete(chunk_id)
    return DeletedChunk(id=chunk_id)


def _shown(chunk: Chunk) -> ChunkObject:
    return ChunkObject(
        id=chunk.id,
        tokens=chunk.tokens,
        created_at=int(chunk.created),
        expires_at=chunk.expires,
        metadata=dict(chunk.metadata),
    )


def _listed(chunks: Sequence[ChunkObject], *, more: bool = False) -> ChunkList:
    ids = [chunk.id for chunk in chunks]
    return ChunkList(
        data=list(chunks),
        has_more=more,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
    )
