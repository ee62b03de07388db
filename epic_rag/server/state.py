"""What all requests of one gateway share, and who asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from epic_engine import Engine
from fastapi import Depends, Request

from epic_rag.server.keys import ApiKey
from epic_rag.server.settings import ServerSettings
from epic_rag.server.tenants import Tenant, Tenants

__all__ = ["Caller", "CallerDep", "Gateway", "GatewayDep"]


@dataclass(frozen=True)
class Gateway:
    """Settings, engine and namespaces of a running gateway."""

    settings: ServerSettings
    engine: Engine
    tenants: Tenants


@dataclass(frozen=True)
class Caller:
    """Who sent a request, and what they have.

    Attributes
    ----------
    key
        Their key.
    tenant
        The namespace that it opens.
    """

    key: ApiKey
    tenant: Tenant


def _gateway(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def _caller(request: Request) -> Caller:
    # In a thread of its own: a namespace's first request opens its files.
    gateway = _gateway(request)
    key = cast(ApiKey, request.state.key)
    return Caller(key, gateway.tenants.get(key.namespace))


GatewayDep = Annotated[Gateway, Depends(_gateway)]
CallerDep = Annotated[Caller, Depends(_caller)]
