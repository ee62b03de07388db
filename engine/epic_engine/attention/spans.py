"""All that a sequence reads, laid out in the order of its positions: the way to read shared KV when many rows do.

Moving the query costs one rotation and one merge per (row, run), which is cheap while rows are few and runs are long.
When a link recomputes many rows over many short chunks it is the other way round. Then the runs' keys are turned to
the sequence's own positions and laid out with the rows' own keys, once per layer in scratch memory. A row sees a
beginning of the span: the later half of many rows reads what lies before all of it in one go, and so does the later
half of each half. What is left, rows that follow each other closely read together, as far as the last of them sees,
with a mask; those without a gap between them read what lies before them densely, and each other causally.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from epic_engine.model.decoder import Decoder

from .base import Run, SequenceRows

__all__ = ["Reading", "Span", "readings", "worth_a_span"]

# Costs on a CPU per element of a head: rotating and merging a moved query; copying and turning a key and a value.
_QUERY_COST = 2.5
_KEY_COST = 2.0
# Keys turned at a time; more would leave the second-level cache.
_KEYS_PER_BLOCK = 1024
# What a call of the attention kernel costs, in pairs of a row and a key that are computed and hidden by the mask.
_CALL_COST = 16384
# Pairs from which many rows read keys apart: without a mask, and many at a time, they are computed half as fast again,
# but merging costs a call and a few more operators.
_APART = 98304


@dataclass(frozen=True)
class Reading:
    """Rows of a sequence that read its span in one go.

    Attributes
    ----------
    first, last
        The rows ``[first, last)`` of the sequence.
    start, stop
        The keys ``[start, stop)`` of the span; the last row sees all of them.
    causal
        Whether the rows' own keys are the last ones, without a gap, so that no mask is needed.
    more
        Whether all rows see all keys, and have read other keys before.
    """

    first: int
    last: int
    start: int
    stop: int
    causal: bool = False
    more: bool = False


@dataclass(frozen=True)
class _Copy:
    """Slots ``[start, stop)`` of a body go to a place in the span, turned by a distance."""

    kv: Tensor
    start: int
    stop: int
    place: int
    distance: int

    @property
    def width(self) -> int:
        return self.stop - self.start


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


def readings(places: Sequence[int], *, masks: bool) -> list[Reading]:
    """Cut what rows see of a span into parts that are read in one go each.

    Parameters
    ----------
    places
        Where in the span each row's own key lies, ascending.
    masks
        Whether rows with gaps between them may share a reading.

    Returns
    -------
    list of Reading
        Those with ``more`` come last.
    """
    stretches: list[tuple[int, int]] = []
    for row, place in enumerate(places):
        if row and place == places[row - 1] + 1:
            stretches[-1] = stretches[-1][0], row + 1
        else:
            stretches.append((row, row + 1))
    found: list[Reading] = []
    apart: list[Reading] = []

    def cut(stretches: list[tuple[int, int]], start: int) -> None:
        """Rows of these stretches, which see all keys before ``start`` elsewhere."""
        first, last = stretches[0][0], stretches[-1][1]
        later = min(range(len(stretches)), key=lambda i: abs(2 * stretches[i][0] - first - last))
        middle = stretches[later][0]
        if later and (last - middle) * (places[middle] - start) >= _APART:
            apart.append(Reading(middle, last, start, places[middle], more=True))
            cut(stretches[:later], start)
            cut(stretches[later:], places[middle])
        else:
            found.extend(_together(places, stretches, start, masks))

    cut(stretches, 0)
    return found + apart


def _together(places: Sequence[int], stretches: Sequence[tuple[int, int]], start: int, masks: bool) -> list[Reading]:
    """Readings of the keys from ``start`` on, for rows in stretches without gaps."""
    found: list[Reading] = []
    hidden = 0  # pairs that the mask of the last reading hides
    for first, last in stretches:
        stop, count = places[last - 1] + 1, last - first
        own = count * (count - 1) // 2
        if not masks or own > _CALL_COST:
            found.append(Reading(first, last, start, stop, causal=True))
            continue
        if found and not found[-1].causal:
            before = found[-1]
            more = (before.last - before.first) * (stop - before.stop) + own
            if hidden + more <= _CALL_COST:
                found[-1] = replace(before, last=last, stop=stop)
                hidden += more
                continue
        found.append(Reading(first, last, start, stop))
        hidden = own
    return found


class Span:
    """The runs and the rows of one sequence in a forward pass, behind each other at the sequence's own positions.

    Runs with a bias are left out: their log-sum-exp must stay apart. So is what the sequence held before.

    Parameters
    ----------
    decoder
        For shapes and rotary tables.
    rows
        The sequence.
    masks
        Whether the attention kernel takes masks.

    Attributes
    ----------
    readings
        How its rows read it, each with its mask.
    """

    def __init__(self, decoder: Decoder, rows: SequenceRows, *, masks: bool = True) -> None:
        self._decoder = decoder
        spec, device = decoder.spec, decoder.device
        self._copies: list[_Copy] = []
        places: list[int] = []
        width = 0
        for run in sorted((run for run in rows.runs if not run.bias), key=lambda run: run.after):
            if run.after > rows.positions[-1]:
                break
            rows_before = bisect_left(rows.positions, run.after) - len(places)
            places.extend(range(width, width + rows_before))
            width += rows_before
            self._copy(run, width, run.offset - rows.private.base)
            width += run.stop - run.start
        places.extend(range(width, width + len(rows.positions) - len(places)))
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self.readings = [(r, None if r.causal or r.more else self._mask(r)) for r in readings(places, masks=masks)]
        self._blocks = _blocks([copy.width for copy in self._copies])
        self._laid = torch.empty((2, spec.num_kv_heads, places[-1] + 1, spec.head_dim), dtype=spec.dtype, device=device)
        wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
        widest = max((sum(copy.width for copy in self._copies[a:b]) for a, b in self._blocks), default=0)
        self._turning = torch.empty((spec.num_kv_heads, widest, spec.head_dim), dtype=wide, device=device)
        self._factors: dict[int, Tensor] = {}

    def _copy(self, run: Run, place: int, distance: int) -> None:
        """Have a run copied to a place. What lies between runs of a body is copied with them if rows replace it."""
        last = self._copies[-1] if self._copies else None
        if (
            last is not None
            and last.kv.data_ptr() == run.kv.data_ptr()
            and last.distance == distance
            and place - last.place == run.start - last.start
        ):
            self._copies[-1] = replace(last, stop=run.stop)
        else:
            self._copies.append(_Copy(run.kv, run.start, run.stop, place, distance))

    def _mask(self, reading: Reading) -> Tensor:
        """``(rows * group, keys)``: 0 where a row sees a key, minus infinity where it does not."""
        spec = self._decoder.spec
        places = self._places[reading.first : reading.last, None]
        hidden = torch.arange(reading.start, reading.stop, device=places.device) > places
        mask = torch.zeros(hidden.shape, dtype=spec.dtype, device=places.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=0)

    def _turns(self, layer: int) -> Tensor | None:
        """Per key the factor that turns it from its chunk's place to the sequence's; None if nothing turns."""
        table = self._decoder.tables[layer]
        if table is None:
            return None
        if id(table) not in self._factors:
            device = self._decoder.device
            distance = torch.tensor([c.distance for c in self._copies], dtype=torch.int64, device=device)
            unit = table.rows(distance.abs())
            unit = unit / unit.abs()  # the scale of YaRN is in the stored key already
            unit = torch.where(distance[:, None] < 0, unit.conj(), unit)
            self._factors[id(table)] = unit.repeat_interleave(
                torch.tensor([c.width for c in self._copies], device=device), dim=0
            )
        return self._factors[id(table)]

    def lay_out(self, layer: int, own_keys: Tensor, own_values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the span for one layer, ``(kv_heads, keys, head_dim)``; valid until the next call.

        Parameters
        ----------
        layer
            Decoder layer.
        own_keys, own_values
            The rows', ``(kv_heads, rows, head_dim)``; keys at the sequence's own positions.
        """
        keys, values = self._laid[0], self._laid[1]
        turns = self._turns(layer)
        done = 0
        for low, high in self._blocks:
            copies, begin = self._copies[low:high], done
            for copy in copies:
                source = copy.kv[layer, 0, :, copy.start : copy.stop]
                if turns is None:
                    keys[:, copy.place : copy.place + copy.width] = source
                else:
                    self._turning[:, done - begin : done - begin + copy.width] = source
                values[:, copy.place : copy.place + copy.width] = copy.kv[layer, 1, :, copy.start : copy.stop]
                done += copy.width
            if turns is not None:
                block = self._turning[:, : done - begin]
                torch.view_as_complex(block.unflatten(-1, (-1, 2))).mul_(turns[begin:done])
                at = 0
                for copy in copies:
                    keys[:, copy.place : copy.place + copy.width] = block[:, at : at + copy.width]
                    at += copy.width
        keys.index_copy_(1, self._places, own_keys.to(keys.dtype))
        values.index_copy_(1, self._places, own_values.to(values.dtype))
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
