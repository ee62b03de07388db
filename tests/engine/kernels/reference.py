"""Attention over segments, rotation and the merge of partial results, in float64 and in plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .problems import Inputs, Item, Keys, Problem, Row


def wide(x: Tensor) -> Tensor:
    """In float64; eight-bit floats have no direct way there."""
    return x if x.dtype == torch.float64 else x.float().double()


def rotated(x: Tensor, order: Tensor, factors: Tensor | None, place: int) -> Tensor:
    """``(..., dim)`` in the model's order to the canonical one in float64, turned to a place."""
    pairs = torch.view_as_complex(wide(x)[..., order.long()].unflatten(-1, (-1, 2)).contiguous())
    if factors is not None:
        pairs = pairs * torch.view_as_complex(wide(factors[place]))
    return torch.view_as_real(pairs).flatten(-2)


def sees(row: Row, keys: Keys, number: int, window: int) -> bool:
    """Whether a row sees one of a segment's keys, counted from its first."""
    if row.hidden is not None and number in row.hidden:
        return False
    if keys.first >= 0:
        own = keys.first + number
        return own < row.own and (not window or own >= row.low)
    end = keys.after + row.shift
    if row.position < end:
        return False
    place = end - keys.count + number
    return not window or row.position - place < window


def softmax_average(scores: Tensor, values: Tensor) -> Tensor:
    """Softmax of the scores ``(n,)`` over the values ``(n, dim)``, and the logarithm of its mass: ``(dim + 1,)``."""
    if not len(scores):
        return torch.tensor([0.0] * values.shape[1] + [-math.inf], dtype=torch.float64)
    lse = torch.logsumexp(scores, 0)
    return torch.cat([torch.exp(scores - lse) @ values, lse[None]])


def _read(p: Problem, inputs: Inputs, keys: Keys, pages: Sequence[int], kv_head: int) -> tuple[Tensor, Tensor]:
    """A segment's keys and values, ``(count, dim)`` each."""
    both = []
    for number in range(keys.start, keys.start + keys.count):
        page, place = pages[number // p.page], number % p.page
        found = wide(inputs.kvs[keys.memory][p.layer, :, kv_head, page * p.page + place])
        if inputs.scales is not None:
            found = found * wide(inputs.scales[keys.memory][p.layer, :, kv_head, page])[:, None]
        both.append(found)
    keys_and_values = torch.stack(both, 1)
    return keys_and_values[0], keys_and_values[1]


def attention_of_item(p: Problem, inputs: Inputs, item: Item, number: int) -> list[Tensor]:
    """Of each row of an item: ``(heads, dim + 1)``, the log-sum-exp last."""
    read = [
        [_read(p, inputs, keys, pages, kv_head) for kv_head in range(p.kv_heads)]
        for keys, pages in zip(item.segments, inputs.pages[number], strict=True)
    ]
    found = []
    for row, place in zip(item.rows, inputs.rows[number], strict=True):
        seen = [[n for n in range(keys.count) if sees(row, keys, n, p.window)] for keys in item.segments]
        heads = []
        for head in range(p.heads):
            scores, values = [], []
            for keys, numbers, by_head in zip(item.segments, seen, read, strict=True):
                if not numbers:
                    continue
                query = rotated(
                    inputs.q[head, place], inputs.order, inputs.factors, row.position - keys.offset - row.shift
                )
                score = by_head[head // p.group][0][numbers] @ query * p.scale
                if p.softcap:
                    score = p.softcap * torch.tanh(score / p.softcap)
                scores.append(score + keys.bias)
                values.append(by_head[head // p.group][1][numbers])
            nothing = torch.zeros(0, p.dim, dtype=torch.float64)
            heads.append(softmax_average(torch.cat([nothing[:, 0], *scores]), torch.cat([nothing, *values])))
        found.append(torch.stack(heads))
    return found


def merged(outs: Tensor, weights: Tensor, sink: float | None) -> Tensor:
    """Partial results ``(n, dim)`` of one row and head with their log-sum-exps ``(n,)`` as one, ``(dim,)``."""
    outs, weights = wide(outs), wide(weights)
    if sink is not None:
        outs, weights = (
            torch.cat([outs, outs.new_zeros(1, outs.shape[1])]),
            torch.cat([weights, weights.new_tensor([sink])]),
        )
    heavy = weights > -math.inf
    if not heavy.any():
        return torch.zeros(outs.shape[1], dtype=torch.float64)
    return torch.softmax(weights[heavy], 0) @ outs[heavy]
