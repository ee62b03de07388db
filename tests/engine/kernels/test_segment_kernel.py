"""Segment attention against float64: any pages, tiles, segments, places and types."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings

pytest.importorskip("triton")

from epic_engine.attention.kernels.configs import padded, segment_config
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Rotation

from .problems import (
    EIGHT_BITS,
    ORDERS,
    PLACES,
    ROTARIES,
    Item,
    Keys,
    Problem,
    Row,
    computed,
    inputs_of,
    problems,
    rotation_of,
    tables_of,
)
from .reference import attention_of_item

HALVES = (torch.bfloat16, torch.float16)


def check(p: Problem, device: torch.device, tolerance: float = 1e-5) -> None:
    """Outputs differ by a part of the largest one, log-sum-exps by as much absolutely."""
    inputs = inputs_of(p)
    for number, (item, found) in enumerate(zip(p.items, computed(p, inputs, device), strict=True)):
        for got, want in zip(found, attention_of_item(p, inputs, item, number), strict=True):
            nothing = want[:, -1] == -math.inf
            assert torch.equal(got[nothing], want[nothing])
            got, want = got[~nothing], want[~nothing]
            assert (got[:, :-1] - want[:, :-1]).abs().amax(1).le(tolerance * want[:, :-1].abs().amax(1)).all()
            assert (got[:, -1] - want[:, -1]).abs().le(tolerance * want[:, -1].abs().clamp_min(1)).all()


def rows_at(*positions: int, **fields: Any) -> tuple[Row, ...]:
    return tuple(Row(position, **fields) for position in positions)


def one(rows: tuple[Row, ...], *segments: Keys, **fields: Any) -> Problem:
    return Problem((Item(rows, segments),), **fields)


RAGGED = (Keys(1, 15, 0, 3), Keys(40, 5, 1, 30, 50), Keys(33, 0, 2, 90, 110), Keys(70, 9, 0, 20, first=4))
# Seven rows: before, between and behind the segments.
SPREAD = tuple(Row(p, own=o) for p, o in ((200, 90), (20, 5), (100, 0), (111, 50), (110, 4), (49, 74), (60, 30)))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
def test_every_head_size_and_group(dim: int, group: int, device: torch.device) -> None:
    readers = segment_config(dim, group, 7, torch.float32).block_m // group
    check(one(SPREAD[:readers], *RAGGED, dim=dim, group=group, readers=7), device)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_every_page_size(page: int, kv_heads: int, device: torch.device) -> None:
    items = (Item(SPREAD, RAGGED), Item(SPREAD[3:5], RAGGED[1:]))
    check(Problem(items, page=page, kv_heads=kv_heads, layer=2, spare=3), device)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("turn_keys", [False, True])
def test_every_rotation(rotary: str, order: str, turn_keys: bool, device: torch.device) -> None:
    end = PLACES - 1
    far = (Keys(30, 3, 0, end - 60, end - 20), Keys(20, 7, 1, 0), Keys(9, 0, 2, end - 1, first=0))
    check(one(rows_at(end, end - 1, own=7), *far, rotary=rotary, order=order, turn_keys=turn_keys, dim=32), device)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 31, 32, 33, 64])
def test_one_to_many_readers_in_tiles(rows: int, device: torch.device) -> None:
    readers = tuple(Row(100 + i, shift=i % 5, own=i + 1) for i in range(rows))
    tile = segment_config(16, 2, rows, torch.float32).block_m // 2
    spans = (Keys(40, 2, 0, 7, 103), Keys(rows, 11, 1, 90, first=0))
    items = tuple(Item(readers[i : i + tile], spans) for i in range(0, rows, tile))
    check(Problem(items, readers=rows), device)


@settings(max_examples=120, deadline=None)
@given(problems())
# One key, in the last place of its page; rows that see nothing of it.
@example(one(rows_at(5, 4, 6), Keys(1, 15, offset=2, after=5)))
# Nobody sees anything.
@example(one(rows_at(1, 2), Keys(20, 3, offset=5, after=9), Keys(8, 0, first=4), Keys(9, offset=1000, after=1001)))
# A segment so far ahead that its distance lies outside the tables, for rows that do not see it.
@example(
    one(rows_at(0, 3000), Keys(50, 3, offset=2900, after=2990), Keys(9, offset=1 << 20, after=(1 << 20) + 9), dim=256)
)
# The first own token is not the first of its page.
@example(one(tuple(Row(9, own=o) for o in (0, 1, 2, 9)), Keys(9, 5, first=0)))
# Windows: of one key; that begins inside a segment, on a page's border, before it.
@example(
    one(tuple(Row(p, own=p, low=p - 1) for p in (30, 31, 40)), Keys(30, 2, after=30), Keys(20, 1, first=20), window=1)
)
@example(one(rows_at(64, 70, 95, 96, 97), Keys(64, 0, after=64), window=32))
@example(one(tuple(Row(p, own=p + 1, low=max(0, p - 15)) for p in range(0, 64, 9)), Keys(64, 0, first=0), window=16))
# Every key of a row is hidden; of another one but the last.
@example(one((Row(9, hidden=frozenset(range(7))), Row(9, hidden=frozenset(range(6))), Row(9)), Keys(7, 12)))
# Masks and shifts: the readers of a chunk that stands elsewhere in each prompt.
@example(one((Row(900, 800, hidden=frozenset({0, 63})), Row(70, 1), Row(64)), Keys(64, 0, after=64), dim=64))
@example(one(rows_at(40), Keys(5, bias=-80.0), Keys(5, 3, bias=80.0), softcap=2.0))
def test_any_problem(device: torch.device, p: Problem) -> None:
    check(p, device)


@settings(max_examples=25, deadline=None)
@given(problems(turn_keys=True))
@example(one(rows_at(0, 3000), Keys(50, 3, offset=2900, after=2990), Keys(9, first=0), turn_keys=True))
def test_keys_that_are_turned_give_the_same(device: torch.device, p: Problem) -> None:
    check(p, device)
    inputs = inputs_of(p)
    for ours, theirs in zip(
        computed(p, inputs, device), computed(replace(p, turn_keys=False), inputs, device), strict=True
    ):
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=0, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(problems(dtypes=HALVES))
@example(one(SPREAD, *RAGGED, dim=128, group=4, dtype=torch.bfloat16, readers=7))
@example(one(SPREAD, *RAGGED, dim=80, group=3, dtype=torch.float16, readers=7))
def test_two_byte_types(device: torch.device, p: Problem) -> None:
    check(p, device, 2e-2)


@settings(max_examples=10, deadline=None)
@given(problems(dtypes=HALVES, turn_keys=True))
def test_two_byte_types_with_turned_keys(device: torch.device, p: Problem) -> None:
    check(p, device, 2e-2)


@settings(max_examples=40, deadline=None)
@given(problems(dtypes=(torch.float32, *HALVES), stored=EIGHT_BITS))
@example(one(SPREAD, *RAGGED, dim=32, stored=torch.int8, readers=7, layer=1, kv_heads=2))
@example(one(SPREAD, *RAGGED, dim=32, stored=torch.float8_e4m3fn, readers=7, layer=1, kv_heads=2))
@example(one((Row(9, hidden=frozenset({1, 2})), Row(8)), Keys(40, 12), stored=torch.int8, dtype=torch.float16))
def test_eight_bit_pages_with_scales(device: torch.device, p: Problem) -> None:
    check(p, device, 1e-5 if p.dtype == torch.float32 else 2e-2)


@settings(max_examples=10, deadline=None)
@given(problems(stored=EIGHT_BITS, turn_keys=True))
def test_eight_bit_pages_with_turned_keys(device: torch.device, p: Problem) -> None:
    check(p, device)


def test_the_reference_sees_every_detail() -> None:
    """If it did not react to these changes, equality with it would prove nothing."""
    row, keys = Row(60, 3, 20, 9, frozenset({4})), Keys(30, 5, 0, 20, 50, -1, 0.5)
    p = one((row,), keys, dim=32, window=25, softcap=3.0)
    own = one((row,), replace(keys, first=2), dim=32, window=25)
    inputs = inputs_of(p)

    def result(p: Problem) -> torch.Tensor:
        return attention_of_item(p, inputs, p.items[0], 0)[0]

    changes: list[tuple[Problem, Row, Keys]] = [
        (p, replace(row, position=59), keys),
        (p, replace(row, shift=4), keys),
        (p, replace(row, hidden=frozenset({20})), keys),
        (p, row, replace(keys, offset=21)),
        (p, row, replace(keys, after=58)),
        (p, row, replace(keys, count=29)),
        (p, row, replace(keys, start=4)),
        (p, row, replace(keys, bias=0.0)),
        (own, replace(row, own=19), replace(keys, first=2)),
        (own, replace(row, low=10), replace(keys, first=2)),
        (own, row, replace(keys, first=3)),
    ]
    for base, changed_row, changed_keys in changes:
        other = replace(base, items=(Item((changed_row,), (changed_keys,)),))
        assert (result(base) - result(other)).abs().max() > 1e-4
    for fields in ({"window": 24}, {"softcap": 0.0}):
        assert (result(p) - result(replace(p, **fields))).abs().max() > 1e-4


# -- what is refused -------------------------------------------------------------------------------------------


def refused(match: str, p: Problem, device: torch.device, **changes: Any) -> None:
    inputs = inputs_of(p).on(device)
    tables, launch, _ = tables_of(p, inputs, device)
    arguments: dict[str, Any] = {
        "q": inputs.q,
        "tables": tables,
        "launch": launch,
        "layer": 0,
        "rotation": rotation_of(p, inputs),
        "out": torch.zeros(tables.partials, p.heads, p.dim, device=device),
        "lse": torch.zeros(tables.partials, p.heads, device=device),
        "page_size": p.page,
        "kv_heads": p.kv_heads,
        "scale": 1.0,
    }
    segment_attention(**arguments)
    with pytest.raises(ValueError, match=match):
        segment_attention(**{**arguments, **{k: v(arguments[k]) if callable(v) else v for k, v in changes.items()}})


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    p = one(rows_at(9, 8), Keys(5), dim=32, group=4)
    order = torch.arange(32, dtype=torch.int32, device=device)
    refused("4 query heads are no multiple of 3", p, device, kv_heads=3)
    refused("must lie next to each other", p, device, q=lambda q: q.mT.contiguous().mT)
    refused(
        "head size 32 must be even and at most 16",
        p,
        device,
        launch=lambda x: replace(x, config=segment_config(16, 4, 1, p.dtype)),
    )
    refused(
        "4 heads a group do not fit a tile of 2",
        p,
        device,
        launch=lambda x: replace(x, config=replace(x.config, block_m=2)),
    )
    refused("int8 pages need scales", p, device, launch=lambda x: replace(x, stored=torch.int8))
    refused("does not belong to this head size", p, device, rotation=lambda r: replace(r, order=r.order[:-2]))
    refused("does not belong to this head size", p, device, rotation=lambda r: replace(r, factors=r.factors[:, :-1]))
    refused("out must be contiguous float32", p, device, out=lambda x: x.half())
    refused("out must be contiguous float32", p, device, out=lambda x: x[:, :-1])
    refused("out must be contiguous float32", p, device, out=lambda x: x[::2])
    refused("lse must be contiguous float32", p, device, lse=lambda x: x.double())
    refused("do not fit the tensors given", p, device, out=lambda x: x[:-1])
    refused("do not fit the tensors given", p, device, lse=lambda x: x[:-1])
    refused("do not fit the tensors given", p, device, q=lambda q: q[:, 1:])
    refused(
        "needs the rotation's unit factors",
        p,
        device,
        turn_keys=True,
        rotation=Rotation(order, rotation_of(p, inputs_of(p).on(device)).factors),
    )


@pytest.mark.parametrize("dim", [15, 258, 512])
def test_head_sizes_that_no_tile_has(dim: int) -> None:
    with pytest.raises(ValueError, match="is odd or above 256"):
        padded(dim)
    with pytest.raises(ValueError, match="is odd or above 256"):
        segment_config(dim, 1, 1, torch.float32)


def test_groups_that_no_tile_has() -> None:
    with pytest.raises(ValueError, match="40 heads a group do not fit a tile"):
        segment_config(64, 40, 1, torch.float32)


def test_a_launch_without_items_does_nothing(device: torch.device) -> None:
    p = one(rows_at(1), Keys(3))
    inputs = inputs_of(p).on(device)
    tables, launch, _ = tables_of(p, inputs, device)
    out = torch.full((tables.partials, p.heads, p.dim), math.nan, device=device)
    segment_attention(
        inputs.q,
        tables,
        replace(launch, items=0),
        0,
        rotation_of(p, inputs),
        out,
        out[:, :, 0].contiguous(),
        page_size=p.page,
        kv_heads=p.kv_heads,
        scale=1.0,
    )
    assert out.isnan().all()
