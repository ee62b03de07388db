"""Responses of server-sent events that end when their reader is gone or stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epic_rag.server.errors import ApiError, translated
from epic_rag.server.limits import SlowReaderError

__all__ = ["EventStream", "first_of", "while_connected"]

Result = TypeVar("Result")


class EventStream(Response):
    """Objects as server-sent events, ``[DONE]`` at the end.

    The first object is awaited before anything is sent, so that what goes wrong until then is an ordinary error
    response. Later errors come as an event of their own. When the client goes away or stops reading, the objects'
    generator is closed.

    Parameters
    ----------
    items
        What is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, items: AsyncGenerator[Mapping[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        writing = asyncio.create_task(self._write(send))
        listening = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait([writing, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, listening):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await writing

    async def _write(self, send: Send) -> None:
        async with aclosing(self._items) as items:
            await self._send_all(items, send)

    async def _send_all(self, items: AsyncIterator[Mapping[str, Any]], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for item in items:
                await self._event(send, json.dumps(item, ensure_ascii=False, separators=(",", ":")))
            await self._event(send, "[DONE]")
        except (ConnectionError, SlowReaderError):
            raise
        except Exception as error:  # the status was sent, so the error must be an event
            await self._event(send, json.dumps(translated(error).body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, text: str) -> None:
        body = f"data: {text}\n\n".encode("utf-8", "replace")
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(items: AsyncGenerator[Result]) -> AsyncGenerator[Result]:
    """The same items, once the first of them is there: what keeps it from coming is raised here.

    Raises
    ------
    Exception
        Whatever the generator raises first.
    """
    try:
        first = await anext(items)
    except StopAsyncIteration:
        first = None

    async def rest() -> AsyncGenerator[Result]:
        async with aclosing(items):
            if first is not None:
                yield first
            async for item in items:
                yield item

    return rest()


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await something for as long as the client is there; it is cancelled when the client goes away.

    Parameters
    ----------
    request
        Whose body was read.
    work
        What is awaited.

    Raises
    ------
    ApiError
        If the client went away; nobody reads it.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client went away.", code="cancelled")
    finally:
        listening.cancel()
        working.cancel()
        await asyncio.wait([working])
