"""A decoding pass whose tables keep their place in memory, so that it can be captured once and replayed.

While the same sequences go on, a pass differs from the one before only in where its rows stand, how much of their own
they see, and where their keys go; the rest of the tables stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .base import SequenceKV, SequenceRows
from .kernels.tables import Launch, Tables
from .schedule import Draft, draft, targets
from .triton_backend import TritonBackend, TritonStep

__all__ = ["StaticStep"]

# Work of a pass that tables have room for: of any, and more for each row.
_ITEMS = 256, 64
_SEGMENTS = 256, 128
_READERS = 64, 128
_MEMORIES = 64
_MOST_PAGES = 1 << 18


class StaticStep:
    """Attention of up to ``rows`` sequences, one row each; an :class:`~epic_engine.model.decoder.AttentionStep`.

    Parameters
    ----------
    backend
        Model and device.
    rows
        Most rows.
    max_len
        Longest context, in tokens.
    partials
        Memory for :meth:`partial_results` or more, shared with other steps; from :meth:`TritonBackend.partials
        <epic_engine.attention.triton_backend.TritonBackend.partials>`.
    """

    def __init__(self, backend: TritonBackend, rows: int, max_len: int, partials: tuple[Tensor, Tensor]) -> None:
        self._backend = backend
        shape = backend.shape
        configs = {shape.config(readers): None for readers in range(1, rows + 1)}
        per_launch = _ITEMS[0] + _ITEMS[1] * rows
        self._launches = [
            Launch(index, index * per_launch, per_launch, config, shape.dtype, masked=True)
            for index, config in enumerate(configs)
        ]
        self.rows = rows
        self._tables = Tables(
            {
                "memories": _MEMORIES,
                "masks": _READERS[0] + _READERS[1] * rows,
                "pages": min(rows * (max_len // shape.page_size + 1) * 2, _MOST_PAGES),
                "segments": _SEGMENTS[0] + _SEGMENTS[1] * rows,
                "readers": _READERS[0] + _READERS[1] * rows,
                "items": per_launch * len(self._launches),
                "counts": len(self._launches),
                "targets": rows,
                "positions": rows,
                "row_starts": rows + 1,
                "row_partials": self.partial_results(rows),
            },
            backend.device,
        )
        self._step = TritonStep(backend, self._tables, self._launches, partials)
        self._draft: Draft | None = None
        self._sequences: list[weakref.ref[SequenceKV]] = []
        self._composition: list[tuple[int, ...]] = []
        self.clear()

    @staticmethod
    def partial_results(rows: int) -> int:
        """Partial results of a pass that there is room for."""
        return _READERS[0] + _READERS[1] * rows

    def clear(self) -> None:
        """Nothing to do: every row of the next pass is unused."""
        self._draft, self._sequences, self._composition = None, [], []
        self._tables.wait()
        Draft(self._backend.shape).fill(self._tables, self._launches)
        self._tables.upload()

    def load(self, batch: Sequence[SequenceRows]) -> bool:
        """Take the rows of the next pass; False if the tables have no room for them.

        Parameters
        ----------
        batch
            One row of each sequence.
        """
        composition = [_composition(item) for item in batch]
        known = [ref() for ref in self._sequences]
        self._tables.wait()
        same = composition == self._composition and all(
            item.private is private for item, private in zip(batch, known, strict=True)
        )
        if not (same and self._go_on(batch)):
            made = draft(batch, self._backend.shape, ahead=True)
            if not self._fits(made):
                return False
            made.fill(self._tables, self._launches)
            self._draft, self._composition = made, composition
            self._sequences = [weakref.ref(item.private) for item in batch]
        self._tables.upload()
        return True

    def _go_on(self, batch: Sequence[SequenceRows]) -> bool:
        """Move every row on; False if its keys would go to memory that the tables do not know."""
        made, host = self._draft, self._tables.host
        assert made is not None
        memories = made.sizes()["memories"]
        entries = [entry for item in batch for entry in targets(made, item)]
        if made.sizes()["memories"] != memories:
            return False
        rows = len(batch)
        host["targets"][:rows] = entries
        host["positions"][:rows] = [item.positions[0] for item in batch]
        host["readers"][made.own_readers, 2] = [item.private.length + 1 for item in batch]
        return True

    def _fits(self, made: Draft) -> bool:
        room = self._tables.sizes
        tiles = {launch.config: launch.items for launch in self._launches}
        shape = self._backend.shape
        return all(
            count <= room[name] for name, count in made.sizes().items() if name not in ("items", "counts")
        ) and all(
            found.items <= tiles.get(found.config, 0) and found.stored == shape.dtype and not found.scaled
            for found in made.launches()
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Attention of one layer; see :class:`~epic_engine.model.decoder.AttentionStep`."""
        return self._step.attend(layer, q, k, v, scaling, options)


def _composition(item: SequenceRows) -> tuple[int, ...]:
    """What a sequence reads, as long as its private KV lives: the lists of its runs live with it."""
    return id(item.runs), id(item.whole), item.private.capacity, len(item.private.memory())
