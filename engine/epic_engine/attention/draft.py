"""The tables of a pass as they grow on the host: memory, stretches of keys, their readers, and items of work."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epic_engine.errors import ConfigError

from .base import Run
from .kernels.configs import SegmentConfig, segment_config
from .kernels.tables import Launch, Tables

__all__ = ["ALWAYS", "Draft", "Reader", "Region", "Shape", "Stretch"]

ALWAYS = -(1 << 30)
"""a place before every row"""
_ADDRESS_ALIGNMENT = 16

Region = tuple[Tensor, int, int, int]
"""memory, first slot, slot behind the last, number of the first token among a sequence's own (-1: of others)"""


@dataclass(frozen=True)
class Shape:
    """What a schedule needs to know of model and machine.

    Attributes
    ----------
    heads, kv_heads, head_dim, dtype
        Of the model's attention.
    page_size
        Tokens a page.
    processors
        Multiprocessors to keep busy.
    turn_keys
        Whether keys are rotated to the rows' places: then only rows at one distance can read together.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    processors: int
    turn_keys: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    def config(self, readers: int) -> SegmentConfig:
        """Tile for items of so many readers."""
        return segment_config(self.head_dim, self.group, readers, self.dtype)

    def tile(self, config: SegmentConfig) -> int:
        """Readers that fit a tile."""
        return config.block_m // self.group


@dataclass(frozen=True)
class Stretch:
    """Consecutive keys in one memory.

    Attributes
    ----------
    memory, page_at
        Where: entry in the table of memories, place of its first page in the list of pages.
    start, stop
        Keys, counted from the beginning of that first page.
    offset
        A row at position p reads them with its query rotated by ``p - offset``.
    after
        Place behind the last key: rows from there on see all of them, rows before it none.
    first
        Of a sequence's own tokens: the number of the first key; a row sees those up to its own. -1: of others.
    bias
        Added to the scores.
    """

    memory: int
    page_at: int
    start: int
    stop: int
    offset: int
    after: int = ALWAYS
    first: int = -1
    bias: float = 0.0

    @property
    def keys(self) -> int:
        """How many."""
        return self.stop - self.start

    def entry(self) -> tuple[int, ...]:
        """Fields in the table of segments."""
        bias = struct.unpack("<i", struct.pack("<f", self.bias))[0]
        return self.memory, self.page_at, self.start, self.stop, self.offset, self.after, self.first, bias

    def cut(self, most: int) -> list[Stretch]:
        """Even pieces of at most so many keys."""
        step = -(-self.keys // -(-self.keys // most))
        pieces = []
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            # No row lies inside a run, so "behind the piece" is "behind the run" to all of them.
            after = self.after if self.after == ALWAYS else self.after - (self.stop - stop)
            first = self.first if self.first < 0 else self.first + start - self.start
            pieces.append(replace(self, start=start, stop=stop, after=after, first=first))
        return pieces


@dataclass(frozen=True)
class Reader:
    """A row that reads a stretch.

    Attributes
    ----------
    row
        Of the pass.
    shift
        Added to the stretch's offset and place.
    own
        Own tokens of its sequence that it sees.
    hidden
        Address of one byte a key, counted like the stretch's, that is not 0 where the row does not see it; 0: it sees
        all.
    """

    row: int
    shift: int = 0
    own: int = 0
    hidden: int = 0


class Draft:
    """The tables of a pass as they grow; see :class:`~.kernels.tables.Tables`.

    Parameters
    ----------
    shape
        Of model and machine.

    Attributes
    ----------
    positions, targets
        Of the rows.
    own_readers
        For every row, the reader of its sequence's own tokens.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.positions: list[int] = []
        self.targets: list[tuple[int, int, int, int]] = []
        self.own_readers: list[int] = []
        self._memories: dict[tuple[int, ...], int] = {}
        self._stored: list[tuple[torch.dtype, bool]] = []
        self._pages: list[int] = []
        self._segments: list[tuple[int, ...]] = []
        self._segment_memories: list[int] = []
        self._readers: list[tuple[int, int, int, int]] = []
        self._masks: list[int] = []
        self._items: dict[tuple[SegmentConfig, torch.dtype, bool], list[tuple[int, ...]]] = {}
        self._masked: set[tuple[SegmentConfig, torch.dtype, bool]] = set()
        self._results: list[int] = []  # the row of every partial result

    def memory(self, kv: Tensor, scales: Tensor | None = None) -> tuple[int, int]:
        """Entry of a KV, and the slot of its first token there.

        Parameters
        ----------
        kv
            ``(layers, 2, kv_heads, slots, head_dim)``, or a cut of such memory along the slots.
        scales
            ``(layers, 2, kv_heads, pages)`` float32, for 8-bit elements; of all pages of the memory.

        Raises
        ------
        ConfigError
            If the kernels cannot read it.
        """
        dim, size = kv.shape[4], kv.element_size()
        if kv.stride(4) != 1 or kv.stride(3) != dim:
            raise ConfigError("the tokens of a KV must lie next to each other in each layer and head.")
        slot, rest = divmod(int(kv.storage_offset()), dim)
        if rest or slot + kv.shape[3] > kv.stride(2) // dim:
            slot = 0  # not a cut of something larger
        address = kv.data_ptr() - slot * dim * size
        if kv.device.type == "cuda" and (address % _ADDRESS_ALIGNMENT or dim * size % _ADDRESS_ALIGNMENT):
            raise ConfigError(f"tokens of a KV on a GPU must begin at multiples of {_ADDRESS_ALIGNMENT} bytes.")
        strides = [kv.stride(i) * size for i in range(3)]
        more = (0, 0, 0, 0)
        if scales is not None:
            if scales.dtype != torch.float32 or scales.stride(3) != 1:
                raise ConfigError("scales of pages must be float32, those of a head next to each other.")
            more = (scales.data_ptr(), *(scales.stride(i) * 4 for i in range(3)))  # type: ignore[assignment]
        key = (address, *strides, *more)
        found = self._memories.setdefault(key, len(self._memories))
        if found == len(self._stored):
            self._stored.append((kv.dtype, scales is not None))
        return found, slot

    def stretches(self, regions: Sequence[Region], offset: int, scales: Tensor | None = None) -> list[Stretch]:
        """Regions of memory in as few stretches as their pages allow.

        Parameters
        ----------
        regions
            In the order of their tokens.
        offset
            As in :class:`Stretch`.
        scales
            As for :meth:`memory`.
        """
        size = self.shape.page_size
        found: list[Stretch] = []
        for kv, start, stop, first in regions:
            memory, slot = self.memory(kv, scales)
            begin, keys = (slot + start) % size, stop - start
            last = found[-1] if found else None
            follows = last is not None and last.memory == memory and last.first + last.keys == first
            if last is not None and follows and not last.stop % size and not begin:
                found[-1] = replace(last, stop=last.stop + keys)
            else:
                found.append(Stretch(memory, len(self._pages), begin, begin + keys, offset, first=first))
            self._pages.extend(range((slot + start) // size, -(-(slot + stop) // size)))
        return found

    def run(self, run: Run) -> Stretch:
        """A run as its own sequence sees it."""
        (found,) = self.stretches([(run.kv, run.start, run.stop, -1)], run.offset)
        return replace(found, after=run.after, bias=run.bias)

    def segments(self, stretches: Sequence[Stretch]) -> int:
        """Enter stretches behind each other; returns the place of the first."""
        at = len(self._segments)
        self._segments.extend(s.entry() for s in stretches)
        self._segment_memories.extend(s.memory for s in stretches)
        return at

    def readers(self, readers: Sequence[Reader]) -> int:
        """Enter readers behind each other; returns the place of the first."""
        at = len(self._readers)
        self._readers.extend((r.row, r.shift, r.own, 0) for r in readers)
        self._masks.extend(r.hidden for r in readers)
        return at

    def item(self, config: SegmentConfig, readers: tuple[int, int], segments: tuple[int, int]) -> None:
        """Enter the work of a program.

        Parameters
        ----------
        config
            Its tile.
        readers, segments
            Where they begin, and the place behind the last.
        """
        stored, scaled = self._stored[self._segment_memories[segments[0]]]
        group = (config, stored, scaled)
        rows = [self._readers[i][0] for i in range(*readers)]
        self._items.setdefault(group, []).append(
            (readers[0], readers[1] - readers[0], *segments, len(self._results), 0, 0, 0)
        )
        self._results.extend(rows)
        if any(self._masks[i] for i in range(*readers)):
            self._masked.add(group)

    def together(self, stretch: Stretch, readers: Sequence[Reader], piece: int) -> None:
        """Enter a stretch that rows of any sequences read, tile by tile and piece by piece."""
        config = self.shape.config(len(readers))
        tile = self.shape.tile(config)
        at = self.readers(readers)
        for part in stretch.cut(piece):
            segment = self.segments([part])
            for first in range(0, len(readers), tile):
                last = min(first + tile, len(readers))
                self.item(config, (at + first, at + last), (segment, segment + 1))

    def apart(self, own: Sequence[Stretch], dense: Sequence[Stretch], readers: Sequence[Reader], piece: int) -> None:
        """Enter the stretches of one sequence.

        Parameters
        ----------
        own
            Its tokens, those of this pass included.
        dense
            Runs.
        readers
            Its rows, by position.
        piece
            Keys of an item.
        """
        config = self.shape.config(len(readers))
        tile = self.shape.tile(config)
        # What a tile sees is a beginning of this list: its own tokens, most of which lie before all rows, then runs.
        parts = [p for s in own for p in s.cut(piece)]
        parts += [p for s in sorted(dense, key=lambda s: s.after) for p in s.cut(piece)]
        if not parts:
            return
        afters = [p.after for p in parts if p.first < 0]
        owns = len(parts) - len(afters)
        edges = [0, *accumulate(p.keys for p in parts)]
        segment = self.segments(parts)
        at = self.readers(readers)
        self.own_readers.extend(range(at, at + len(readers)))
        for first in range(0, len(readers), tile):
            last = min(first + tile, len(readers))
            seen = owns + bisect_right(afters, self.positions[readers[last - 1].row])
            begin = 0
            pieces = max(1, -(-edges[seen] // piece))
            for count in range(1, pieces + 1):
                end = bisect_left(edges, edges[seen] * count // pieces)
                if end > begin:
                    self.item(config, (at + first, at + last), (segment + begin, segment + end))
                    begin = end

    # -- what comes of it --------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Entries of each table."""
        return {
            "memories": len(self._memories),
            "masks": len(self._masks),
            "pages": len(self._pages),
            "segments": len(self._segments),
            "readers": len(self._readers),
            "items": sum(map(len, self._items.values())),
            "counts": len(self._items),
            "targets": len(self.targets),
            "positions": len(self.positions),
            "row_starts": len(self.positions) + 1,
            "row_partials": len(self._results),
        }

    def launches(self) -> list[Launch]:
        """Launches that the items need, in order."""
        found = []
        at = 0
        for index, (group, items) in enumerate(self._items.items()):
            config, stored, scaled = group
            found.append(Launch(index, at, len(items), config, stored, scaled, group in self._masked))
            at += len(items)
        return found

    def fill(self, tables: Tables, launches: Sequence[Launch]) -> None:
        """Write everything to tables that are large enough.

        Parameters
        ----------
        tables
            On the host.
        launches
            Where each tile's items go; from :meth:`launches`, or wider ones that were made before.
        """
        host = tables.host

        def put(name: str, values: Any) -> None:
            if len(values):
                host[name][: len(values)] = values

        put("memories", list(self._memories))
        put("masks", self._masks)
        put("pages", self._pages)
        put("segments", self._segments)
        put("readers", self._readers)
        put("targets", self.targets)
        host["targets"][len(self.targets) :, 0] = -1
        put("positions", self.positions)
        host["counts"][:] = 0
        for launch in launches:
            items = self._items.get((launch.config, launch.stored, launch.scaled), [])
            host["counts"][launch.index] = len(items)
            if items:
                host["items"][launch.first_item : launch.first_item + len(items)] = items
        rows = np.array(self._results, dtype=np.int32)
        counts = np.bincount(rows, minlength=tables.rows)
        host["row_starts"][1:] = np.cumsum(counts)
        put("row_partials", np.argsort(rows, kind="stable"))
