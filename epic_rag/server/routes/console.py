"""The web console: one page at ``/``, and its files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response

from epic_rag.server.state import GatewayDep

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

_PAGE = "index.html"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Nothing of other origins, nothing inline: text that was taken for markup could neither run nor send anything.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _files() -> Mapping[str, bytes]:
    """Contents by name: no request's path is ever one of a file."""
    folder = resources.files("epic_rag.server") / "console"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


@router.get("/")
def page(gateway: GatewayDep) -> Response:
    """The page."""
    return _response(_PAGE, gateway)


@router.get("/console/{name}")
def file(name: str, gateway: GatewayDep) -> Response:
    """One of its files."""
    return _response(name, gateway)


def _response(name: str, gateway: GatewayDep) -> Response:
    kind = _KINDS.get(name.rpartition(".")[2])
    if not gateway.settings.console or kind is None or name not in _files():
        raise HTTPException(404)
    return Response(_files()[name], media_type=kind, headers=_HEADERS)
