"""Segment attention in plain torch, for CPUs and as the fallback on CUDA.

Every piece (a run, the private keys) is computed densely as an output and a log-sum-exp and the pieces are merged
exactly in float32. Rows that read the same run share one product, each with its query rotated by its own distance;
grouped query heads are folded into the rows, so a key is read once for all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epic_engine.errors import ConfigError
from epic_engine.model.decoder import Decoder

from .base import AttentionBackend, Plan, Run, SequenceKV, SequenceRows
from .spans import Span, worth_a_span

__all__ = ["TorchBackend", "dense_math"]

# Rotated queries of this many (row, run) pairs are made at a time: more would leave the caches.
_PAIRS_PER_BLOCK = 1024
# Pieces of more slices of rows than this are mixed by one product, if its weights are not too many.
_FEW_SLICES = 8
_MOST_WEIGHTS = 1 << 15

_Dense = Callable[[Tensor, Tensor, Tensor, float, bool, Tensor | None], tuple[Tensor, Tensor]]


def dense_math(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention by matrix products in at least float32: runs everywhere and shows what the others compute.

    Parameters
    ----------
    q, k, v
        ``(batch, heads, rows, dim)`` and ``(batch, heads, keys, dim)``.
    scale
        Factor on the scores.
    causal
        Row i sees keys 0 … i only.
    mask
        ``(rows, keys)``, added to the scores; no row may be hidden from all keys.

    Returns
    -------
    tuple of Tensor
        Output ``(batch, rows, heads, dim)`` and log-sum-exp ``(batch, rows, heads)``.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(torch.exp(scores - lse[..., None]), v.to(wide)).to(q.dtype)
    return out.transpose(1, 2), lse.transpose(1, 2)


def dense_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention by torch's CPU flash kernel; arguments and results as :func:`dense_math`."""
    if mask is not None:
        mask = mask[None, None]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def dense_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention by torch's CUDA flash kernel (16-bit types); arguments and results as :func:`dense_math`."""
    if mask is not None or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > 256:
        return dense_math(q, k, v, scale, causal, mask)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out.transpose(1, 2), lse.transpose(1, 2)


@dataclass(frozen=True)
class _Group:
    """All pairs of one block that read the same run: pairs ``[first, last)``.

    ``readers`` are their rows, as ranges ``[begin, end)`` in the order of the pairs.
    """

    kv: Tensor
    start: int
    stop: int
    first: int
    last: int
    bias: float
    readers: Sequence[tuple[int, int]]
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class _Block:
    """Some of the (row, run) pairs of a pass.

    ``slots`` are their places among the pieces of the merge, ``mix`` among ``rows * pairs`` weights; None if the pieces
    are few and long.
    """

    rows: Tensor
    distances: Tensor
    slots: Tensor
    groups: tuple[_Group, ...]
    mix: Tensor | None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def scratch(self, name: str, like: Tensor, dim: int) -> Tensor:
        """A buffer shaped as ``like`` with one entry a pair in ``dim``; the same for every layer.

        Fresh memory costs more than the arithmetic here: its pages are cleared one by one.
        """
        found = self.buffers.get(name)
        if found is None:
            shape = list(like.shape)
            shape[dim] = self.rows.numel()
            found = self.buffers[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return found


@dataclass(frozen=True)
class _Sequence:
    """Rows ``[first, last)`` of the pass, and the private KV they extend; ``held`` is what many rows read of it."""

    first: int
    last: int
    private: SequenceKV
    span: Span | None
    held: Sequence[tuple[Tensor, int, int]]


class TorchBackend(AttentionBackend):
    """Attention through torch's own kernels.

    Parameters
    ----------
    decoder
        The model whose rotary tables and shapes are used.
    dense
        Dense attention with log-sum-exp; None picks the one for the decoder's device.
    """

    name = "torch"

    def __init__(self, decoder: Decoder, dense: _Dense | None = None) -> None:
        self._decoder = decoder
        self._dense = dense or {"cpu": dense_cpu, "cuda": dense_cuda}.get(decoder.device.type, dense_math)

    def plan(self, batch: Sequence[SequenceRows]) -> TorchPlan:
        """Group rows by the run they read and tabulate their rotations."""
        return TorchPlan(self._decoder, self._dense, batch)


class TorchPlan(Plan):
    """One forward pass; made by :class:`TorchBackend`."""

    def __init__(self, decoder: Decoder, dense: _Dense, batch: Sequence[SequenceRows]) -> None:
        self._decoder = decoder
        self._dense = dense
        self._wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        device = decoder.device
        self._masks = dense is not dense_cuda  # its kernel takes none
        self._sequences: list[_Sequence] = []
        self._waits: dict[int, Callable[[int], None]] = {}
        local: list[int] = []
        readers: dict[tuple[int, int, int, float], list[tuple[Run, int, list[int]]]] = {}
        for item in batch:
            first, private = len(local), item.private
            if private.length + len(item.positions) > private.capacity:
                raise ConfigError(
                    f"{len(item.positions)} rows do not fit a private KV of {private.capacity} tokens "
                    f"that holds {private.length}."
                )
            local.extend(p - private.base for p in item.positions)
            span = None
            if len(item.positions) > 1 and worth_a_span(item, decoder.spec):
                span = Span(decoder, item, masks=self._masks)
            held = private.pieces()
            own: list[Run] = []
            if len(item.positions) == 1:  # forks that decode read what they share together, like any other run
                own = [Run(kv, start, stop, private.base, 0) for kv, start, stop in held]
                held = []
            self._sequences.append(_Sequence(first, len(local), private, span, held))
            shared: Sequence[Run] = item.runs
            if item.whole is not None and self._masks and span is None:
                shared = item.whole
            for run in (*own, *(r for r in shared if span is None or r.bias)):
                begin = bisect_left(item.positions, run.after)
                if begin < len(item.positions):
                    distances = [p - run.offset for p in item.positions[begin:]]
                    readers.setdefault(run.shared_as, []).append((run, first + begin, distances))
            self._waits.update({id(run.kv): run.wait for run in item.runs if run.wait is not None})
        self._rows = len(local)
        alone = [seq.first for seq in self._sequences if seq.last - seq.first == 1]
        self._alone = torch.tensor(alone, dtype=torch.int64, device=device)
        self._local = torch.tensor(local, dtype=torch.int64, device=device)
        self._blocks = [self._block(b, device) for b in _split(list(readers.values()))]
        self._factors: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._lse = torch.empty(0)

    def _block(self, groups: list[list[tuple[Run, int, list[int]]]], device: torch.device) -> _Block:
        rows: list[int] = []
        distances: list[int] = []
        slots: list[int] = []
        made = []
        for index, group in enumerate(groups):
            first, run = len(rows), group[0][0]
            for _, begin, turns in group:
                rows.extend(range(begin, begin + len(turns)))
                distances.extend(turns)
            # Slot 0 of the merge is what the rows have gathered so far; each group adds one.
            readers = _joined([(begin, begin + len(turns)) for _, begin, turns in group])
            mask = _mask([(r.hidden, len(turns)) for r, _, turns in group], run.stop - run.start, self._decoder)
            made.append(_Group(run.kv, run.start, run.stop, first, len(rows), run.bias, readers, mask))
            slots.extend([index + 1] * (len(rows) - first))
        flat = [s * self._rows + r for s, r in zip(slots, rows, strict=True)]

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        scattered = sum(len(g.readers) for g in made) > _FEW_SLICES and self._rows * len(rows) <= _MOST_WEIGHTS
        mix = tensor([r * len(rows) + pair for pair, r in enumerate(rows)]) if scattered else None
        return _Block(tensor(rows), tensor(distances), tensor(flat), tuple(made), mix)

    def _turns(self, layer: int) -> tuple[Tensor, list[Tensor]] | None:
        """Rotation factors of rows and of each block's pairs; shared by the layers of one table."""
        table = self._decoder.tables[layer]
        if table is None:
            return None
        if id(table) not in self._factors:
            blocks = [table.rows(b.distances)[None, :, None] for b in self._blocks]
            self._factors[id(table)] = (table.rows(self._local)[None, :, None], blocks)
        return self._factors[id(table)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Attention of one layer; see :class:`~epic_engine.model.decoder.AttentionStep`."""
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
        group = heads // kv_heads
        turns = self._turns(layer)
        query = self._complex(q[0].unflatten(0, (kv_heads, group)).transpose(1, 2))
        key = self._complex(k[0][:, :, None])
        if turns is not None:
            key = key * turns[0]
        key = torch.view_as_real(key).flatten(-2)[:, :, 0]
        own = query if turns is None else query * turns[0]
        own_query = self._narrow(own)

        shape = (self._rows, group, kv_heads)
        total = torch.empty((*shape, dim), dtype=self._wide, device=q.device)
        lse = torch.empty(shape, dtype=self._wide, device=q.device)
        values = v[0]
        for seq in self._sequences:
            mine = slice(seq.first, seq.last)
            seq.private.write(layer, key[:, mine], values[:, mine])
            if seq.last - seq.first > 1 and seq.span is None:
                total[mine], lse[mine] = self._causal(own_query[:, mine], key[:, mine], values[:, mine], scaling)
        if self._alone.numel():
            self._see_themselves(total, lse, own_query, key, values, scaling)
        for wait in self._waits.values():
            wait(layer)
        for seq in self._sequences:
            mine = slice(seq.first, seq.last)
            if seq.span is not None:
                spanned = seq.span.lay_out(layer, key[:, mine], values[:, mine])
                self._read(total[mine], lse[mine], own_query[:, mine], seq.span, spanned, scaling)
            for kv, start, stop in seq.held:
                keys, theirs = kv[layer, 0, :, start:stop], kv[layer, 1, :, start:stop]
                self._absorb(total[mine], lse[mine], own_query[:, mine], keys, theirs, scaling)
        for index, block in enumerate(self._blocks):
            pairs = torch.index_select(query, 1, block.rows, out=block.scratch("pairs", query, 1))
            if turns is not None:
                pairs *= turns[1][index]
            rotated = block.scratch("rotated", own_query, 1).copy_(torch.view_as_real(pairs).flatten(-2))
            lse = self._merge(total, lse, block, rotated, layer, scaling)
        self._lse = lse
        result = torch.empty((1, self._rows, heads, dim), dtype=q.dtype, device=q.device)
        result.view(self._rows, kv_heads, group, dim).copy_(total.transpose(1, 2))
        return result

    def _complex(self, x: Tensor) -> Tensor:
        """``(..., dim)`` in the model's order to ``(..., dim / 2)`` complex in canonical order."""
        x = self._decoder.as_pairs(x)
        return torch.view_as_complex(torch.empty(x.shape, dtype=self._wide, device=x.device).copy_(x))

    def _narrow(self, x: Tensor) -> Tensor:
        """``(kv_heads, rows, group, dim / 2)`` complex to ``(kv_heads, rows, group, dim)`` in the model's dtype."""
        return torch.view_as_real(x).flatten(-2).to(self._decoder.dtype)

    def _causal(self, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Causal attention of a sequence's new rows to each other."""
        grouped = (q.shape[0], q.shape[2], q.shape[1], keys.shape[-1])
        keys, values = (x.to(q.dtype)[:, None].expand(grouped) for x in (keys, values))
        out, lse = self._dense(q.transpose(1, 2), keys, values, scaling, True, None)
        return out.permute(1, 2, 0, 3).to(self._wide), lse.permute(1, 2, 0).to(self._wide)

    def _see_themselves(
        self, total: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> None:
        """The first piece of rows that are their sequence's only one: their own key."""
        if self._alone.numel() < self._rows:
            q, keys, values = (x.index_select(1, self._alone) for x in (q, keys, values))
        scores = (q.to(self._wide) * keys[:, :, None].to(self._wide)).sum(dim=-1) * scaling
        lse.index_copy_(0, self._alone, scores.permute(1, 2, 0))
        own = values[:, :, None].expand(-1, -1, q.shape[2], -1).permute(1, 2, 0, 3)
        total.index_copy_(0, self._alone, own.to(self._wide))

    def _folded(
        self, q: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Unmasked attention with grouped heads as rows: ``(rows, group, kv_heads, dim)`` and its log-sum-exp."""
        rows, group = q.shape[1:3]
        out, lse = self._dense(q.flatten(1, 2)[None], keys[None], values[None], scaling, False, mask)
        return out[0].unflatten(0, (rows, group)), lse[0].unflatten(0, (rows, group))

    def _read(
        self, total: Tensor, lse: Tensor, q: Tensor, span: Span, laid: tuple[Tensor, Tensor], scaling: float
    ) -> None:
        """What a sequence's rows gather from its span, and the log-sum-exp of that."""
        for reading, mask in span.readings:
            mine, seen = slice(reading.first, reading.last), slice(reading.start, reading.stop)
            rows, (keys, values) = q[:, mine], (x[:, seen] for x in laid)
            if reading.more:
                self._absorb(total[mine], lse[mine], rows, keys, values, scaling)
            elif not reading.causal:
                total[mine], lse[mine] = self._folded(rows, keys, values, scaling, mask)
            else:
                before = keys.shape[1] - rows.shape[1]
                total[mine], lse[mine] = self._causal(rows, keys[:, before:], values[:, before:], scaling)
                if before:
                    self._absorb(total[mine], lse[mine], rows, keys[:, :before], values[:, :before], scaling)

    def _absorb(self, total: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Add keys that all rows see, at the sequence's own positions, in place."""
        out, weight = self._folded(q, keys, values, scaling)
        both = torch.logaddexp(lse, weight.to(self._wide))
        total.lerp_(out.to(self._wide), torch.exp(weight - both)[..., None])
        lse.copy_(both)

    def _merge(self, total: Tensor, lse: Tensor, block: _Block, q: Tensor, layer: int, scaling: float) -> Tensor:
        """Add one block's pieces to ``total`` in place; returns the new log-sum-exp."""
        outs, weights = [], []
        for g in block.groups:
            # One indexing call each: unpacking kv[layer] costs as much as a small product.
            keys, values = g.kv[layer, 0, :, g.start : g.stop], g.kv[layer, 1, :, g.start : g.stop]
            out, weight = self._folded(q[:, g.first : g.last], keys, values, scaling, g.mask)
            outs.append(out)
            # A bias on every score of a piece is a bias on its log-sum-exp, exactly.
            weights.append(weight + g.bias if g.bias else weight)
        pieces = lse.new_full((1 + len(block.groups), *lse.shape), -torch.inf)
        pieces[0] = lse
        pieces.flatten(0, 1).index_copy_(0, block.slots, torch.cat(weights).to(self._wide))
        top = pieces.amax(dim=0)
        shares = pieces.sub_(top).exp_()
        mass = shares.sum(dim=0)
        shares /= mass
        total.mul_(shares[0, ..., None])
        if block.mix is not None:
            own = shares.flatten(0, 1).index_select(0, block.slots).permute(1, 2, 0)
            mix = own.new_zeros((*own.shape[:2], self._rows * len(block.rows)))
            mix.index_copy_(2, block.mix, own)
            parts = torch.cat(outs).permute(1, 2, 0, 3).to(self._wide)
            total += torch.matmul(mix.unflatten(2, (self._rows, -1)), parts).permute(2, 0, 1, 3)
            return top + mass.log_()
        # Row by row an index_add would do, but it takes many times as long as these few slices.
        for index, (g, out) in enumerate(zip(block.groups, outs, strict=True)):
            at = 0
            for begin, end in g.readers:
                part = out[at : at + end - begin].to(self._wide)
                total[begin:end].addcmul_(part, shares[index + 1, begin:end, ..., None])
                at += end - begin
        return top + mass.log_()

    def log_sum_exp(self) -> Tensor:
        """Of every row's scores in the layer that was attended last, ``(heads, rows)``."""
        return self._lse.permute(2, 1, 0).flatten(0, 1)

    def commit(self) -> None:
        """Count the rows' keys as part of their sequences."""
        for seq in self._sequences:
            seq.private.length += seq.last - seq.first


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges with those made one that follow each other."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _mask(readers: list[tuple[Tensor | None, int]], keys: int, decoder: Decoder) -> Tensor | None:
    """What rows do not read of a run: ``(rows * group, keys)`` to be added to the scores, or None."""
    if all(hidden is None for hidden, _ in readers):
        return None
    group = decoder.spec.num_heads // decoder.spec.num_kv_heads
    parts = []
    for hidden, rows in readers:
        part = torch.zeros(keys, dtype=decoder.dtype, device=decoder.device)
        if hidden is not None:
            part.masked_fill_(hidden, -torch.inf)
        parts.append(part.expand(rows * group, keys))
    return torch.cat(parts)


def _split(
    groups: list[list[tuple[Run, int, list[int]]]],
) -> list[list[list[tuple[Run, int, list[int]]]]]:
    """Cut the pairs into blocks of groups.

    A group holds a row at most once: a run that one sequence reads at two offsets (the same chunk twice) makes two
    groups, so that each of its log-sum-exps has its own slot in the merge.
    """
    blocks: list[list[list[tuple[Run, int, list[int]]]]] = []
    size = _PAIRS_PER_BLOCK
    for group in groups:
        waves: list[list[tuple[Run, int, list[int]]]] = []
        taken: list[set[int]] = []
        for reader in group:
            _, begin, turns = reader
            last_row = begin + len(turns)
            at = next((i for i, rows in enumerate(taken) if last_row not in rows), len(waves))
            if at == len(waves):
                waves.append([])
                taken.append(set())
            waves[at].append(reader)
            taken[at].add(last_row)
        for wave in waves:
            count = sum(len(turns) for _, _, turns in wave)
            if size + count > _PAIRS_PER_BLOCK:
                blocks.append([])
                size = 0
            blocks[-1].append(wave)
            size += count
    return blocks
