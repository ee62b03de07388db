"""What is published under a URL, as this process sees it: the newest catalogue, and chunks one at a time."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from epic_engine.chunks import ChunkKey
from epic_engine.errors import ChunkNotFoundError, StoreError

from .generations import Generations
from .objects import Objects
from .payload import Encoded
from .remote_reader import Line, UnreachableError, fetch_chunk
from .snapshots import CURRENT, MOST_CURRENT, Current, Snapshot
from .store import ChunkInfo

__all__ = ["Published", "RemoteStatus"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class RemoteStatus:
    """How a remote store is doing.

    Attributes
    ----------
    generation
        Of the catalogue that is looked up in; None if none was ever fetched.
    reachable
        Whether the last call was answered.
    fetched, nbytes
        Chunks fetched by this process, and their bytes.
    unusable
        Chunks whose objects were damaged or missing.
    """

    generation: int | None
    reachable: bool
    fetched: int
    nbytes: int
    unusable: int


class Published:
    """The newest catalogue under a URL and what it names. The network is never waited for without an end.

    Parameters
    ----------
    objects
        What is below the URL.
    generations
        Where catalogues are kept here.
    refresh_seconds
        Seconds after which a question has a thread see whether something newer was published.
    timeout
        Seconds after which an answer is not awaited any more.
    adopted
        Called with each new catalogue.
    """

    def __init__(
        self,
        objects: Objects,
        generations: Generations,
        refresh_seconds: float,
        timeout: float,
        adopted: Callable[[Snapshot], None],
    ) -> None:
        self._url = objects.url
        self._line = Line(objects, timeout)
        self._generations = generations
        self._refresh_seconds = refresh_seconds
        self._adopted = adopted
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._looked = float("-inf")
        self._thread: threading.Thread | None = None
        self._closed = False
        self._told = ""
        self._unusable: set[ChunkKey] = set()
        self._fetched = self._nbytes = self._damaged = 0
        self._snapshot = generations.newest()

    @property
    def up(self) -> bool:
        """Whether the last call was answered."""
        return self._line.up

    @property
    def status(self) -> RemoteStatus:
        """How it is doing."""
        snapshot = self._snapshot
        generation = snapshot.current.generation if snapshot else None
        with self._lock:
            return RemoteStatus(generation, self._line.up, self._fetched, self._nbytes, self._damaged)

    # -- the catalogue -----------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Adopt what was published since; whether there was anything. What keeps it from that is logged."""
        with self._refreshing:
            self._looked = time.monotonic()
            try:
                return self._refresh()
            except UnreachableError:  # the line has said so
                return False
            except FileNotFoundError:
                self._tell(f"nothing is published under {self._url}: check the URL, or publish first")
            except (ValueError, OSError, StoreError, sqlite3.Error) as error:
                self._tell(f"what is published under {self._url} cannot be used: {error}")
            return False

    def _refresh(self) -> bool:
        text = self._line.read_small(CURRENT, MOST_CURRENT)
        before = self._snapshot
        if before is not None and before.current == Current.of(text):
            self._told = ""
            return False
        try:
            snapshot = self._generations.adopt(text, self._line.read)
        except FileNotFoundError:  # something newer still was published while this was fetched
            snapshot = self._generations.adopt(self._line.read_small(CURRENT, MOST_CURRENT), self._line.read)
        with self._lock:
            self._snapshot = snapshot
            self._unusable = set()
            self._told = ""
        self._adopted(snapshot)
        return True

    def ask(self, question: Callable[[Snapshot], Result], otherwise: Result) -> Result:
        """What the catalogue says, ``otherwise`` if there is none; one that turns out damaged is fetched again."""
        self._look()
        snapshot = self._snapshot
        if snapshot is None:
            return otherwise
        try:
            return question(snapshot)
        except StoreError as error:
            with self._lock:
                if self._snapshot is snapshot:
                    self._snapshot = None
                    self._looked = float("-inf")
            self._generations.forget(snapshot)
            self._tell(f"the catalogue of {self._url} is fetched again: {error}")
            return otherwise

    def _look(self) -> None:
        """Have a thread refresh if it is time to."""
        due = time.monotonic() >= self._looked + self._refresh_seconds and self._line.due
        if not due or self._refreshing.locked():
            return
        with self._lock:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self.refresh, name="epic-remote-refresh", daemon=True)
            self._thread.start()

    # -- chunks ------------------------------------------------------------------------------------------------

    def usable(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those of some chunks whose objects were not found damaged or missing."""
        return set(keys) - self._unusable

    def fetch(self, key: ChunkKey) -> tuple[ChunkInfo, Encoded]:
        """A chunk over the network, its bytes checked.

        Raises
        ------
        ChunkNotFoundError
            If it cannot be had now.
        """
        try:
            found = self.ask(lambda snapshot: fetch_chunk(self._line.read, snapshot, key), None)
        except UnreachableError as error:
            raise ChunkNotFoundError(f"chunk {key} cannot be fetched: {error}. Compile its tokens again.") from error
        except (FileNotFoundError, ValueError) as error:
            raise self.set_aside(key, error) from error
        if found is None:
            raise ChunkNotFoundError(f"chunk {key} is not published under {self._url} any more: compile its tokens.")
        with self._lock:
            self._fetched += 1
            self._nbytes += found[1].nbytes
        return found

    def set_aside(self, key: ChunkKey, error: Exception) -> ChunkNotFoundError:
        """A published chunk is of no use, until something newer is published; returns what is to be raised."""
        with self._lock:
            self._unusable.add(key)
            self._damaged += 1
        text = f"chunk {key} under {self._url} cannot be used: {error}. Compile its tokens again."
        logger.warning("%s", text)
        return ChunkNotFoundError(text)

    def _tell(self, text: str) -> None:
        """Log something once, until something else is said."""
        with self._lock:
            known, self._told = self._told == text, text
        if not known and not self._closed:
            logger.warning("%s", text)

    def close(self) -> None:
        """Refresh no more."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSING_SECONDS)  # a dead network is not waited for
