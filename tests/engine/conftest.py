"""Engines on another attention backend, and residencies that are closed when a test ends."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from epic_engine import engine as engine_module
from epic_engine.attention.base import AttentionBackend
from epic_engine.attention.select import make_backend
from epic_engine.memory.pages import PagePool
from epic_engine.memory.residency import Residency
from epic_engine.model.decoder import Decoder
from epic_engine.scheduling import serving
from epic_engine.scheduling.decode_graphs import DecodeGraphs

if importlib.util.find_spec("triton"):
    from tests.engine.interpreter import quicken

    quicken()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``backends`` run on torch's kernels, and on Triton's in its interpreter or on a GPU."""
    if metafunc.definition.get_closest_marker("backends") and "attention" in metafunc.fixturenames:
        names = ["torch", "triton"] if importlib.util.find_spec("triton") else ["torch"]
        metafunc.parametrize("attention", names, indirect=True)


@pytest.fixture(autouse=True)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of engines that do not choose one."""
    name: str = getattr(request, "param", os.environ.get("EPIC_TEST_ATTENTION", "auto"))
    if name == "triton":
        use_triton(monkeypatch)
    return name


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """Engines compute attention by Triton, and decode by steps that could be captured."""

    def backend(_: str, decoder: Decoder, page_size: int) -> AttentionBackend:
        return make_backend("triton", decoder, page_size)

    def graphs(decoder: Decoder, found: AttentionBackend, most_rows: int) -> DecodeGraphs:
        return DecodeGraphs(decoder, found, min(most_rows, 4), lambda forward: forward)

    from epic_engine.attention import static_step
    from epic_engine.attention.kernels import configs

    if not torch.cuda.is_available():  # the interpreter takes its time for every program, used or not, and every tile
        patch.setattr(static_step, "_ITEMS", (16, 8))
        patch.setattr(configs, "MERGE_HEADS", 16)
        for number, rows in enumerate((16, 128)):
            patch.setitem(configs._SHAPES, (64, 4, number), (rows, 128, 4, 2))
    patch.setattr(engine_module, "make_backend", backend)
    patch.setattr(serving, "decode_graphs", graphs)


@pytest.fixture
def opened() -> Iterator[Callable[..., Residency]]:
    made: list[Residency] = []

    def open_one(pool: PagePool, store: Any, **options: Any) -> Residency:
        made.append(Residency(pool, store, **options))
        return made[-1]

    yield open_one
    for residency in made:
        residency.close()
