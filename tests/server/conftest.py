"""Gateways that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Running, running


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    """A fresh gateway that asks nobody for a key."""
    with running(tmp_path) as here:
        yield here


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One gateway for the tests of a file that do not mind each other."""
    with running(tmp_path_factory.mktemp("gateway")) as here:
        yield here


@pytest.fixture
def two_keys(tmp_path: Path) -> Iterator[Running]:
    """A gateway with the keys ``ann`` and ``bob``, each with a namespace of its own."""
    with running(tmp_path, keys={"ann": {"namespace": "anns"}, "bob": {"namespace": "bobs"}}) as here:
        yield here
