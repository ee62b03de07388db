"""Decoding steps captured as CUDA graphs: one launch for a whole forward pass.

A decoding step of a small batch is short, and hundreds of launches from Python would take longer than the work itself.
Steps are captured when an engine starts, for a few sizes of batch; a batch takes the next larger one, and what does
not fit any is run as every other pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epic_engine.attention.base import AttentionBackend, SequenceRows
from epic_engine.model.decoder import Decoder

if TYPE_CHECKING:
    from epic_engine.attention.static_step import StaticStep

__all__ = ["DecodeGraphs", "decode_graphs"]

logger = logging.getLogger(__name__)

_MOST_ROWS = 64
_WARM_UPS = 2

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def decode_graphs(decoder: Decoder, backend: AttentionBackend, most_rows: int) -> DecodeGraphs | None:
    """Captured steps for a model on a GPU; None where steps cannot be captured.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    most_rows
        Most sequences that decode at once.
    """
    if backend.name != "triton" or decoder.device.type != "cuda":
        return None
    try:
        return DecodeGraphs(decoder, backend, most_rows, _capture)
    except Exception as error:  # a model may do what a graph cannot hold; it is served all the same
        logger.warning("decoding runs without CUDA graphs, which is slower: %s", error)
        torch.cuda.synchronize(decoder.device)
        return None


class DecodeGraphs:
    """Decoding steps for batches of up to 1, 2, 4, … sequences.

    Parameters
    ----------
    decoder, backend
        The model and its attention, which is Triton's.
    most_rows
        Most sequences at once.
    capture
        Makes a function that repeats what it is given on the memory that this used.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, most_rows: int, capture: Capture) -> None:
        from epic_engine.attention.static_step import StaticStep
        from epic_engine.attention.triton_backend import TritonBackend

        assert isinstance(backend, TritonBackend)
        most = min(most_rows, _MOST_ROWS)
        sizes = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
        partials = backend.partials(StaticStep.partial_results(most))
        # The largest first: the others fit into the memory that it took.
        self._steps = [
            _Step(decoder, StaticStep(backend, rows, decoder.max_model_len, partials), capture)
            for rows in reversed(sizes)
        ][::-1]

    def run(self, ids: Sequence[int], batch: Sequence[SequenceRows]) -> Tensor | None:
        """Logits of one row of each sequence, ``(len(batch), vocab)``, or None if the batch does not fit.

        The logits are valid until the next call.

        Parameters
        ----------
        ids
            Token of each row.
        batch
            One row of each sequence.
        """
        for step in self._steps:
            if step.rows >= len(batch):
                return step.run(ids, batch)
        return None


class _Step:
    """One captured step and the memory that it reads and writes."""

    def __init__(self, decoder: Decoder, attention: StaticStep, capture: Capture) -> None:
        self.rows = attention.rows
        self._attention = attention
        on_gpu = decoder.device.type == "cuda"
        self._host = torch.zeros((2, self.rows), dtype=torch.int64, pin_memory=on_gpu)
        self._inputs = self._host.to(decoder.device)
        self._copied = torch.cuda.Event() if on_gpu else None

        def forward() -> Tensor:
            return decoder.logits(self._inputs[0], self._inputs[1], attention, self.rows)

        self._replay = capture(forward)

    def run(self, ids: Sequence[int], batch: Sequence[SequenceRows]) -> Tensor | None:
        if not self._attention.load(batch):
            return None
        count = len(batch)
        if self._copied is not None:
            self._copied.synchronize()
        self._host[0, :count] = torch.tensor(ids)
        self._host[1, :count] = torch.tensor([item.positions[0] for item in batch])
        self._inputs.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        logits = self._replay()[:count]
        for item in batch:
            item.private.length += 1
        return logits


def _capture(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):  # kernels are compiled and libraries set up outside the graph
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Chunks may be loading on a thread of their own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        logits = forward()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
