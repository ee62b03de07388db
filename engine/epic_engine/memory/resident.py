"""A chunk's KV while it is in memory, and the job that brings it there layer by layer."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from .ledger import ChunkEntry
from .loader import Job
from .maps import advise_cold, advise_need

__all__ = ["Load", "MappedResident", "PooledResident", "Resident", "StreamedResident"]


class Resident(ABC):
    """Immutable KV of a chunk that somebody leases, perhaps still on its way.

    Parameters
    ----------
    entry
        Its pages.
    layers
        Decoder layers.
    """

    def __init__(self, entry: ChunkEntry, layers: int) -> None:
        self.entry = entry
        self.layers = layers
        self._filled = 0
        self._error: Exception | None = None
        self._condition = threading.Condition()

    @property
    @abstractmethod
    def kv(self) -> Tensor:
        """``(layers, 2, kv_heads, tokens, head_dim)``; a layer may be read once :meth:`wait` has returned for it."""

    @property
    def error(self) -> Exception | None:
        """Why it could not be loaded, or None."""
        return self._error

    def ready(self, layer: int) -> bool:
        """Whether :meth:`wait` would return at once."""
        return layer < self._filled or self._error is not None

    def wait(self, layer: int) -> None:
        """Block until this layer and those below it are there; on a GPU, make the current stream wait.

        Raises
        ------
        Exception
            The loader's: :class:`~epic_engine.errors.ChunkNotFoundError` if the chunk was damaged or is gone,
            :class:`~epic_engine.errors.StoreError`, :class:`~epic_engine.errors.EngineClosedError`.
        """
        if layer >= self._filled:
            with self._condition:
                self._condition.wait_for(lambda: self.ready(layer))
        if self._error is not None:
            raise self._error

    def complete(self) -> Tensor:
        """Wait for every layer; returns ``kv``. Raises as :meth:`wait`."""
        self.wait(self.layers - 1)
        return self.kv

    def _advance(self, filled: int) -> None:
        with self._condition:
            self._filled = filled
            self._condition.notify_all()

    def fail(self, error: Exception) -> None:
        """Let everybody who waits raise this error. The loader's."""
        with self._condition:
            self._error = error
            self._condition.notify_all()

    @abstractmethod
    def fill(self, layer: int, host: Tensor) -> None:
        """Bring one layer in; ``host`` is the whole KV as the store has it. The loader's."""

    @abstractmethod
    def finish(self) -> None:
        """Return when nothing writes to the memory any more. The loader's."""

    @abstractmethod
    def let_go(self) -> None:
        """The chunk is evicted."""


class MappedResident(Resident):
    """KV that is read where the store has it, which is a memory map for a store of files."""

    def __init__(self, entry: ChunkEntry, layers: int) -> None:
        super().__init__(entry, layers)
        self._kv: Tensor | None = None

    @property
    def kv(self) -> Tensor:
        """The map; waits until the store has opened it, and raises as :meth:`wait`."""
        if self._kv is None:
            self.wait(0)
        assert self._kv is not None
        return self._kv

    def fill(self, layer: int, host: Tensor) -> None:
        """Have a layer read ahead. Readers need not wait for that: a page that is missing makes them wait by itself."""
        if self._kv is None:
            self._kv = host
            self._advance(self.layers)
        advise_need(host[layer])

    def finish(self) -> None:
        """Nothing is written."""

    def let_go(self) -> None:
        """Tell the system which memory to take first when it is short."""
        if self._kv is not None:
            advise_cold(self._kv)


class PooledResident(Resident):
    """KV that is copied into pages.

    Parameters
    ----------
    entry, layers
        As for :class:`Resident`.
    kv
        The pages' memory, cut to the chunk's tokens.
    """

    def __init__(self, entry: ChunkEntry, layers: int, kv: Tensor) -> None:
        super().__init__(entry, layers)
        self._kv = kv

    @property
    def kv(self) -> Tensor:
        """The pages' memory."""
        return self._kv

    def fill(self, layer: int, host: Tensor) -> None:
        """Copy a layer."""
        self._kv[layer].copy_(host[layer])
        self._advance(layer + 1)

    def finish(self) -> None:
        """Copies are done when they return."""

    def let_go(self) -> None:
        """The pages are given back, nothing else is held."""


class StreamedResident(PooledResident):
    """KV that is copied into pages of a GPU beside the computing stream.

    Must be made by a thread whose current stream is the one that computes: earlier work there may still read the
    pages' former contents.
    """

    def __init__(self, entry: ChunkEntry, layers: int, kv: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(entry, layers, kv)
        self._stream = stream
        self._events: list[torch.cuda.Event] = []
        self._done = False
        self._pages_free = torch.cuda.Event()
        self._pages_free.record(torch.cuda.current_stream(kv.device))

    def wait(self, layer: int) -> None:
        """Make the current stream wait for the copy of a layer, once that was enqueued."""
        super().wait(layer)
        if not self._done:
            torch.cuda.current_stream(self._kv.device).wait_event(self._events[layer])

    def fill(self, layer: int, host: Tensor) -> None:
        """Enqueue the copy of a layer, from host memory by way of page-locked memory."""
        with torch.cuda.stream(self._stream):
            if not layer:
                self._stream.wait_event(self._pages_free)
            source = host[layer]
            if source.device.type == "cpu":
                source = source.pin_memory()
            self._kv[layer].copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._events.append(event)
        self._advance(layer + 1)

    def finish(self) -> None:
        """Wait for the last copy."""
        if self._events:
            self._events[-1].synchronize()
        self._done = self._filled == self.layers


class Load(Job):
    """Brings one chunk in.

    Parameters
    ----------
    resident
        Filled layer by layer.
    fetch
        Returns the KV in host memory, and sets ``source``.
    finished
        Called at the end, whether it went well or not (``resident.error``).

    Attributes
    ----------
    source
        Where the KV came from; empty until that is known.
    given_up
        Nobody wanted it any more.
    seconds
        Time spent in steps.
    """

    def __init__(self, resident: Resident, fetch: Callable[[Load], Tensor], finished: Callable[[Load], None]) -> None:
        super().__init__()
        self.resident = resident
        self.source = ""
        self.given_up = False
        self.seconds = 0.0
        self.nbytes = 0
        self._fetch = fetch
        self._finished = finished
        self._host: Tensor | None = None
        self._layer = 0

    def step(self) -> bool:
        """Bring one layer in."""
        begin = time.perf_counter()
        resident = self.resident
        try:
            if self._host is None:
                self._host = self._fetch(self)
                self.nbytes = self._host.nbytes
            resident.fill(self._layer, self._host)
            self._layer += 1
            over = self._layer == resident.layers
            if over:
                resident.finish()
        except Exception as error:
            with contextlib.suppress(Exception):  # a broken device fails here, too
                resident.finish()
            resident.fail(error)
            over = True
        self.seconds += time.perf_counter() - begin
        if over:
            self._host = None
            self._finished(self)
        return over

    def stopped(self) -> None:
        """End here."""
        with contextlib.suppress(Exception):
            self.resident.finish()
        self.give_up()

    def give_up(self) -> None:
        """End without the rest, between two steps."""
        self._host = None
        self.given_up = True
        self._finished(self)
