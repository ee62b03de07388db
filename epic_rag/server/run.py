"""Runs a gateway until it is told to stop, and lets running answers end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from epic_engine import ConfigError, Engine, StoreError, parse_policy
from fastapi import FastAPI

from epic_rag.defaults import AUTO
from epic_rag.retrieval import Embedder, MiniLMEmbedder
from epic_rag.server.app import create_app
from epic_rag.server.keys import KeyRing
from epic_rag.server.settings import ServerSettings
from epic_rag.server.state import Gateway
from epic_rag.server.tenants import Tenants

__all__ = ["GatewayServer", "open_app", "serve"]

logger = logging.getLogger(__name__)

# After what a client may take to read, its connection is let go by the system, too.
_MARGIN_S = 5


class GatewayServer(uvicorn.Server):
    """An HTTP server that refuses new requests at shutdown and waits for the running ones.

    Parameters
    ----------
    app
        From :func:`~epic_rag.server.app.create_app`.
    settings
        Of the gateway.

    Attributes
    ----------
    gave_up
        Whether there were requests at the end that did not end in time.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        # uvicorn's own waiting comes after ours, and must not add to it.
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        super().__init__(config)
        self.gave_up = False
        self._admission = app.state.admission
        self._settings = settings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end, then stop."""
        logger.info("shutting down; %d requests are running", self._admission.running)
        await self._drain()
        self.gave_up = self._admission.running > 0
        if self.gave_up:
            logger.warning("%d requests did not end in time and are given up", self._admission.running)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C: the first ends the gateway gracefully, another one at once."""
        # uvicorn would raise the signal again when it has ended, before the store is closed.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _drain(self) -> None:
        draining = asyncio.create_task(self._admission.drain(self._settings.drain_seconds))
        while not draining.done() and not self.force_exit:
            await asyncio.wait([draining], timeout=0.1)
        draining.cancel()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens at; once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return host, port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            # An answer that was given up may lie in the system's buffers: without this for as long as its reader likes.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                patience = int((self._settings.write_seconds + _MARGIN_S) * 1000)
                for server in self.servers:
                    for listening in server.sockets:
                        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
            logger.info("listening", extra={"host": self.address[0], "port": self.address[1]})


@contextmanager
def open_app(
    settings: ServerSettings, *, engine: Engine | None = None, embedder: Callable[[], Embedder] = MiniLMEmbedder
) -> Iterator[FastAPI]:
    """The application with everything that it needs; closed at the end.

    Parameters
    ----------
    settings
        Of the gateway.
    engine
        An open engine whose store is ``settings.store / "chunks"``; it stays open. None loads the settings' model.
    embedder
        Makes the embedder of documents.

    Raises
    ------
    ConfigError
        If keys or settings cannot be used; before the model is loaded.
    ModelLoadError, SelfTestError, StoreError
        As for :class:`~epic_engine.Engine`.
    """
    if settings.policy != AUTO:
        parse_policy(settings.policy)
    keys = KeyRing.open(settings.api_key_file, settings.namespace)
    if not keys.required and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("everybody who reaches %s may use this gateway: give api_key_file", settings.host)
    opened = engine or _engine(settings)
    try:
        tenants = Tenants(opened, settings.store, policy=settings.policy, context=settings.context, embedder=embedder)
        try:
            # Whoever asks first should not wait for files to be opened, nor be the one who finds that they cannot be.
            for namespace in keys.namespaces:
                tenants.get(namespace)
            yield create_app(Gateway(settings, opened, tenants), keys)
        finally:
            tenants.close()
    finally:
        if engine is None:
            opened.close()


def _engine(settings: ServerSettings) -> Engine:
    try:
        settings.store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the store {settings.store} cannot be made ({error.strerror}): give a folder that may be written."
        ) from error
    return Engine(
        settings.model,
        store=settings.store / "chunks",
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        memory=settings.memory,
        max_model_len=settings.max_model_len,
    )


def serve(settings: ServerSettings) -> bool:
    """Run a gateway until SIGTERM or Ctrl-C.

    Returns
    -------
    bool
        Whether all requests had ended when it did.

    Raises
    ------
    ConfigError
        If it cannot listen at its address; as :func:`open_app` also.
    """
    # Before the model is loaded, which takes its time.
    with _bound(settings.host, settings.port) as listening, open_app(settings) as app:
        server = GatewayServer(app, settings)
        server.run(sockets=[listening])
    return not server.gave_up


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Clients that know IPv4 only are more than those that know IPv6 only.
        family, kind, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listening = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address of this machine ({error.strerror}): give another.") from error
    try:
        if os.name == "posix":  # else a port stays taken for a while after its gateway has ended
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"the gateway cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}): "
            "give another port, or end what listens there."
        ) from error
    return listening
