"""Attention of rows to segments of paged KV, one partial result per (item, row).

A program is one *item* for one KV head: a tile of readers (rows), and a list of segments that all of them go through
with one running softmax. The same kernel serves links, where an item has many rows of one prompt and walks its
segments one after the other, and decoding, where an item is a chunk with every request that reads it or a stretch of
one request's context. Splitting is the planner's: what belongs to one row but to several items is merged afterwards,
exactly, by :mod:`.merge`.

Keys are rotated at their own places and stay as they are; a row is rotated by its distance to the segment, in float32,
in registers, when the segment is entered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import ELEMENTS
from .tables import ITEM_FIELDS, MEMORY_FIELDS, READER_FIELDS, SEGMENT_FIELDS, Launch, Rotation, Tables

__all__ = ["segment_attention", "segment_kernel"]

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _product(a, b):
    """Matrix product of ``a`` with ``b``, which may be of a narrower type."""
    if _INTERPRETED:  # The interpreter takes bfloat16's bits for integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit(do_not_specialize=["layer", "window", "first_item"])
def segment_kernel(
    q,
    out,
    lse,
    order,
    factors,
    turns,
    positions,
    memories,
    segments,
    readers,
    masks,
    items,
    counts,
    pages,
    layer,
    window,
    scale,
    softcap,
    first_item,
    q_head_stride,
    q_row_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STORED: tl.constexpr,
    CLASS: tl.constexpr,
    HALVES: tl.constexpr,
    TURN_KEYS: tl.constexpr,
    ROTATE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    ITEM: tl.constexpr,
    READER: tl.constexpr,
    SEGMENT: tl.constexpr,
    MEMORY: tl.constexpr,
):
    """See :func:`segment_attention`."""
    # Buffers of a captured step are as large as a step may get; what is in use is counted.
    if tl.program_id(0) >= tl.load(counts + CLASS):
        return
    item = items + (tl.program_id(0) + first_item) * ITEM
    kv_head = tl.program_id(1)
    reader_at = tl.load(item)
    reader_count = tl.load(item + 1)
    segment_at = tl.load(item + 2)
    segment_stop = tl.load(item + 3)
    partial_at = tl.load(item + 4)

    HALF: tl.constexpr = D_PAD // 2
    element: tl.constexpr = q.dtype.element_ty
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, HALF)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    pair = h < D // 2
    dim = d < D

    # Heads of a group share their keys, so they are rows of one product.
    valid = m // GROUP < reader_count
    reader = readers + (reader_at + m // GROUP) * READER
    row = tl.load(reader, mask=valid, other=0)
    shift = tl.load(reader + 1, mask=valid, other=0)
    own = tl.load(reader + 2, mask=valid, other=0)
    low = tl.load(reader + 3, mask=valid, other=0)
    position = tl.load(positions + row, mask=valid, other=0)
    head = kv_head * GROUP + m % GROUP
    q_row = q + row.to(tl.int64) * q_row_stride + head * q_head_stride
    if HALVES:  # so that a thread loads several at once
        real_dim = h
        imaginary_dim = h + D // 2
    else:
        real_dim = tl.load(order + 2 * h, mask=pair, other=0)
        imaginary_dim = tl.load(order + 2 * h + 1, mask=pair, other=0)
    q_mask = valid[:, None] & pair[None, :]

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    LOG2E: tl.constexpr = 1.4426950408889634

    for index in range(segment_at, segment_stop):
        segment = segments + index * SEGMENT
        memory = memories + tl.load(segment) * MEMORY
        page_at = tl.load(segment + 1)
        key_start = tl.load(segment + 2)
        key_stop = tl.load(segment + 3)
        offset = tl.load(segment + 4)
        after = tl.load(segment + 5)
        first = tl.load(segment + 6)
        bias = tl.load(segment + 7).to(tl.float32, bitcast=True)
        base = tl.load(memory) + tl.load(memory + 1) * layer + tl.load(memory + 3) * kv_head
        key_base = tl.multiple_of(base.to(tl.pointer_type(STORED)), 16)
        value_base = tl.multiple_of((base + tl.load(memory + 2)).to(tl.pointer_type(STORED)), 16)
        if SCALED:
            scale_base = tl.load(memory + 4) + tl.load(memory + 5) * layer + tl.load(memory + 7) * kv_head
            key_scales = scale_base.to(tl.pointer_type(tl.float32))
            value_scales = (scale_base + tl.load(memory + 6)).to(tl.pointer_type(tl.float32))

        # Which keys a row sees: a dense segment all or none, its own tokens those up to itself.
        lower = tl.full([BLOCK_M], 0, tl.int32) + key_start
        if first >= 0:
            upper = tl.minimum(key_start + own - first, key_stop)
            if WINDOW:
                lower = tl.maximum(key_start + low - first, key_start)
        else:
            upper = tl.where(position >= after + shift, key_stop, key_start)
            if WINDOW:
                lower = tl.maximum(position - window + 1 - (after + shift) + key_stop, key_start)
        upper = tl.where(valid, upper, key_start)
        stop = tl.max(upper, 0)

        # 0, but not to the compiler: it would hold the rows in registers instead of loading them for each segment.
        again = tl.minimum(key_start, 0)
        x = tl.load((q_row + again)[:, None] + real_dim[None, :], mask=q_mask, other=0.0).to(tl.float32)
        y = tl.load((q_row + again)[:, None] + imaginary_dim[None, :], mask=q_mask, other=0.0).to(tl.float32)
        if ROTATE:
            if TURN_KEYS:
                distance = position
            else:
                # Behind a row that does not see the segment, the table may not reach.
                distance = tl.maximum(position - offset - shift, 0)
            # Cosine and sine in one load: apart, they need twice the addresses and take four times the loads.
            factor = factors.to(tl.pointer_type(tl.int64)) + distance[:, None] * (D // 2) + h[None, :]
            wide = tl.load(factor, mask=q_mask, other=0)
            cos = wide.to(tl.int32).to(tl.float32, bitcast=True)
            sin = (wide >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            turned = tl.join(x * cos - y * sin, x * sin + y * cos)
            if TURN_KEYS:
                turn = turns + (offset * (D // 2) + h) * 2
                key_cos = tl.load(turn, mask=pair, other=0.0)
                key_sin = tl.load(turn + 1, mask=pair, other=0.0)
        else:
            turned = tl.join(x, y)
        query = tl.reshape(turned, (BLOCK_M, D_PAD)).to(element)

        # Not from a place that a window would give: loads whose addresses depend on a reduction are not pipelined.
        for at in range(key_start, stop, BLOCK_N):
            j = at + n
            there = j < stop
            page = tl.load(pages + page_at + j // PAGE, mask=there, other=0)
            slot = (page * PAGE + j % PAGE).to(tl.int64) * D
            if TURN_KEYS:
                keys = tl.load(key_base + slot[:, None] + d[None, :], mask=there[:, None] & dim[None, :], other=0.0)
                a, b = tl.split(tl.reshape(keys.to(tl.float32), (BLOCK_N, HALF, 2)))
                if ROTATE:
                    both = tl.join(a * key_cos - b * key_sin, a * key_sin + b * key_cos)
                else:
                    both = tl.join(a, b)
                key = tl.trans(tl.reshape(both, (BLOCK_N, D_PAD)).to(element))
            else:
                key = tl.load(key_base + slot[None, :] + d[:, None], mask=there[None, :] & dim[:, None], other=0.0)
            scores = _product(query, key) * scale
            if SCALED:
                scores *= tl.load(key_scales + page, mask=there, other=0.0)[None, :]
            if SOFTCAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            scores = (scores + bias) * LOG2E
            seen = j[None, :] < upper[:, None]
            if WINDOW:
                seen &= j[None, :] >= lower[:, None]
            if MASKED:
                mask_row = tl.load(masks + reader_at + m // GROUP, mask=valid, other=0)
                hidden = tl.load(
                    mask_row.to(tl.pointer_type(tl.int8))[:, None] + j[None, :],
                    mask=(mask_row != 0)[:, None] & seen,
                    other=0,
                )
                seen &= hidden == 0
            scores = tl.where(seen, scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            # A row that has seen nothing yet keeps a finite reference: -inf minus -inf is not a number.
            reference = tl.where(top == float("-inf"), 0.0, top)
            shares = tl.exp2(scores - reference[:, None])
            decay = tl.exp2(best - reference)
            mass = mass * decay + tl.sum(shares, 1)
            if SCALED:
                shares *= tl.load(value_scales + page, mask=there, other=0.0)[None, :]
            values = tl.load(value_base + slot[:, None] + d[None, :], mask=there[:, None] & dim[None, :], other=0.0)
            acc = acc * decay[:, None] + _product(shares.to(element), values)
            best = top

    some = mass > 0
    acc = acc / tl.where(some, mass, 1.0)[:, None]
    weight = tl.where(some, (best + tl.log2(tl.where(some, mass, 1.0))) / LOG2E, float("-inf"))
    place = (partial_at + m // GROUP).to(tl.int64) * HEADS + head
    tl.store(out + place[:, None] * D + d[None, :], acc, mask=valid[:, None] & dim[None, :])
    tl.store(lse + place, weight, mask=valid)


def segment_attention(
    q: Tensor,
    tables: Tables,
    launch: Launch,
    layer: int,
    rotation: Rotation,
    out: Tensor,
    lse: Tensor,
    *,
    page_size: int,
    kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    turn_keys: bool = False,
) -> None:
    """Attention of the items of one launch; fills their partial results.

    Parameters
    ----------
    q
        ``(heads, rows, dim)``, unrotated, in the model's own order of dimensions; the last one contiguous.
    tables
        Work of the pass; see :class:`~.tables.Tables`.
    launch
        Which items, in which tiles.
    layer
        Decoder layer, from 0.
    rotation
        Tables of the layer, and the order of dimensions.
    out, lse
        ``(partials, heads, dim)`` and ``(partials, heads)`` float32: output and natural log-sum-exp; -inf and 0 for a
        row that sees nothing of its item.
    page_size
        Tokens a page.
    kv_heads
        Heads of keys and values.
    scale
        Factor on the scores.
    window
        A row sees keys less than so many positions before it; 0: all.
    softcap
        Scores are capped to this by tanh (Gemma 2); 0: not.
    turn_keys
        Rotate keys to their places in the prompt, as MEPIC does in its kernel, and rows to theirs. Items must not mix
        readers of different shifts. For comparison: the result is the same.

    Raises
    ------
    ValueError
        If shapes, types or memory layout do not fit together.
    """
    heads, rows, dim = q.shape
    config = launch.config
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} heads of keys")
    if q.stride(2) != 1:
        raise ValueError("the dimensions of a query head must lie next to each other")
    if dim % 2 or dim > config.head_dim:
        raise ValueError(f"head size {dim} must be even and at most {config.head_dim} in this configuration")
    if heads // kv_heads > config.block_m:
        raise ValueError(f"{heads // kv_heads} heads a group do not fit a tile of {config.block_m} rows")
    if launch.stored in (torch.int8, torch.float8_e4m3fn) and not launch.scaled:
        raise ValueError(f"{launch.stored} pages need scales")
    if rotation.order.numel() != dim or (rotation.factors is not None and rotation.factors.shape[1:] != (dim // 2, 2)):
        raise ValueError("the rotation does not belong to this head size")
    for name, tensor, shape in (("out", out, (heads, dim)), ("lse", lse, (heads,))):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.shape[1:] != shape:
            raise ValueError(f"{name} must be contiguous float32 of shape (partials, {', '.join(map(str, shape))})")
    if rows < tables.rows or out.shape[0] < tables.partials or lse.shape[0] < tables.partials:
        raise ValueError(f"{tables.rows} rows and {tables.partials} partial results do not fit the tensors given")
    if turn_keys and rotation.factors is not None and rotation.turns is None:
        raise ValueError("turning keys needs the rotation's unit factors")
    if not launch.items:
        return
    segment_kernel[(launch.items, kv_heads)](
        q,
        out,
        lse,
        rotation.order,
        rotation.factors,
        rotation.turns if turn_keys else None,
        tables.positions,
        tables.memories,
        tables.segments,
        tables.readers,
        tables.masks,
        tables.items,
        tables.counts,
        tables.pages,
        layer,
        window,
        scale,
        softcap,
        launch.first_item,
        q.stride(0),
        q.stride(1),
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        D_PAD=config.head_dim,
        PAGE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STORED=ELEMENTS[launch.stored],
        CLASS=launch.index,
        HALVES=rotation.halves,
        TURN_KEYS=turn_keys,
        ROTATE=rotation.factors is not None,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        MASKED=launch.masked,
        SCALED=launch.scaled,
        ITEM=ITEM_FIELDS,
        READER=READER_FIELDS,
        SEGMENT=SEGMENT_FIELDS,
        MEMORY=MEMORY_FIELDS,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )
