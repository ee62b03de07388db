"""What a pass has to do, as tables on the device: written on the host once a pass, read by every layer's kernels.

=============  ==========================================================================================
``memories``   where KV lies: address of layer 0's first key, strides in bytes; the same for scales
``pages``      page numbers; segments name stretches of this list
``segments``   keys in one memory: pages, first and last key, distance, who sees them
``readers``    a row with what is its own about a segment: shift of its distance, how many of its tokens it sees
``masks``      per reader, the address of one byte a key of its segment's pages, not 0 where it is hidden; or 0
``items``      a program's work: readers, segments, where its results go
``counts``     items of each launch
``targets``    where a row's key and value are written, and the place that the key is rotated to
``positions``  of rows
``row_starts``, ``row_partials``
               which partial results belong to a row
=============  ==========================================================================================

All lie in one buffer, so that a pass costs one copy to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .configs import SegmentConfig

__all__ = [
    "ITEM_FIELDS",
    "MEMORY_FIELDS",
    "READER_FIELDS",
    "SEGMENT_FIELDS",
    "TARGET_FIELDS",
    "Launch",
    "Rotation",
    "Tables",
]

MEMORY_FIELDS = 8
"""address, layer stride, value stride, head stride; address of scales and their three strides: all in bytes"""
SEGMENT_FIELDS = 8
"""memory, place in pages, first key, key behind the last, offset, after, number of the first key among a sequence's own
(-1: of others), bias (bits)"""
READER_FIELDS = 4
"""row, shift, own tokens it sees, first own token it sees"""
ITEM_FIELDS = 8
"""place in readers, readers, place in segments, segment behind the last, place of its partial results"""
TARGET_FIELDS = 4
"""memory (-1: none), slot, place of rotation"""

_WIDE = frozenset({"memories", "masks"})
_WIDTHS = {
    "memories": MEMORY_FIELDS,
    "segments": SEGMENT_FIELDS,
    "readers": READER_FIELDS,
    "items": ITEM_FIELDS,
    "targets": TARGET_FIELDS,
}
_ALIGNMENT = 16
_NAMES = (
    "memories",
    "masks",
    "pages",
    "segments",
    "readers",
    "items",
    "counts",
    "targets",
    "positions",
    "row_starts",
    "row_partials",
)


@dataclass(frozen=True)
class Launch:
    """Items that run in tiles of one shape.

    Attributes
    ----------
    index
        Which entry of ``counts`` says how many there are.
    first_item, items
        Where they begin, and how many programs are started for them: all, or as many as a captured step may have.
    config
        Shape of tiles.
    stored
        Type of the elements of keys and values.
    scaled
        Whether memories have scales.
    masked
        Whether readers have hidden keys.
    """

    index: int
    first_item: int
    items: int
    config: SegmentConfig
    stored: torch.dtype
    scaled: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of a layer on the device.

    Attributes
    ----------
    order
        ``(dim,)`` int32: dimension of the model behind each one of the canonical, pair-adjacent order.
    factors
        ``(positions, dim / 2, 2)`` float32: cosine and sine, scaled as the model scales them; None: nothing rotates.
    turns
        The same without the scale, for keys that are rotated again.
    halves
        Whether the order is that of a model whose pairs are dimensions i and i + dim / 2; then loads are wider.
    """

    order: Tensor
    factors: Tensor | None
    turns: Tensor | None = None
    halves: bool = False


class Tables:
    """The tables of a pass, in one buffer on the host and one on the device.

    Parameters
    ----------
    sizes
        Entries of each table.
    device
        Where the kernels run.

    Attributes
    ----------
    host
        Every table on the host, to be filled in.
    rows, partials
        Rows of the pass, and partial results.
    """

    memories: Tensor
    masks: Tensor
    pages: Tensor
    segments: Tensor
    readers: Tensor
    items: Tensor
    counts: Tensor
    targets: Tensor
    positions: Tensor
    row_starts: Tensor
    row_partials: Tensor

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self.sizes = dict(sizes)
        self.rows = sizes["positions"]
        self.partials = sizes["row_partials"]
        spans: dict[str, tuple[int, int, bool]] = {}
        at = 0
        for name in _NAMES:
            wide = name in _WIDE
            count = max(sizes[name], 1) * _WIDTHS.get(name, 1)
            nbytes = count * (8 if wide else 4)
            spans[name] = (at, at + nbytes, wide)
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(at, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.empty(at, dtype=torch.uint8, device=device) if on_gpu else self._host
        if on_gpu:
            self._copied = torch.cuda.Event()
        self.host: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {}
        for name, (start, stop, wide) in spans.items():
            dtype = torch.int64 if wide else torch.int32
            setattr(self, name, self._device[start:stop].view(dtype))
            table = self._host[start:stop].view(dtype).numpy()
            width = _WIDTHS.get(name, 1)
            self.host[name] = table.reshape(-1, width) if width > 1 else table

    def upload(self) -> None:
        """Copy to the device what the host has; returns before that is done."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()

    def wait(self) -> None:
        """Return when the host's tables may be written to again."""
        if self._device is not self._host:
            self._copied.synchronize()
