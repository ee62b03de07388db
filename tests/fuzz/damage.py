"""Damaged bytes: what a bad disk, a torn write and an attacker leave."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st

__all__ = ["any_json", "mutated", "numbers"]

_EXTREMES = (0, 1, 63, 64, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def numbers() -> st.SearchStrategy[int]:
    """Numbers at the edges of what fields can hold, and some between."""
    return st.sampled_from(_EXTREMES) | st.integers(0, 300)


def any_json() -> st.SearchStrategy[Any]:
    """Any JSON value, such as nobody expects."""
    leaves = (
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6)
    )  # fmt: skip
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | _objects(inner), max_leaves=6)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.text(max_size=4), inner, max_size=3)


def mutated(data: st.DataObject, whole: bytes, *, before: int | None = None) -> bytes:
    """A file with one to four places changed, removed, inserted, overwritten by a number, or cut off.

    Parameters
    ----------
    data
        Draws.
    whole
        The file.
    before
        Mostly damage what is before this place, such as a header.
    """
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        most = max(len(raw) - 1, 0)
        near = st.integers(0, min(most, before)) | st.integers(0, most) if before else st.integers(0, most)
        at = data.draw(near)
        match data.draw(st.sampled_from(("flip", "remove", "insert", "number", "cut"))):
            case "flip" if raw:
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "remove":
                del raw[at : at + data.draw(st.integers(1, 100))]
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=70))
            case "number":
                packed = struct.pack("<Q", data.draw(numbers()))[: data.draw(st.sampled_from((1, 2, 4, 8)))]
                raw[at : at + len(packed)] = packed
            case "cut":
                del raw[at:]
    return bytes(raw)
