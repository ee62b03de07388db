"""Many requests at once: order, time limits, shared and short memory, coroutines, failures that stay alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from epic_engine import ConfigError, Engine, EngineClosedError, OutOfPagesError, SamplingParams
from epic_engine.best_of import best_of
from epic_engine.storage.memory_store import MemoryStore
from torch import Tensor

from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


CHUNKS = [_ids(n, n) for n in (20, 33, 17, 40)]
QUESTION = _ids(6, 2)
FOREVER = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny("llama"), selftest=False) as made:
        yield made
        made.drain()
        made.check_integrity()


def private_pages(engine: Engine) -> int:
    pages: int = engine.stats()["memory"]["pages"]["private"]
    return pages


class Gate:
    """Holds the loop's thread, so that what is submitted meanwhile stands in line together."""

    def __init__(self, engine: Engine) -> None:
        self._open, self._held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: engine.call(self._hold))

    def _hold(self) -> None:
        self._held.set()
        self._open.wait()

    def __enter__(self) -> None:
        self._thread.start()
        self._held.wait()

    def __exit__(self, *exc: object) -> None:
        self._open.set()
        self._thread.join()


def test_requests_run_together(engine: Engine) -> None:
    """All next tokens in one pass: eight requests take about as many passes as one."""
    keys = engine.compile_many(CHUNKS)
    prompts = [[keys[n % 4], keys[(n + 1) % 4], _ids(5, 60 + n)] for n in range(8)]
    alone = [engine.generate(prompt, SHORT).token_ids for prompt in prompts]
    before = engine.stats()["steps"]["count"]
    with Gate(engine):
        streams = [engine.stream(prompt, SHORT) for prompt in prompts]
    assert [tuple(e.token_id for e in stream) for stream in streams] == alone
    engine.drain()
    assert engine.stats()["steps"]["count"] - before <= 8 + 8  # 7 decode passes; links may need one each


def test_higher_priority_goes_first() -> None:
    with Engine(tiny("llama"), selftest=False, max_running=1) as engine:
        order: list[int] = []
        with Gate(engine):
            streams = {p: engine.stream([_ids(5, p)], SHORT, priority=p) for p in (0, 3, 1, 2)}

        def read(priority: int) -> None:
            next(streams[priority])
            order.append(priority)
            list(streams[priority])

        threads = [threading.Thread(target=read, args=(p,)) for p in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queued = {p: s.completion.stats.times.queued for p, s in streams.items()}
        assert sorted(queued, key=lambda p: queued[p]) == [3, 2, 1, 0]


def test_a_time_limit_ends_an_answer_with_what_there_is(engine: Engine) -> None:
    done = engine.generate([QUESTION], SamplingParams(max_tokens=500, ignore_eos=True), timeout=0.15)
    assert done.finish_reason == "timeout"
    assert len(done.token_ids) < 500
    want = engine.generate([QUESTION], SamplingParams(max_tokens=500, ignore_eos=True)).token_ids
    assert done.token_ids == want[: len(done.token_ids)]


def test_a_time_limit_counts_in_the_line() -> None:
    with Engine(tiny("llama"), selftest=False, max_running=1) as engine:
        first = engine.stream([QUESTION], FOREVER)
        next(first)
        late = engine.generate([QUESTION], SHORT, timeout=0.01)
        assert (late.token_ids, late.finish_reason) == ((), "timeout")
        first.close()
        with pytest.raises(ConfigError, match="above 0 seconds"):
            engine.generate([QUESTION], SHORT, timeout=0)


# -- shared memory ---------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_share_its_pages(engine: Engine) -> None:
    prompt = [_ids(160, 9)]
    answer = SamplingParams(max_tokens=300, ignore_eos=True)
    one = engine.stream(prompt, answer, policy="full")
    next(one)
    pages = private_pages(engine)
    one.close()
    engine.drain()
    streams = engine.streams(prompt, answer, 5, policy="full")
    for stream in streams:
        next(stream)
    assert pages >= 10
    # Ten whole pages are shared; each answer adds its own behind them.
    assert private_pages(engine) < 5 * 10
    shared = {tuple(s._generation.linked.private.extents[:1]) for s in streams if s._generation.linked}
    assert len(shared) == 1
    for stream in streams:
        stream.close()
    engine.drain()
    assert private_pages(engine) == 0


def test_several_answers_are_those_of_their_seeds(engine: Engine) -> None:
    key = engine.compile(CHUNKS[0])
    params = SamplingParams(12, temperature=1.0, seed=5, ignore_eos=True)
    streams = engine.streams([key, QUESTION], params, 3)
    got = [tuple(e.token_id for e in stream) for stream in streams]
    want = [
        engine.generate([key, QUESTION], SamplingParams(12, temperature=1.0, seed=5 + n, ignore_eos=True)).token_ids
        for n in range(3)
    ]
    assert got == want
    assert len(set(got)) == 3
    with pytest.raises(ConfigError, match="at least 1"):
        engine.streams([QUESTION], params, 0)


def test_one_of_several_answers_may_leave(engine: Engine) -> None:
    streams = engine.streams([CHUNKS[0], QUESTION], FOREVER, 3)
    want = engine.generate([CHUNKS[0], QUESTION], FOREVER).token_ids
    for stream in streams:
        next(stream)
    streams[0].close()
    assert [e.token_id for e in streams[2]] == list(want[1:])
    assert [e.token_id for e in streams[1]] == list(want[1:])


@pytest.mark.backends
def test_a_conversation_reuses_its_own_kv(engine: Engine) -> None:
    """Turn by turn, against the untouched model on all that was said."""
    model = untouched(tiny("llama"))
    said: list[int] = []
    linked = None
    for turn in range(4):
        new = _ids(9 + turn, 80 + turn)
        with engine.stream([new], SHORT, policy="full", after=linked, keep=True) as stream:
            answer = [e.token_id for e in stream]
        said += new
        want = []
        for _ in range(8):
            want.append(int(plain_logits(model, [*said, *want])[-1].argmax()))
        assert answer == want
        stats = stream.completion.stats
        assert stats.prompt == len(said)
        assert stats.rows == len(new) + (turn > 0)  # and the last token of the answer before it
        assert stats.continued == len(said) - stats.rows
        said += answer
        if linked is not None:
            linked.close()
        linked = stream.linked
    assert linked is not None
    assert private_pages(engine) > 0
    linked.close()
    assert private_pages(engine) == 0
    with pytest.raises(ConfigError, match="was closed"):
        engine.stream([QUESTION], SHORT, after=linked)


@pytest.mark.backends
def test_a_conversation_may_take_two_ways(engine: Engine) -> None:
    key, other = engine.compile_many(CHUNKS[:2])
    base = engine.link([key, QUESTION], policy="naive")
    ways = [[_ids(7, 30)], [other, _ids(5, 31)]]
    with Gate(engine):
        streams = [engine.stream(way, SHORT, policy="naive", after=base) for way in ways]
    got = [[e.token_id for e in stream] for stream in streams]
    for way, tokens in zip(ways, got, strict=True):
        assert tokens == list(engine.generate([key, QUESTION, *way], SHORT, policy="naive").token_ids)
    assert streams[1].completion.stats.linked == len(CHUNKS[1])
    assert streams[1].completion.stats.continued == len(CHUNKS[0]) + len(QUESTION)
    base.close()


def test_what_was_not_kept_cannot_be_continued(engine: Engine) -> None:
    stream = engine.stream([QUESTION], SHORT)
    with pytest.raises(ConfigError, match="has not ended"):
        _ = stream.linked
    list(stream)
    with pytest.raises(ConfigError, match="keep=True"):
        _ = stream.linked


# -- short memory ----------------------------------------------------------------------------------------------


def small(pages: int, **options: Any) -> Engine:
    spec_engine = Engine(tiny("llama"), selftest=False)
    size = 16 * spec_engine.spec.kv_bytes_per_token
    spec_engine.close()
    return Engine(tiny("llama"), selftest=False, memory=pages * size, **options)


def test_a_request_that_can_never_fit_fails_at_once_with_the_numbers() -> None:
    with small(8) as engine:
        with pytest.raises(OutOfPagesError, match=r"needs .* budget is .*memory="):
            engine.stream([_ids(100, 1)], SamplingParams(max_tokens=64))
        stats = engine.stats()["requests"]
        assert stats["outcomes"]["rejected"] == 1
        assert len(engine.generate([_ids(100, 1)], SHORT).token_ids) == 8


def test_requests_wait_for_memory_and_all_are_served() -> None:
    with small(12) as engine:
        want = [engine.generate([_ids(60, n)], FOREVER_40).token_ids for n in range(9)]
        streams = [engine.stream([_ids(60, n)], FOREVER_40) for n in range(9)]
        assert [tuple(e.token_id for e in stream) for stream in streams] == want
        engine.drain()
        assert private_pages(engine) == 0
        stats = engine.stats()
        assert stats["steps"]["preemptions"] > 0  # 12 pages do not hold two answers of 100 tokens
        engine.check_integrity()


FOREVER_40 = SamplingParams(max_tokens=40, ignore_eos=True)


def test_more_chunks_than_memory_roll_through() -> None:
    """Three times as many as fit; the pinned one stays."""
    store = MemoryStore()
    with Engine(tiny("llama"), selftest=False, store=store) as roomy:
        keys = roomy.compile_many([_ids(32, n) for n in range(24)])
        prompts = [[keys[n], keys[(n + 7) % 24], _ids(4, n)] for n in range(24)]
        want = [roomy.generate(prompt, SHORT).token_ids for prompt in prompts]
    for placement in ("map", "pool"):
        with small(16, store=store, chunk_placement=placement) as engine:
            engine.pin(keys[:1])
            peak = 0
            for prompt, tokens in zip(prompts, want, strict=True):
                assert engine.generate(prompt, SHORT).token_ids == tokens
                memory = engine.stats()["memory"]
                peak = max(peak, memory["private_bytes"] + memory["chunk_bytes"])
                engine.check_integrity()
            memory = engine.stats()["memory"]
            assert 0 < peak <= memory["budget_bytes"]
            assert memory["residency"]["evictions"] > 0
            assert memory["pages"]["pinned"] == 2
            hits = memory["residency"]["hits"]["device"]
            engine.generate([keys[0], QUESTION], SHORT)
            assert engine.stats()["memory"]["residency"]["hits"]["device"] == hits + 1


def test_prefetching_makes_a_hit() -> None:
    store = MemoryStore()
    with Engine(tiny("llama"), selftest=False, store=store) as first:
        key = first.compile(CHUNKS[0])
    with Engine(tiny("llama"), selftest=False, store=store, chunk_placement="pool") as engine:
        engine.prefetch([key])
        engine.generate([key, QUESTION], SHORT)
        memory = engine.stats()["memory"]["residency"]
        assert memory["prefetched"] == 1
        assert memory["hits"]["device"] == 1


# -- readers ---------------------------------------------------------------------------------------------------


def test_coroutines_read_side_by_side(engine: Engine) -> None:
    keys = engine.compile_many(CHUNKS)
    prompts = [[keys[n % 4], _ids(4, n)] for n in range(6)]
    want = [engine.generate(prompt, SHORT).token_ids for prompt in prompts]

    async def read(number: int) -> tuple[int, ...]:
        async with engine.stream(prompts[number], SHORT) as stream:
            return tuple([event.token_id async for event in stream])

    async def every() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(n) for n in range(6)))

    assert asyncio.run(every()) == want


def test_a_cancelled_task_frees_its_request(engine: Engine) -> None:
    async def main() -> None:
        stream = engine.stream([QUESTION], SamplingParams(max_tokens=450, ignore_eos=True))
        began = asyncio.Event()

        async def read() -> None:
            async with stream:
                async for _ in stream:
                    began.set()

        task = asyncio.create_task(read())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.completion.finish_reason == "cancelled"

    asyncio.run(main())
    engine.drain()
    assert private_pages(engine) == 0


def test_a_slow_reader_does_not_hold_the_others_up(engine: Engine) -> None:
    unread = engine.stream([QUESTION], SHORT)
    assert len(list(engine.stream([QUESTION], SamplingParams(max_tokens=50, ignore_eos=True)))) == 50
    assert unread.completion.finish_reason == "length"  # though nobody has read a token
    assert len(list(unread)) == 8


# -- what goes wrong -------------------------------------------------------------------------------------------


class Failing:
    """A constraint that fails at its third token."""

    finished = False

    def __init__(self) -> None:
        self.count = 0

    def mask(self, logits: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3:
            raise RuntimeError("lost its place")
        return logits

    def advance(self, token_id: int) -> None:
        pass


def test_one_requests_failure_is_its_own(engine: Engine) -> None:
    want = engine.generate([QUESTION], FOREVER).token_ids
    other = engine.stream([QUESTION], FOREVER)
    broken = engine.stream([QUESTION], SamplingParams(max_tokens=50), constraint=Failing())
    with pytest.raises(RuntimeError, match="lost its place"):
        list(broken)
    assert [e.token_id for e in other] == list(want)


def test_closing_the_engine_ends_every_request() -> None:
    engine = Engine(tiny("llama"), selftest=False, max_running=1)
    streams = [engine.stream([QUESTION], SamplingParams(max_tokens=450, ignore_eos=True)) for _ in range(3)]
    next(streams[0])
    engine.close()
    for stream in streams:
        with pytest.raises(EngineClosedError, match="was closed"):
            list(stream)
    with pytest.raises(EngineClosedError):
        engine.stream([QUESTION], SHORT)


def test_an_engine_that_is_dropped_ends_its_thread() -> None:
    engine = Engine(tiny("llama"), selftest=False)
    engine.generate([QUESTION], SHORT)
    thread = engine._loop._thread
    assert thread is not None
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.backends
def test_logits_of_chosen_rows_are_those_rows(engine: Engine) -> None:
    plan = engine.backend.plan([engine.link([QUESTION], policy="full", room=4).rows(range(6, 10))])
    logits = engine.decoder.logits([5, 6, 7, 8], range(6, 10), plan, [0, 2])
    want = plain_logits(untouched(tiny("llama")), [*QUESTION, 5, 6, 7, 8])
    assert torch.allclose(logits, want[[6, 8]], atol=1e-4)


def test_chunks_with_different_holes_are_read_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each request computed anew, the next tokens of all read a chunk in one product."""
    keys = engine.compile_many(CHUNKS)
    prompts = [[*keys, _ids(6, 70 + n)] for n in range(4)]
    policy = "query_aware:0.3"
    want = [engine.generate(prompt, SHORT, policy=policy).token_ids for prompt in prompts]
    read: list[int] = []
    dense = engine.backend._dense  # type: ignore[attr-defined]

    def counted(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        read.append(k.shape[2])
        return dense(q, k, *arguments)

    monkeypatch.setattr(engine.backend, "_dense", counted)
    with Gate(engine):
        streams = [engine.stream(prompt, SHORT, policy=policy) for prompt in prompts]
    assert [tuple(e.token_id for e in stream) for stream in streams] == want
    # The longest chunk tells, no private KV is as long. Four first passes read it whole, and seven passes of next
    # tokens, which would be 28 if each request read it by itself.
    assert 0 < read.count(max(map(len, CHUNKS))) <= engine.spec.num_layers * (4 + 4 + 7)


@pytest.mark.backends
def test_the_best_of_several_is_the_likeliest(engine: Engine) -> None:
    key = engine.compile(CHUNKS[0])
    prompt = [key, QUESTION]
    done = best_of(engine, prompt, SamplingParams(6, temperature=1.5, seed=3, ignore_eos=True), 5, policy="naive")
    likelihood = []
    for answer in done:
        scores = torch.log_softmax(engine.score(prompt, answer.token_ids, policy="naive").double(), -1)
        likelihood.append(float(scores[range(6), list(answer.token_ids)].mean()))
    assert likelihood == sorted(likelihood, reverse=True)
    assert len({answer.token_ids for answer in done}) == 5


def test_a_broken_loop_ends_its_requests_and_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.stream([QUESTION], FOREVER)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine._serving.scheduler, "background", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    engine.drain()
    assert private_pages(engine) == 0
    assert len(engine.generate([QUESTION], SHORT).token_ids) == 8
