"""What went wrong, in OpenAI's shape."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from epic_engine import (
    ChunkNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EpicError,
    InsufficientResourcesError,
    OutOfPagesError,
    StoreError,
)
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from epic_rag.errors import DocumentNotFoundError, MissingDependencyError, RagError, RegistryError

__all__ = ["ApiError", "ErrorBody", "error_response", "install_error_handlers", "not_found", "translated"]

logger = logging.getLogger(__name__)

_KIND = re.compile(r"^(?:str|int)$|[\[(]")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class ErrorDetail(BaseModel):
    """What OpenAI's clients read of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with an error that its client sees.

    Parameters
    ----------
    status
        HTTP status.
    message
        What is wrong and how to mend it.
    code, param
        For programs: what kind of error, and which field.
    headers
        Further headers, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def not_found(what: str, name: str, *, param: str | None = None) -> ApiError:
    """The same for what nobody has and for what somebody else has."""
    return ApiError(404, f"there is no {what} {name[:200]!r} here.", code=f"{what}_not_found", param=param)


def translated(error: BaseException) -> ApiError:
    """What a client is told of an error; what it could not mend, and what names files, is logged instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, MissingDependencyError):
        return ApiError(501, str(error), code="not_installed")
    if isinstance(error, ChunkNotFoundError):
        return ApiError(404, "a chunk of this prompt is not there any more: send the request again.", code="chunk_gone")
    if isinstance(error, DocumentNotFoundError):
        return ApiError(404, "there is no such document here.", code="document_not_found")
    if isinstance(error, OutOfPagesError):
        return ApiError(400, str(error), code="memory_exceeded")
    if isinstance(error, InsufficientResourcesError):
        return ApiError(507, "the gateway has no room for this.", code="storage_exceeded")
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the gateway is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, RegistryError | StoreError):
        logger.error("the store failed: %s", error)
        return ApiError(500, "the gateway's store failed; its log says why.", code="store_failed")
    if isinstance(error, ConfigError | RagError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, EpicError | TimeoutError):
        logger.error("a request failed: %s", error)
        return ApiError(500, "the request failed; the gateway's log says why.", code="failed")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the gateway failed; its log says why.", code="internal_error")


def error_response(error: BaseException) -> JSONResponse:
    """A whole response."""
    found = translated(error)
    return JSONResponse(found.body, found.status, headers=found.headers)


def _validation(error: RequestValidationError) -> ApiError:
    # Where a field may be of several kinds, the kind that was meant is the one that came farthest.
    place, message = max(((_place(e["loc"]), e["msg"]) for e in error.errors()), key=lambda found: len(found[0]))
    where = ".".join(place).encode("utf-8", "replace").decode()
    others = len(error.errors()) - 1
    more = f" ({others} more problems)" if others else ""
    return ApiError(400, f"{where or 'body'}: {message}{more}", code="invalid_value", param=where or None)


def _place(parts: Sequence[Any]) -> list[str]:
    """The names in a body that lead to an error, without pydantic's names of the kinds that it tried."""
    return [str(part) for part in parts if part != "body" and not (isinstance(part, str) and _KIND.search(part))]


def install_error_handlers(app: FastAPI) -> None:
    """Have everything that routes raise answered in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_validation(error))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        texts = {404: "there is no such path.", 405: "this path does not take this method."}
        headers = error.headers
        return error_response(
            ApiError(error.status_code, texts.get(error.status_code, str(error.detail)), headers=headers)
        )

    @app.exception_handler(ApiError)
    @app.exception_handler(EpicError)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)
