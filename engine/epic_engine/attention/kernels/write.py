"""New keys and values to pages: keys are rotated at their own place on the way."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import ELEMENTS, WRITE_ROWS, padded
from .tables import MEMORY_FIELDS, TARGET_FIELDS, Rotation, Tables

__all__ = ["write_kernel", "write_kv"]


@triton.jit(do_not_specialize=["layer", "rows"])
def write_kernel(
    k,
    v,
    order,
    factors,
    memories,
    targets,
    layer,
    rows,
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    ROTATE: tl.constexpr,
    MEMORY: tl.constexpr,
    TARGET: tl.constexpr,
):
    """See :func:`write_kv`."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kv_head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    h = tl.arange(0, D_PAD // 2)
    dim = d < D
    pair = h < D // 2
    there = r < rows
    memory = tl.load(targets + r * TARGET, mask=there, other=-1)
    slot = tl.load(targets + r * TARGET + 1, mask=there, other=0)
    place = tl.load(targets + r * TARGET + 2, mask=there, other=0)
    there &= memory >= 0  # a row of a captured step that is not in use
    field = memories + tl.where(there, memory, 0) * MEMORY
    base = tl.load(field) + tl.load(field + 1) * layer + tl.load(field + 3) * kv_head
    key_base = base.to(tl.pointer_type(STORED))
    value_base = (base + tl.load(field + 2)).to(tl.pointer_type(STORED))

    half = there[:, None] & pair[None, :]
    k_row = k + r.to(tl.int64) * k_row_stride + kv_head * k_head_stride
    real_dim = tl.load(order + 2 * h, mask=pair, other=0)
    imaginary_dim = tl.load(order + 2 * h + 1, mask=pair, other=0)
    x = tl.load(k_row[:, None] + real_dim[None, :], mask=half, other=0.0).to(tl.float32)
    y = tl.load(k_row[:, None] + imaginary_dim[None, :], mask=half, other=0.0).to(tl.float32)
    if ROTATE:
        factor = factors + (place[:, None] * (D // 2) + h[None, :]) * 2
        cos = tl.load(factor, mask=half, other=0.0)
        sin = tl.load(factor + 1, mask=half, other=0.0)
        turned = tl.join(x * cos - y * sin, x * sin + y * cos)
    else:
        turned = tl.join(x, y)
    keys = tl.reshape(turned, (BLOCK, D_PAD)).to(STORED)
    whole = there[:, None] & dim[None, :]
    target = slot.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(key_base[:, None] + target, keys, mask=whole)
    v_row = v + r.to(tl.int64) * v_row_stride + kv_head * v_head_stride
    values = tl.load(v_row[:, None] + d[None, :], mask=whole, other=0.0)
    tl.store(value_base[:, None] + target, values.to(STORED), mask=whole)


def write_kv(k: Tensor, v: Tensor, tables: Tables, layer: int, rotation: Rotation) -> None:
    """Write the rows' keys and values to their pages.

    Parameters
    ----------
    k, v
        ``(kv_heads, rows, dim)``: keys unrotated in the model's own order of dimensions, values as they are; the last
        dimension contiguous.
    tables
        Where each row goes, and the place that its key is rotated to.
    layer
        Decoder layer, from 0.
    rotation
        Tables of the layer, and the order of dimensions.

    Raises
    ------
    ValueError
        If shapes do not fit together.
    """
    kv_heads, rows, dim = k.shape
    if v.shape != k.shape or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("keys and values must be of one shape, with the dimensions of a head next to each other")
    if rotation.order.numel() != dim or (rotation.factors is not None and rotation.factors.shape[1:] != (dim // 2, 2)):
        raise ValueError("the rotation does not belong to this head size")
    if rows < tables.rows:
        raise ValueError(f"{tables.rows} rows are to be written, {rows} are given")
    if not tables.rows:
        return
    write_kernel[(triton.cdiv(tables.rows, WRITE_ROWS), kv_heads)](
        k,
        v,
        rotation.order,
        rotation.factors,
        tables.memories,
        tables.targets,
        layer,
        tables.rows,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        D=dim,
        D_PAD=padded(dim),
        BLOCK=WRITE_ROWS,
        STORED=ELEMENTS[k.dtype],
        ROTATE=rotation.factors is not None,
        MEMORY=MEMORY_FIELDS,
        TARGET=TARGET_FIELDS,
        num_warps=4,
        enable_fp_fusion=True,
    )
