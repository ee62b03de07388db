"""Streams in an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import aclosing

import pytest
from epic_engine import Engine, SamplingParams

from epic_rag.aio import drain, iterate, to_the_end
from tests.rag.stack import model, tokenizer


class Counter:
    """Counts up to a limit; each number waits for a permit, if there are permits."""

    def __init__(self, limit: int, permits: threading.Semaphore | None = None) -> None:
        self.closed = threading.Event()
        self.threads: set[str] = set()
        self._permits = permits
        self._numbers = iter(range(limit))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.threads.add(threading.current_thread().name)
        if self._permits is not None:
            while not self._permits.acquire(timeout=0.01):
                if self.closed.is_set():
                    raise StopIteration
        return next(self._numbers)

    def close(self) -> None:
        self.closed.set()


async def test_items_come_in_order_from_another_thread() -> None:
    stream = Counter(5)
    assert [n async for n in iterate(lambda: stream)] == list(range(5))
    assert threading.current_thread().name not in stream.threads
    assert stream.closed.is_set()


async def test_the_loop_runs_while_the_stream_waits() -> None:
    permits = threading.Semaphore(0)
    items = iterate(lambda: Counter(3, permits))
    first = asyncio.ensure_future(anext(items))
    for _ in range(50):  # a blocked loop would never come this far
        await asyncio.sleep(0.001)
    assert not first.done()
    permits.release(3)
    assert [await first, await anext(items), await anext(items)] == [0, 1, 2]
    await items.aclose()


async def test_closing_early_closes_the_stream_and_ends_its_thread() -> None:
    stream = Counter(10**9)
    before = threading.active_count()
    async with aclosing(iterate(lambda: stream)) as items:
        async for n in items:
            if n == 3:
                break
    assert stream.closed.is_set()
    assert threading.active_count() <= before + 1  # its thread is past its last statement


async def test_a_cancelled_task_closes_the_stream() -> None:
    permits = threading.Semaphore(2)
    stream = Counter(10, permits)
    task = asyncio.ensure_future(drain(lambda: stream))
    while len(stream.threads) == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.closed.is_set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the generator itself is abandoned
def test_a_loop_that_is_closed_ends_the_thread() -> None:
    permits = threading.Semaphore(0)
    stream = Counter(10, permits)
    loop = asyncio.new_event_loop()
    items = iterate(lambda: stream)
    task = loop.create_task(anext(items))
    while not stream.threads:
        loop.run_until_complete(asyncio.sleep(0.001))
    workers = [t for t in threading.enumerate() if t.name in stream.threads]
    loop.close()
    permits.release(10)
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    assert stream.closed.is_set()
    del task, items
    gc.collect()


async def test_cancelling_before_the_stream_is_made_closes_it_later() -> None:
    go, stream = threading.Event(), Counter(10)

    def start() -> Counter:
        go.wait()
        return stream

    task = asyncio.ensure_future(drain(start))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # impatience does not leave a thread behind
    await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.closed.is_set()
    assert stream.threads == set()


@pytest.mark.parametrize("where", ["start", "next"])
async def test_errors_arrive(where: str) -> None:
    class Broken(Counter):
        def __next__(self) -> int:
            if next(self._numbers) == 2:
                raise ValueError("broken")
            return 7

    def start() -> Counter:
        if where == "start":
            raise ValueError("broken")
        return Broken(5)

    items = iterate(start)
    if where == "next":
        assert [await anext(items), await anext(items)] == [7, 7]
    with pytest.raises(ValueError, match="broken"):
        await anext(items)
    with pytest.raises(ValueError, match="broken"):
        await drain(start)


async def test_a_cancelled_task_waits_for_its_function() -> None:
    began, go, done = threading.Event(), threading.Event(), []

    def work(fails: bool) -> int:
        began.set()
        go.wait(10)
        done.append(fails)
        if fails:
            raise ValueError("broken")
        return 7

    for fails in (False, True):
        began.clear()
        go.clear()
        task = asyncio.create_task(to_the_end(work, fails))
        while not began.is_set():
            await asyncio.sleep(0.001)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done.pop() is fails
    assert await to_the_end(work, False) == 7
    with pytest.raises(ValueError, match="broken"):
        await to_the_end(work, True)


async def test_several_at_once_take_turns() -> None:
    permits = [threading.Semaphore(0) for _ in range(3)]
    streams = [iterate(lambda p=p: Counter(4, p)) for p in permits]
    order = []
    for _ in range(4):
        for index, stream in enumerate(streams):
            item = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            permits[index].release()
            order.append((index, await item))
    assert order == [(i, n) for n in range(4) for i in range(3)]
    for stream in streams:
        await stream.aclose()


async def test_an_engines_stream_is_cancelled_in_the_middle_and_the_same_to_its_end() -> None:
    prompt, endless = [[5, 6, 7, 8]], SamplingParams(max_tokens=1500, ignore_eos=True)
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine(model(), tokenizer=tokenizer(), selftest=False) as engine:
        want = engine.generate(prompt, short)
        both = await asyncio.gather(*(drain(lambda: engine.stream(prompt, short)) for _ in range(2)))
        assert [s.completion.token_ids for s in both] == [want.token_ids] * 2
        made = []
        async with aclosing(iterate(lambda: made.append(engine.stream(prompt, endless)) or made[0])) as items:
            async for _ in items:
                if len(made) == 1:
                    break
        assert made[0].completion.finish_reason == "cancelled"
        assert made[0].completion.stats.generated < 1500
