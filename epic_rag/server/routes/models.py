"""``/v1/models``, ``/v1/embeddings``, ``/tokenize``, and what operators ask for: ``/health`` and ``/metrics``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from epic_engine import __version__
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from epic_rag.errors import MissingDependencyError
from epic_rag.prompt import TextPart
from epic_rag.server.answering import linked_chunks
from epic_rag.server.embedding import embed
from epic_rag.server.errors import ApiError, not_found
from epic_rag.server.events import while_connected
from epic_rag.server.http_metrics import metrics_page
from epic_rag.server.messages import plain_chat
from epic_rag.server.schemas.models import (
    EmbeddingList,
    EmbeddingRequest,
    FoundChunk,
    Health,
    ModelList,
    ModelObject,
    TokenizeRequest,
    Tokens,
)
from epic_rag.server.state import CallerDep, Gateway, GatewayDep

__all__ = ["router"]

router = APIRouter(tags=["models"])


def _models(gateway: Gateway) -> list[ModelObject]:
    models = [ModelObject(id=gateway.settings.shown_model)]
    with suppress(MissingDependencyError):
        models.append(ModelObject(id=gateway.tenants.embedder().name))
    return models


@router.get("/v1/models")
def list_models(gateway: GatewayDep) -> ModelList:
    """The model that answers, and the embedder."""
    return ModelList(data=_models(gateway))


@router.get("/v1/models/{model_id:path}")
def get_model(model_id: str, gateway: GatewayDep) -> ModelObject:
    """One of them."""
    found = next((model for model in _models(gateway) if model.id == model_id), None)
    if found is None:
        raise not_found("model", model_id)
    return found


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request, gateway: GatewayDep, caller: CallerDep) -> EmbeddingList:
    """Embed texts as documents and questions are embedded."""

    def work() -> EmbeddingList:
        embedder = gateway.tenants.embedder()
        if body.model not in ("", embedder.name, gateway.settings.shown_model):
            raise ApiError(
                404,
                f"this gateway embeds with {embedder.name!r}, not {body.model[:200]!r}.",
                code="model_not_found",
                param="model",
            )
        return embed(body, embedder, caller.tenant.texts.composer, gateway.engine.spec.vocab_size)

    async def made() -> EmbeddingList:
        return await asyncio.get_running_loop().run_in_executor(gateway.tenants.embedding_work, work)

    found = await while_connected(request, made())
    request.state.tally.prompt_tokens = found.usage.prompt_tokens
    return found


@router.post("/tokenize")
def tokenize(body: TokenizeRequest, gateway: GatewayDep, caller: CallerDep) -> Tokens:
    """The tokens of a prompt, and which compiled chunks stand in it."""
    tenant = caller.tenant
    if (body.text is None) == (body.messages is None):
        raise ApiError(400, "give either text or messages.", code="invalid_value")
    if body.messages is not None:
        chat = plain_chat(body.messages, tenant.texts, tenant.shelf)
        parts = tenant.texts.composer.segments(chat.messages, chat.marks.cut)
    else:
        parts = tenant.texts.composer.formatted_segments(body.text or "", tenant.texts.find)
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, TextPart):
            record = tenant.texts.record(part.name or "")
            tokens += record.token_ids if record else ()
        else:
            tokens += part
    return Tokens(
        tokens=tokens,
        count=len(tokens),
        max_model_len=gateway.engine.max_model_len,
        chunks=[FoundChunk(**asdict(chunk)) for chunk in linked_chunks(parts, tenant)],
    )


@router.get("/health", responses={503: {"model": Health, "description": "It is shutting down."}})
async def health(request: Request, gateway: GatewayDep) -> Health:
    """Whether the gateway takes requests."""
    draining = request.app.state.admission.draining
    found = Health(status="draining" if draining else "ok", model=gateway.settings.shown_model, version=__version__)
    return JSONResponse(found.model_dump(), 503) if draining else found  # type: ignore[return-value]


_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format."}
}


@router.get("/metrics", response_class=Response, responses=_TEXT)
def metrics(request: Request, gateway: GatewayDep) -> Response:
    """Counters of the engine and of HTTP requests, of all namespaces together."""
    if not request.state.key.metrics:
        raise ApiError(403, "this key may not read metrics: set metrics = true for it.", code="not_allowed")
    try:
        from epic_engine.prometheus import EngineCollector
    except ImportError:
        raise ApiError(
            501, "metrics need prometheus-client: pip install 'epic-rag[metrics]'", code="not_installed"
        ) from None
    page, kind = metrics_page(EngineCollector(gateway.engine.metrics), request.app.state.http_metrics)
    return Response(page, headers={"content-type": kind})
