"""What the operating system knows about mapped memory. Linux only; elsewhere hints do nothing and questions get None.

No hint changes what is read: all of them are safe on memory that is no map of a file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
from torch import Tensor

__all__ = ["advise_cold", "advise_need", "disk_bytes_read", "in_memory"]

# Linux, include/uapi/asm-generic/mman-common.h. MADV_DONTNEED would be the usual way to let go of a map, but it zeroes
# memory that is none; MADV_COLD only moves pages to the front of the kernel's own queue.
_MADV_WILLNEED = 3
_MADV_COLD = 20
_BLOCK = 512

_libc: ctypes.CDLL | None = None
if sys.platform == "linux":
    import resource

    _libc = ctypes.CDLL(None, use_errno=True)
    for _name in ("madvise", "mincore"):
        getattr(_libc, _name).argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _range(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the system pages under a contiguous tensor."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, tensor.data_ptr() + tensor.nbytes - begin


def _advise(tensor: Tensor, advice: int) -> None:
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes and tensor.is_contiguous():
        _libc.madvise(*_range(tensor), advice)  # a hint: an old kernel's refusal changes nothing


def advise_need(tensor: Tensor) -> None:
    """Start to read a mapped tensor from disk; returns at once."""
    _advise(tensor, _MADV_WILLNEED)


def advise_cold(tensor: Tensor) -> None:
    """Say that a tensor's memory may go first when memory is short. Its contents stay."""
    _advise(tensor, _MADV_COLD)


def in_memory(tensor: Tensor) -> float | None:
    """Fraction of a contiguous CPU tensor that can be read without the disk; None where that is unknown."""
    if _libc is None or tensor.device.type != "cpu" or not tensor.nbytes or not tensor.is_contiguous():
        return None
    address, length = _range(tensor)
    states = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    if _libc.mincore(address, length, states.ctypes.data):
        return None
    return float((states & 1).mean())


def disk_bytes_read() -> int | None:
    """Bytes that this thread has had read from a disk so far, page faults included; None where that is unknown."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock * _BLOCK if _libc is not None else None
