"""A generation as its reader sees it."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from .errors import ConfigError
from .linking.linked import LinkedPrompt
from .request import Completion, StreamEvent
from .scheduling.generation import Generation

__all__ = ["Stream"]


class Stream:
    """A running generation; made by :meth:`~epic_engine.Engine.stream`.

    Iterate over it, in a thread or with ``async for``, for :class:`~epic_engine.request.StreamEvent` objects. The
    engine does not wait for its reader. :meth:`close`, from any thread, and dropping it cancel it; either way its KV
    is freed.
    """

    def __init__(self, generation: Generation, notice: Callable[[], None]) -> None:
        self._generation = generation
        self._channel = generation.channel
        self._notice = notice
        # Without self: a stream that nobody holds must not live on in its own finalizer.
        self._dropped = weakref.finalize(self, _cancel, generation, notice)
        self._dropped.atexit = False

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        event = self._channel.get()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._channel.aget()
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """Cancel: no more tokens are computed and the KV is freed; what was not read is gone."""
        _cancel(self._generation, self._notice)
        self._channel.clear()
        self._channel.wait_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """As :meth:`close`; the event loop goes on meanwhile."""
        _cancel(self._generation, self._notice)
        while await self._channel.aget() is not None:
            pass

    @property
    def completion(self) -> Completion:
        """The whole answer; what there is of it if the stream was cancelled.

        Raises
        ------
        ConfigError
            If the stream has not ended.
        """
        if self._channel.result is None:
            raise ConfigError("the stream has not ended: iterate over it, or close it, before reading completion.")
        return self._channel.result

    @property
    def linked(self) -> LinkedPrompt:
        """The prompt with its answer, to be continued (see ``after`` of :meth:`~epic_engine.Engine.stream`).

        Close it when the conversation is over.

        Raises
        ------
        ConfigError
            If the stream has not ended, ended before its first token, or was not made with ``keep=True``.
        """
        _ = self.completion
        if self._generation.linked is None:
            raise ConfigError("nothing was kept of this stream: make it with keep=True, and let it reach a token.")
        return self._generation.linked


def _cancel(generation: Generation, notice: Callable[[], None]) -> None:
    generation.end("cancelled")
    notice()
