"""Shared KV laid out for one sequence: the way to read it when many rows do.

Moving the query costs one rotation and one merge per (row, run), which is cheap while rows are few and runs are long.
When a link recomputes many rows over many short chunks it is the other way round. Then the runs' keys are turned to
the sequence's own positions and laid out behind each other, once per layer in scratch memory, and rows read long
stretches of them. A row sees a beginning of the span, later rows see more of it; this staircase is cut into dense
rectangles by halving, so that a row merges about log2(runs) pieces instead of one per run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epic_engine.model.decoder import Decoder

from .base import SequenceRows

__all__ = ["Rectangle", "Span", "staircase", "worth_a_span"]

# Costs on a CPU per element of a head: rotating and merging a moved query; copying and turning a key and a value.
_QUERY_COST = 2.5
_KEY_COST = 2.0
# Keys turned at a time; more would leave the second-level cache.
_KEYS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Rectangle:
    """Rows ``[first, last)`` of a pass read the keys ``[start, stop)`` of a span, all of them."""

    first: int
    last: int
    start: int
    stop: int


class _Shapes(Protocol):
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


def worth_a_span(rows: SequenceRows, shapes: _Shapes) -> bool:
    """Whether laying out the runs of a sequence costs less than moving the queries of its rows."""
    runs = [run for run in rows.runs if not run.bias]
    pairs = sum(len(rows.positions) - bisect_left(rows.positions, run.after) for run in runs)
    keys = sum(run.stop - run.start for run in runs)
    return pairs * shapes.num_heads * _QUERY_COST > keys * shapes.num_kv_heads * _KEY_COST


def staircase(readers: Sequence[int], widths: Sequence[int], last: int) -> list[Rectangle]:
    """Cut "rows from ``readers[j]`` on read run j" into dense rectangles.

    Parameters
    ----------
    readers
        First row that reads each run, ascending.
    widths
        Keys of each run.
    last
        Row behind the last one.
    """
    edges = [0]
    for width in widths:
        edges.append(edges[-1] + width)
    found: list[Rectangle] = []

    def cut(low: int, high: int, end: int) -> None:
        while high > low and readers[high - 1] >= end:
            high -= 1
        if low == high:
            return
        middle = (low + high + 1) // 2
        # Rows from here on read all of the first half, so it is one rectangle for them.
        begin = readers[middle - 1]
        found.append(Rectangle(begin, end, edges[low], edges[middle]))
        cut(low, middle - 1, begin)
        cut(middle, high, end)

    cut(0, len(widths), last)
    return found


class Span:
    """The runs of one sequence in a forward pass, behind each other at the sequence's own positions.

    Runs with a bias are left out: their log-sum-exp must stay apart.

    Parameters
    ----------
    decoder
        For shapes and rotary tables.
    rows
        The sequence.
    first
        Its first row in the pass.
    """

    def __init__(self, decoder: Decoder, rows: SequenceRows, first: int) -> None:
        self._decoder = decoder
        runs = sorted((run for run in rows.runs if not run.bias), key=lambda run: run.after)
        readers = [first + bisect_left(rows.positions, run.after) for run in runs]
        last = first + len(rows.positions)
        self._runs = [run for run, reader in zip(runs, readers, strict=True) if reader < last]
        widths = [run.stop - run.start for run in self._runs]
        self.rectangles = staircase(readers[: len(widths)], widths, last)
        self._offsets = [run.offset - rows.private.base for run in self._runs]
        spec, device = decoder.spec, decoder.device
        self._blocks = _blocks(widths)
        shape = (2, spec.num_kv_heads, sum(widths), spec.head_dim)
        self._laid = torch.empty(shape, dtype=spec.dtype, device=device)
        wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
        widest = max((sum(widths[a:b]) for a, b in self._blocks), default=0)
        self._turning = torch.empty((spec.num_kv_heads, widest, spec.head_dim), dtype=wide, device=device)
        self._factors: dict[int, Tensor] = {}

    def _turns(self, layer: int) -> Tensor | None:
        """Per key the factor that turns it from its chunk's place to the sequence's; None if nothing turns."""
        table = self._decoder.tables[layer]
        if table is None:
            return None
        if id(table) not in self._factors:
            device = self._decoder.device
            distance = torch.tensor(self._offsets, dtype=torch.int64, device=device)
            unit = table.rows(distance.abs())
            unit = unit / unit.abs()  # the scale of YaRN is in the stored key already
            unit = torch.where(distance[:, None] < 0, unit.conj(), unit)
            widths = torch.tensor([run.stop - run.start for run in self._runs], device=device)
            self._factors[id(table)] = unit.repeat_interleave(widths, dim=0)
        return self._factors[id(table)]

    def lay_out(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the span for one layer, ``(kv_heads, keys, head_dim)``; valid until the next call."""
        keys, values = self._laid[0], self._laid[1]
        turns = self._turns(layer)
        at = 0
        for low, high in self._blocks:
            begin = at
            for run in self._runs[low:high]:
                stop = at + run.stop - run.start
                source = run.kv[layer, 0, :, run.start : run.stop]
                if turns is None:
                    keys[:, at:stop] = source
                else:
                    self._turning[:, at - begin : stop - begin] = source
                values[:, at:stop] = run.kv[layer, 1, :, run.start : run.stop]
                at = stop
            if turns is not None:
                block = self._turning[:, : at - begin]
                torch.view_as_complex(block.unflatten(-1, (-1, 2))).mul_(turns[begin:at])
                keys[:, begin:at] = block
        return keys, values


def _blocks(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive runs to turn together."""
    blocks: list[tuple[int, int]] = []
    low = size = 0
    for index, width in enumerate(widths):
        if index > low and size + width > _KEYS_PER_BLOCK:
            blocks.append((low, index))
            low, size = index, 0
        size += width
    if widths:
        blocks.append((low, len(widths)))
    return blocks
