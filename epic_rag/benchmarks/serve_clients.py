"""Clients of an engine: they send requests, each read by a thread of its own, and note what they see when."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from epic_engine import Engine, SamplingParams, Stream

from epic_rag.benchmarks.serve_corpus import Request

__all__ = ["Clients", "Outcome", "Timeline", "engine_memory"]

ReadMemory = Callable[[Engine], Mapping[str, Any]]


def engine_memory(engine: Engine) -> Mapping[str, Any]:
    """What the engine holds, with ``private_bytes`` (of requests), ``chunk_bytes`` and ``budget_bytes`` among it."""
    memory: Mapping[str, Any] = engine.stats()["memory"]
    return memory


class Timeline:
    """Time and threads, real ones. A subclass may make time pass as it likes."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        """Wait; returns at once if the moment is past."""
        delay = moment - self.now()
        if delay > 0:
            time.sleep(delay)

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` beside the caller; returns a function that waits for its end."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread.join


@dataclass
class Outcome:
    """What a client saw of one request, in seconds of its timeline.

    Attributes
    ----------
    due
        When it was to be sent.
    times
        When each token came.
    prompt, linked, reused
        Tokens, as the engine reports them.
    held_bytes
        What the engine held for all requests and chunks when the first token came.
    state
        ``running``, ``done``, ``refused`` (not accepted), ``failed`` (accepted but not finished), or ``cancelled``
        (by the client).
    error
        Why it was refused or failed.
    """

    due: float
    times: list[float] = field(default_factory=list)
    prompt: int = 0
    linked: int = 0
    reused: int = 0
    held_bytes: int | None = None
    state: str = "running"
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.times[0] - self.due

    @property
    def per_token(self) -> float | None:
        """Mean seconds of the tokens after the first; None if there is only one."""
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class Clients:
    """Sends requests to an engine.

    Parameters
    ----------
    engine
        Serves them.
    timeline
        Time and threads.
    read_memory
        Reads what the engine holds.
    """

    def __init__(
        self, engine: Engine, timeline: Timeline | None = None, read_memory: ReadMemory = engine_memory
    ) -> None:
        self.engine = engine
        self.timeline = timeline or Timeline()
        self._read_memory = read_memory
        self._lock = threading.Lock()
        self._running: set[Stream] = set()
        self._cancelled = False

    def memory(self) -> Mapping[str, Any]:
        """What the engine reports about its memory."""
        return self._read_memory(self.engine)

    def held_bytes(self) -> int:
        """Bytes that the engine holds now, for requests and chunks."""
        memory = self.memory()
        return int(memory["private_bytes"] + memory["chunk_bytes"])

    def ask(self, request: Request, policy: str, due: float | None = None, outcome: Outcome | None = None) -> Outcome:
        """Send one request and read its answer in the calling thread.

        Parameters
        ----------
        request
            Prompt and length of the answer.
        policy
            Link policy.
        due
            When it was to be sent; None is now.
        outcome
            Filled as it goes, for callers that watch; None makes one.
        """
        found = outcome or Outcome(0.0)
        found.due = self.timeline.now() if due is None else due
        sampling = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
        try:
            stream = self.engine.stream(request.prompt, sampling, policy=policy)
        except Exception as error:  # whatever the server raises is the client's finding
            found.state, found.error = "refused", repr(error)
            return found
        with self._lock:
            self._running.add(stream)
            cancelled = self._cancelled
        try:
            if not cancelled:
                for _ in stream:
                    found.times.append(self.timeline.now())
                    if len(found.times) == 1:
                        found.held_bytes = self.held_bytes()
        except Exception as error:
            found.state, found.error = "failed", repr(error)
        finally:
            with self._lock:
                self._running.discard(stream)
            stream.close()
        if found.state == "running":
            stats = stream.completion.stats
            found.prompt, found.linked, found.reused = stats.prompt, stats.linked, stats.reused
            whole = len(found.times) == request.max_tokens
            found.state = "done" if whole else "cancelled" if self._cancelled else "failed"
            if found.state == "failed":
                found.error = f"ended after {len(found.times)} of {request.max_tokens} tokens"
        return found

    def cancel(self) -> None:
        """Close what is running, from any thread; nothing more is sent before the :meth:`crew` has ended."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for stream in running:
            stream.close()

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called in this :meth:`crew`."""
        return self._cancelled

    @contextmanager
    def crew(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Yields a function that starts a client; waits for all of them, after an error or Ctrl-C cancelling first."""
        joins: list[Callable[[], None]] = []
        try:
            yield lambda work: joins.append(self.timeline.start(work))
            for join in joins:
                join()
        except BaseException:
            self.cancel()
            for join in joins:
                join()
            raise
        finally:
            self._cancelled = False

    def open_loop(self, requests: Sequence[Request], arrivals: Sequence[float], policy: str) -> list[Outcome]:
        """Send each request when it is due, however many are still running.

        Parameters
        ----------
        requests, arrivals
            What, and when: seconds from now, rising.
        policy
            Link policy.
        """
        begin = self.timeline.now()
        outcomes = [Outcome(begin + at) for at in arrivals]
        with self.crew() as start:
            for request, outcome in zip(requests, outcomes, strict=True):
                self.timeline.sleep_until(outcome.due)
                start(partial(self._ask, request, policy, outcome.due, outcome))
        return outcomes

    def closed_loop(self, requests: Sequence[Request], policy: str, concurrency: int) -> list[Outcome]:
        """Keep ``concurrency`` requests running until all were answered."""
        outcomes = [Outcome(0.0) for _ in requests]
        left = itertools.count()

        def client() -> None:
            # next() on a count is atomic, so that clients share the line without a lock.
            while not self._cancelled and (index := next(left)) < len(requests):
                self.ask(requests[index], policy, outcome=outcomes[index])

        with self.crew() as start:
            for _ in range(min(concurrency, len(requests))):
                start(client)
        return outcomes

    def _ask(self, request: Request, policy: str, due: float | None, outcome: Outcome) -> None:
        self.ask(request, policy, due, outcome)
