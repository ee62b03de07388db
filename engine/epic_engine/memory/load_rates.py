"""Is it quicker to load a chunk or to compile it again? (Jin et al. 2024, "Compute or load KV cache? Why not both?")"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from epic_engine.chunks import ChunkKey
from epic_engine.storage.store import ChunkInfo

__all__ = ["LoadRates"]

_SMOOTHING = 0.2
_EXPLORE_EVERY = 16
_MOST_KNOWN = 8192


class LoadRates:
    """Measured speed of loading, against a given speed of compiling.

    A chunk's first load in this process reads and checks its file; later ones mostly find it in the system's page
    cache. The two are measured apart.

    Parameters
    ----------
    token_seconds
        Seconds to compile one token, asked when it is needed; None where that is not known.
    """

    def __init__(self, token_seconds: Callable[[], float | None]) -> None:
        self._token_seconds = token_seconds
        self._lock = threading.Lock()
        self._byte_seconds: dict[bool, float] = {}
        self._known: OrderedDict[ChunkKey, None] = OrderedDict()
        self._chances = 0

    def record(self, key: ChunkKey, nbytes: int, seconds: float) -> None:
        """Count a finished load."""
        with self._lock:
            again = key in self._known
            now = seconds / max(nbytes, 1)
            before = self._byte_seconds.get(again, now)
            self._byte_seconds[again] = before + _SMOOTHING * (now - before)
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def recompute(self, info: ChunkInfo) -> bool:
        """Whether compiling this chunk is quicker than loading it.

        Loads until it has measured something, and now and then although compiling looks quicker, to notice when that
        has changed.
        """
        token_seconds = self._token_seconds()
        if token_seconds is None:
            return False
        with self._lock:
            byte_seconds = self._byte_seconds.get(info.key in self._known)
            if byte_seconds is None or byte_seconds * info.nbytes <= token_seconds * len(info.token_ids):
                return False
            self._chances += 1
            return self._chances % _EXPLORE_EVERY != 0

    def stats(self) -> dict[str, float]:
        """Bytes a second of first and repeated loads, as far as there were any."""
        names = {False: "first", True: "again"}
        with self._lock:
            return {names[again]: 1 / max(s, 1e-15) for again, s in sorted(self._byte_seconds.items())}
