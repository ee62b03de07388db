"""How long links are cut, joined, and interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from epic_engine import Engine, SamplingParams
from epic_engine.scheduling.cost import PassCost
from epic_engine.scheduling.scheduler import Pass
from torch import Tensor

from tests.engine.models import tiny
from tests.engine.test_serving import Gate, _ids


def test_a_long_link_lets_others_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every pass a long one, a short request is answered while the rows of another are under way."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with Engine(tiny("llama"), selftest=False, step_seconds=1e-9, stall_seconds=0) as engine:
        monkeypatch.setattr(engine._serving.scheduler, "_background_seconds", 100.0)
        passes: list[int] = []
        within: list[tuple[int, int]] = []
        logits = engine.decoder.logits

        def watched(ids: Any, *arguments: Any) -> Tensor:
            if passes:
                within.append((passes[-1], len(ids)))
            passes.append(len(ids))
            try:
                return logits(ids, *arguments)
            finally:
                passes.pop()

        monkeypatch.setattr(engine.decoder, "logits", watched)
        short = engine.stream([_ids(3, 2)], SamplingParams(max_tokens=400, ignore_eos=True), policy="full")
        next(short)
        long = engine.stream([_ids(300, 1)], params, policy="full")
        got = [e.token_id for e in long]
        short.close()
    assert (300, 1) in within
    with Engine(tiny("llama"), selftest=False) as engine:
        assert got == list(engine.generate([_ids(300, 1)], params, policy="full").token_ids)
        want = engine.generate([_ids(3, 2)], SamplingParams(max_tokens=400, ignore_eos=True), policy="full")
        tokens = short.completion.token_ids
        assert tokens == want.token_ids[: len(tokens)]


class FixedCost(PassCost):
    """A hundredth of a second a row, whatever is observed."""

    def seconds(self, rows: int, pairs: int) -> float:
        return rows / 100

    def rows_within(self, seconds: float, keys: int) -> int:
        return max(1, int(seconds * 100))


def test_long_links_share_passes_of_twice_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[_ids(90, 1)], [_ids(90, 2)], [_ids(90, 3)]]
    with Engine(tiny("llama"), selftest=False, step_seconds=1e-9) as engine:
        want = [engine.generate(prompt, params, policy="full").token_ids for prompt in [*prompts, [_ids(250, 4)]]]
        scheduler = engine._serving.scheduler
        monkeypatch.setattr(scheduler, "cost", FixedCost(engine.spec, 1))
        monkeypatch.setattr(scheduler, "_background_seconds", 1.0)
        rows: list[int] = []
        forward = engine._loop._forward

        def watched(work: Pass) -> Any:
            rows.append(work.rows)
            return forward(work)

        monkeypatch.setattr(engine._loop, "_forward", watched)
        background = scheduler.background

        def together() -> Pass:
            """Nothing until all are laid out."""
            laid_out = sum(job.linked is not None for job in scheduler.linking)
            return background() if rows or laid_out == len(prompts) else Pass()

        monkeypatch.setattr(scheduler, "background", together)
        with Gate(engine):
            streams = [engine.stream(prompt, params, policy="full") for prompt in prompts]
        assert [tuple(e.token_id for e in stream) for stream in streams] == want[:3]
        assert rows == [180, 90]
        assert engine.generate([_ids(250, 4)], params, policy="full").token_ids == want[3]
        assert rows[2:] == [84, 83, 83]
