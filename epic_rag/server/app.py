"""The application: routes, guard and error shapes around one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from epic_engine import __version__
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from epic_rag.server.errors import ErrorBody, install_error_handlers
from epic_rag.server.guard import Guard
from epic_rag.server.http_metrics import HttpMetrics
from epic_rag.server.keys import KeyRing
from epic_rag.server.limits import Admission, RateLimiter
from epic_rag.server.routes import chat, chunks, console, documents, models
from epic_rag.server.state import Gateway

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

_ROUTERS = (chat.router, chunks.router, console.router, documents.router, models.router)
_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "What the client can mend."},
    "5XX": {"model": ErrorBody, "description": "What it cannot."},
}


def create_app(gateway: Gateway, keys: KeyRing) -> FastAPI:
    """Put a gateway's application together.

    Parameters
    ----------
    gateway
        Settings, engine and namespaces; they stay open.
    keys
        Who may ask.

    Returns
    -------
    FastAPI
        With ``state.gateway``, ``state.admission`` and ``state.http_metrics``.
    """
    settings = gateway.settings

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(gateway))
        try:
            yield
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping

    app = FastAPI(
        title="epic-rag",
        version=__version__,
        lifespan=lifespan,
        responses=_RESPONSES,
        docs_url=None,
        redirect_slashes=False,  # an id may end with one
    )
    app.state.gateway = gateway
    app.state.admission = Admission(settings.max_concurrent)
    app.state.http_metrics = HttpMetrics()
    install_error_handlers(app)
    for router in _ROUTERS:
        app.include_router(router)
    app.add_middleware(
        Guard,
        settings=settings,
        keys=keys,
        admission=app.state.admission,
        rates=RateLimiter(settings),
        metrics=app.state.http_metrics,
    )
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _sweep(gateway: Gateway) -> None:
    """Forget what has expired, now and then."""
    while True:
        await asyncio.sleep(gateway.settings.sweep_seconds)
        for tenant in gateway.tenants.opened():
            try:
                await asyncio.to_thread(tenant.shelf.sweep)
            except Exception:
                logger.exception("expired chunks of %s could not be removed", tenant.namespace)
