"""Residencies that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from epic_engine.memory.pages import PagePool
from epic_engine.memory.residency import Residency


@pytest.fixture
def opened() -> Iterator[Callable[..., Residency]]:
    made: list[Residency] = []

    def open_one(pool: PagePool, store: Any, **options: Any) -> Residency:
        made.append(Residency(pool, store, **options))
        return made[-1]

    yield open_one
    for residency in made:
        residency.close()
