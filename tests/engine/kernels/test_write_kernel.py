"""Keys and values on their way to pages, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from epic_engine.attention.kernels.tables import Rotation, Tables
from epic_engine.attention.kernels.write import write_kv

from .problems import ORDERS, PLACES, ROTARIES, factors_of, order_of
from .reference import rotated

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SLOTS, MEMORIES = 48, 2


@dataclass(frozen=True)
class Case:
    """``rows``: the place a key is rotated to, None for a row that is not in use."""

    rows: tuple[int | None, ...]
    dim: int = 16
    kv_heads: int = 2
    layer: int = 0
    dtype: torch.dtype = torch.float32
    order: str = "half"
    rotary: str = "full"
    seed: int = 0


def tables_of(kvs: list[Tensor], targets: list[list[int]], device: torch.device) -> Tables:
    names = ("masks", "pages", "segments", "readers", "items", "counts", "row_partials")
    rows = len(targets)
    sizes = {
        **dict.fromkeys(names, 0),
        "memories": len(kvs),
        "targets": rows,
        "positions": rows,
        "row_starts": rows + 1,
    }
    tables = Tables(sizes, device)
    for index, kv in enumerate(kvs):
        tables.host["memories"][index, :4] = [kv.data_ptr(), *(kv.stride(i) * kv.element_size() for i in range(3))]
    if targets:
        tables.host["targets"][:] = targets
    tables.upload()
    return tables


def check(case: Case, device: torch.device) -> None:
    random = torch.Generator().manual_seed(case.seed)
    count = len(case.rows)
    shape = (case.layer + 2, 2, case.kv_heads, SLOTS, case.dim)
    before = [torch.randn(shape, generator=random).to(case.dtype) for _ in range(MEMORIES)]
    # As a model gives them, with another row behind those of the pass: the heads of a row lie next to each other.
    k, v = (
        torch.randn((count + 1, case.kv_heads, case.dim), generator=random).to(case.dtype).transpose(0, 1)
        for _ in range(2)
    )
    slots = torch.randperm(SLOTS * MEMORIES, generator=random).tolist()
    targets, want = [], [kv.clone() for kv in before]
    order, factors = order_of(case.dim, case.order), factors_of(case.dim, case.rotary)
    for row, place in enumerate(case.rows):
        memory, slot = divmod(slots[row], SLOTS)
        targets.append([-1 if place is None else memory, slot, place or 0, 0])
        if place is not None:
            want[memory][case.layer, 0, :, slot] = rotated(k[:, row], order, factors, place).to(case.dtype)
            want[memory][case.layer, 1, :, slot] = v[:, row]
    kvs = [kv.to(device) for kv in before]
    rotation = Rotation(order.to(device), None if factors is None else factors.to(device))
    write_kv(k.to(device), v.to(device), tables_of(kvs, targets, device), case.layer, rotation)
    for kv, expected, old in zip(kvs, want, before, strict=True):
        got = kv.cpu()
        assert torch.equal(got[:, 1], expected[:, 1])
        untouched = (expected[:, 0] == old[:, 0]).all(-1)
        assert torch.equal(got[:, 0][untouched], old[:, 0][untouched])
        error = (got[:, 0].double() - expected[:, 0].double()).abs()
        assert (error <= DTYPES[case.dtype] * expected[:, 0].double().abs().clamp_min(1)).all()
        if case.rotary == "none":
            assert torch.equal(got, expected)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        tuple(draw(st.lists(st.none() | st.integers(0, PLACES - 1), min_size=1, max_size=40))),
        draw(st.sampled_from((16, 32, 64, 80, 96, 128, 256))),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(sorted(DTYPES, key=str))),
        draw(st.sampled_from(ORDERS)),
        draw(st.sampled_from(ROTARIES)),
        draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
@example(Case((PLACES - 1,)))
@example(Case((None,)))
@example(Case((None, 3, None), rotary="none"))
@example(Case(tuple(range(16)), dim=80, kv_heads=1))
@example(Case((*range(16), None, *range(4000, 4015)), dim=256, dtype=torch.bfloat16, order="arbitrary"))
def test_any_rows(device: torch.device, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_rotation(order: str, rotary: str, dtype: torch.dtype, device: torch.device) -> None:
    check(Case((7, None, PLACES - 1, 0), 96, dtype=dtype, order=order, rotary=rotary, layer=1), device)


@pytest.fixture
def arguments(device: torch.device) -> Iterator[dict[str, Any]]:
    kv = torch.zeros(1, 2, 2, 8, 32, device=device)
    k = torch.zeros(2, 3, 32, device=device)
    factors = factors_of(32, "full")
    assert factors is not None
    yield {
        "k": k,
        "v": k.clone(),
        "tables": tables_of([kv], [[0, i, i, 0] for i in range(3)], device),
        "layer": 0,
        "rotation": Rotation(order_of(32, "half").to(device), factors.to(device)),
    }
    del kv  # the tables have no more than its address


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("must be of one shape", "v", lambda v: v[:, :2]),
        ("next to each other", "k", lambda k: k.mT.contiguous().mT),
        ("next to each other", "v", lambda v: v.mT.contiguous().mT),
        ("does not belong to this head size", "rotation", lambda r: replace(r, order=r.order[:16])),
        ("does not belong to this head size", "rotation", lambda r: replace(r, factors=r.factors[:, :8])),
    ],
)
def test_what_does_not_fit_is_refused(match: str, name: str, change: Any, arguments: dict[str, Any]) -> None:
    write_kv(**arguments)
    with pytest.raises(ValueError, match=match):
        write_kv(**{**arguments, name: change(arguments[name])})


def test_too_few_rows_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="3 rows are to be written, 2 are given"):
        write_kv(**{**arguments, "k": arguments["k"][:, :2], "v": arguments["v"][:, :2]})


def test_no_rows_is_no_work(arguments: dict[str, Any], device: torch.device) -> None:
    write_kv(**{**arguments, "tables": tables_of([], [], device)})
