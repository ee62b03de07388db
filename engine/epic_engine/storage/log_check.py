"""Whether a catalogue's write-ahead log has lost commits.

SQLite ends a log where a checksum fails, and says nothing: of a killed process that is the commit it was at. A bit that
flipped further ahead takes everything behind it along, deletions included. The difference is that whole commits follow.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

__all__ = ["lost_commits"]

# https://www.sqlite.org/fileformat.html#the_write_ahead_log
_HEADER, _FRAME = 32, 24
_MAGIC = 0x377F0682  # with the lowest bit set, checksums are of big-endian numbers
_VERSION = 3007000
_READ_AT_ONCE = 4096


def lost_commits(log: Path) -> bool:
    """Whether commits that were made cannot be read, because something before them is damaged.

    The commit at which a log ends may have been interrupted; that is no damage. What is being written meanwhile is
    none, either.

    Parameters
    ----------
    log
        The file; it need not exist.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    try:
        with open(log, "rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER:
                return False
            if not _is_header(header):  # which is durable before the first frame is written
                return len(file.read(_FRAME)) == _FRAME
            size = _FRAME + int.from_bytes(header[8:12], "big")
            last, broken, commits = header[24:32], False, 0
            while len(frames := _frames(file, size)):
                current = (frames[:, 8:16] == np.frombuffer(header[16:24], np.uint8)).all(1)
                ends = frames[:, 4:8].any(1)
                first = 0
                if not broken:
                    fits = current & _fit(frames, last, header[3] & 1)
                    broken, first = not fits.all(), int(np.argmin(fits))
                    current[first] = True  # perhaps its salts are what is damaged
                    last = frames[-1, 16:24].tobytes()
                if broken:
                    commits += int((current & ends)[first:].sum())
            # The first of them may be the one that was interrupted; the disk need not have written it in order.
            if commits < 2:
                return False
            file.seek(0)
            return file.read(_HEADER) == header  # otherwise the log was begun anew meanwhile
    except FileNotFoundError:
        return False


def _is_header(header: bytes) -> bool:
    magic, version, page = struct.unpack(">3I", header[:12])
    if magic | 1 != _MAGIC | 1 or version != _VERSION or page & (page - 1) or not 512 <= page <= 65536:
        return False
    sums = _sums(np.frombuffer(header[:24], np.uint8)[None], np.zeros((1, 2), np.uint32), magic & 1)
    return sums.astype(">u4").tobytes() == header[24:]


def _frames(file: BinaryIO, size: int) -> np.ndarray:
    raw = file.read(_READ_AT_ONCE * size)
    return np.frombuffer(raw[: len(raw) // size * size], np.uint8).reshape(-1, size)


def _fit(frames: np.ndarray, last: bytes, big: int) -> np.ndarray:
    """Which frames have the checksum that follows from the one before."""
    given = np.frombuffer(frames[:, 16:24].tobytes(), ">u4").reshape(-1, 2).astype(np.uint32)
    before = np.concatenate([np.frombuffer(last, ">u4").astype(np.uint32)[None], given[:-1]])
    return (_sums(np.concatenate([frames[:, :8], frames[:, _FRAME:]], 1), before, big) == given).all(1)


def _sums(raw: np.ndarray, before: np.ndarray, big: int) -> np.ndarray:
    """SQLite's checksums of rows of bytes, each carried on from one before: two 32-bit numbers a row."""
    words = np.frombuffer(raw.tobytes(), ">u4" if big else "<u4").reshape(len(raw), -1).astype(np.uint32)
    numbers = np.concatenate([before, words], 1)
    return numbers @ _weights(words.shape[1])


@lru_cache(maxsize=8)
def _weights(words: int) -> np.ndarray:
    """How often the sums before and each word are in the sums after all words: (2 + words, 2), modulo 2**32.

    With every two words ``x, y`` the sums become ``s += x + t`` and then ``t += y + s``, which is linear.
    """
    s, t = np.array([1, 0], np.uint32), np.array([0, 1], np.uint32)
    rows = []
    for _ in range(words // 2):
        # Backwards: s and t are how often today's sums are in the last ones.
        rows.append(t)
        rows.append(s + t)
        s, t = s + t, s + t + t
    return np.stack([s, t, *rows[::-1]])
