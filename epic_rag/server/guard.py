"""Everything a request passes before its route: its key, its limits, and the log."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epic_rag.server.errors import ApiError, error_response
from epic_rag.server.http_metrics import HttpMetrics
from epic_rag.server.keys import ApiKey, KeyRing
from epic_rag.server.limits import Admission, RateLimiter, SlowReaderError, limited_body, limited_send, too_long
from epic_rag.server.settings import ServerSettings

__all__ = ["Guard", "Tally"]

logger = logging.getLogger("epic_rag.server.access")

_OPEN = frozenset({"/", "/health", "/openapi.json", "/favicon.ico"})
"""Paths that everybody may read: they tell nothing of anybody's data."""

_OPEN_FOLDER = "/console/"
"""Files of the web console."""

_UNCOUNTED = frozenset({"/metrics"})
"""Paths that answer a gateway's operator while it is busy or shutting down."""


@dataclass
class Tally:
    """What one request took, for the log and the limits; on ``request.state.tally``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def usage(self, usage: dict[str, Any]) -> None:
        """Enter what a response says that it took."""
        self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


class Guard:
    """ASGI middleware around the whole application.

    Parameters
    ----------
    app
        What is guarded.
    settings, keys, admission, rates, metrics
        Of the gateway.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keys: KeyRing,
        admission: Admission,
        rates: RateLimiter,
        metrics: HttpMetrics,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._admission = admission
        self._rates = rates
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        tally = Tally()
        request_id = f"req-{uuid.uuid4().hex}"
        status = 0

        sending = limited_send(send, self._settings)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await sending(message)

        key = self._keys.find(Headers(scope=scope).get("authorization"))
        entered = False
        try:
            if self._guarded(scope):
                key = self._checked(key)
                self._check_length(scope)
                if scope["path"] not in _UNCOUNTED:
                    self._admission.enter()
                    entered = True
                self._rates.admit(key)
            scope.setdefault("state", {}).update(key=key, tally=tally, request_id=request_id)
            await self._app(scope, limited_body(receive, self._settings), noted)
        except SlowReaderError:
            logger.info("a client did not read for %g seconds; its answer was given up", self._settings.write_seconds)
        except Exception as error:
            if status:  # it is too late to say what is wrong: the connection ends
                raise
            await error_response(error)(scope, receive, noted)
        finally:
            if entered:
                self._admission.leave()
            if key is not None:
                self._rates.spend(key, tally.prompt_tokens + tally.completion_tokens)
            seconds = time.perf_counter() - begin
            self._metrics.observe(scope, status, seconds)
            logger.info(
                "%s %s %s",
                scope["method"],
                scope["path"],
                status,
                extra={
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(seconds, 4),
                    "key": key.name if key else None,
                    "request_id": request_id,
                    "prompt_tokens": tally.prompt_tokens,
                    "completion_tokens": tally.completion_tokens,
                },
            )

    def _guarded(self, scope: Scope) -> bool:
        # A browser asks with OPTIONS whether it may send its key at all.
        path: str = scope["path"]
        return path not in _OPEN and not path.startswith(_OPEN_FOLDER) and scope["method"] != "OPTIONS"

    def _checked(self, key: ApiKey | None) -> ApiKey:
        if key is None:
            raise ApiError(
                401,
                "send a key of this gateway: Authorization: Bearer …",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key

    def _check_length(self, scope: Scope) -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            error = too_long(self._settings)
            raise ApiError(error.status_code, error.detail, code="body_too_long", headers=error.headers)
