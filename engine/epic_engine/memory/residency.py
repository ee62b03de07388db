"""Compiled KV on the device that computes.

On a CPU a chunk is read straight from the store's memory map and nothing is kept here. On a GPU recently used chunks
stay in device memory, up to a part of what was free.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from epic_engine.chunks import ChunkKey

__all__ = ["Residency"]

_DEVICE_SHARE = 0.3


class Residency:
    """Copies of chunks on a device, least recently used first out.

    Parameters
    ----------
    device
        Where attention runs.
    budget
        Bytes to keep there; None takes a share of what is free now.
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._held: OrderedDict[ChunkKey, Tensor] = OrderedDict()
        self._bytes = 0
        if budget is None:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            budget = int(free * _DEVICE_SHARE)
        self._budget = budget

    def on_device(self, key: ChunkKey, load: Callable[[ChunkKey], Tensor]) -> Tensor:
        """The chunk's KV on the device; ``load`` brings it from the store where it is not."""
        if self._device.type == "cpu":
            return load(key)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        kv = load(key).to(self._device)
        with self._lock:
            if key not in self._held:
                self._held[key] = kv
                self._bytes += kv.nbytes
            while self._bytes > self._budget and self._held:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return kv

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0
