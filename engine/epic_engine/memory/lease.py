"""The right to read chunks in memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Self

from epic_engine.chunks import ChunkKey

from .resident import Resident

if TYPE_CHECKING:
    from .residency import Residency

__all__ = ["Lease"]


class Lease:
    """Chunks that stay in memory until they are released, or until this is garbage-collected."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._residents: dict[ChunkKey, Resident] = {}

    def body(self, key: ChunkKey) -> Resident:
        """KV of a chunk of this lease. It must not be read after the release.

        Raises
        ------
        ValueError
            If the chunk is not part of the lease, or that was released.
        """
        try:
            return self._residents[key]
        except KeyError:
            raise ValueError(f"chunk {key} is not part of this lease, or the lease was released") from None

    def release(self) -> None:
        """Give the chunks free. Again, nothing happens."""
        self._residency._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._residents:
            residents = tuple(self._residents.values())
            self._residency._pool.cleanups.append(partial(self._residency._let_go, residents))
