"""A gateway on a real socket, with the tiny model, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from epic_engine import Engine
from fastapi import FastAPI

from epic_rag.retrieval import Embedder
from epic_rag.server.run import GatewayServer, open_app
from epic_rag.server.settings import ServerSettings, load_settings
from epic_rag.server.tenants import Tenant, Tenants
from tests.rag.stack import BagOfWords, model, tokenizer

__all__ = ["MODEL", "Running", "key_of", "running"]

MODEL = "tiny"
"""The name under which clients ask for the model."""

_SECONDS = 60.0
"""Longest that a client of a test waits: a gateway that hangs fails the test."""


def key_of(name: str) -> str:
    """The API key that a test's key of this name has."""
    return f"{name}-key-for-tests-only"


@dataclass
class Running:
    """A gateway that runs.

    Attributes
    ----------
    base_url
        ``http://127.0.0.1:port``.
    app, engine, settings
        What runs.
    """

    base_url: str
    app: FastAPI
    engine: Engine
    settings: ServerSettings

    @property
    def tenants(self) -> Tenants:
        """Its namespaces."""
        return self.app.state.gateway.tenants  # type: ignore[no-any-return]

    def tenant(self, namespace: str = "default") -> Tenant:
        """One of them."""
        return self.tenants.get(namespace)

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        """A plain HTTP client; ``key`` is the name of a key."""
        headers = {} if key is None else {"Authorization": f"Bearer {key_of(key)}"}
        return httpx.Client(base_url=self.base_url, headers=headers, **{"timeout": _SECONDS, **options})

    def openai(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """The official client; it does not retry, so that tests see every error."""
        options = {"timeout": _SECONDS, "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=key_of(key or "nobody"), **options)

    @property
    def memory(self) -> dict[str, Any]:
        """What the engine says of its memory."""
        return self.engine.stats()["memory"]  # type: ignore[no-any-return]

    def check_idle(self) -> None:
        """No request holds memory any more, and the counts of pages are right."""
        self.engine.drain()
        self.engine.check_integrity()
        memory = self.memory
        assert memory["private_bytes"] == 0, memory  # what prefix caches keep is counted apart
        assert not memory["pages"]["leased"], memory


def _keys_file(folder: Path, keys: Mapping[str, Mapping[str, Any]]) -> Path:
    lines = []
    for name, fields in keys.items():
        lines += ["[[keys]]", f'name = "{name}"', f'key = "{key_of(name)}"']
        lines += [
            f"{field} = {str(value).lower() if isinstance(value, bool | int) else repr(value)}"
            for field, value in fields.items()
        ]
    path = folder / "keys.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    path.chmod(0o600)
    return path


@contextmanager
def running(
    folder: Path,
    *,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    embedder: Callable[[], Embedder] = BagOfWords,
    engine_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Run a gateway in a thread; at the end it must shut down and all memory of requests must be free.

    Parameters
    ----------
    folder
        For its store and keys; a folder that was used before has what it had.
    keys
        Name to further fields (``namespace`` and limits); the key itself is :func:`key_of` the name. None asks nobody
        for a key.
    embedder
        Makes the embedder of documents.
    engine_options
        Of the engine.
    **settings
        Of the gateway.
    """
    options = {"context": "isolated", "policy": "naive", "model_name": MODEL, "port": 0, **settings}
    if keys is not None:
        options["api_key_file"] = _keys_file(folder, keys)
    store = folder / "store"
    made = load_settings({"store": store, **options})
    with (
        Engine(
            model(), tokenizer=tokenizer(), selftest=False, store=store / "chunks", **(engine_options or {})
        ) as engine,
        open_app(made, engine=engine, embedder=embedder) as app,
    ):
        server = GatewayServer(app, made)
        thread = threading.Thread(target=server.run, name="gateway", daemon=True)
        thread.start()
        try:
            _wait(lambda: server.started or not thread.is_alive())
            assert server.started, "the gateway did not start"
            host, port = server.address
            here = Running(f"http://{host}:{port}", app, engine, made)
            yield here
        finally:
            server.should_exit = True
            thread.join(_SECONDS)
            assert not thread.is_alive(), "the gateway did not shut down"
        here.check_idle()


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)
