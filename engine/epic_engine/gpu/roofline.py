"""How much a kernel has to move and to compute for two typical problems."""

from __future__ import annotations

import torch

from .cards import Demand
from .kernel_build import HEADS, KV_HEADS, Case
from .kernel_record import DECODE_ROWS

__all__ = ["PROBLEMS", "demand"]

_REQUESTS = 8
_CONTEXT = 32_768
_CHUNK = 512
_LINK_ROWS = 1024
_PARTIALS = 4  # of a row: enough to keep the largest of the cards busy

PROBLEMS = {
    "decode": f"decode: {_REQUESTS} requests, each with its own {_CONTEXT:,} tokens of context in chunks of {_CHUNK}",
    "link": f"link: {_LINK_ROWS:,} rows of one request over {_CONTEXT:,} tokens",
    "merge": f"merge: {_LINK_ROWS:,} rows of {_PARTIALS} partial results",
    "write": f"write: {_LINK_ROWS:,} rows",
}


def demand(case: Case) -> tuple[str, Demand]:
    """Which problem a configuration is for, and what one layer of it asks for."""
    dim, element = case.dim, case.dtype.itemsize
    tensor = case.dtype is not torch.float32
    if case.kernel == "write":
        moved = 2 * 2 * _LINK_ROWS * KV_HEADS * dim * element
        return "write", Demand(moved, moved, 0, tensor)
    if case.kernel == "merge":
        moved = _LINK_ROWS * HEADS * (_PARTIALS * (dim + 1) * 4 + dim * element)
        return "merge", Demand(moved, moved, 0, tensor)
    assert case.config is not None
    tile, group = case.config.block_m, HEADS // KV_HEADS
    decode = tile <= DECODE_ROWS
    rows, contexts = (1, _REQUESTS) if decode else (_LINK_ROWS, 1)
    tiles = -(-rows * group // tile)
    keys = contexts * KV_HEADS * 2 * _CONTEXT * dim * (case.stored or case.dtype).itemsize
    own = contexts * rows * HEADS * (dim * element + _PARTIALS * (dim + 1) * 4)
    flops = 4 * contexts * KV_HEADS * tiles * tile * _CONTEXT * case.config.head_dim
    return "decode" if decode else "link", Demand(keys + own, keys * tiles + own, flops, tensor)
