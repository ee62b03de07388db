"""What the kernels should compute, in float64 and plain torch, from a plain description of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Item", "Keys", "Problem", "Reader", "largest", "merged", "partial", "relative_error", "rotated"]


@dataclass(frozen=True)
class Keys:
    """Consecutive keys in the pages of one memory.

    Attributes
    ----------
    pages
        Page numbers.
    start, stop
        Keys, counted from the beginning of the first page.
    offset
        A row at position p reads them with its query rotated by ``p - offset``.
    after
        Place behind the last key.
    first
        The reader's own token that the first page begins with; -1: keys of others, which a row sees all or none of.
    bias
        Added to the scores.
    """

    pages: tuple[int, ...]
    start: int
    stop: int
    offset: int
    after: int = -(1 << 30)
    first: int = -1
    bias: float = 0.0


@dataclass(frozen=True)
class Reader:
    """A row that reads an item's keys.

    Attributes
    ----------
    row
        Its number.
    shift
        Added to offset and place of the keys.
    own, low
        Own tokens that it sees: ``low`` up to ``own - 1``.
    hidden
        ``(keys,)`` bool: what it does not see of the item's only keys; None: it sees all.
    """

    row: int
    shift: int = 0
    own: int = 0
    low: int = 0
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Item:
    """Rows that read the same keys in one program."""

    readers: tuple[Reader, ...]
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class Problem:
    """Attention of some rows over paged keys.

    Attributes
    ----------
    q
        ``(heads, rows, dim)``, unrotated, in the model's order of dimensions.
    positions
        Of the rows.
    kv
        ``(layers, 2, kv_heads, slots, dim)``: keys in canonical order, rotated, and values.
    layer
        Which one is read.
    scales
        ``(layers, 2, kv_heads, pages)`` of 8-bit elements, or None.
    order
        ``(dim,)``: the model's dimension behind each canonical one.
    factors
        ``(positions, dim / 2)`` complex, or None: nothing rotates.
    items
        Who reads what.
    page_size, scale, window, softcap
        As the kernels take them.
    """

    q: Tensor
    positions: tuple[int, ...]
    kv: Tensor
    layer: int
    scales: Tensor | None
    order: Tensor
    factors: Tensor | None
    items: tuple[Item, ...]
    page_size: int
    scale: float
    window: int = 0
    softcap: float = 0.0


def rotated(x: Tensor, order: Tensor, factors: Tensor | None, places: Tensor) -> Tensor:
    """Rows ``(..., rows, dim)`` of the model's order, in canonical order and rotated to places ``(rows,)``; float64."""
    pairs = x.double().index_select(-1, order.long()).unflatten(-1, (-1, 2)).contiguous()
    if factors is None:
        return pairs.flatten(-2)
    turned = torch.view_as_complex(pairs) * factors[places].to(torch.complex128)
    return torch.view_as_real(turned).flatten(-2)


def partial(problem: Problem, item: Item, reader: Reader) -> tuple[Tensor, Tensor]:
    """Output ``(heads, dim)`` and log-sum-exp ``(heads,)`` of one row over the keys of one item."""
    heads, _, dim = problem.q.shape
    device = problem.q.device
    group = heads // problem.kv.shape[2]
    at = problem.positions[reader.row]
    scores, values = [], []
    for keys in item.keys:
        j = torch.arange(keys.start, keys.stop, device=device)
        page = torch.tensor(keys.pages, device=device)[j // problem.page_size]
        slots = page * problem.page_size + j % problem.page_size
        key, value = problem.kv[problem.layer].double()[:, :, slots]
        if problem.scales is not None:
            key = key * problem.scales[problem.layer, 0][:, page, None].double()
            value = value * problem.scales[problem.layer, 1][:, page, None].double()
        if keys.first >= 0:
            seen = (keys.first + j >= reader.low) & (keys.first + j < reader.own)
        else:
            place = keys.after + reader.shift  # of what follows the last key
            seen = torch.full_like(j, at >= place, dtype=torch.bool)
            if problem.window:
                seen &= place - keys.stop + j > at - problem.window
        if reader.hidden is not None:
            seen &= ~reader.hidden
        distance = torch.tensor([at - keys.offset - reader.shift], device=device)
        query = rotated(problem.q[:, reader.row : reader.row + 1], problem.order, problem.factors, distance)
        found = (query @ key.repeat_interleave(group, 0).transpose(1, 2))[:, 0] * problem.scale
        if problem.softcap:
            found = problem.softcap * torch.tanh(found / problem.softcap)
        scores.append((found + keys.bias)[:, seen])
        values.append(value.repeat_interleave(group, 0)[:, seen])
    score, visible = torch.cat(scores, 1), torch.cat(values, 1)
    if not score.shape[1]:
        empty = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        return empty, torch.full((heads,), -torch.inf, dtype=torch.float64, device=device)
    return (torch.softmax(score, 1)[:, None] @ visible)[:, 0], torch.logsumexp(score, 1)


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None) -> Tensor:
    """Merge outputs ``(heads, dim)`` of one row by their log-sum-exps ``(heads,)``; 0 where nothing was seen."""
    weights = torch.stack([lse.double() for lse in lses])
    everything = weights if sinks is None else torch.cat([weights, sinks.double()[None]])
    total = torch.logsumexp(everything, 0)
    shares = torch.where(torch.isfinite(weights), torch.exp(weights - total), 0.0)
    return (torch.stack([out.double() for out in outs]) * shares[..., None]).sum(0)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference as a share of the largest number wanted."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))


def largest(*errors: float) -> float:
    """The largest error; not a number if one of them is none, which ``max`` would depend on their order for."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
