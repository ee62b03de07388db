"""Runs a property: few examples, always the same ones, or many from a seed."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .bounds import bounded

__all__ = ["Check", "run"]

Check = Callable[[st.DataObject], None]


def run(check: Check, examples: int, seed: int | None = None) -> None:
    """Try a property on examples.

    Parameters
    ----------
    check
        The property.
    examples
        How many.
    seed
        Of the examples; None takes the same ones every time.
    """

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        with bounded():
            check(data)

    (tried if seed is None else hypothesis.seed(seed)(tried))()
