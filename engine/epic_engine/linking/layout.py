"""Where everything stands in a linked prompt.

A prompt is a list of segments. A segment backed by shared KV is one *instance* of it: the same chunk twice is two
segments with two offsets. Positions are consecutive over the whole prompt::

    segment    [ head ][ chunk A        ][ chunk B        ][ question ]
    position     0 …     a …               b …               q …
    computed     (A, B: the slots a policy chose)            all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from epic_engine.attention.base import Run

__all__ = ["Body", "Damp", "Layout", "LinkPlan", "Segment", "runs_between", "whole_runs"]


@dataclass(frozen=True, eq=False)
class Body:
    """Shared KV behind a segment.

    Attributes
    ----------
    kv
        ``(layers, 2, kv_heads, slots, head_dim)``.
    context_ids
        Tokens that stood before it when it was computed; its KV is exact where the prompt begins with them.
    rotation_base
        Keys are rotated at ``slot + rotation_base``: 0 for compiled chunks, the absolute place for cached prefixes.
    wait
        Blocks until a layer of ``kv`` is there; None if all of it is.
    """

    kv: Tensor
    context_ids: tuple[int, ...]
    rotation_base: int = 0
    wait: Callable[[int], None] | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of a prompt, with or without shared KV.

    Attributes
    ----------
    start
        Position of the first token.
    token_ids
        The tokens; never empty.
    body
        Shared KV of all the tokens, or None for plain tokens.
    exact
        Whether the shared KV is what full computation would give at this place.
    """

    start: int
    token_ids: tuple[int, ...]
    body: Body | None
    exact: bool

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


class Layout:
    """A prompt's segments at their positions.

    Parameters
    ----------
    parts
        Pairs of token ids and shared KV (or None), in order; empty parts are left out.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], Body | None]]) -> None:
        segments: list[Segment] = []
        before: tuple[int, ...] = ()
        for ids, body in parts:
            if not ids:
                continue
            exact = body is not None and body.context_ids == before
            segments.append(Segment(len(before), tuple(ids), body, exact))
            before += tuple(ids)
        self.segments = tuple(segments)
        self.token_ids = before

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def linked(self) -> tuple[Segment, ...]:
        """Segments with shared KV."""
        return tuple(s for s in self.segments if s.body is not None)


def runs_between(length: int, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs ``[a, b)`` of slots 0 … length - 1 outside the sorted ``slots``."""
    runs = []
    begin = 0
    for slot in [*slots, length]:
        if slot > begin:
            runs.append((begin, slot))
        begin = slot + 1
    return runs


@dataclass(frozen=True)
class Damp:
    """Lower the scores of each chunk's first tokens.

    Attributes
    ----------
    amount
        Subtracted from the logits.
    tokens
        How many slots, from the chunk's first.
    """

    amount: float
    tokens: int


def _runs(segment: Segment, body: Body, slots: Sequence[int], damp: Damp | None) -> Iterator[Run]:
    """The runs of a segment outside ``slots``, cut where damping begins and ends."""
    offset = segment.start - body.rotation_base
    until = damp.tokens if damp else 0
    cuts = {0, until} | ({1} if segment.start == 0 else set())  # the prompt's first token is never damped
    for a, b in runs_between(len(segment.token_ids), slots):
        edges = [a, *sorted(c for c in cuts if a < c < b), b]
        for low, high in pairwise(edges if damp else [a, b]):
            bias = -damp.amount if damp and high <= until and segment.start + low > 0 else 0.0
            yield Run(body.kv, low, high, offset, segment.start + high, bias, body.wait)


def whole_runs(runs: Sequence[Run]) -> list[Run]:
    """Runs of one body joined to one that hides what lies between them; for rows behind all of them.

    Sequences that computed different tokens of a chunk anew then still read it together, and none reads it in dozens
    of pieces.
    """
    bodies: dict[tuple[int, int, float], list[Run]] = {}
    for run in runs:
        bodies.setdefault((run.kv.data_ptr(), run.offset, run.bias), []).append(run)
    found = []
    for pieces in bodies.values():
        first = pieces[0]
        if len(pieces) == 1:
            found.append(first)
            continue
        slots = first.kv.shape[3]
        hidden = torch.ones(slots, dtype=torch.bool, device=first.kv.device)
        for piece in pieces:
            hidden[piece.start : piece.stop] = False
        last = max(piece.after for piece in pieces)
        found.append(replace(first, start=0, stop=slots, after=last, hidden=hidden))
    return found


class LinkPlan:
    """Which tokens of a layout are computed, and which runs of shared KV the rest reads.

    ``linked`` counts the tokens that shared KV covers, ``recomputed`` those of them that are computed anew.

    Parameters
    ----------
    layout
        The prompt.
    recompute
        Per index of a linked segment in ``layout.segments``: sorted slots to compute anew. The last token of the
        prompt is always added, for its logits are wanted.
    damp
        Lowered scores of the first slots of chunks that are not exact.
    settled
        Tokens at the beginning that an earlier turn computed or linked; they are neither again. A segment lies on one
        side of that border.
    runs
        What the earlier turn reads.
    """

    def __init__(
        self,
        layout: Layout,
        recompute: Mapping[int, Sequence[int]],
        damp: Damp | None = None,
        *,
        settled: int = 0,
        runs: Sequence[Run] = (),
    ) -> None:
        self.layout = layout
        self.rows: list[int] = []
        self.runs: list[Run] = list(runs)
        self.linked = 0
        self.recomputed = 0
        last = len(layout) - 1
        for index, segment in enumerate(layout.segments):
            if segment.stop <= settled:
                continue
            if segment.body is None:
                self.rows.extend(range(segment.start, segment.stop))
                continue
            self.linked += len(segment.token_ids)
            slots = sorted(set(recompute.get(index, ())))
            if slots and (slots[0] < 0 or slots[-1] >= len(segment.token_ids)):
                raise ValueError(f"slots {slots[0]}…{slots[-1]} lie outside a segment of {len(segment.token_ids)}")
            if segment.stop - 1 == last and (not slots or slots[-1] != last - segment.start):
                slots.append(last - segment.start)
            self.rows.extend(segment.start + s for s in slots)
            self.recomputed += len(slots)
            self.runs.extend(_runs(segment, segment.body, slots, None if segment.exact else damp))

    @property
    def row_ids(self) -> list[int]:
        """Token ids of the rows."""
        return [self.layout.token_ids[p] for p in self.rows]
