"""Kernels of one layer, timed: decoding, the link phase, writing keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from epic_engine.attention.base import PrivateKV, Run, SequenceRows
from epic_engine.attention.kernels.merge import merge_partials
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Rotation, Tables
from epic_engine.attention.kernels.write import write_kv
from epic_engine.attention.schedule import Shape, draft
from epic_engine.errors import InsufficientResourcesError

from .kernel_cases import rotation_of, unit_factors
from .report import Report, tidy
from .shapes import ModelShape, Sizes
from .timing import Timing, copy_bandwidth, free_memory, l2_bytes, measure

__all__ = ["run_decode", "run_link", "run_write"]

_PAGE = 16
# Measurements read more than this many times the L2 cache before they come back to the same memory.
_L2_TIMES = 4
_INTERPRETER_PROCESSORS = 4
_MEMORY_SHARE = 0.8
_CELL_SECONDS = 12.0


class _Layers:
    """Attention of a pass over some layers of synthetic memory, without the model around it."""

    def __init__(
        self, batch: Sequence[SequenceRows], model: ModelShape, dtype: torch.dtype, rotation: Rotation, turn: bool
    ) -> None:
        self.device = rotation.order.device
        processors = _INTERPRETER_PROCESSORS
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        shape = Shape(model.heads, model.kv_heads, model.head_dim, dtype, _PAGE, processors, turn)
        made = draft(batch, shape)
        self.tables = Tables(made.sizes(), self.device)
        self.launches = made.launches()
        made.fill(self.tables, self.launches)
        self.tables.upload()
        self.shape, self.rotation = shape, rotation
        partials = max(self.tables.partials, 1)
        rows = self.tables.rows
        self.out = torch.empty(partials, model.heads, model.head_dim, dtype=torch.float32, device=self.device)
        self.lse = torch.empty(partials, model.heads, dtype=torch.float32, device=self.device)
        self.q = _random((model.heads, rows, model.head_dim), dtype, self.device)
        self.result = torch.empty(rows, model.heads, model.head_dim, dtype=dtype, device=self.device)

    def attend(self, layer: int) -> None:
        """Attention and merge of one layer."""
        for launch in self.launches:
            segment_attention(
                self.q,
                self.tables,
                launch,
                layer,
                self.rotation,
                self.out,
                self.lse,
                page_size=_PAGE,
                kv_heads=self.shape.kv_heads,
                scale=self.shape.head_dim**-0.5,
                turn_keys=self.shape.turn_keys,
            )
        merge_partials(self.out, self.lse, self.tables, self.result)

    def measure(self, layers: int, repeats: int) -> Timing:
        """Time of a layer."""

        def sweep() -> None:
            for layer in range(layers):
                self.attend(layer)

        return measure(sweep, layers, self.device, repeats=repeats)

    @property
    def moved_bytes(self) -> int:
        """Bytes beside keys and values: queries, results, partial results written and read."""
        return 2 * self.q.nbytes + 2 * (self.out.nbytes + self.lse.nbytes)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _rotation(model: ModelShape, places: int, device: torch.device, *, turn: bool = False) -> Rotation:
    half = model.head_dim // 2
    order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()
    factors = unit_factors(places, model.head_dim)
    return rotation_of(order, factors, factors if turn else None, device)


def _memory(model: ModelShape, layers: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """KV of some layers, random.

    Raises
    ------
    InsufficientResourcesError
        If it would take most of the device's memory.
    """
    shape = (layers, 2, model.kv_heads, tokens, model.head_dim)
    need = dtype.itemsize * layers * 2 * model.kv_heads * tokens * model.head_dim
    free = free_memory(device)
    if need > free * _MEMORY_SHARE:
        raise InsufficientResourcesError(f"{need / 2**30:.1f} GiB of keys and values, {free / 2**30:.1f} GiB are free.")
    return _random(shape, dtype, device)


def _layers_for(nbytes: int, device: torch.device) -> int:
    """Layers of so many bytes each that a cache cannot serve in turn."""
    return max(1, -(-_L2_TIMES * l2_bytes(device) // nbytes))


def _own(model: ModelShape, layers: int, rows: int, dtype: torch.dtype, device: torch.device) -> PrivateKV:
    private = PrivateKV(model.spec(layers, dtype), rows, device)
    private.kv.zero_()
    return private


def copy_rate(report: Report, device: torch.device, sizes: Sizes) -> float | None:
    """Bytes a second of a plain copy, measured once a run; None if that failed."""
    found = report.find("copy")
    if found is None:
        nbytes = min(sizes.copy_bytes, int(free_memory(device) * _MEMORY_SHARE) // 2)
        rate = report.step("copy bandwidth", 5.0 * (not sizes.tiny), lambda: copy_bandwidth(device, nbytes))
        tidy()
        if rate is None:
            return None
        report.add("copy", bytes=nbytes, bytes_per_second=rate)
        return rate
    return float(found["bytes_per_second"])


# -- decoding --------------------------------------------------------------------------------------------------


def run_decode(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Attention of the next token of some requests over contexts of their own, and over one that all share."""
    model = sizes.models[0]
    rate = copy_rate(report, device, sizes)
    for context in sizes.contexts:
        for requests in sizes.requests:
            for shared in (False, True):
                name = f"decode {requests} x {context}, {'shared' if shared else 'disjoint'}"

                def cell(requests: int = requests, context: int = context, shared: bool = shared) -> None:
                    report.add("decode", **_decode(model, requests, context, shared, rate, device, sizes))

                report.step(name, _CELL_SECONDS * (not sizes.tiny), cell)
                tidy()


def _decode(
    model: ModelShape, requests: int, context: int, shared: bool, rate: float | None, device: torch.device, sizes: Sizes
) -> dict[str, Any]:
    tokens = context * (1 if shared else requests)
    token_bytes = 2 * model.kv_heads * model.head_dim * sizes.dtype.itemsize
    layers = _layers_for(tokens * token_bytes, device)
    kv = _memory(model, layers, tokens, sizes.dtype, device)
    batch = []
    for request in range(requests):
        base = 0 if shared else request * context
        runs = [
            # Keys stand at the chunk's own slots, whichever slots of the memory these are.
            Run(kv, base + at, base + at + sizes.chunk, offset=at, after=at + sizes.chunk)
            for at in range(0, context, sizes.chunk)
        ]
        batch.append(SequenceRows([context], _own(model, layers, _PAGE, sizes.dtype, device), runs))
    rotation = _rotation(model, context + 1, device)
    work = _Layers(batch, model, sizes.dtype, rotation, turn=False)
    time = work.measure(layers, sizes.repeats)
    moved = (tokens + requests) * token_bytes + work.moved_bytes
    return {
        "model": model.name,
        "requests": requests,
        "context": context,
        "shared": shared,
        "microseconds": time.seconds * 1e6,
        "spread": time.spread,
        "timer": time.how,
        "layers": layers,
        "bytes": moved,
        "bytes_per_second": moved / time.seconds,
        "of_copy": None if rate is None else moved / time.seconds / rate,
    }


# -- linking ---------------------------------------------------------------------------------------------------


def run_link(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Attention of the rows that a link computes anew, and torch's flash kernel on as many rows behind all keys."""
    model = sizes.models[0]
    needs = _CELL_SECONDS * (not sizes.tiny)

    def flash() -> None:
        report.add("link", **_flash(model, device, sizes))

    report.step("torch's flash attention, rows behind all keys", needs, flash)
    tidy()
    kinds = (("rows among the chunks", False, False), ("rows behind all keys", True, False))
    for name, behind, turn in (*kinds, ("rows among the chunks, keys rotated", False, True)):

        def cell(name: str = name, behind: bool = behind, turn: bool = turn) -> None:
            report.add("link", kernel=name, **_link(model, behind, turn, device, sizes))

        report.step(f"segment attention, {name}", needs, cell)
        tidy()


def _link(model: ModelShape, behind: bool, turn: bool, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    chunk, count, chosen = sizes.link_chunk, sizes.link_chunks, sizes.link_rows
    context, rows = chunk * count, count * chosen
    layers = max(2, _layers_for(2 * model.kv_heads * context * model.head_dim * sizes.dtype.itemsize, device))
    kv = _memory(model, layers, context, sizes.dtype, device)
    first = 0 if behind else chosen
    runs = [Run(kv, at + first, at + chunk, offset=at, after=at + chunk) for at in range(0, context, chunk)]
    if behind:
        positions = list(range(context, context + rows))
    else:
        positions = [at + slot for at in range(0, context, chunk) for slot in range(chosen)]
    batch = [SequenceRows(positions, _own(model, layers, rows, sizes.dtype, device), runs)]
    rotation = _rotation(model, context + rows, device, turn=turn)
    work = _Layers(batch, model, sizes.dtype, rotation, turn)
    time = work.measure(layers, sizes.repeats)
    pairs = rows * (rows + 1) // 2 + sum(r.stop - r.start for p in positions for r in runs if p >= r.after)
    return _figures(model, rows, pairs, time)


def _figures(model: ModelShape, rows: int, pairs: int, time: Timing) -> dict[str, Any]:
    flops = 4 * model.heads * model.head_dim * pairs
    return {
        "rows": rows,
        "pairs": pairs,
        "microseconds": time.seconds * 1e6,
        "spread": time.spread,
        "timer": time.how,
        "flops_per_second": flops / time.seconds,
    }


def _flash(model: ModelShape, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    context, rows = sizes.link_chunk * sizes.link_chunks, sizes.link_chunks * sizes.link_rows
    layers = max(2, _layers_for(2 * model.kv_heads * context * model.head_dim * sizes.dtype.itemsize, device))
    kv = _memory(model, layers, context, sizes.dtype, device)
    q = _random((1, model.heads, rows, model.head_dim), sizes.dtype, device)

    def sweep() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for layer in range(layers):
                keys, values = kv[layer][:, None]
                torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    time = measure(sweep, layers, device, repeats=sizes.repeats)
    return {"kernel": "torch's flash attention, rows behind all keys", **_figures(model, rows, rows * context, time)}


# -- writing ---------------------------------------------------------------------------------------------------


def run_write(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Keys and values of many rows to their pages."""
    rate = copy_rate(report, device, sizes)

    def cell() -> None:
        report.add("write", **_write(sizes.models[0], rate, device, sizes))

    report.step(f"write {sizes.write_rows} rows", _CELL_SECONDS * (not sizes.tiny), cell)
    tidy()


def _write(model: ModelShape, rate: float | None, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    rows = sizes.write_rows
    nbytes = 2 * model.kv_heads * rows * model.head_dim * sizes.dtype.itemsize
    layers = _layers_for(2 * nbytes, device)
    new = _random((layers, 2, rows, model.kv_heads, model.head_dim), sizes.dtype, device)
    private = _own(model, layers, rows, sizes.dtype, device)
    rotation = _rotation(model, rows, device)
    tables = _Layers([SequenceRows(range(rows), private, [])], model, sizes.dtype, rotation, turn=False).tables

    def sweep() -> None:
        for layer in range(layers):
            keys, values = new[layer].transpose(1, 2)
            write_kv(keys, values, tables, layer, rotation)

    time = measure(sweep, layers, device, repeats=sizes.repeats)
    return {
        "model": model.name,
        "rows": rows,
        "microseconds": time.seconds * 1e6,
        "spread": time.spread,
        "timer": time.how,
        "bytes": 2 * nbytes,
        "bytes_per_second": 2 * nbytes / time.seconds,
        "of_copy": None if rate is None else 2 * nbytes / time.seconds / rate,
    }
