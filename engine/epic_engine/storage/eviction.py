"""Which chunks go when a store or a tenant has no room: GreedyDual-Size-Frequency (Cherkasova 1998).

A chunk's priority is ``clock + uses * cost / size``: what it is worth to have it, by the byte. The lowest go first, and
the clock rises to the highest priority that went, so that what was worth much once and is no longer used grows old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from epic_engine.errors import StoreError

from .store import ChunkInfo

__all__ = ["SECONDS_PER_TOKEN", "no_room", "victims", "weight"]

# Only ratios matter, so it matters little how fast the machine is: chunks of one store were mostly compiled on one.
SECONDS_PER_TOKEN = 2e-3

Item = TypeVar("Item")


def weight(info: ChunkInfo, size: int) -> float:
    """Seconds saved per byte by one use of a chunk.

    Parameters
    ----------
    info
        The chunk; without a cost it is taken to cost as much as its tokens mostly do.
    size
        Bytes that it takes.
    """
    cost = len(info.token_ids) * SECONDS_PER_TOKEN if info.cost is None else info.cost
    return max(cost, 0.0) / max(size, 1)


def victims(ranked: Iterable[tuple[Item, int, float]], need: int) -> tuple[list[Item], float] | None:
    """The first chunks that together free enough bytes, and the clock after they went; None if there are too few.

    Parameters
    ----------
    ranked
        Chunks that may go with their size and priority, the lowest priority first.
    need
        Bytes; 0 or less is free already.
    """
    chosen: list[Item] = []
    clock = 0.0
    if need > 0:
        for item, size, priority in ranked:
            chosen.append(item)
            clock = max(clock, priority)
            need -= size
            if need <= 0:
                break
    return (chosen, clock) if need <= 0 else None


def no_room(what: str, limit: int, wanted: int, pinned: int) -> StoreError:
    """The error that says why chunks cannot be stored.

    Parameters
    ----------
    what
        Whose limit it is, such as ``"namespace 'a'"``.
    limit, wanted, pinned
        Bytes allowed, bytes of the new chunks, and bytes of chunks that must stay.
    """
    return StoreError(
        f"{what} may take {limit:,} bytes, of which pinned chunks take {pinned:,}, and the new chunks need {wanted:,}: "
        "raise the limit, unpin or delete chunks, or store fewer at once."
    )
