"""Segment attention in Triton, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from epic_engine.model.decoder import Decoder

from .base import AttentionBackend, Plan, SequenceKV, SequenceRows
from .kernels.merge import merge_partials
from .kernels.segment import segment_attention
from .kernels.tables import Launch, Rotation, Tables
from .kernels.write import write_kv
from .schedule import Shape, draft

__all__ = ["TritonBackend", "TritonPlan", "TritonStep"]

# What the interpreter, which has no multiprocessors, is asked to keep busy.
_INTERPRETER_PROCESSORS = 4


class TritonBackend(AttentionBackend):
    """Attention through this package's kernels.

    Parameters
    ----------
    decoder
        The model whose rotary tables and shapes are used.
    page_size
        Tokens a page of KV memory.
    turn_keys
        Rotate keys in the kernel instead of queries, as MEPIC does; for comparison.

    Attributes
    ----------
    shape
        What schedules need to know.
    """

    name = "triton"

    def __init__(self, decoder: Decoder, page_size: int = 16, *, turn_keys: bool = False) -> None:
        spec, device = decoder.spec, decoder.device
        self.device = device
        processors = _INTERPRETER_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.shape = Shape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, page_size, processors, turn_keys
        )
        self._order = decoder.pairs.order.to(device=device, dtype=torch.int32)
        rotations: dict[int, Rotation] = {}
        self.rotations: list[Rotation] = []
        for table in decoder.tables:
            if id(table) not in rotations:
                factors = turns = None
                if table is not None:
                    factors = torch.view_as_real(table.factors.to(torch.complex64)).contiguous()
                    if turn_keys:  # the scale of YaRN is in the stored key already
                        turns = torch.view_as_real(table.factors / table.factors.abs()).float().contiguous()
                rotations[id(table)] = Rotation(self._order, factors, turns, decoder.pairs.half_split)
            self.rotations.append(rotations[id(table)])

    @property
    def identity(self) -> str:
        """Triton's version, the card, and the tiles, which may have been tuned."""
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreter"
        tiles = sorted({repr(self.shape.config(1 << n)) for n in range(8)})
        return f"{self.name} {triton.__version__} {card} {self.shape.page_size} {tiles}"

    def plan(self, batch: Sequence[SequenceRows]) -> TritonPlan:
        """Lay the pass out and send its tables to the device."""
        made = draft(batch, self.shape)
        tables, launches = Tables(made.sizes(), self.device), made.launches()
        made.fill(tables, launches)
        tables.upload()
        return TritonPlan(TritonStep(self, tables, launches, self.partials(tables.partials)), batch)

    def partials(self, count: int) -> tuple[Tensor, Tensor]:
        """Memory for so many partial results: ``(count, heads, head_dim)`` and ``(count, heads)`` float32."""
        shape = (max(count, 1), self.shape.heads, self.shape.head_dim)
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        return out, torch.empty(shape[:2], dtype=torch.float32, device=self.device)


class TritonStep:
    """The kernels of a pass; an :class:`~epic_engine.model.decoder.AttentionStep`.

    Parameters
    ----------
    backend
        Model and device.
    tables, launches
        What is to be done.
    partials
        From :meth:`TritonBackend.partials`.
    """

    def __init__(
        self, backend: TritonBackend, tables: Tables, launches: Sequence[Launch], partials: tuple[Tensor, Tensor]
    ) -> None:
        self._backend = backend
        self._tables = tables
        self._launches = launches
        self._out, self._lse = partials

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        options: dict[str, Any],
        waits: Sequence[Callable[[int], None]] = (),
    ) -> Tensor:
        """Attention of one layer; ``waits`` are called before chunks are read."""
        shape, tables, rotation = self._backend.shape, self._tables, self._backend.rotations[layer]
        q, k, v = (x[0] if x.stride(3) == 1 else x[0].contiguous() for x in (q, k, v))
        write_kv(k, v, tables, layer, rotation)
        for wait in waits:
            wait(layer)
        for launch in self._launches:
            segment_attention(
                q,
                tables,
                launch,
                layer,
                rotation,
                self._out,
                self._lse,
                page_size=shape.page_size,
                kv_heads=shape.kv_heads,
                scale=scaling,
                turn_keys=shape.turn_keys,
            )
        result = torch.empty((1, q.shape[1], shape.heads, shape.head_dim), dtype=q.dtype, device=q.device)
        merge_partials(self._out, self._lse, tables, result[0])
        return result

    def log_sum_exp(self) -> Tensor:
        """Of every row's scores in the layer that was attended last, ``(heads, rows)`` float32."""
        rows, starts = self._tables.rows, self._tables.row_starts
        counts = starts[1 : rows + 1] - starts[:rows]
        owners = torch.repeat_interleave(torch.arange(rows, device=counts.device), counts)
        parts = self._lse[self._tables.row_partials[: owners.numel()].long()]
        found = torch.full((rows, parts.shape[1]), -torch.inf, device=parts.device)
        top = found.scatter_reduce(0, owners[:, None].expand_as(parts), parts, "amax")
        mass = torch.zeros_like(top).index_add_(0, owners, torch.exp(parts - top[owners]))
        return (top + mass.log()).T


class TritonPlan(Plan):
    """One forward pass; made by :class:`TritonBackend`.

    Parameters
    ----------
    step
        Its kernels.
    batch
        Its rows.
    """

    def __init__(self, step: TritonStep, batch: Sequence[SequenceRows]) -> None:
        self._step = step
        self._grown: list[tuple[SequenceKV, int]] = [(item.private, len(item.positions)) for item in batch]
        waits: dict[int, Callable[[int], None]] = {}
        for item in batch:
            waits.update({id(run.kv): run.wait for run in item.runs if run.wait is not None})
        self._waits = list(waits.values())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Attention of one layer; see :class:`~epic_engine.model.decoder.AttentionStep`."""
        return self._step.attend(layer, q, k, v, scaling, options, self._waits)

    def log_sum_exp(self) -> Tensor:
        """Of every row's scores in the layer that was attended last, ``(heads, rows)`` float32."""
        return self._step.log_sum_exp()

    def commit(self) -> None:
        """Count the rows' keys as part of their sequences."""
        for private, rows in self._grown:
            private.length += rows
