"""Problems that go through the kernels on a card, and the tables that describe them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epic_engine.attention.kernels.configs import segment_config
from epic_engine.attention.kernels.tables import Launch, Rotation, Tables

from .reference import Item, Keys, Problem, Reader

__all__ = ["CASES", "KernelCase", "make_problem", "make_tables", "rotation_of", "unit_factors"]

_HALF, _BRAIN, _FULL = torch.float16, torch.bfloat16, torch.float32
_PLACES = 4096
_YARN = 1.2  # some factor on cos and sin, as YaRN has one


@dataclass(frozen=True)
class KernelCase:
    """One problem for the segment kernel.

    Attributes
    ----------
    dtype, dim, group, page_size
        Of queries, of a head, of heads that share keys, of a page.
    readers
        Rows of an item: few or many choose the tile.
    stored
        Type of keys and values; None: as the queries.
    masked, turn_keys, rotates
        Whether some keys are hidden, keys are rotated in the kernel, anything is rotated.
    window, softcap
        0: none.
    """

    dtype: torch.dtype
    dim: int
    group: int
    page_size: int
    readers: int
    stored: torch.dtype | None = None
    masked: bool = False
    turn_keys: bool = False
    rotates: bool = True
    window: int = 0
    softcap: float = 0.0

    @property
    def name(self) -> str:
        """For tables."""
        parts = [_short(self.dtype), f"head {self.dim}", f"group {self.group}", f"page {self.page_size}"]
        parts.append(f"{self.readers} rows")
        if self.stored is not None:
            parts.append(f"{_short(self.stored)} pages")
        parts += [text for text, there in (("masks", self.masked), ("key side", self.turn_keys)) if there]
        parts += [] if self.rotates else ["no rotation"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        return ", ".join(parts)

    @property
    def tolerance(self) -> float:
        """Relative error that rounding explains."""
        return 1e-5 if self.dtype == _FULL else 2e-2


def _short(dtype: torch.dtype) -> str:
    return {_BRAIN: "bf16", _HALF: "fp16", _FULL: "fp32", torch.int8: "int8"}.get(dtype, "fp8")


CASES = (
    # Every type and head size, with few rows and with many.
    KernelCase(_BRAIN, 64, 4, 16, 2),
    KernelCase(_BRAIN, 64, 8, 64, 20),
    KernelCase(_BRAIN, 128, 4, 16, 1),
    KernelCase(_BRAIN, 128, 4, 16, 24),
    KernelCase(_BRAIN, 128, 8, 64, 6),
    KernelCase(_BRAIN, 256, 1, 64, 3),
    KernelCase(_BRAIN, 256, 8, 16, 20),
    KernelCase(_BRAIN, 80, 8, 64, 2),
    KernelCase(_BRAIN, 80, 1, 16, 70),
    KernelCase(_HALF, 128, 8, 16, 2),
    KernelCase(_HALF, 256, 1, 16, 5),
    KernelCase(_HALF, 80, 4, 16, 20),
    KernelCase(_FULL, 64, 8, 64, 12),
    KernelCase(_FULL, 128, 1, 16, 2),
    KernelCase(_FULL, 256, 4, 16, 3),
    KernelCase(_FULL, 80, 8, 64, 4),
    # Everything else that the kernel can do.
    KernelCase(_BRAIN, 128, 4, 16, 8, masked=True),
    KernelCase(_FULL, 64, 4, 64, 8, masked=True),
    KernelCase(_BRAIN, 128, 4, 16, 12, window=20),
    KernelCase(_FULL, 80, 4, 16, 12, window=20),
    KernelCase(_BRAIN, 256, 4, 16, 4, softcap=3.0),
    KernelCase(_FULL, 128, 4, 64, 4, softcap=3.0),
    KernelCase(_BRAIN, 128, 4, 16, 24, turn_keys=True),
    KernelCase(_FULL, 80, 4, 16, 4, turn_keys=True),
    KernelCase(_FULL, 64, 1, 16, 4, rotates=False),
    KernelCase(_BRAIN, 128, 4, 16, 4, stored=torch.int8),
    KernelCase(_HALF, 64, 8, 64, 8, stored=torch.int8, turn_keys=True),
    KernelCase(_BRAIN, 128, 8, 64, 2, stored=torch.float8_e4m3fn),
    KernelCase(_BRAIN, 80, 4, 16, 20, stored=torch.float8_e4m3fn),
)


def unit_factors(places: int, dim: int, rotated_pairs: int | None = None) -> Tensor:
    """Rotation of every place, ``(places, dim / 2)`` complex64; 1 for pairs behind the rotated ones."""
    half = dim // 2
    pairs = half if rotated_pairs is None else rotated_pairs
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(places, dtype=torch.float64)[:, None] * frequencies
    factors = torch.ones(places, half, dtype=torch.complex64)
    factors[:, :pairs] = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    return factors


def rotation_of(order: Tensor, factors: Tensor | None, turns: Tensor | None, device: torch.device) -> Rotation:
    """The kernels' form of complex factors."""

    def real(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.view_as_real(x).contiguous().to(device)

    return Rotation(order.to(device=device, dtype=torch.int32), real(factors), real(turns))


def make_problem(case: KernelCase, device: torch.device, seed: int) -> tuple[Problem, Rotation]:
    """A random problem of one case: rows that share a run, and rows with runs and tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    size, dim, kv_heads, rows = case.page_size, case.dim, 2, case.readers
    pages = 40
    normal = torch.randn(2, 2, kv_heads, pages * size, dim, generator=generator)
    scales = None
    if case.stored is None:
        kv = normal.to(case.dtype)
    else:
        scales = 0.5 + torch.rand(2, 2, kv_heads, pages, generator=generator)
        eighth = (normal * 30).round().clamp(-127, 127) if case.stored == torch.int8 else normal
        scales = scales / 30 if case.stored == torch.int8 else scales
        kv = eighth.to(case.stored)
    half = dim // 2
    order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()
    rotated_pairs = half // 2 if dim == 80 else half
    units = unit_factors(_PLACES, dim, rotated_pairs)
    factors = units.clone()
    factors[:, :rotated_pairs] *= _YARN
    free = torch.randperm(pages, generator=generator).tolist()

    def take(tokens: int, begin: int) -> tuple[int, ...]:
        return tuple(free.pop() for _ in range(-(-(begin + tokens) // size)))

    def keys(tokens: int, begin: int, offset: int, after: int, first: int = -1, bias: float = 0.0) -> Keys:
        return Keys(take(tokens, begin), begin, begin + tokens, offset, after, first, bias)

    # Prompt: run of 70 keys at 300, run of 37 at 400, run that only later rows see at 450; own tokens from 440 on.
    positions = tuple(range(440, 440 + rows // 2)) + tuple(range(480, 480 + rows - rows // 2))
    apart = Item(
        tuple(
            Reader(i, own=20 + i + 1, low=max(0, 20 + i + 1 - case.window) if case.window else 0) for i in range(rows)
        ),
        (
            keys(20 + rows, 0, 420, 0, first=0),
            keys(70, 3, 300 - 3, 370),
            keys(37, 0, 400, 437, bias=-0.7),
            keys(16, 5, 450 - 5, 450 + 16),
        ),
    )
    # A run that every row reads at a distance of its own, unless keys are rotated, which needs one for all.
    shifts = [100 if case.turn_keys else 60 + 3 * (i % 7) for i in range(rows)]
    readers = []
    for i, shift in enumerate(shifts):
        hidden = torch.rand(90, generator=generator) < 0.4 if case.masked and i % 3 != 1 else None
        shift = 0 if case.turn_keys else shift
        readers.append(Reader(i, shift=shift, hidden=None if hidden is None else hidden.to(device)))
    offset = shifts[0] if case.turn_keys else 0
    if case.window:
        # Near enough for the window to end in its middle.
        readers = [Reader(r.row, shift=positions[r.row] - 100) for r in readers]
    together = Item(tuple(readers), (keys(90, 2, offset - 2 * case.turn_keys, 92 if case.window else -(1 << 30)),))
    q = torch.randn(rows, kv_heads * case.group, dim, generator=generator).to(case.dtype).to(device)
    problem = Problem(
        q.transpose(0, 1),  # rows apart by heads, as a projection leaves them
        positions,
        kv.to(device),
        1,
        None if scales is None else scales.to(device),
        order.to(device),
        factors.to(device) if case.rotates else None,
        (apart, together),
        size,
        dim**-0.5 / (_YARN**2 if case.rotates else 1.0),
        case.window,
        case.softcap,
    )
    rotation = rotation_of(order, factors if case.rotates else None, units if case.turn_keys else None, device)
    return problem, rotation


def make_tables(problem: Problem, case: KernelCase, device: torch.device) -> tuple[Tables, Launch, list[Tensor]]:
    """The kernels' tables of a problem, what to launch, and memory that must outlive the launch."""
    every = [(item, reader) for item in problem.items for reader in item.readers]
    keys = [k for item in problem.items for k in item.keys]
    readers = max(len(item.readers) for item in problem.items)
    config = segment_config(case.dim, case.group, readers, case.dtype)
    tile = config.block_m // case.group
    cuts: list[tuple[int, ...]] = []
    reader_at = segment_at = 0
    for item in problem.items:
        for first in range(0, len(item.readers), tile):
            begin, count = reader_at + first, min(tile, len(item.readers) - first)
            cuts.append((begin, count, segment_at, segment_at + len(item.keys), begin, 0, 0, 0))
        reader_at += len(item.readers)
        segment_at += len(item.keys)
    tables = Tables(
        {
            "memories": 1,
            "masks": len(every),
            "pages": sum(len(k.pages) for k in keys),
            "segments": len(keys),
            "readers": len(every),
            "items": len(cuts),
            "counts": 1,
            "targets": 0,
            "positions": len(problem.positions),
            "row_starts": len(problem.positions) + 1,
            "row_partials": len(every),
        },
        device,
    )
    host = tables.host
    kv, scales = problem.kv, problem.scales
    memory = [kv.data_ptr(), *(kv.stride(i) * kv.element_size() for i in range(3)), 0, 0, 0, 0]
    if scales is not None:
        memory[4:] = [scales.data_ptr(), *(scales.stride(i) * 4 for i in range(3))]
    host["memories"][0] = memory
    at = 0
    for number, k in enumerate(keys):
        host["pages"][at : at + len(k.pages)] = k.pages
        bias = struct.unpack("<i", struct.pack("<f", k.bias))[0]
        host["segments"][number] = (0, at, k.start, k.stop, k.offset, k.after, k.first, bias)
        at += len(k.pages)
    kept: list[Tensor] = []
    for number, (item, reader) in enumerate(every):
        host["readers"][number] = (reader.row, reader.shift, reader.own, reader.low)
        if reader.hidden is not None:  # a byte for every key from the beginning of the first page
            kept.append(torch.nn.functional.pad(reader.hidden.to(torch.int8), (item.keys[0].start, 0)))
            host["masks"][number] = kept[-1].data_ptr()
    host["items"][:] = cuts
    host["counts"][0] = len(cuts)
    host["positions"][:] = problem.positions
    rows = np.array([reader.row for _, reader in every])
    host["row_partials"][:] = np.argsort(rows, kind="stable")
    host["row_starts"][1:] = np.cumsum(np.bincount(rows, minlength=len(problem.positions)))
    tables.upload()
    stored = case.stored or case.dtype
    return tables, Launch(0, 0, len(cuts), config, stored, scales is not None, bool(kept)), kept
