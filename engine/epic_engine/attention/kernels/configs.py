"""Tile shapes of the kernels: few, chosen by what a program has to do, never tuned in the path of a request.

Which of them a card uses may have been measured before: see :mod:`.tuned`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from .tuned import tuned

__all__ = [
    "ELEMENTS",
    "MERGE_HEADS",
    "MERGE_PARTIALS",
    "WRITE_ROWS",
    "SegmentConfig",
    "default_config",
    "default_configs",
    "padded",
    "segment_config",
]

ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
WRITE_ROWS = 16
MERGE_PARTIALS = 16
MERGE_HEADS = 2
_SMALLEST_HEAD = 16  # of a matrix product
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class SegmentConfig:
    """Shape of a tile of segment attention.

    Attributes
    ----------
    head_dim
        Padded head size.
    block_m
        Rows of a tile: readers times heads of a group.
    block_n
        Keys at a time.
    warps, stages
        Of a program; iterations that are under way at once. A key waits for its page's number, so that half as many of
        keys are: with five stages the next ones are loaded while these are worked on.
    """

    head_dim: int
    block_m: int
    block_n: int
    warps: int
    stages: int


def padded(dim: int) -> int:
    """Head size that tiles have for a model's.

    Raises
    ------
    ValueError
        If there is none.
    """
    if dim > _LARGEST_HEAD or dim % 2:
        raise ValueError(f"head size {dim} is odd or above {_LARGEST_HEAD}")
    return max(_SMALLEST_HEAD, 1 << (dim - 1).bit_length())


# (padded head size, bytes of an element of a query, few or many rows) -> rows, keys, warps, stages
_SHAPES = {
    (64, 2, 0): (16, 128, 4, 5),
    (64, 2, 1): (64, 64, 4, 5),
    (64, 2, 2): (128, 64, 8, 5),
    (128, 2, 0): (16, 64, 4, 5),
    (128, 2, 1): (32, 64, 4, 5),
    (128, 2, 2): (64, 64, 8, 5),
    (128, 2, 3): (128, 64, 8, 5),
    (256, 2, 0): (16, 32, 4, 5),
    (256, 2, 1): (32, 32, 8, 5),
    (256, 2, 2): (64, 32, 8, 5),
    (64, 4, 0): (16, 32, 8, 3),
    (64, 4, 1): (32, 32, 8, 3),
    (128, 4, 0): (16, 16, 4, 3),
    (128, 4, 1): (32, 16, 8, 3),
    (256, 4, 0): (16, 16, 8, 3),
}


def segment_config(dim: int, group: int, readers: int, dtype: torch.dtype) -> SegmentConfig:
    """The tile for items of about so many readers, as :func:`default_config` or as tuned for this card."""
    return tuned(default_config(dim, group, readers, dtype), _element(dtype))


def _element(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 2 else 4


def default_config(dim: int, group: int, readers: int, dtype: torch.dtype) -> SegmentConfig:
    """The tile for items of about so many readers, whatever the card.

    Parameters
    ----------
    dim
        Head size.
    group
        Query heads that share a head of keys.
    readers
        Rows that read the same segments.
    dtype
        Of queries.

    Raises
    ------
    ValueError
        If there is no tile for such heads or so many of them.
    """
    size = padded(dim)
    rows = group * readers
    shapes = [_SHAPES[key] for key in sorted(_SHAPES) if key[:2] == (max(size, 64), _element(dtype))]
    shape = next((s for s in shapes if s[0] >= rows), shapes[-1])
    if shape[0] < group:
        raise ValueError(f"{group} heads a group do not fit a tile of {shape[0]} rows")
    return SegmentConfig(size, *shape)


def default_configs() -> list[tuple[SegmentConfig, torch.dtype]]:
    """Every configuration that :func:`default_config` gives, with the type of the query."""
    found = []
    for (size, element, _), shape in sorted(_SHAPES.items()):
        found.append((SegmentConfig(size, *shape), torch.bfloat16 if element == 2 else torch.float32))
    return found
