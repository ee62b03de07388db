"""Several processes that want the same chunks: each is compiled by one of them, and the others wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from .chunks import ChunkKey
from .compiler import pack
from .errors import StoreError
from .storage.store import ChunkStore

__all__ = ["compile_in_turns"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


def compile_in_turns(
    store: ChunkStore,
    keys: Sequence[ChunkKey],
    lengths: Sequence[int],
    rows: int,
    compile_batch: Callable[[list[int]], None],
    lease_seconds: Callable[[int], float],
    finished: Callable[[list[int]], None],
) -> None:
    """Have every chunk compiled and stored, by this process or by another; returns when all of them are.

    A process leases the chunks of a batch while it compiles them, and takes over those of others whose leases end
    without a result. An interrupted batch gives its leases back.

    Parameters
    ----------
    store
        Where the chunks go.
    keys, lengths
        Chunks, each once, and their tokens.
    rows
        Most tokens in a batch.
    compile_batch
        Compiles and stores the chunks of these indices.
    lease_seconds
        How long a batch of so many tokens may take at most; then others take it over.
    finished
        Called with the indices of chunks that are stored.
    """
    todo = list(range(len(keys)))
    pause = _FIRST_PAUSE
    while todo:
        left: list[int] = []
        for batch in pack([lengths[i] for i in todo], rows):
            left += _turn(store, keys, lengths, [todo[i] for i in batch], compile_batch, lease_seconds, finished)
        if len(left) == len(todo):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            pause = _FIRST_PAUSE
        todo = left


def _turn(
    store: ChunkStore,
    keys: Sequence[ChunkKey],
    lengths: Sequence[int],
    batch: list[int],
    compile_batch: Callable[[list[int]], None],
    lease_seconds: Callable[[int], float],
    finished: Callable[[list[int]], None],
) -> list[int]:
    """Compile what nobody else is compiling; returns the indices of the rest."""
    known = store.known([keys[i] for i in batch])
    wanted = [i for i in batch if keys[i] not in known]
    granted: set[ChunkKey] = set()
    if wanted:
        granted = store.lease([keys[i] for i in wanted], lease_seconds(sum(lengths[i] for i in wanted)))
    try:
        # Whoever had them leased may have finished since the first look.
        known |= store.known(list(granted))
        mine = [i for i in wanted if keys[i] in granted and keys[i] not in known]
        if mine:
            compile_batch(mine)
    finally:
        if granted:
            with contextlib.suppress(StoreError):  # they end by themselves
                store.release(list(granted))
    left = [i for i in wanted if keys[i] not in granted]
    done = [i for i in batch if i not in left]
    if done:
        finished(done)
    return left
