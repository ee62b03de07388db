"""Synchronous work in an event loop: it runs in a thread, and the loop never waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

__all__ = ["ClosableStream", "Opening", "drain", "iterate", "to_the_end"]

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ClosableStream(Protocol[T_co]):
    """An iterator whose ``close()`` cancels it from any thread, and may be called twice."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def close(self) -> None:
        """Cancel."""


S = TypeVar("S", bound=ClosableStream[Any])


class Opening(Generic[S]):
    """Makes a stream for :func:`iterate`, and keeps it: for what it knows when its items are through.

    Parameters
    ----------
    start
        As in :func:`iterate`.

    Attributes
    ----------
    stream
        The stream; there from the first item on, and at the end.
    """

    stream: S

    def __init__(self, start: Callable[[], S]) -> None:
        self._start = start

    def __call__(self) -> S:
        """Make the stream."""
        self.stream = self._start()
        return self.stream


async def iterate(start: Callable[[], ClosableStream[T]]) -> AsyncGenerator[T]:
    """Iterate over a stream that works in a thread of its own.

    Closing the generator early (``aclose()``, a cancelled task) closes the stream and returns when its thread has
    ended. Items that nobody has asked for yet are kept, however many.

    Parameters
    ----------
    start
        Makes the stream; called in the thread, so that it may take its time too.

    Yields
    ------
    T
        The stream's items.

    Raises
    ------
    Exception
        Whatever ``start`` or the stream raises.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    ended: asyncio.Future[BaseException | None] = loop.create_future()
    cancelled = threading.Event()
    opened: list[ClosableStream[T]] = []

    def end(error: BaseException | None) -> None:
        ended.set_result(error)
        items.put_nowait(None)

    def work() -> None:
        error: BaseException | None = None
        try:
            stream = start()
            opened.append(stream)
            try:
                # Whoever cancels sets the flag before looking into `opened`: one of the two sees the other.
                while not cancelled.is_set():
                    loop.call_soon_threadsafe(items.put_nowait, (next(stream),))
            except StopIteration:
                pass
            finally:
                stream.close()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop was closed, and nobody waits
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="epic-rag stream").start()
    try:
        while (item := await items.get()) is not None:
            yield item[0]
    finally:
        cancelled.set()
        for stream in opened:
            stream.close()
        await _until(ended)
    error = ended.result()
    if error is not None:
        raise error


async def _until(ended: asyncio.Future[Any]) -> None:
    """Wait for the end, even if the waiting task is cancelled meanwhile; the cancellation comes after it."""
    interrupted: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


async def drain(start: Callable[[], S]) -> S:
    """Run a stream to its end in a thread; a cancelled task closes it.

    Parameters
    ----------
    start
        As in :func:`iterate`.

    Returns
    -------
    ClosableStream
        The stream, at its end.
    """
    opening = Opening(start)
    async with aclosing(iterate(opening)) as items:
        async for _ in items:
            pass
    return opening.stream


async def to_the_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread; a cancelled task waits for its end, so that what follows does not meet it half done.

    Parameters
    ----------
    function, *args, **kwargs
        What to call.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        await _until(work)
    except asyncio.CancelledError:
        work.exception()  # looked at, or the loop complains that nobody did
        raise
    return work.result()
