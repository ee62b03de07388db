"""What tiles are measured on: decoding and linking over one layer, with numbers that no tile may change.

The numbers are chosen so that 16-bit types round nothing. Rotations are quarter turns, a row reads four dimensions
whose keys are -1, 0 or 1, and the scale is log 2: scores are small integers times that, shares of the softmax are
powers of two, and values are small integers. Whatever the tile, results differ by float32 rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epic_engine.attention.base import PrivateKV, Run, SequenceRows
from epic_engine.attention.kernels.configs import SegmentConfig, default_config
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Rotation, Tables
from epic_engine.attention.schedule import Shape, draft

from .shapes import ModelShape
from .timing import l2_bytes, measure

__all__ = ["REAL", "TINY", "TileProblem", "TuneSizes", "tile_problems"]

_PAGE = 16
_L2_TIMES = 4  # as in bench_attention
_INTERPRETER_PROCESSORS = 4
_DIMENSIONS = 4
_LARGEST_VALUE = 8
_SCALE = math.log(2.0)


@dataclass(frozen=True)
class TuneSizes:
    """Sizes of the problems.

    Attributes
    ----------
    requests, context, chunk
        Decoding with contexts of their own: requests, tokens that each one reads, tokens of a chunk.
    link_chunks, link_chunk, link_rows
        Chunks of a link, tokens of each, and how many of these are computed anew.
    sweeps
        Timed sweeps of a measurement.
    rounds
        Measurements of each tile, in turn with those of the others.
    """

    requests: int
    context: int
    chunk: int
    link_chunks: int
    link_chunk: int
    link_rows: int
    sweeps: int
    rounds: int


REAL = TuneSizes(8, 8192, 512, 16, 2048, 64, sweeps=3, rounds=9)
TINY = TuneSizes(1, 48, 24, 2, 32, 2, sweeps=1, rounds=1)


class TileProblem:
    """Items of one pass, whose tiles can be replaced by others of as many rows.

    Parameters
    ----------
    name
        ``"decode"`` or ``"link"``.
    batch
        Rows of the pass.
    model, dtype
        Shapes and type of its attention.
    layers
        Layers of the memory that the batch reads.
    places
        Positions that there may be.
    rows
        Of the tiles that are measured; others stay as they are.
    device
        Where kernels run.
    sweeps
        Timed sweeps of a measurement.
    """

    def __init__(
        self,
        name: str,
        batch: Sequence[SequenceRows],
        model: ModelShape,
        dtype: torch.dtype,
        *,
        layers: int,
        places: int,
        rows: int,
        device: torch.device,
        sweeps: int,
    ) -> None:
        self.name = name
        self._batch, self._layers, self._rows, self._device, self._sweeps = batch, layers, rows, device, sweeps
        processors = _INTERPRETER_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        made = draft(batch, Shape(model.heads, model.kv_heads, model.head_dim, dtype, _PAGE, processors))
        self._tables, self._launches = Tables(made.sizes(), device), made.launches()
        if all(launch.config.block_m != rows for launch in self._launches):
            raise ValueError(f"nothing of this problem runs in tiles of {rows} rows")
        made.fill(self._tables, self._launches)
        self._tables.upload()
        self._kv_heads = model.kv_heads
        self._rotation = _quarter_turns(places, model.head_dim, device)
        self._q = _queries((model.heads, self._tables.rows, model.head_dim), dtype, device)
        partials = (self._tables.partials, model.heads)
        self._out = torch.empty((*partials, model.head_dim), dtype=torch.float32, device=device)
        self._lse = torch.empty(partials, dtype=torch.float32, device=device)

    def numbers(self, config: SegmentConfig) -> tuple[Tensor, Tensor]:
        """Partial results in a tile: ``(partials, heads, dim)`` and log-sum-exps ``(partials, heads)``, float32."""
        self._out.fill_(math.nan)  # what is not written is found
        self._lse.fill_(math.nan)
        self._attend(config, 0)
        return self._out.clone(), self._lse.clone()

    def seconds(self, config: SegmentConfig) -> float:
        """Time of a layer in a tile, once."""

        def sweep() -> None:
            for layer in range(self._layers):
                self._attend(config, layer)

        return measure(sweep, self._layers, self._device, repeats=self._sweeps).seconds

    def _attend(self, config: SegmentConfig, layer: int) -> None:
        for launch in self._launches:
            segment_attention(
                self._q,
                self._tables,
                replace(launch, config=config) if launch.config.block_m == self._rows else launch,
                layer,
                self._rotation,
                self._out,
                self._lse,
                page_size=_PAGE,
                kv_heads=self._kv_heads,
                scale=_SCALE,
            )


def tile_problems(
    config: SegmentConfig, model: ModelShape, dtype: torch.dtype, device: torch.device, sizes: TuneSizes
) -> list[TileProblem]:
    """Decoding and a link whose items run in a tile's rows.

    Parameters
    ----------
    config
        A default tile of the model.
    model, dtype
        Shapes and type of its attention.
    device
        Where kernels run.
    sizes
        Of the problems.
    """
    group = model.heads // model.kv_heads
    few = default_config(model.head_dim, group, 1, dtype).block_m == config.block_m
    many = default_config(model.head_dim, group, 1 << 20, dtype).block_m == config.block_m
    readers = config.block_m // group
    token_bytes = 2 * model.kv_heads * model.head_dim * dtype.itemsize

    def memory(tokens: int) -> Tensor:
        layers = max(1, -(-_L2_TIMES * l2_bytes(device) // (tokens * token_bytes)))
        kv = torch.empty(layers, 2, model.kv_heads, tokens, model.head_dim, dtype=dtype, device=device)
        kv[:, 0] = _integers(kv[:, 0], 1)
        kv[:, 1] = _integers(kv[:, 1], _LARGEST_VALUE)
        return kv

    def own(rows: int, layers: int) -> PrivateKV:
        private = PrivateKV(model.spec(layers, dtype), rows, device)
        private.kv.zero_()
        return private

    def problem(name: str, batch: Sequence[SequenceRows], layers: int, places: int) -> TileProblem:
        return TileProblem(
            name,
            batch,
            model,
            dtype,
            layers=layers,
            places=places,
            rows=config.block_m,
            device=device,
            sweeps=sizes.sweeps,
        )

    # Few rows are those of single requests; more come together when requests read the same chunks.
    requests = sizes.requests if few else readers
    kv = memory(sizes.context * (requests if few else 1))
    layers = len(kv)
    batch = []
    for request in range(requests):
        base = request * sizes.context if few else 0
        runs = [
            Run(kv, base + at, base + at + sizes.chunk, offset=at, after=at + sizes.chunk)
            for at in range(0, sizes.context, sizes.chunk)
        ]
        batch.append(SequenceRows([sizes.context], own(_PAGE, layers), runs))
    decode = problem("decode", batch, layers, sizes.context + 1)

    # A link's rows stand among its chunks if they are many; a question's stand behind them.
    context = sizes.link_chunks * sizes.link_chunk
    chosen = max(sizes.link_rows, -(-readers // sizes.link_chunks)) if many else 0
    positions = [at + slot for at in range(0, context, sizes.link_chunk) for slot in range(chosen)]
    positions = positions or list(range(context, context + readers))
    kv = memory(context)
    layers = len(kv)
    runs = [
        Run(kv, at + chosen, at + sizes.link_chunk, offset=at, after=at + sizes.link_chunk)
        for at in range(0, context, sizes.link_chunk)
    ]
    batch = [SequenceRows(positions, own(len(positions), layers), runs)]
    return [decode, problem("link", batch, layers, positions[-1] + 1)]


def _integers(like: Tensor, largest: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(largest)
    return torch.empty_like(like).random_(-largest, largest + 1, generator=generator)


def _queries(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of zeros, with 1 or -1 in some dimensions of each."""
    generator = torch.Generator(device).manual_seed(0)
    chosen = torch.rand(shape, generator=generator, device=device).topk(_DIMENSIONS, dim=-1).indices
    signs = torch.randint(0, 2, chosen.shape, generator=generator, device=device) * 2 - 1
    return torch.zeros(shape, dtype=dtype, device=device).scatter_(-1, chosen, signs.to(dtype))


def _quarter_turns(places: int, dim: int, device: torch.device) -> Rotation:
    """Rotary tables that turn a pair by a quarter, a half, three quarters or nothing."""
    half = dim // 2
    turns = torch.arange(places)[:, None] * torch.arange(1, half + 1) % 4
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]
    order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()
    factors = torch.stack([cos, sin], -1).contiguous()
    return Rotation(order.to(device=device, dtype=torch.int32), factors.to(device), halves=True)
