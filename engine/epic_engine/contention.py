"""Whether this process's threads get the cores that they want, and what its workers do when they do not.

Workers of GNU's OpenMP wait awake for each other, some 20 ms at most. That is right as long as each has a core. Where
two share one because another process is on the rest, each wait lasts until the system takes the core away, and a pass
takes a hundred times as long as it should. Once a process has more workers than cores they sleep at once; so while
threads stand in line for cores, this process has more of them, which do nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch

from .workers import give_workers_back, have_workers, workers_are_known

__all__ = ["ContentionWatch", "times_of_threads", "waits_for_cores"]

# Seconds between two looks, and for how long workers sleep at once after a look that found a thread waiting.
_LOOK_EVERY = 0.1
_SLEEP_FOR = 2.0
# Share of the time that a thread that works may stand in line for a core.
_MOST_WAITING = 0.2
# A thread that did less than this share of the time says nothing: a moment in line is much of a short life.
_LEAST_WORK = 0.2


class ContentionWatch:
    """Looks while an engine works whether threads wait for cores, and has workers sleep at once as long as they do.

    Linux only, with torch's GNU OpenMP; elsewhere it does nothing.

    Attributes
    ----------
    contended
        Whether workers sleep at once now.
    """

    def __init__(self) -> None:
        self.contended = False
        self._working = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """The engine works from now on."""
        self._working.set()
        if self._thread is None and not self._ended.is_set() and workers_are_known() and times_of_threads():
            self._thread = threading.Thread(target=self._main, name="epic-contention", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """The engine has nothing to do."""
        self._working.clear()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._ended.set()
        self._working.set()
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        until = 0.0
        before, since = times_of_threads(), time.monotonic()
        while not self._ended.wait(_LOOK_EVERY):
            after, now = times_of_threads(), time.monotonic()
            if waits_for_cores(before, after, now - since):
                until = now + _SLEEP_FOR
            before, since = after, now
            wanted = now < until and self._working.is_set()
            if wanted != self.contended:
                self._crowd() if wanted else give_workers_back()
                self.contended = wanted
            if not self._working.is_set():
                self._working.wait()
                before, since = times_of_threads(), time.monotonic()
        give_workers_back()

    def _crowd(self) -> None:
        """Give this thread workers that make those of the process more than there are cores."""
        have_workers(len(os.sched_getaffinity(0)) + 1)
        torch.ones(1 << 16).exp_()


def times_of_threads() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of the process has run, and has been ready without a core; empty if not known."""
    found: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                    ran, waited, _ = file.read().split()
                found[thread] = int(ran), int(waited)
    return found


def waits_for_cores(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], seconds: float) -> bool:
    """Whether a thread that worked stood in line for a core for long, between two looks so many seconds apart."""
    for thread, (ran, waited) in after.items():
        ran_before, waited_before = before.get(thread, (ran, waited))
        worked = ran - ran_before > _LEAST_WORK * seconds * 1e9
        if worked and waited - waited_before > _MOST_WAITING * seconds * 1e9:
            return True
    return False
