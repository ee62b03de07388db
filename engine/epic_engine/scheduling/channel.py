"""From the loop's thread to whoever reads: a thread or a coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

__all__ = ["Channel"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Channel(Generic[Item, Result]):
    """Items in order, then one result or error. One writer; readers may be threads and event loops."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._sleepers: list[Callable[[], object]] = []
        self._ended = False
        self.result: Result | None = None
        self._error: BaseException | None = None

    def put(self, item: Item) -> None:
        """Hand an item over."""
        with self._changed:
            self._items.append(item)
            self._wake()

    def end(self, result: Result) -> None:
        """No more items; the first end counts."""
        self._end(result, None)

    def fail(self, error: BaseException, result: Result) -> None:
        """No more items: readers get this error once they have read what was there."""
        self._end(result, error)

    def _end(self, result: Result, error: BaseException | None) -> None:
        with self._changed:
            if not self._ended:
                self._ended, self.result, self._error = True, result, error
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for wake in sleepers:
            wake()

    def clear(self) -> None:
        """Drop what nobody has read."""
        with self._changed:
            self._items.clear()

    def _take(self) -> Item | None:
        if self._items:
            return self._items.popleft()
        if self._ended and self._error is not None:
            raise self._error
        return None

    def get(self) -> Item | None:
        """The next item, or None at the end; waits in this thread.

        Raises
        ------
        BaseException
            Whatever :meth:`fail` was given.
        """
        with self._changed:
            while not (self._items or self._ended):
                self._changed.wait()
            return self._take()

    async def aget(self) -> Item | None:
        """As :meth:`get`; the event loop goes on meanwhile."""
        while True:
            with self._changed:
                if self._items or self._ended:
                    return self._take()
                arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._sleepers.append(partial(_wake, arrived))
            await arrived

    def wait_ended(self) -> None:
        """Return once there will be no more items."""
        with self._changed:
            while not self._ended:
                self._changed.wait()


def _wake(future: asyncio.Future[None]) -> None:
    """Set a future of another thread's event loop."""
    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
