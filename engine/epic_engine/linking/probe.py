"""First passes over a prompt: what the question attends to, and where stored KV deviates from the truth."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epic_engine.attention.base import AttentionBackend, Plan, PrivateKV, SequenceRows
from epic_engine.errors import ConfigError
from epic_engine.model.decoder import AttentionStep, Decoder

from .layout import Layout, LinkPlan, Segment

__all__ = ["Probe"]

# Rows of the question that vote; a longer question says the same by its end.
_VOTERS = 64
# Slots that are voted on in one go: more would leave the second-level cache.
_SLOTS_AT_ONCE = 1024


class _EnoughError(Exception):
    """Ends a forward pass that has seen what it wanted."""


class Probe:
    """Runs first passes with one engine's model; implements :class:`~epic_engine.linking.policies.LinkProbe`.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    run
        Runs rows through the model with a given step; takes turns with other requests.
    rows_per_step
        Most rows at once.

    Attributes
    ----------
    rows
        Rows computed so far, in whole passes through the model (a pass through one layer of ten counts a tenth).
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        run: Callable[[Sequence[int], Sequence[int], AttentionStep], None],
        rows_per_step: int,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._run = run
        self._rows_per_step = rows_per_step
        self.rows = 0

    def question_attention(self, layout: Layout, layers: tuple[float, float]) -> dict[int, Tensor]:
        """Largest attention of the rows behind the last chunk to each linked slot, summed over layers."""
        plan = LinkPlan(layout, {})
        private = PrivateKV(self._decoder.spec, len(plan.rows), self._decoder.device)
        depth = self._decoder.spec.num_layers
        chosen = range(math.floor(layers[0] * depth), max(math.ceil(layers[1] * depth), 1))
        stale = [i for i, s in enumerate(layout.segments) if s.body is not None and not s.exact]
        if not stale:
            return {}
        votes = _Votes(self._decoder, [layout.segments[i] for i in stale], chosen)
        behind = max(s.stop for s in layout.linked)
        # A prompt that ends with a chunk is asked by its last token.
        voters = min(max(sum(p >= behind for p in plan.rows), 1), _VOTERS)
        for at in range(0, len(plan.rows), self._rows_per_step):
            positions = plan.rows[at : at + self._rows_per_step]
            inner = self._backend.plan([SequenceRows(positions, private, plan.runs)])
            voting = min(len(positions), at + len(positions) - (len(plan.rows) - voters))
            step = _Scoring(inner, votes, positions[len(positions) - max(voting, 0) :])
            with contextlib.suppress(_EnoughError):
                self._run(plan.row_ids[at : at + self._rows_per_step], positions, step)
            inner.commit()
        self.rows += math.ceil(len(plan.rows) * chosen.stop / depth)
        return dict(zip(stale, votes.counted(), strict=True))

    def second_layer_deviation(self, layout: Layout) -> dict[int, Tensor]:
        """Squared deviation of stored KV in the second layer."""
        spec = self._decoder.spec
        if spec.num_layers < 2:
            raise ConfigError("cacheblend needs a model of at least two layers.")
        linked = [(i, s) for i, s in enumerate(layout.segments) if s.body is not None and not s.exact]
        if not linked:
            return {}
        one_layer = dataclasses.replace(spec, num_layers=1)
        private = PrivateKV(one_layer, len(layout), self._decoder.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for at in range(0, len(layout), self._rows_per_step):
            positions = range(at, min(at + self._rows_per_step, len(layout)))
            inner = self._backend.plan([SequenceRows(positions, private, [])])
            step = _SecondLayer(inner)
            try:
                self._run([layout.token_ids[p] for p in positions], positions, step)
            except _EnoughError:
                inner.commit()
            assert step.key is not None
            assert step.value is not None
            keys.append(step.key)
            values.append(step.value)
        self.rows += math.ceil(len(layout) / spec.num_layers)
        key, value = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        found: dict[int, Tensor] = {}
        for index, segment in linked:
            assert segment.body is not None
            place = slice(segment.start, segment.stop)
            slots = torch.arange(len(segment.token_ids), device=key.device) + segment.body.rotation_base
            true = _turned(self._decoder, 1, key[:, place], slots).float()
            if segment.body.wait is not None:
                segment.body.wait(1)
            stored = segment.body.kv[1].to(key.device).float()
            error = (true - stored[0]).square().sum(dim=(0, 2)) + (value[:, place].float() - stored[1]).square().sum(
                dim=(0, 2)
            )
            found[index] = error.cpu()
        return found


def _turned(decoder: Decoder, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``(heads, rows, dim)`` in the model's order to places ``(..., rows)``; canonical order, model's dtype."""
    wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
    pairs = torch.view_as_complex(decoder.as_pairs(x).to(wide).contiguous())
    table = decoder.tables[layer]
    if table is None:
        pairs = pairs.expand(torch.broadcast_shapes(pairs.shape, (*positions.shape, 1)))
    else:
        pairs = pairs * table.rows(positions.flatten()).unflatten(0, positions.shape)
    return torch.view_as_real(pairs).flatten(-2).to(decoder.dtype)


class _SecondLayer:
    """Attention of the first layer; keeps the keys and values of the second and ends the pass."""

    def __init__(self, inner: Plan) -> None:
        self._inner = inner
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """As :class:`~epic_engine.model.decoder.AttentionStep`."""
        if layer == 0:
            return self._inner.attend(layer, q, k, v, scaling, options)
        self.key, self.value = k[0].clone(), v[0].clone()
        raise _EnoughError


class _Votes:
    """The most that a head of any voter pays to each slot of some segments, layer by layer."""

    def __init__(self, decoder: Decoder, segments: Sequence[Segment], layers: range) -> None:
        self.layers = layers
        self.depth = decoder.spec.num_layers
        self.device = decoder.device
        self._decoder = decoder
        self._bodies = [s.body for s in segments if s.body is not None]
        self._widths = [len(s.token_ids) for s in segments]
        offsets = [s.start - body.rotation_base for s, body in zip(segments, self._bodies, strict=True)]
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device=decoder.device)
        shape = (len(layers), sum(self._widths))
        self._most = torch.zeros(shape, dtype=torch.float32, device=decoder.device)

    def counted(self) -> list[Tensor]:
        """Sums over the layers, ``(slots,)`` for each segment."""
        return list(self._most.sum(dim=0).cpu().split(self._widths))

    def add(self, layer: int, q: Tensor, lse: Tensor, places: Tensor) -> None:
        """Take the votes of rows: their shares of the softmax over everything they see.

        Parameters
        ----------
        layer
            One of ``layers``.
        q
            ``(heads, rows, head_dim)``, scaled; all rows lie behind all slots.
        lse
            ``(heads, rows)``.
        places
            ``(rows,)`` positions of the rows.
        """
        kv_heads = self._decoder.spec.num_kv_heads
        turned = _turned(self._decoder, layer, q, places - self._offsets[:, None, None])
        queries = turned.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        sums = lse.unflatten(0, (kv_heads, -1)).flatten(1, 2)[..., None]
        most, at, first = self._most[layer - self.layers.start], 0, 0
        while first < len(self._bodies):
            pieces: list[Tensor] = []
            width = 0
            while first < len(self._bodies) and (not pieces or width + self._widths[first] <= _SLOTS_AT_ONCE):
                keys = self._bodies[first].kv[layer, 0]
                pieces.append(torch.matmul(queries[first], keys.transpose(-1, -2)))
                width += self._widths[first]
                first += 1
            logits = (torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]).to(sums.dtype)
            mine = most[at : at + width]
            torch.maximum(mine, logits.sub_(sums).amax(dim=(0, 1)).exp_(), out=mine)
            at += width


class _Scoring:
    """Attention as planned; the last rows, at the given positions, vote."""

    def __init__(self, inner: Plan, votes: _Votes, voters: Sequence[int]) -> None:
        self._inner = inner
        self._votes = votes
        self._voters = len(voters)
        self._places = torch.tensor(voters, dtype=torch.int64, device=votes.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """As :class:`~epic_engine.model.decoder.AttentionStep`."""
        out = self._inner.attend(layer, q, k, v, scaling, options)
        layers = self._votes.layers
        if self._voters and layer in layers:
            lse = self._inner.log_sum_exp()[:, -self._voters :]
            query = q[0, :, -self._voters :].to(lse.dtype) * scaling
            self._votes.add(layer, query, lse, self._places)
        if layer == layers.stop - 1 < self._votes.depth - 1:
            raise _EnoughError  # the layers above have no say
        return out
