"""Exact merge of partial attention results of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .tables import Tables

__all__ = ["merge_kernel", "merge_partials"]


@triton.jit
def merge_kernel(
    out,
    lse,
    result,
    row_starts,
    row_partials,
    sinks,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """See :func:`merge_partials`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    d = tl.arange(0, D_PAD)
    p = tl.arange(0, BLOCK)
    real = head < HEADS
    whole = real[:, None] & (d < D)[None, :]
    best = tl.full([HEADS_BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS_BLOCK], tl.float32)
    if SINKS:
        best = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        mass += 1.0
    acc = tl.zeros([HEADS_BLOCK, D_PAD], tl.float32)
    stop = tl.load(row_starts + row + 1)
    # Many at once: one after the other, a row of a long context would wait for memory a hundred times.
    for start in range(tl.load(row_starts + row), stop, BLOCK):
        there = start + p < stop
        partial = tl.load(row_partials + start + p, mask=there, other=0).to(tl.int64)
        place = partial[:, None] * HEADS + head[None, :]
        weight = tl.load(lse + place, mask=there[:, None] & real[None, :], other=-float("inf"))
        parts = tl.load(
            out + place[:, :, None] * D + d[None, None, :], mask=there[:, None, None] & whole[None, :, :], other=0.0
        )
        top = tl.maximum(best, tl.max(weight, 0))
        reference = tl.where(top == -float("inf"), 0.0, top)
        decay = tl.exp(best - reference)
        shares = tl.exp(weight - reference[None, :])
        acc = acc * decay[:, None] + tl.sum(parts * shares[:, :, None], 0)
        mass = mass * decay + tl.sum(shares, 0)
        best = top
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    target = (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(result + target, acc.to(result.dtype.element_ty), mask=whole)


def merge_partials(out: Tensor, lse: Tensor, tables: Tables, result: Tensor, sinks: Tensor | None = None) -> None:
    """Merge the partial results of every row.

    Parameters
    ----------
    out, lse
        From :func:`~.segment.segment_attention`.
    tables
        Which partials belong to a row.
    result
        ``(rows, heads, dim)``, contiguous; a row without partials becomes 0.
    sinks
        ``(heads,)`` logits of a key without a value that every row sees (gpt-oss); None: there is none.

    Raises
    ------
    ValueError
        If shapes do not fit together.
    """
    rows, heads, dim = result.shape
    if not (result.is_contiguous() and out.is_contiguous() and lse.is_contiguous()):
        raise ValueError("results must be contiguous")
    if out.shape[1:] != (heads, dim) or lse.shape[1:] != (heads,):
        raise ValueError("the result must be of the partial results' heads and size")
    if rows < tables.rows:
        raise ValueError(f"{tables.rows} rows do not fit a result of {rows}")
    if min(out.shape[0], lse.shape[0]) < tables.partials:
        raise ValueError(f"{tables.partials} partial results do not fit the tensors given")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous of shape ({heads},)")
    if out.dtype != torch.float32 or lse.dtype != torch.float32:
        raise ValueError("partial results are float32")
    if not tables.rows:
        return
    merge_kernel[(tables.rows, triton.cdiv(heads, configs.MERGE_HEADS))](
        out,
        lse,
        result,
        tables.row_starts,
        tables.row_partials,
        sinks,
        HEADS=heads,
        D=dim,
        D_PAD=configs.padded(dim),
        BLOCK=configs.MERGE_PARTIALS,
        HEADS_BLOCK=configs.MERGE_HEADS,
        SINKS=sinks is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
