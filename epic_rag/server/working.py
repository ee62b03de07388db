"""Work that takes its time, with news of how it goes; it ends soon after its client is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any

__all__ = ["Report", "last_of", "reported"]

Report = Callable[[Mapping[str, Any]], None]
"""Takes a piece of news; raises where nobody waits for the work any more."""


class _UnwantedError(Exception):
    """Ends work whose client is gone."""


async def reported(
    executor: Executor, work: Callable[[Report], Mapping[str, Any]]
) -> AsyncGenerator[Mapping[str, Any]]:
    """News of some work as they come, and its result at the end.

    Closed early, the work is told at its next piece of news, and waited for.

    Parameters
    ----------
    executor
        Runs the work; its own, for work may take minutes.
    work
        Is given what takes its news; may block.

    Raises
    ------
    Exception
        Whatever the work raises.
    """
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
    unwanted = threading.Event()

    def report(piece: Mapping[str, Any]) -> None:
        if unwanted.is_set():
            raise _UnwantedError
        loop.call_soon_threadsafe(news.put_nowait, piece)

    submitted = executor.submit(work, report)
    working = asyncio.wrap_future(submitted)
    working.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (piece := await news.get()) is not None:
            yield piece
        yield await asyncio.shield(working)
    finally:
        unwanted.set()
        if not submitted.cancel():
            await asyncio.wait([working])
            working.exception()  # nobody else reads it


async def last_of(items: AsyncGenerator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last of some objects, once all of them came; there is at least one."""
    last: Mapping[str, Any] = {}
    async with aclosing(items):
        async for item in items:
            last = item
    return last
