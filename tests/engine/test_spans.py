"""Laid-out spans: the staircase is cut exactly, and rows read the same as with moved queries."""

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
    widths=st.lists(st.integers(1, 5), max_size=12),
    gaps=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    tail=st.integers(0, 3),
)
def test_staircase_covers_each_pair_once(widths: list[int], gaps: list[int], tail: int) -> None:
    readers = np.cumsum(gaps[: len(widths)]).tolist()
    last = max(readers, default=0) + tail
    covered = np.zeros((last + 1, sum(widths) + 1), dtype=int)
    for r in spans.staircase(readers, widths, last):
        assert r.first < r.last <= last
        assert r.start < r.stop
        covered[r.first : r.last, r.start : r.stop] += 1
    wanted = np.zeros_like(covered)
    at = 0
    for reader, width in zip(readers, widths, strict=True):
        wanted[reader:last, at : at + width] = 1
        at += width
    assert (covered == wanted).all()


def test_a_row_merges_few_rectangles() -> None:
    readers, widths = list(range(0, 64 * 16, 16)), [100] * 64
    found = spans.staircase(readers, widths, 64 * 16 + 20)
    per_row = [sum(r.first <= row < r.last for r in found) for row in range(64 * 16 + 20)]
    assert max(per_row) <= 8


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_span_equals_moved_queries(data: st.DataObject) -> None:
    model = build("Llama", {"rope_parameters": YARN}, torch.float64)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    context = data.draw(st.sampled_from(["isolated", "sink:3"]))
    policy = data.draw(st.sampled_from(["naive", "legolink:2", "legolink:9"]))
    with Engine(model, selftest=False) as engine:
        keys = engine.compile_many([[(7 * i + n) % 190 for i in range(n)] for n in lengths], context)
        prompt = [[5, 6, 7], *keys, keys[0], [9, 8]]
        results = []
        for cost in (0.0, 1e9):  # never, and always, lay out
            patch = pytest.MonkeyPatch()
            patch.setattr(spans, "_QUERY_COST", cost)
            patch.setattr(spans, "_KEYS_PER_BLOCK", data.draw(st.sampled_from([4, 1024])))
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
