"""Laid-out spans: rows are cut into groups that each see what they should, and read the same as with moved queries."""

from __future__ import annotations

import epic_engine.attention.spans as spans
import numpy as np
import pytest
import torch
from epic_engine import Engine
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.models import YARN, build, tiny


@given(
    gaps=st.lists(st.sampled_from([0, 0, 0, 1, 3, 90, 4000]), min_size=1, max_size=150),
    masks=st.booleans(),
    hidden=st.sampled_from([0, 10, 16384]),
    apart=st.sampled_from([1, 2000, 98304]),
)
def test_each_row_reads_what_it_sees_once(gaps: list[int], masks: bool, hidden: int, apart: int) -> None:
    places = np.cumsum([gap + 1 for gap in gaps]).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_CALL_COST", hidden)
        patch.setattr(spans, "_APART", apart)
        found = spans.readings(places, masks=masks)
    seen: list[list[tuple[int, int]]] = [[] for _ in places]
    begun: set[int] = set()
    for reading in found:
        rows = range(reading.first, reading.last)
        if reading.more:
            assert begun >= set(rows)  # they are added to what is there
            assert (reading.last - reading.first) * (reading.stop - reading.start) >= apart
            assert reading.stop <= places[reading.first]
        else:
            assert not begun & set(rows)
            begun.update(rows)
            mine = places[reading.first : reading.last]
            assert reading.stop == mine[-1] + 1
            if reading.causal:
                assert mine == list(range(mine[0], mine[-1] + 1))
                assert mine[0] >= reading.start
            else:
                assert masks
                assert sum(reading.stop - 1 - place for place in mine) <= hidden
        for row in rows:
            seen[row].append((reading.start, min(reading.stop, places[row] + 1)))
    for row, ranges in enumerate(seen):
        ranges.sort()
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == places[row] + 1


def test_later_halves_read_apart() -> None:
    scattered = [120 * window + slot for window in range(30) for slot in range(12)]
    apart = [r for r in spans.readings(scattered, masks=True) if r.more]
    assert [(r.first, r.last, r.start, r.stop) for r in apart] == [(180, 360, 0, 1800)]
    assert not [r for r in spans.readings(range(3600), masks=True) if r.more]


def test_rows_that_lie_closely_read_together() -> None:
    scattered = [100 * window + slot for window in range(30) for slot in range(12)]
    found = [r for r in spans.readings([*scattered, *range(4000, 4300)], masks=True) if not r.more]
    assert 3 <= len(found) <= 12
    assert [r.causal for r in found] == [False] * (len(found) - 1) + [True]  # the question, in one stretch
    assert sum(not r.more for r in spans.readings(scattered, masks=False)) == 30


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_span_equals_moved_queries(data: st.DataObject) -> None:
    model = build("Llama", {"rope_parameters": YARN}, torch.float64)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    context = data.draw(st.sampled_from(["isolated", "sink:3"]))
    policy = data.draw(st.sampled_from(["naive", "legolink:2", "legolink:9", "query_aware:0.3"]))
    with Engine(model, selftest=False) as engine:
        keys = engine.compile_many([[(7 * i + n) % 190 for i in range(n)] for n in lengths], context)
        prompt = [[5, 6, 7], *keys, keys[0], [9, 8]]
        results = []
        for cost in (0.0, 1e9):  # never, and always, lay out
            patch = pytest.MonkeyPatch()
            patch.setattr(spans, "_QUERY_COST", cost)
            patch.setattr(spans, "_KEYS_PER_BLOCK", data.draw(st.sampled_from([4, 1024])))
            patch.setattr(spans, "_CALL_COST", data.draw(st.sampled_from([0, 10, 16384])))
            patch.setattr(spans, "_APART", data.draw(st.sampled_from([1, 40, 98304])))
            results.append(engine.score(prompt, [3, 4, 5], policy=policy))
            patch.undo()
    assert (results[0] - results[1]).abs().max() < 1e-4


def test_layers_without_rotation_are_laid_out_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny("cohere2")) as engine:
        keys = engine.compile_many([list(range(3, 40)), list(range(50, 80))])
        prompt = [[5, 6], *keys, [9, 8]]
        monkeypatch.setattr(spans, "_QUERY_COST", 0.0)
        moved = engine.score(prompt, [3], policy="legolink:4")
        monkeypatch.setattr(spans, "_QUERY_COST", 1e9)
        assert (engine.score(prompt, [3], policy="legolink:4") - moved).abs().max() < 1e-4
