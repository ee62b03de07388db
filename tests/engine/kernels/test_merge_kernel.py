"""The merge of partial results against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from epic_engine.attention.kernels.merge import merge_partials
from epic_engine.attention.kernels.tables import Tables

from .reference import merged

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Weights = list[list[float]]


def tables_of(counts: list[int], device: torch.device, seed: int) -> tuple[Tables, list[list[int]]]:
    """Tables of rows with so many partial results, in any order, and which these are."""
    total = sum(counts)
    places = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    names = ("memories", "masks", "pages", "segments", "readers", "items", "counts", "targets")
    sizes = {**dict.fromkeys(names, 0), "positions": len(counts), "row_starts": len(counts) + 1, "row_partials": total}
    tables = Tables(sizes, device)
    tables.host["row_partials"][:total] = places
    found: list[list[int]] = []
    at = 0
    for row, count in enumerate(counts):
        found.append(places[at : at + count])
        at += count
        tables.host["row_starts"][row + 1] = at
    tables.upload()
    return tables, found


def check(
    rows: Weights, heads: int, dim: int, dtype: torch.dtype, sinks: list[float] | None, seed: int, device: torch.device
) -> None:
    random = torch.Generator().manual_seed(seed)
    tables, places = tables_of([len(weights) for weights in rows], device, seed)
    total = sum(map(len, rows))
    out = torch.randn((total + 2, heads, dim), generator=random)
    lse = torch.zeros(total + 2, heads)
    for weights, found in zip(rows, places, strict=True):
        for place, weight in zip(found, weights, strict=True):
            lse[place] = weight + torch.rand(heads, generator=random)
    sink = None if sinks is None else torch.tensor((sinks * heads)[:heads])
    result = torch.full((len(rows) + 1, heads, dim), math.nan, dtype=dtype, device=device)
    merge_partials(
        out.to(device), lse.to(device), tables, result, None if sink is None else sink.to(device=device, dtype=dtype)
    )
    got = result.cpu().double()
    assert got[-1].isnan().all()  # a row behind those of the pass
    for row, found in enumerate(places):
        for head in range(heads):
            want = merged(out[found, head], lse[found, head], None if sink is None else float(sink.to(dtype)[head]))
            assert (got[row, head] - want).abs().max() <= DTYPES[dtype] * max(1.0, float(want.abs().max()))


WEIGHT = st.just(-math.inf) | st.floats(-60, 60, width=32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(WEIGHT, max_size=9), min_size=1, max_size=5),
    heads=st.sampled_from((1, 3, 8)),
    dim=st.sampled_from((16, 64, 80, 96, 128, 256)),
    dtype=st.sampled_from(sorted(DTYPES, key=str)),
    sinks=st.none() | st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@example([[]], 1, 16, torch.float32, None, 0)
@example([[], [0.0]], 2, 16, torch.float32, [2.0], 0)
@example([[-math.inf], [-math.inf] * 5], 2, 80, torch.float32, None, 0)
@example([[-math.inf] * 3], 1, 64, torch.float32, [-5.0], 0)
@example([[-math.inf, 3.0, -math.inf], [3.0, -math.inf]], 1, 64, torch.float32, None, 0)
@example([[-1000.0, -1001.0], [1000.0, 1001.0, -1000.0]], 1, 64, torch.float32, None, 0)
@example([[0.5 * (i % 7) for i in range(200)]], 2, 128, torch.float32, [1.0], 0)
def test_any_partial_results(
    device: torch.device, rows: Weights, heads: int, dim: int, dtype: torch.dtype, sinks: list[float] | None, seed: int
) -> None:
    check(rows, heads, dim, dtype, sinks, seed, device)


def test_one_result_comes_back_as_it_is(device: torch.device) -> None:
    tables, _ = tables_of([1, 1], device, 0)
    out = torch.randn(2, 3, 64, device=device)
    result = torch.empty(2, 3, 64, device=device)
    merge_partials(out, torch.full((2, 3), 7.0, device=device), tables, result)
    assert torch.equal(result[tables.row_partials.argsort().cpu()], out)


def test_no_rows_is_no_work(device: torch.device) -> None:
    tables, _ = tables_of([], device, 0)
    result = torch.full((1, 2, 16), math.nan, device=device)
    merge_partials(torch.zeros(1, 2, 16, device=device), torch.zeros(1, 2, device=device), tables, result)
    assert result.isnan().all()


def _arguments(device: torch.device) -> dict[str, Any]:
    tables, _ = tables_of([2, 1], device, 0)
    return {
        "out": torch.zeros(3, 4, 32, device=device),
        "lse": torch.zeros(3, 4, device=device),
        "tables": tables,
        "result": torch.zeros(2, 4, 32, device=device),
        "sinks": torch.zeros(4, device=device),
    }


@pytest.mark.parametrize(
    ("match", "name", "change"),
    [
        ("must be contiguous", "result", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        ("must be contiguous", "out", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        ("must be contiguous", "lse", lambda x: x.t().contiguous().t()),
        ("heads and size", "out", lambda x: x[:, :3].contiguous()),
        ("heads and size", "lse", lambda x: x[:, :3].contiguous()),
        ("2 rows do not fit a result of 1", "result", lambda x: x[:1]),
        ("3 partial results do not fit", "out", lambda x: x[:2]),
        ("3 partial results do not fit", "lse", lambda x: x[:2]),
        (r"sinks must be contiguous of shape \(4,\)", "sinks", lambda x: x[:3]),
        (r"sinks must be contiguous of shape \(4,\)", "sinks", lambda x: torch.zeros(8, device=x.device)[::2]),
        ("partial results are float32", "out", lambda x: x.half()),
        ("partial results are float32", "lse", lambda x: x.double()),
    ],
)
def test_what_does_not_fit_is_refused(match: str, name: str, change: Any, device: torch.device) -> None:
    arguments = _arguments(device)
    merge_partials(**arguments)
    tensor: Tensor = arguments[name]
    with pytest.raises(ValueError, match=match):
        merge_partials(**{**arguments, name: change(tensor)})
