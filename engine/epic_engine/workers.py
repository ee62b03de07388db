"""Threads that share the work of torch's CPU operators.

GNU's OpenMP gives each thread that runs large operators workers of its own, and they stay. Once a process has more of
them than cores, all workers sleep between two operators instead of waiting awake, and to wake them takes longer than
most operators of a small model. So a thread that waits for an engine gives its workers back, and the threads that help
an engine have none: the workers of the one that runs the passes stay awake.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

import torch

__all__ = ["do_without_workers", "give_workers_back", "have_workers", "workers_are_known"]

_SOFT = 1  # omp_pause_soft


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP if it is the one that torch uses."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not sys.platform.startswith("linux") or not library.exists():
        return None
    try:
        found = ctypes.CDLL(os.fspath(library))  # its symbols, and those of the libraries that it needs
    except OSError:
        return None
    names = ("GOMP_parallel", "omp_pause_resource_all", "omp_set_num_threads")
    return found if all(hasattr(found, name) for name in names) and not hasattr(found, "__kmpc_fork_call") else None


def give_workers_back() -> None:
    """End the workers of the calling thread; its next large operator starts new ones, in less than a millisecond."""
    library = _openmp()
    if library is not None:
        library.omp_pause_resource_all(_SOFT)


def do_without_workers() -> None:
    """Have the calling thread run every operator alone from now on."""
    have_workers(1)


def have_workers(threads: int) -> None:
    """Have the calling thread run its operators with so many threads from now on, itself included."""
    library = _openmp()
    if library is not None:
        torch.get_num_threads()  # sets the thread's number the first time it is asked
        library.omp_set_num_threads(threads)
        if hasattr(library, "MKL_Set_Num_Threads_Local"):  # a number that was set for MKL counts more than OpenMP's
            library.MKL_Set_Num_Threads_Local(threads)


def workers_are_known() -> bool:
    """Whether the functions here do anything: torch uses GNU's OpenMP."""
    return _openmp() is not None
