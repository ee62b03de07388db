"""Any schedule of requests gives each of them what it would get alone, and leaves no page behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache, lru_cache
from typing import Any, ClassVar

import pytest
from epic_engine import ChunkKey, Engine, LinkedPrompt, SamplingParams, Stream
from epic_engine.errors import OutOfPagesError
from epic_engine.scheduling import serving
from epic_engine.scheduling.loop import StepLoop
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from tests.engine.models import tiny

_RNG = random.Random(4)
CHUNKS = [[_RNG.randrange(3, 199) for _ in range(n)] for n in (5, 9, 14, 16, 21, 33)]
HEAD = [7, 8, 9]
QUESTIONS = [[_RNG.randrange(3, 199) for _ in range(n)] for n in (1, 4, 11)]
POLICIES = ("naive", "legolink:3", "legolink:1p", "query_aware:0.3", "full", "damp:1,2", "prefix", "cacheblend:0.2")
PAGE = 4


class Inline(Executor):
    """Runs work where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ManualLoop(StepLoop):
    """Has no thread: whoever made it takes its turns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._thread = threading.current_thread()
        self._preparers = Inline()  # type: ignore[assignment]


@lru_cache(maxsize=1)
def alone() -> tuple[Engine, list[ChunkKey]]:
    engine = Engine(tiny("llama"), selftest=False, memory="64MiB", head=HEAD)
    return engine, engine.compile_many(CHUNKS)


@cache
def expected(chunks: tuple[int, ...], question: int, policy: str, before: tuple[Any, ...] = ()) -> tuple[int, ...]:
    """Twelve greedy tokens behind a prompt, or behind a conversation's earlier turn ``(…, tokens kept)``."""
    engine, keys = alone()
    params = SamplingParams(12, ignore_eos=True)
    prompt = [HEAD, *(keys[c] for c in chunks), QUESTIONS[question]]
    if not before:
        return engine.generate(prompt, params, policy=policy).token_ids
    *turn, count = before
    with engine.stream(
        [HEAD, *(keys[c] for c in turn[0]), QUESTIONS[turn[1]]],
        SamplingParams(count, ignore_eos=True),
        policy=turn[2],
        keep=True,
    ) as first:
        list(first)
    answer = engine.generate(prompt[1:], params, policy=policy, after=first.linked).token_ids
    first.linked.close()
    return answer


class Schedules(RuleBasedStateMachine):
    """Drives an engine's loop by hand, in too little memory."""

    placement: ClassVar[str] = "map"
    step_seconds: ClassVar[float] = 0.1

    streams = Bundle("streams")
    kept = Bundle("kept")

    @initialize(pages=st.integers(26, 80), rows=st.sampled_from([5, 16, 2048]), most=st.sampled_from([2, 64]))
    def begin(self, pages: int, rows: int, most: int) -> None:
        model = tiny("llama")
        _, self.keys = alone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving, "StepLoop", ManualLoop)
            self.engine = self.make(model, pages, rows, most)
        self.loop = self.engine._loop
        # A chunk that is compiled again needs the loop's turn, which nobody takes while its load is waited for.
        self.engine._serving.residency._recompile = None
        self.pages, self.kept_some = pages, False
        self.want: dict[Stream, tuple[tuple[Any, ...], int]] = {}
        self.open: list[LinkedPrompt] = []
        self.pinned: list[ChunkKey] = []

    def make(self, model: Any, pages: int, rows: int, most: int) -> Engine:
        other, _ = alone()
        return Engine(
            model,
            selftest=False,
            store=other.store,
            memory=pages * PAGE * other.spec.kv_bytes_per_token,
            page_size=PAGE,
            chunk_placement=self.placement,
            step_seconds=self.step_seconds,
            stall_seconds=0,
            rows_per_step=rows,
            max_running=most,
            head=HEAD,
            prefix_cache_bytes=40 * other.spec.kv_bytes_per_token,
        )

    @rule(
        target=streams,
        chunks=st.lists(st.integers(0, len(CHUNKS) - 1), max_size=4).map(tuple),
        question=st.integers(0, len(QUESTIONS) - 1),
        policy=st.sampled_from(POLICIES),
        tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        n=st.integers(1, 3),
        keep=st.booleans(),
    )
    def submit(
        self, chunks: tuple[int, ...], question: int, policy: str, tokens: int, priority: int, n: int, keep: bool
    ) -> Any:
        try:
            made = self.engine.streams(
                [HEAD, *(self.keys[c] for c in chunks), QUESTIONS[question]],
                SamplingParams(tokens, ignore_eos=True),
                n,
                policy=policy,
                priority=priority,
                keep=keep and policy != "prefix",
            )
        except OutOfPagesError:  # can never fit, and says so at once
            return multiple()
        self.kept_some |= keep
        for stream in made:
            self.want[stream] = (chunks, question, policy), tokens
        return multiple(*made)

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.loop._turn()
            self.engine.check_integrity()

    @rule(stream=streams)
    def cancel(self, stream: Stream) -> None:
        stream._generation.end("cancelled")

    @rule(target=kept, stream=streams)
    def take(self, stream: Stream) -> Any:
        """What a stream kept of its prompt and answer."""
        linked = stream._generation.linked
        done = stream._channel.result
        if done is None or not stream._generation.keep or linked is None or stream not in self.want:
            return multiple()
        before, _ = self.want[stream]
        if len(before) == 4 or done.finish_reason != "length":
            return multiple()
        if linked not in self.open:
            self.open.append(linked)
        return linked, (*before, len(done.token_ids))

    @rule(
        target=streams,
        kept=kept,
        chunks=st.lists(st.integers(0, len(CHUNKS) - 1), max_size=2).map(tuple),
        question=st.integers(0, len(QUESTIONS) - 1),
        policy=st.sampled_from([p for p in POLICIES if p != "prefix"]),
        tokens=st.integers(1, 12),
    )
    def turn_again(
        self,
        kept: tuple[LinkedPrompt, tuple[Any, ...]],
        chunks: tuple[int, ...],
        question: int,
        policy: str,
        tokens: int,
    ) -> Any:
        linked, before = kept
        if linked.closed:
            return multiple()
        try:
            made = self.engine.stream(
                [*(self.keys[c] for c in chunks), QUESTIONS[question]],
                SamplingParams(tokens, ignore_eos=True),
                policy=policy,
                after=linked,
            )
        except OutOfPagesError:
            return multiple()
        self.want[made] = (chunks, question, policy, before), tokens
        return made

    @rule(keys=st.lists(st.integers(0, len(CHUNKS) - 1), max_size=3))
    def prefetch(self, keys: list[int]) -> None:
        self.engine.prefetch([self.keys[k] for k in keys])

    @rule(key=st.integers(0, 2))
    def pin(self, key: int) -> None:
        try:
            self.engine.pin([self.keys[key]])
        except OutOfPagesError:
            return
        self.pinned.append(self.keys[key])

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.engine.unpin(self.pinned)
        self.pinned.clear()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            memory = self.engine.stats()["memory"]
            assert memory["private_bytes"] + memory["chunk_bytes"] <= memory["budget_bytes"]

    def needs(self, prompt: tuple[Any, ...], tokens: int) -> int:
        """Most pages that a request takes: its chunks, and rows for all that its policy may compute."""
        parts = [HEAD, *(CHUNKS[c] for c in prompt[0]), QUESTIONS[prompt[1]]]
        own = sum(map(len, parts)) + tokens + 1
        return sum(-(-len(CHUNKS[c]) // PAGE) for c in set(prompt[0])) + -(-own // PAGE)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.unpin(self.pinned)
        for _ in range(3000):
            if self.engine._serving.scheduler.idle and not self.loop._inbox:
                break
            if not self.loop._turn():
                time.sleep(0.001)  # chunks are on their way
            self.engine.check_integrity()
        assert self.engine._serving.scheduler.idle
        for stream, (prompt, tokens) in self.want.items():
            try:
                events = list(stream)
            except OutOfPagesError:  # nobody was left who would have given memory back
                assert self.kept_some or self.needs(prompt, tokens) > self.pages
                continue
            done = stream.completion
            want = expected(*prompt)[:tokens]
            if done.finish_reason == "cancelled":
                assert done.token_ids == want[: len(done.token_ids)]
            else:
                assert done.finish_reason == "length"
                assert done.token_ids == want
                assert [e.token_id for e in events] == list(want)
            if stream._generation.linked is not None:
                stream._generation.linked.close()
        while self.engine._serving.residency.stats()["loading"]:
            pass
        self.engine.check_integrity()
        assert self.engine.stats()["memory"]["private_bytes"] == 0
        assert self.engine._serving.residency.stats()["chunks"]["leased"] == 0
        self.loop._end()
        self.engine.close()


class Pooled(Schedules):
    """Chunks are copied to pages, as on a GPU."""

    placement = "pool"


class Background(Schedules):
    """Every pass is a long one, so that all others run between its layers."""

    step_seconds = 1e-9


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("machine", [Schedules, Pooled, Background])
def test_schedules(machine: type[Schedules]) -> None:
    case = machine.TestCase
    case.settings = _settings(60)
    case("runTest").runTest()
