"""Clients that leave in every way there is, and what a gateway must not keep of them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.server.sockets import chat_body, post

__all__ = ["Held", "abort", "held", "open_files"]

_PATHS = ("/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/chunks")

_POOL = re.compile(r"_\d+$|^AnyIO")


@dataclass(frozen=True)
class Held:
    """What a process has and should give back.

    Attributes
    ----------
    resident
        Bytes of memory.
    threads
        Names of those outside of pools, which grow to their size.
    files, tasks
        How many; asyncio's tasks that have not ended.
    """

    resident: int
    threads: tuple[str, ...]
    files: int
    tasks: int


def held() -> Held:
    """What this process holds now. Linux only."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = [thread.name for thread in threading.enumerate() if not _POOL.search(thread.name)]
    tasks = [one for one in gc.get_objects() if type(one) is asyncio.Task and not one.done()]
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), tuple(sorted(threads)), open_files(), len(tasks))


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def abort(url: str, count: int, *, at_once: int = 8, seed: int = 0) -> None:
    """Begin requests and leave them: before they are whole, before the first token, in the middle, without reading.

    Parameters
    ----------
    url
        Of the gateway.
    count
        How many.
    at_once
        At most so many of them are there at a time.
    seed
        Of what each does.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    random_ = random.Random(seed)
    places = asyncio.Semaphore(at_once)

    async def one(number: int, pause: float, share: float) -> None:
        async with places:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                content = _content(number)
                whole = post(_PATHS[number % len(_PATHS)], length=len(content)) + content
                if number % 5 == 0:  # leaves while it sends
                    writer.write(whole[: int(share * len(whole))])
                    await writer.drain()
                else:
                    writer.write(whole)
                    await writer.drain()
                    if number % 5 in (1, 2):  # leaves in the middle of the answer
                        await reader.read(1 + int(share * 4000))
                    elif number % 5 == 3:  # does not read, and leaves after a while
                        writer.transport.pause_reading()  # type: ignore[attr-defined]
                    await asyncio.sleep(pause)
            finally:
                if number % 2:
                    writer.transport.abort()
                else:
                    writer.close()

    await asyncio.gather(*(one(n, random_.uniform(0, 0.05), random_.random()) for n in range(count)))


def _content(number: int) -> bytes:
    path = _PATHS[number % len(_PATHS)]
    if path == "/v1/chunks":
        texts = [{"text": f"Boat {number} of {n} comes in at noon. " * 20} for n in range(20)]
        return json.dumps({"chunks": texts, "stream": bool(number % 3)}).encode()
    body = chat_body(max_tokens=1500, stream=number % 7 != 0, n=1 + number % 2)
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    return json.dumps(body).encode()
