"""No test leaves an engine open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epic_rag import engines


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    yield
    left = list(engines._engines)
    engines.close_all()
    assert not left
