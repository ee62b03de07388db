"""Hooks for :func:`epic_engine.storage.faults.install`."""

from __future__ import annotations

from collections.abc import Callable


def at(point: str, number: int, act: Callable[[], None]) -> Callable[[str], None]:
    """A hook that acts when a point is passed for the ``number``-th time, counted from 0."""
    seen = [0]

    def hook(name: str) -> None:
        if name == point:
            seen[0] += 1
            if seen[0] == number + 1:
                act()

    return hook


def throw(error: BaseException) -> None:
    """Raise an error, where an expression is wanted."""
    raise error
