"""A store in front of a published one: one machine compiles, many link.

What :func:`~epic_engine.storage.publish.publish` has put under a URL is found and read as if it lay here. A chunk is
fetched when it is first loaded and kept in a cache of its own; chunks that are compiled here go into the local store.
The network is only ever a way to save work: what cannot be read from it is a miss, and is compiled.

::

    LOCAL/remote/<32 hex>/generations/   the newest published catalogue
    LOCAL/remote/<32 hex>/cache/         a store with the chunks that were fetched
    LOCAL/remote/<32 hex>/hidden.sqlite  what was deleted here
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, ConfigError, StoreError

from .file_store import FileStore
from .generations import Generations
from .objects import Objects
from .payload import Encoded, decode
from .published import Published, RemoteStatus
from .snapshots import Snapshot
from .store import ChunkInfo, ChunkStore, GcReport, StoreUsage, VerifyReport
from .tombstones import Tombstones

__all__ = ["RemoteStatus", "RemoteStore"]

logger = logging.getLogger(__name__)

_FETCHES = 8
_PAGE = 1000


class RemoteStore(ChunkStore):
    """A local store that also has what was published under a URL.

    Chunks of the local store come first. ``put``, leases, pins and quotas are the local store's; deleting a chunk that
    is published hides it here, also after a restart.

    Parameters
    ----------
    url
        Where it was published, such as ``"s3://bucket/prefix"``.
    local
        What is compiled here; closed with this store.
    storage_options
        For fsspec: credentials, endpoints.
    refresh_seconds
        Seconds after which a look-up has a thread see whether something newer was published.
    timeout
        Seconds after which an answer of the network is not awaited any more, and the chunk is a miss.
    cache_bytes
        What fetched chunks may take here; None: as much as the local store may, or what it was before.

    Raises
    ------
    ConfigError
        If an option or the URL cannot be used, or a package is missing.
    StoreError
        If there cannot be written beside the local store.
    """

    def __init__(
        self,
        url: str,
        local: FileStore,
        *,
        storage_options: Mapping[str, Any] | None = None,
        refresh_seconds: float = 60.0,
        timeout: float = 60.0,
        cache_bytes: int | None = None,
    ) -> None:
        if not (refresh_seconds >= 0 and timeout > 0):
            raise ConfigError(f"refresh_seconds={refresh_seconds} and timeout={timeout} must be positive.")
        self.url = url
        self.local = local
        objects = Objects(url, storage_options)
        home = local.path / "remote" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
        try:
            generations = Generations(home / "generations")
        except OSError as error:
            raise StoreError(
                f"{home} cannot be written: {error}. A remote store keeps what it fetches beside the local one: give a "
                "local store in a directory that can be written."
            ) from error
        self._hidden = Tombstones(home / "hidden.sqlite")
        self.cache = FileStore(home / "cache", max_bytes=cache_bytes if cache_bytes is not None else local.budget)
        self._lock = threading.Lock()
        self._closed = False
        self._fetching: dict[ChunkKey, Future[Tensor]] = {}
        self._executor = ThreadPoolExecutor(_FETCHES, thread_name_prefix="epic-remote")
        self._remote = Published(objects, generations, refresh_seconds, timeout, self._adopted)
        self._remote.refresh()

    # -- what is published -------------------------------------------------------------------------------------

    @property
    def status(self) -> RemoteStatus:
        """How the remote store is doing."""
        return self._remote.status

    def refresh(self) -> bool:
        """See whether something newer was published, and look up in that from now on; whether it was so.

        What keeps it from that is logged; then everything stays as it was.
        """
        return self._remote.refresh()

    def _adopted(self, snapshot: Snapshot) -> None:
        """Let go of what is published no more."""
        for page in _pages(self.cache.entries()):
            keys = [info.key for info in page]
            self.cache.delete(list(set(keys) - snapshot.known(keys)))

    def _available(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Published chunks that can be had now."""
        found = self._remote.usable(keys)
        return found if self._remote.up else self.cache.known(list(found))

    def _visible(self, infos: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Published chunks that can be had now and are not hidden."""
        available = self._available(info.key for info in infos)
        return self._hidden.visible([info for info in infos if info.key in available])

    def _published(self, key: ChunkKey) -> ChunkInfo | None:
        """A chunk that is not in the local store."""
        info = self._remote.ask(lambda snapshot: snapshot.info(key), None)
        return info if info is not None and self._visible([info]) else None

    # -- look-ups ----------------------------------------------------------------------------------------------

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """Catalogue entry, or None."""
        return self.local.info(key) or self._published(key)

    def known(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Which of the keys are here or published."""
        found = self.local.known(keys)
        left = [key for key in keys if key not in found]
        if left:
            there = self._available(self._remote.ask(lambda snapshot: snapshot.known(left), set()))
            if self._hidden.any():
                infos = [info for key in there if (info := self._remote.ask(partial(Snapshot.info, key=key), None))]
                there = {info.key for info in self._hidden.visible(infos)}
            found |= there
        return found

    def forms(self, namespace: str, fingerprint: str, content: str) -> list[ChunkInfo]:
        """All compiled forms of some token ids, oldest first."""
        here = self.local.forms(namespace, fingerprint, content)
        there = self._visible(self._remote.ask(lambda snapshot: snapshot.forms(namespace, fingerprint, content), []))
        return _together(there, here)

    def entries(self) -> Iterator[ChunkInfo]:
        """All catalogue entries, oldest first."""
        others: Iterator[ChunkInfo] = self._remote.ask(self._others, iter(()))
        return heapq.merge(self.local.entries(), others, key=_age)

    def _others(self, snapshot: Snapshot) -> Iterator[ChunkInfo]:
        """Published chunks that the local store does not have."""
        for page in _pages(snapshot.entries()):
            here = self.local.known([info.key for info in page])
            yield from self._visible([info for info in page if info.key not in here])

    # -- loads -------------------------------------------------------------------------------------------------

    def load(self, key: ChunkKey) -> Tensor:
        """KV of a chunk: from the local store, from what was fetched before, or from the network.

        Raises
        ------
        ChunkNotFoundError
            If nobody has it, or it cannot be had now: then it is not known any more until that has changed.
        """
        try:
            return self.local.load(key)
        except ChunkNotFoundError:
            if self._published(key) is None:
                raise
        try:
            return self.cache.load(key)
        except ChunkNotFoundError:
            return self._fetch_once(key)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to fetch what is not here, several chunks at a time; returns at once."""
        missing = set(keys) - self.local.known(keys)
        for key in missing - self.cache.known(list(missing)):
            with self._lock:
                if self._closed or key in self._fetching:
                    continue
                self._executor.submit(self._fetch_ahead, key)

    def _fetch_ahead(self, key: ChunkKey) -> None:
        try:
            if self._published(key) is not None:
                self._fetch_once(key)
        except (ChunkNotFoundError, StoreError) as error:  # whoever loads it finds out
            logger.debug("chunk %s was not fetched ahead: %s", key, error)

    def _fetch_once(self, key: ChunkKey) -> Tensor:
        """Fetch a chunk, or wait for the thread that does so already."""
        with self._lock:
            running = self._fetching.get(key)
            mine = running or self._fetching.setdefault(key, Future())
        if running is not None:
            return running.result()
        try:
            kv = self._fetch(key)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(kv)
            return kv
        finally:
            with self._lock:
                del self._fetching[key]

    def _fetch(self, key: ChunkKey) -> Tensor:
        try:
            return self.cache.load(key)  # another thread has just fetched it
        except ChunkNotFoundError:
            pass
        info, encoded = self._remote.fetch(key)
        try:
            self.cache.put([(info, encoded)])
            if not self._hidden.visible([info]):  # deleted while it was on its way
                self.cache.delete([key])
            return self.cache.load(key)
        except (StoreError, ChunkNotFoundError) as error:
            logger.debug("chunk %s is not kept: %s", key, error)
        try:
            return decode(encoded.parts[0], encoded.encoding, encoded.shape, encoded.dtype)
        except (ValueError, StoreError) as error:  # numbers that are not finite; a package that is missing
            raise self._remote.set_aside(key, error) from error

    def stored(self, key: ChunkKey) -> tuple[ChunkInfo, Encoded]:
        """Entry of a chunk with its KV as it is kept, wherever it is.

        Raises
        ------
        ChunkNotFoundError
            As :meth:`load`.
        """
        try:
            return self.local.stored(key)
        except ChunkNotFoundError:
            if self._published(key) is None:
                raise
        try:
            return self.cache.stored(key)
        except ChunkNotFoundError:
            return self._remote.fetch(key)

    # -- changes -----------------------------------------------------------------------------------------------

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor | Encoded]]) -> None:
        """Keep chunks in the local store."""
        self.local.put(chunks)
        self._hidden.welcome(info for info, _ in chunks)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks of the local store, and hide those that are published."""
        return self._gone(keys, lambda: self._hidden.hide_chunks(keys), lambda store: store.delete(keys))

    def erase(self, namespace: str, contents: Sequence[str]) -> int:
        """Forget every form of some token ids and what was compiled behind them, and hide what is published of that."""
        there: set[ChunkKey] = set()
        for content in contents:
            there |= self._remote.ask(partial(Snapshot.saw, namespace=namespace, content=content), set())
        return self._gone(
            list(there),
            lambda: self._hidden.hide_contents(namespace, contents),
            lambda store: store.erase(namespace, contents),
        )

    def erase_namespace(self, namespace: str) -> int:
        """Forget every chunk of a tenant, and hide all that is published of it, now and later."""
        there: set[ChunkKey] = self._remote.ask(lambda snapshot: snapshot.of_namespace(namespace), set())
        return self._gone(
            list(there),
            lambda: self._hidden.hide_namespace(namespace),
            lambda store: store.erase_namespace(namespace),
        )

    def _gone(self, published: Sequence[ChunkKey], hide: Callable[[], None], remove: Callable[[FileStore], int]) -> int:
        """Hide first, then remove: what was deleted is never seen again, whatever ends this process."""
        only_there = self.known(published) - self.local.known(published)
        hide()
        remove(self.cache)
        return remove(self.local) + len(only_there)

    def pin(self, keys: Sequence[ChunkKey]) -> int:
        """Never evict these chunks of the local store."""
        return self.local.pin(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """Let pinned chunks be evicted again."""
        return self.local.unpin(keys)

    def set_quota(self, namespace: str, nbytes: int | None) -> None:
        """Limit what a tenant may take of the local store."""
        self.local.set_quota(namespace, nbytes)

    def lease(self, keys: Sequence[ChunkKey], seconds: float) -> set[ChunkKey]:
        """Take the right to compile chunks here."""
        return self.local.lease(keys, seconds)

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Give leases back."""
        self.local.release(keys)

    # -- upkeep ------------------------------------------------------------------------------------------------

    def verify(self, *, repair: bool = False, quick: bool = False) -> VerifyReport:
        """Check the local store and what was fetched; nothing is read from the network."""
        report = self.local.verify(repair=repair, quick=quick)
        fetched = self.cache.verify(repair=repair, quick=quick)
        folder = self.cache.path.relative_to(self.local.path).as_posix()
        report.checked += fetched.checked
        report.corrupt += fetched.corrupt
        report.missing += fetched.missing
        report.orphans += [f"{folder}/{name}" for name in fetched.orphans]
        report.quarantined += fetched.quarantined
        return report

    def usage(self) -> StoreUsage:
        """What the local store and the fetched chunks take here."""
        here, fetched = self.local.usage(), self.cache.usage()
        models = dict(here.models)
        for name, (chunks, nbytes) in fetched.models.items():
            before = models.get(name, (0, 0))
            models[name] = before[0] + chunks, before[1] + nbytes
        return StoreUsage(models, here.dead_bytes + fetched.dead_bytes, here.quarantined + fetched.quarantined)

    def gc(self) -> GcReport:
        """Remove what is expired and what nothing needs, of the local store and of what was fetched."""
        report, fetched = self.local.gc(), self.cache.gc()
        folder = self.cache.path.relative_to(self.local.path).as_posix()
        report.expired += fetched.expired
        report.files += [f"{folder}/{name}" for name in fetched.files]
        report.nbytes += fetched.nbytes
        report.quarantined += fetched.quarantined
        report.leases += fetched.leases
        return report

    def compact(self, *, live_share: float = 0.5) -> int:
        """Give the bytes of deleted chunks back to the disk, also those of fetched ones."""
        return self.local.compact(live_share=live_share) + self.cache.compact(live_share=live_share)

    def free_bytes(self) -> int:
        """Bytes that the local store can still keep."""
        return self.local.free_bytes()

    def close(self) -> None:
        """Close everything, the local store, too. Closing twice is fine."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._remote.close()
        self._hidden.close()
        self.cache.close()
        self.local.close()


def _pages(infos: Iterable[ChunkInfo]) -> Iterator[list[ChunkInfo]]:
    left = iter(infos)
    while page := list(islice(left, _PAGE)):
        yield page


def _age(info: ChunkInfo) -> tuple[float, str]:
    return info.created, info.key.hex


def _together(there: Iterable[ChunkInfo], here: Iterable[ChunkInfo]) -> list[ChunkInfo]:
    """Chunks of both, oldest first; what is here counts."""
    return sorted({info.key: info for info in (*there, *here)}.values(), key=_age)
