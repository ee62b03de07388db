"""What a request must not exceed: size, pace, rate, and how many there are at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Send

from epic_rag.server.errors import ApiError
from epic_rag.server.keys import ApiKey
from epic_rag.server.settings import ServerSettings

__all__ = ["Admission", "RateLimiter", "SlowReaderError", "limited_body", "limited_send", "too_long"]

# Whoever waited for as long as they were told must not be sent away because of a rounding.
_ROUNDING_S = 1e-6


@dataclass
class _Bucket:
    """So many units a minute, refilled evenly; one that is empty may be overdrawn, and is waited for then."""

    per_minute: float
    level: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.at = self.per_minute, time.monotonic()

    def refill(self) -> None:
        now = time.monotonic()
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now

    def wait(self, units: float) -> float:
        """Seconds until there are so many units."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)


class RateLimiter:
    """Requests and tokens a minute of each key. Any number of threads may use one.

    Tokens are counted when an answer has ended: a key that has used too many waits before its next request.

    Parameters
    ----------
    settings
        Limits of keys that have none.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._lock = threading.Lock()

    def _bucket(self, key: ApiKey, what: str) -> _Bucket | None:
        limit = getattr(key, f"{what}_per_minute") or getattr(self._settings, f"{what}_per_minute")
        if limit is None:
            return None
        bucket = self._buckets.setdefault((key.name, what), _Bucket(limit))
        bucket.refill()
        return bucket

    def admit(self, key: ApiKey) -> None:
        """Count a request.

        Raises
        ------
        ApiError
            429 if the key must wait; its ``Retry-After`` says for how long.
        """
        with self._lock:
            requests, tokens = self._bucket(key, "requests"), self._bucket(key, "tokens")
            for bucket, units, what in ((requests, 1.0, "requests"), (tokens, 0.0, "tokens")):
                if bucket is not None and (seconds := bucket.wait(units)) > _ROUNDING_S:
                    raise ApiError(
                        429,
                        f"this key may use {bucket.per_minute:g} {what} a minute: wait {seconds:.1f} seconds.",
                        code="rate_limit_exceeded",
                        headers={"Retry-After": str(math.ceil(seconds - _ROUNDING_S))},
                    )
            if requests is not None:
                requests.level -= 1

    def spend(self, key: ApiKey, tokens: int) -> None:
        """Count the tokens of a prompt and its answers."""
        with self._lock:
            bucket = self._bucket(key, "tokens")
            if bucket is not None:
                bucket.level -= tokens


class Admission:
    """How many requests are worked on; one event loop uses it.

    Parameters
    ----------
    most
        Further ones are refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.running = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in.

        Raises
        ------
        ApiError
            503 if there are too many, or the gateway is shutting down.
        """
        if self.draining:
            raise ApiError(503, "the gateway is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
        if self.running >= self._most:
            raise ApiError(
                503,
                f"the gateway is busy with {self.running} requests: try again.",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count it out."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more, and wait for those who are, but not longer than this."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()


# The rest of such a body is not read.
_CLOSE = {"Connection": "close"}


def limited_body(receive: Receive, settings: ServerSettings) -> Receive:
    """A request's messages; one that is too long or comes too slowly ends in 413 or 408.

    No pause may be longer than ``body_seconds``, and all of it may not take longer than an answer.
    """
    taken = 0
    ended = False
    end = time.monotonic() + settings.request_seconds

    async def limited() -> Message:
        nonlocal taken, ended
        if ended:  # what follows is the client's leaving, for which there is no hurry
            return await receive()
        try:
            async with asyncio.timeout(min(settings.body_seconds, end - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"the request's body did not go on for {settings.body_seconds:g} seconds, or took too long.",
                headers=_CLOSE,
            ) from None
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if taken > settings.max_body_bytes:
                raise too_long(settings)
        return message

    return limited


def too_long(settings: ServerSettings) -> HTTPException:
    """What is said to a body that is too long."""
    return HTTPException(
        413,
        f"the request's body is longer than {settings.max_body_bytes} bytes: send less at a time.",
        headers=_CLOSE,
    )


class SlowReaderError(Exception):
    """A client does not read its answer."""


def limited_send(send: Send, settings: ServerSettings) -> Send:
    """Sends messages to a client that must read on; raises SlowReaderError if it does not."""

    async def limited(message: Message) -> None:
        try:
            async with asyncio.timeout(settings.write_seconds):
                await send(message)
        except TimeoutError:
            raise SlowReaderError from None

    return limited
