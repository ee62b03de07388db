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

from .layout import Layout, LinkPlan

__all__ = ["Probe"]

# Rows of the question that vote; a longer question says the same by its end.
_VOTERS = 64


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
        scores = {
            i: torch.zeros(len(chosen), len(s.token_ids), dtype=torch.float32, device=self._decoder.device)
            for i, s in enumerate(layout.segments)
            if s.body is not None and not s.exact
        }
        if not scores:
            return {}
        behind = max(s.stop for s in layout.linked)
        # A prompt that ends with a chunk is asked by its last token.
        voters = min(max(sum(p >= behind for p in plan.rows), 1), _VOTERS)
        for at in range(0, len(plan.rows), self._rows_per_step):
            positions = plan.rows[at : at + self._rows_per_step]
            inner = self._backend.plan([SequenceRows(positions, private, plan.runs)])
            voting = min(len(positions), at + len(positions) - (len(plan.rows) - voters))
            step = _Scoring(self._decoder, inner, layout, positions, chosen, scores, voting)
            with contextlib.suppress(_EnoughError):
                self._run(plan.row_ids[at : at + self._rows_per_step], positions, step)
            inner.commit()
        self.rows += math.ceil(len(plan.rows) * chosen.stop / depth)
        return {i: s.sum(dim=0).cpu() for i, s in scores.items()}

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
    """Rotate ``(heads, rows, dim)`` in the model's order to the given positions; canonical order, model's dtype."""
    wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
    pairs = torch.view_as_complex(decoder.as_pairs(x).to(wide).contiguous())
    table = decoder.tables[layer]
    if table is not None:
        pairs = pairs * table.rows(positions)
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


class _Scoring:
    """Attention as planned; keeps, per layer, the most that a head of the last ``voters`` rows pays to a slot."""

    def __init__(
        self,
        decoder: Decoder,
        inner: Plan,
        layout: Layout,
        positions: Sequence[int],
        layers: range,
        scores: dict[int, Tensor],
        voters: int,
    ) -> None:
        self._decoder = decoder
        self._inner = inner
        self._segments = [(layout.segments[index], mine) for index, mine in scores.items()]
        self._layers = layers
        self._voters = voters
        places = torch.tensor(positions[len(positions) - max(voters, 0) :], dtype=torch.int64, device=decoder.device)
        self._places = places
        offsets = [s.start - s.body.rotation_base for s, _ in self._segments if s.body is not None]
        self._distances = places - torch.tensor(offsets, dtype=torch.int64, device=decoder.device)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """As :class:`~epic_engine.model.decoder.AttentionStep`."""
        out = self._inner.attend(layer, q, k, v, scaling, options)
        if self._voters > 0 and layer in self._layers:
            self._vote(layer, q[0, :, -self._voters :], scaling)
        if layer == self._layers.stop - 1 < self._decoder.spec.num_layers - 1:
            raise _EnoughError  # the layers above have no say
        return out

    def _vote(self, layer: int, q: Tensor, scaling: float) -> None:
        """The voters' largest shares of the softmax over everything they see become the linked slots' scores."""
        kv_heads = self._decoder.spec.num_kv_heads
        lse = self._inner.log_sum_exp()[:, -self._voters :]
        q = q.to(lse.dtype) * scaling
        sums = lse.unflatten(0, (kv_heads, -1)).flatten(1, 2)[..., None]
        for (segment, scores), distances in zip(self._segments, self._distances, strict=True):
            assert segment.body is not None
            query = _turned(self._decoder, layer, q, distances).unflatten(0, (kv_heads, -1)).flatten(1, 2)
            logits = torch.matmul(query, segment.body.kv[layer, 0].transpose(-1, -2)).to(sums.dtype)
            if self._places[0] < segment.stop:
                unseen = torch.arange(segment.start, segment.stop, device=q.device) > self._places[:, None]
                logits.unflatten(1, (-1, self._voters)).masked_fill_(unseen, -torch.inf)
            most = logits.sub_(sums).amax(dim=(0, 1)).exp_()
            mine = scores[layer - self._layers.start]
            torch.maximum(mine, most, out=mine)
