"""Work that is done in small steps on a few threads, the most urgent step first.

Urgent groups are served in the order of their arrival, and within a group breadth first: the first layer of every
chunk of a prompt is there before the second layer of any, because a forward pass reads them in that order. Work that
nobody waits for comes last, one job after the other.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from epic_engine.workers import do_without_workers

__all__ = ["Job", "Loader"]


class Job(ABC):
    """Work in steps."""

    def __init__(self) -> None:
        self._group: int | None = None  # None: nobody waits for it
        self._arrival = 0
        self._stopped = False

    @abstractmethod
    def step(self) -> bool:
        """Do a little; returns whether that was all. Must not raise."""

    @abstractmethod
    def stopped(self) -> None:
        """Called after a step in which the job was stopped, unless that was the last. Must not raise."""


class Loader:
    """Runs jobs on threads that exist only while there is work.

    Parameters
    ----------
    threads
        Most jobs that are in a step at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "epic-loader", do_without_workers)
        self._threads = threads
        self._lock = threading.Lock()
        self._queue: list[tuple[float, int, Job]] = []  # group, turn
        self._turns = itertools.count()
        self._groups = itertools.count()
        self._waiting: set[Job] = set()
        self._active = 0
        self._closed = False

    def submit(self, jobs: Iterable[Job], *, urgent: bool) -> None:
        """Run jobs from now on, as one group if somebody waits for them."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this loader was closed")
            group = next(self._groups) if urgent else None
            for job in jobs:
                job._group, job._arrival = group, next(self._turns)
                self._push(job)
                if self._active < self._threads:
                    self._active += 1
                    self._executor.submit(self._work)

    def hurry(self, jobs: Iterable[Job]) -> None:
        """Somebody waits for these jobs now; those that are urgent already keep their turn."""
        with self._lock:
            group = next(self._groups)
            for job in jobs:
                if job._group is None:
                    job._group = group
                    if job in self._waiting:
                        self._push(job)

    def remove(self, job: Job) -> bool:
        """Forget a job that is between two steps; False if it is in one, or has ended."""
        with self._lock:
            found = job in self._waiting
            self._waiting.discard(job)
            return found

    def stop(self, job: Job) -> None:
        """Let a job that is in a step take no other; :meth:`Job.stopped` tells when it has ended."""
        with self._lock:
            job._stopped = True

    def _push(self, job: Job) -> None:
        self._waiting.add(job)
        if job._group is None:
            heapq.heappush(self._queue, (math.inf, job._arrival, job))
        else:  # behind the others of its group
            heapq.heappush(self._queue, (job._group, next(self._turns), job))

    def _pop(self) -> Job | None:
        while self._queue:
            job = heapq.heappop(self._queue)[2]
            if job in self._waiting:  # one that was hurried stands in the queue twice, a removed one once too often
                self._waiting.remove(job)
                return job
        return None

    def _work(self) -> None:
        while True:
            with self._lock:
                job = self._pop()
                if job is None:
                    self._active -= 1
                    return
            if job.step():
                continue
            with self._lock:
                stopped = job._stopped
                if not (stopped or self._closed):
                    self._push(job)
            if stopped:
                job.stopped()

    def close(self) -> None:
        """Start no further step, and return when the running ones have ended. Closing twice is fine."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._executor.shutdown(wait=True)
