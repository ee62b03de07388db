"""Ragged sequences in passes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["steps"]


def steps(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Forward passes of at most ``most`` rows: pairs of sequence and rows, every sequence at most once a pass."""
    group: list[tuple[int, int]] = []
    room = most
    for index, length in enumerate(lengths):
        while length:
            count = min(length, room)
            group.append((index, count))
            length, room = length - count, room - count
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group
