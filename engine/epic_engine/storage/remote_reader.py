"""Chunks read from a published store over a network that may be slow, broken or gone."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from epic_engine.chunks import ChunkKey

from .objects import Objects, within
from .payload import Encoded, encoded_nbytes
from .segments import DTYPES, as_bytes, checksum_of, read_header
from .snapshots import MOST_PAYLOAD, Snapshot
from .store import ChunkInfo

__all__ = ["Line", "UnreachableError", "fetch_chunk"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0


class UnreachableError(Exception):
    """The remote store does not answer; says nothing about what it holds."""


class Line:
    """The way to a remote store: every call is over after some seconds, and a broken line is left alone for a while.

    Parameters
    ----------
    objects
        The store's.
    timeout
        Seconds after which an answer is not awaited any more.
    """

    def __init__(self, objects: Objects, timeout: float) -> None:
        self._objects = objects
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0

    @property
    def up(self) -> bool:
        """Whether the last call was answered."""
        return not self._failures

    @property
    def due(self) -> bool:
        """Whether it is time to call again."""
        return time.monotonic() >= self._retry_at

    def read(self, name: str, start: int, end: int) -> bytes:
        """As :meth:`Objects.read`; raises as :meth:`_call`."""
        return self._call(lambda: self._objects.read(name, start, end))

    def read_small(self, name: str, most: int) -> bytes:
        """As :meth:`Objects.read_small`; raises as :meth:`_call`."""
        return self._call(lambda: self._objects.read_small(name, most))

    def _call(self, call: Callable[[], Result]) -> Result:
        """The result of a call.

        Raises
        ------
        FileNotFoundError, ValueError
            The call's.
        UnreachableError
            If it failed in any other way, or took too long.
        """
        try:
            result = within(self._timeout, call)
        except (FileNotFoundError, ValueError):  # an answer, too
            self._answered()
            raise
        except Exception as error:  # every file system has errors of its own
            self._failed(error)
            raise UnreachableError(f"{self._objects.url} does not answer: {error}") from error
        self._answered()
        return result

    def _answered(self) -> None:
        with self._lock:
            failures, self._failures = self._failures, 0
        if failures:
            logger.info("the remote store %s answers again", self._objects.url)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            first = self._failures == 1
            self._retry_at = time.monotonic() + min(_FIRST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        if first:
            logger.warning(
                "the remote store %s does not answer (%s: %s): what is not here is compiled until it does",
                self._objects.url,
                type(error).__name__,
                error,
            )


def fetch_chunk(
    read: Callable[[str, int, int], bytes], snapshot: Snapshot, key: ChunkKey
) -> tuple[ChunkInfo, Encoded] | None:
    """A chunk as it is stored, compared with the catalogue and its checksums; None if the catalogue does not have it.

    Parameters
    ----------
    read
        Reads bytes of an object.
    snapshot
        Says where the chunk lies.
    key
        Of the chunk.

    Raises
    ------
    ValueError
        If the catalogue contradicts itself, or the bytes are not what it says.
    FileNotFoundError, UnreachableError
        As ``read``.
    """
    info, place = snapshot.info(key), snapshot.place(key)
    if info is None or place is None:
        return None
    if not place.whole:
        raise ValueError("its row in the catalogue is damaged")
    dtype = DTYPES[place.dtype]
    # Before anything is fetched: neither memory nor network for sizes that no such chunk has.
    expected = encoded_nbytes(place.shape, dtype, place.encoding)
    # What does not compress grows by a few bytes a block.
    most = expected + expected // 128 + 1024 if place.encoding.endswith("+zstd") else expected
    fits = (
        place.encoding == info.encoding
        and expected <= MOST_PAYLOAD
        and (place.stored <= most if most != expected else place.stored == expected)
        and place.shape[3] == len(info.token_ids)
        and info.nbytes == math.prod(place.shape) * dtype.itemsize
    )
    if not fits:
        raise ValueError("its entry contradicts itself")
    data = read(f"segments/{place.name}.seg", place.start, place.start + place.span)
    if len(data) != place.span:
        raise ValueError(f"its object is too short: {len(data):,} of {place.span:,} bytes")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    record = read_header(raw, 0)
    if record is None or (record.info, record.shape, record.dtype, record.checksum, record.offset, record.stored) != (
        info,
        place.shape,
        place.dtype,
        place.checksum,
        place.offset - place.start,
        place.stored,
    ):
        raise ValueError("its header differs from the catalogue")
    payload = raw[record.offset : record.offset + record.stored]
    if checksum_of([as_bytes(payload)]) != place.checksum:
        raise ValueError("its bytes differ from what was published")
    return info, Encoded((payload,), place.encoding, place.shape, dtype)
