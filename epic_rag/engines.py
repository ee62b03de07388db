"""Engines that several objects of one process share.

A model, a vector store and an ingestion step of one application each ask for an engine by its settings; they get
the same one, and the last to let go closes it. A lease also hands out the compiled texts of its directory::

    store/
      chunks/               compiled KV, of all namespaces
      texts/<namespace>/    ids and texts, see epic_rag.texts
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from epic_engine import ConfigError, Engine, EngineClosedError, FileStore, RemoteStore

from epic_rag.defaults import AUTO
from epic_rag.publishing import fetch_documents
from epic_rag.texts import CompiledTexts

__all__ = ["EngineUser", "LazyLease", "Lease", "acquire", "close_all", "folder_name"]

logger = logging.getLogger(__name__)


# File systems take names of 255 bytes.
_LONGEST_NAME = 200


def folder_name(namespace: str) -> str:
    """A namespace as the name of a folder, a different one for each; never one that leads elsewhere."""
    name = quote(namespace, safe="")
    if name in (".", ".."):
        return name.replace(".", "%2E")
    if len(name) > _LONGEST_NAME:  # longer than any that is not shortened
        return f"{name[: _LONGEST_NAME - 60]}~{hashlib.sha256(namespace.encode()).hexdigest()}"
    return name


class _Shared:
    """One engine, how many hold it, and the compiled texts that were asked for."""

    def __init__(
        self,
        key: Hashable,
        model: Any,
        tokenizer: Any,
        home: Path | None,
        remote: tuple[str, Mapping[str, Any] | None] | None,
        options: dict[str, Any],
    ) -> None:
        self.key = key
        self.holders = 0
        # Held, so that no other object can take the identity that is part of the key.
        self.model = model
        self._tokenizer = tokenizer
        self._home = home
        self._remote = remote
        self._options = options
        self._engine: Engine | None = None
        self._texts: dict[tuple[str, str], CompiledTexts] = {}
        self._lock = threading.RLock()
        self._open = ExitStack()

    def engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = Engine(self.model, tokenizer=self._tokenizer, store=self._store(), **self._options)
                self._open.callback(self._engine.close)
            return self._engine

    def _store(self) -> Path | RemoteStore | None:
        if self._home is None or self._remote is None:
            return None if self._home is None else self._home / "chunks"
        url, options = self._remote
        fetch_documents(self._home, url, storage_options=options)
        store = RemoteStore(url, FileStore(self._home / "chunks"), storage_options=options)
        self._open.callback(store.close)
        return store

    def texts(self, context: str, policy: str) -> CompiledTexts:
        with self._lock:
            engine = self.engine()
            if self._home is None:
                # Ids and texts beside KV in memory: gone with it.
                self._home = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="epic-rag-")))
            if (context, policy) not in self._texts:
                folder = self._home / "texts" / folder_name(engine.config.namespace)
                opened = CompiledTexts(folder, engine, context=context, policy=policy)
                self._open.callback(opened.close)
                self._texts[context, policy] = opened
            return self._texts[context, policy]

    def close(self) -> None:
        with self._lock:
            self._open.close()


class Lease:
    """A share in an engine; made by :func:`acquire`. Closing twice is fine, and so is not closing before exit."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The engine; every lease with the same settings has the same one.

        Raises
        ------
        EngineClosedError
            If the lease was closed.
        """
        self._check()
        return self._shared.engine()

    def texts(self, context: str = AUTO, policy: str = AUTO) -> CompiledTexts:
        """The compiled texts beside the engine's store; the same object for the same arguments.

        They are closed with the engine: do not close them yourself.

        Parameters
        ----------
        context, policy
            As in :class:`~epic_rag.texts.CompiledTexts`.

        Raises
        ------
        EngineClosedError
            If the lease was closed.
        """
        self._check()
        return self._shared.texts(context, policy)

    def _check(self) -> None:
        if self._closed:
            raise EngineClosedError("this share in the engine was closed: acquire() another one.")

    def close(self) -> None:
        """Give the share back; the last one closes the engine and its compiled texts."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            self._shared.holders -= 1
            last = self._shared.holders == 0
            if last:
                _engines.pop(self._shared.key, None)
        if last:
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LazyLease:
    """A lease that is taken at its first use, and again after it was given back; any number of threads may use one.

    Parameters
    ----------
    take
        Takes the lease; what :func:`acquire` returns.
    """

    def __init__(self, take: Callable[[], Lease]) -> None:
        self._take = take
        self._lease: Lease | None = None
        self._lock = threading.Lock()

    def get(self) -> Lease:
        """The lease."""
        with self._lock:
            if self._lease is None:
                self._lease = self._take()
            return self._lease

    @property
    def taken(self) -> bool:
        """Whether it is held now."""
        return self._lease is not None

    def close(self) -> None:
        """Give it back, if it is held."""
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


class EngineUser:
    """What models of all frameworks have in common: an engine by their settings, opened at the first use.

    Mixed into a framework's class, whose constructor sets ``_engine`` to ``LazyLease(self._acquire)``.
    """

    # Pydantic would take annotations that it sees for fields.
    if TYPE_CHECKING:
        model: str
        store: str | None
        policy: str
        context: str
        namespace: str
        device: str
        dtype: str
        context_window: int | None
        engine_options: dict[str, Any]
        _loaded: tuple[Any, Any] | None
        _engine: LazyLease

    def _acquire(self) -> Lease:
        model, tokenizer = self._loaded or (self.model, None)
        return acquire(
            model,
            tokenizer=tokenizer,
            store=self.store,
            device=self.device,
            dtype=self.dtype,
            namespace=self.namespace,
            max_model_len=self.context_window,
            **self.engine_options,
        )

    @property
    def engine(self) -> Engine:
        """The engine; opened at the first use."""
        return self._engine.get().engine

    @property
    def texts(self) -> CompiledTexts:
        """The compiled texts that are found in prompts."""
        return self._engine.get().texts(self.context, self.policy)

    def warm_up(self) -> Self:
        """Load the model now rather than at the first call; returns itself."""
        _ = self.texts
        return self

    def close(self) -> None:
        """Let go of the engine, which closes if no other object uses it; the next call opens it again."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_lock = threading.Lock()
_engines: dict[Hashable, _Shared] = {}


def acquire(
    model: Any,
    *,
    tokenizer: Any = None,
    store: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    namespace: str = "default",
    max_model_len: int | None = None,
    remote: str | None = None,
    remote_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Lease:
    """A share in the engine with these settings; the model is loaded by the first one in this process.

    Parameters
    ----------
    model
        As in :class:`~epic_engine.Engine`. A loaded model is known by identity, a path by where it leads.
    tokenizer
        Tokenizer of a loaded model.
    store
        Directory; None keeps everything in memory, for as long as anyone holds a share.
    remote, remote_options
        URL that another machine publishes its directory to, and what fsspec needs for it; see
        :mod:`epic_rag.publishing`. Needs a ``store``, in which is kept what was fetched.
    device, dtype, namespace, max_model_len, **options
        As in :class:`~epic_engine.EngineConfig`.

    Returns
    -------
    Lease
        To be closed when it is not needed any more.

    Raises
    ------
    ModelLoadError, SelfTestError
        As for :class:`~epic_engine.Engine`.
    ConfigError
        If an option is unknown or cannot be used.
    """
    home = None if store is None else Path(os.path.abspath(Path(store).expanduser()))
    settings = {"device": device, "dtype": dtype, "namespace": namespace, "max_model_len": max_model_len, **options}
    if remote is not None and home is None:
        raise ConfigError("remote=… needs store=…: a directory in which what was fetched is kept.")
    from_where = None if remote is None else (remote, repr(sorted((remote_options or {}).items())))
    key = (_identity(model), None if tokenizer is None else id(tokenizer), home, from_where, *sorted(settings.items()))
    try:
        hash(key)
    except TypeError:
        raise ConfigError("engine options must be plain numbers and strings, so that engines can be shared.") from None
    with _lock:
        shared = _engines.get(key)
        if shared is None:
            shared = _engines[key] = _Shared(
                key, model, tokenizer, home, None if remote is None else (remote, remote_options), settings
            )
        shared.holders += 1
    lease = Lease(shared)
    try:
        shared.engine()
    except BaseException:
        lease.close()
        raise
    return lease


def _identity(model: Any) -> Hashable:
    if not isinstance(model, str | os.PathLike):
        return id(model)
    path = Path(model).expanduser()
    return os.path.realpath(path) if path.exists() else os.fspath(model)


def close_all() -> None:
    """Close every shared engine, whoever holds it; runs at exit."""
    with _lock:
        left = list(_engines.values())
        _engines.clear()
    for shared in left:
        try:
            shared.close()
        except Exception:
            logger.exception("an engine could not be closed")


atexit.register(close_all)
