"""The attention interface: plan once per forward pass, run once per layer.

A forward pass computes *rows* (tokens) of one or more sequences. Each row attends to two kinds of keys:

- *private* keys of its own sequence: recomputed tokens, the question, generated tokens. Causal by position.
- *runs* of compiled chunks: consecutive slots of an immutable KV, shared by every row, request and batch. A row
  either lies behind a run and sees all of it, or before it and sees nothing, so a run is dense and unmasked.

Keys of a run are rotated at the chunk's own slots; a row reads them with its query rotated by
``position - run.offset``, which is exact because RoPE depends on distances only (Su et al. 2021, section 3.2.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epic_engine.model.spec import ModelSpec

__all__ = ["AttentionBackend", "Plan", "PrivateKV", "Run", "SequenceKV", "SequenceRows"]


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive slots of a shared KV as one sequence sees them.

    Attributes
    ----------
    kv
        ``(layers, 2, kv_heads, slots, head_dim)``: keys (canonical order, rotated) and values.
    start, stop
        The slots ``[start, stop)`` that are read; never empty.
    offset
        A row at position p reads with its query rotated by ``p - offset``.
    after
        Rows at positions ``>= after`` read the run, rows before it do not.
    bias
        Added to the run's scores.
    wait
        Blocks until a layer of ``kv`` is there; None if all of it is.
    hidden
        ``(stop - start,)`` bool: slots that are not read, never all of them; None reads all.
    """

    kv: Tensor
    start: int
    stop: int
    offset: int
    after: int
    bias: float = 0.0
    wait: Callable[[int], None] | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        """Empty or reversed runs would make the attention kernel fail."""
        if not 0 <= self.start < self.stop <= self.kv.shape[3]:
            raise ValueError(f"run [{self.start}, {self.stop}) is empty or outside {self.kv.shape[3]} slots")

    @property
    def shared_as(self) -> tuple[int, int, int, float]:
        """Equal for runs that read the same memory, so that their rows can be served together."""
        return self.kv.data_ptr(), self.start, self.stop, self.bias


class SequenceKV(ABC):
    """Keys and values that belong to one sequence, in order of position.

    Attributes
    ----------
    length
        Tokens held; raised by :meth:`Plan.commit`.
    base
        Keys are rotated at ``position - base``.
    """

    length: int
    base: int

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that fit, those held included."""

    @abstractmethod
    def memory(self) -> list[tuple[Tensor, int, int]]:
        """Memory of the tokens that fit, in order: ``(kv, start, stop)`` with kv shaped as in :class:`Run`.

        Sequences that share memory name the same pieces of it.
        """

    def pieces(self, tokens: int | None = None) -> list[tuple[Tensor, int, int]]:
        """As :meth:`memory`, of the first tokens; None: of those held."""
        found = []
        left = self.length if tokens is None else tokens
        for kv, start, stop in self.memory():
            if left <= 0:
                break
            found.append((kv, start, min(stop, start + left)))
            left -= stop - start
        return found

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep the rows that follow the tokens held; ``length`` stays.

        Parameters
        ----------
        layer
            Decoder layer.
        keys, values
            ``(kv_heads, rows, head_dim)``.
        """


class PrivateKV(SequenceKV):
    """A sequence's own KV in one stretch of memory.

    Parameters
    ----------
    spec
        Model shapes.
    capacity
        Tokens to make room for.
    device
        Where the buffer lives.
    base
        Keys are rotated at ``position - base``. A compiled chunk's own KV uses the chunk's start, so that its keys
        end up rotated at slots 0 … n - 1 whatever stood before it.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device, base: int = 0) -> None:
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity, spec.head_dim)
        self.kv = torch.empty(shape, dtype=spec.dtype, device=device)
        self.length = 0
        self.base = base

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.kv.shape[3]

    def memory(self) -> list[tuple[Tensor, int, int]]:
        """One piece."""
        return [(self.kv, 0, self.capacity)]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep the rows that follow the tokens held."""
        stop = self.length + keys.shape[1]
        self.kv[layer, 0, :, self.length : stop] = keys
        self.kv[layer, 1, :, self.length : stop] = values


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Rows of one sequence in a forward pass.

    Attributes
    ----------
    positions
        Places of the rows, strictly ascending and above every position already in ``private``.
    private
        Receives the rows' keys and values; what it holds already is attended to.
    runs
        Shared KV that the rows may read.
    whole
        The same for rows behind all of it, in as few pieces as there are bodies: what a sequence does not read is
        hidden. A backend may take either.
    """

    positions: Sequence[int]
    private: SequenceKV
    runs: Sequence[Run]
    whole: Sequence[Run] | None = None


class Plan(ABC):
    """Everything about a forward pass that does not depend on the layer."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Attention of one layer; see :class:`~epic_engine.model.decoder.AttentionStep`."""

    @abstractmethod
    def log_sum_exp(self) -> Tensor:
        """Of every row's scores in the layer that was attended last, ``(heads, rows)`` in at least float32."""

    @abstractmethod
    def commit(self) -> None:
        """Count the rows' keys as part of their sequences, once all layers have run."""


class AttentionBackend(ABC):
    """Makes plans for one kind of device."""

    name: str

    @property
    def identity(self) -> str:
        """Whatever may change its numbers on a device: what was proven of one identity says nothing of another."""
        return self.name

    @abstractmethod
    def plan(self, batch: Sequence[SequenceRows]) -> Plan:
        """Lay out one forward pass over the rows of all sequences, in the order given."""
