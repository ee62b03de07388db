"""A server and its clients in virtual time: threads take turns, so that every figure is exact."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from epic_engine import ChunkKey, SamplingParams
from epic_engine.errors import ConfigError

from epic_rag.benchmarks.serve_clients import Timeline


class VirtualTime(Timeline):
    """Threads take turns, one at a time, in the order in which they wake; time jumps from one waking to the next."""

    def __init__(self, stop_at: float = float("inf")) -> None:
        self._now = 0.0
        self._stop_at = stop_at
        self._main = threading.current_thread()
        self._waiting: list[tuple[float, int, threading.Event]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def _wake_at(self, moment: float, event: threading.Event) -> None:
        heapq.heappush(self._waiting, (max(moment, self._now), next(self._order), event))

    def _next(self) -> None:
        self._now, _, event = heapq.heappop(self._waiting)
        event.set()

    def sleep_until(self, moment: float) -> None:
        if moment >= self._stop_at and threading.current_thread() is self._main:
            self._stop_at = float("inf")
            raise KeyboardInterrupt
        mine = threading.Event()
        self._wake_at(moment, mine)
        self._next()
        assert mine.wait(20)

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        begin, joining, ended = threading.Event(), [], []

        def run() -> None:
            assert begin.wait(20)
            try:
                work()
            finally:
                ended.append(True)
                for event in joining:
                    self._wake_at(self._now, event)
                self._next()

        def join() -> None:
            if not ended:
                mine = threading.Event()
                joining.append(mine)
                self._next()
                assert mine.wait(20)

        threading.Thread(target=run, daemon=True).start()
        self._wake_at(self._now, begin)
        return join


class FakeEngine:
    """Serves requests one after another, or all at once, in virtual time; ``link`` and ``token`` say how long it takes.

    Parameters
    ----------
    link
        Seconds to the first token, by prompt and policy.
    token
        Seconds of each further token, by prompt.
    together
        Whether requests are served at once.
    """

    def __init__(
        self,
        timeline: Timeline,
        link: Callable[[Sequence[Any], str], float],
        token: Callable[[Sequence[Any]], float] = lambda prompt: 0.0,
        *,
        together: bool = False,
    ) -> None:
        self.timeline, self.link, self.token, self.together = timeline, link, token, together
        self.free_at = 0.0
        self.asked: list[tuple[str, float, tuple[Any, ...], int]] = []
        self.running: dict[FakeStream, str] = {}
        self.device, self.max_model_len = "cpu", 4096
        self.spec = SimpleNamespace(architecture="Fake", dtype="torch.float32", kv_bytes_per_token=10)

    def compile_many(self, chunks: Sequence[Sequence[int]], context: str) -> list[ChunkKey]:
        return [ChunkKey.of("fake", "default", context, ids) for ids in chunks]

    def stream(self, prompt: Sequence[Any], sampling: SamplingParams, policy: str) -> FakeStream:
        assert sampling.ignore_eos
        self.asked.append((policy, self.timeline.now(), tuple(prompt), sampling.max_tokens))
        if policy == "refuses":
            raise ConfigError("the queue is full")
        return FakeStream(self, prompt, sampling.max_tokens, policy)


class FakeStream:
    def __init__(self, engine: FakeEngine, prompt: Sequence[Any], tokens: int, policy: str) -> None:
        self.engine, self.policy, self.tokens, self.closed, self.sent = engine, policy, tokens, False, 0
        timeline = engine.timeline
        begin = timeline.now() if engine.together else max(timeline.now(), engine.free_at)
        first, each = begin + engine.link(prompt, policy), engine.token(prompt)
        self.times = [first + i * each for i in range(tokens)]
        engine.free_at = self.times[-1]
        engine.running[self] = policy

    def __iter__(self) -> Iterator[int]:
        for number, moment in enumerate(self.times):
            self.engine.timeline.sleep_until(moment)
            if self.closed:
                return
            if self.policy == "breaks" and number:
                raise RuntimeError("out of pages")
            self.sent += 1
            yield number

    def close(self) -> None:
        self.closed = True
        self.engine.running.pop(self, None)

    @property
    def completion(self) -> Any:
        return SimpleNamespace(stats=SimpleNamespace(prompt=100, linked=80, reused=60))
