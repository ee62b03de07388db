"""Bounds of memory and time, so that what would take the machine down is a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from epic_engine import EpicError

__all__ = ["HangError", "bounded", "clean"]

MEMORY = 1 << 30
SECONDS = 20.0


class HangError(BaseException):
    """More processor time was used than any file may cost."""


@contextlib.contextmanager
def bounded(memory: int = MEMORY, seconds: float = SECONDS) -> Iterator[None]:
    """Let a block take only so many more bytes of address space, and seconds of processor time; on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    def over(number: int, frame: FrameType | None) -> None:
        raise HangError(f"more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    earlier = signal.signal(signal.SIGPROF, over)
    # Processor time: a machine that is busy with other things makes nobody late.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)


@contextlib.contextmanager
def clean(*also: type[Exception]) -> Iterator[None]:
    """Errors of ours are fine, and those that a docstring names; anything else is a defect."""
    try:
        yield
    except (EpicError, *also):
        return
