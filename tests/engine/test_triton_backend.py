"""Engines that compute attention with the Triton kernels, in its interpreter or on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from epic_engine import ConfigError, Engine, SamplingParams
from epic_engine.attention import select
from epic_engine.attention.base import SequenceRows
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.scheduling.decode_graphs import DecodeGraphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import test_attention as linked_prompts
from tests.engine import test_selective as policies
from tests.engine import test_serving_schedules as schedules
from tests.engine.conftest import use_triton
from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched
from tests.engine.test_attention import MIXED, Part

pytest.importorskip("triton")

KINDS = ("qwen3", "phi3-partial")
FOREVER = SamplingParams(10, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def attention() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        use_triton(patch)
        yield "triton"


def check(engine: Engine, kind: str, parts: Sequence[Part], continuation: Sequence[int]) -> None:
    want = linked_prompts.oracle_logits(kind, parts, continuation)
    got = linked_prompts.engine_logits(engine, parts, continuation)
    assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[str, int], Engine]]:
    made = {
        (kind, rows): Engine(
            linked_prompts.model_of(kind),
            max_model_len=linked_prompts.MAX_LEN,
            rows_per_step=rows,
            head=linked_prompts.HEAD,
            selftest=False,
        )
        for kind in KINDS
        for rows in (7, 2048)
    }
    yield made
    for engine in made.values():
        engine.close()


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    parts=linked_prompts.parts_of(),
    continuation=st.lists(st.integers(3, 198), min_size=1, max_size=3),
    at_the_end=st.booleans(),
    rows=st.sampled_from((7, 2048)),
)
def test_any_linked_prompt_equals_one_forward(
    engines: dict[tuple[str, int], Engine],
    kind: str,
    parts: list[Part],
    continuation: list[int],
    at_the_end: bool,
    rows: int,
) -> None:
    if at_the_end:
        parts = linked_prompts._pushed_to_the_end(parts, continuation)
    check(engines[kind, rows], kind, parts, continuation)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_prompt(engines: dict[tuple[str, int], Engine], kind: str) -> None:
    engine = engines[kind, 2048]
    assert engine.backend.name == "triton"
    check(engine, kind, MIXED, [11, 12, 13])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_question_attends_to(kind: str) -> None:
    """The kernels' log-sum-exps give the shares."""
    policies.test_question_attention_is_hugging_faces(kind)


def test_turned_keys_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from epic_engine import engine as engine_module
    from epic_engine.attention.triton_backend import TritonBackend

    monkeypatch.setattr(engine_module, "make_backend", lambda _, d, page: TritonBackend(d, page, turn_keys=True))
    model = linked_prompts.model_of("qwen3")
    with Engine(model, max_model_len=linked_prompts.MAX_LEN, head=linked_prompts.HEAD, selftest=False) as engine:
        check(engine, "qwen3", MIXED, [11, 12])


@pytest.mark.parametrize("kind", ["llama-yarn", "phi3-longrope", "cohere2", "gpt-neox", "glm"])
def test_every_way_of_rotating(kind: str) -> None:
    """Scaled, long, per layer, partial, interleaved."""
    ids = linked_prompts._ids(40, 3)
    with Engine(tiny(kind), selftest=False, policy="full") as engine:
        got = engine.score([ids[:30]], ids[30:])
    want = plain_logits(untouched(tiny(kind), freeze_at=512 if "longrope" in kind else None), ids)[29:-1]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("machine", [schedules.Schedules, schedules.Pooled])
def test_schedules(machine: type[schedules.Schedules], monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests get alone is computed by torch."""
    with monkeypatch.context() as patch:
        patch.setattr("epic_engine.engine.make_backend", select.make_backend)
        patch.setattr("epic_engine.scheduling.serving.decode_graphs", lambda *_: None)
        schedules.alone()
    schedules.expected.cache_clear()
    case = machine.TestCase
    case.settings = settings(schedules._settings(3), stateful_step_count=12)
    case("runTest").runTest()


def test_what_was_proven_of_other_tiles_is_not_taken_for_proven(
    engines: dict[tuple[str, int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from epic_engine.attention.kernels import configs

    backend = engines["qwen3", 2048].backend
    before = backend.identity
    assert before == engines["qwen3", 7].backend.identity
    monkeypatch.setitem(configs._SHAPES, (64, 4, 0), (16, 64, 4, 2))
    assert backend.identity != before


# -- captured steps --------------------------------------------------------------------------------------------


class Counted(DecodeGraphs):
    """Says how many steps were taken the captured way, and how many of these went on from the one before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken = self.refused = self.went_on = 0
        for step in self._steps:
            attention = step._attention
            attention._go_on = self._count(attention._go_on)  # type: ignore[method-assign]

    def _count(self, go_on: Any) -> Any:
        def counted(batch: Sequence[SequenceRows]) -> bool:
            found: bool = go_on(batch)
            self.went_on += found
            return found

        return counted

    def run(self, ids: Sequence[int], batch: Sequence[SequenceRows]) -> torch.Tensor | None:
        found = super().run(ids, batch)
        self.taken += found is not None
        self.refused += found is None
        return found


def counted(engine: Engine, rows: int) -> Counted:
    graphs = Counted(engine.decoder, engine.backend, rows, lambda forward: forward)
    engine._loop._graphs = graphs
    return graphs


def test_decoding_step_by_step_equals_hugging_face() -> None:
    ids = linked_prompts._ids(20, 1)
    with Engine(tiny("llama"), selftest=False, policy="full", page_size=4) as engine:
        graphs = counted(engine, 2)
        got = engine.generate([ids], SamplingParams(14, ignore_eos=True)).token_ids
    want = list(ids)
    for _ in range(14):
        want.append(int(plain_logits(untouched(tiny("llama")), want)[-1].argmax()))
    assert list(got) == want[20:]
    assert graphs.taken == 13
    assert graphs.went_on >= 8  # all but the first, and those that needed a page


def test_sequences_come_and_go_between_captured_steps() -> None:
    chunks = [linked_prompts._ids(n, n) for n in (20, 33)]
    params = [SamplingParams(n, ignore_eos=True) for n in (3, 9, 6)]
    prompts = [(0, 1), (1, 0), (1,)]

    def answers(engine: Engine) -> list[tuple[int, ...]]:
        keys = engine.compile_many(chunks)
        streams = [
            engine.stream([*(keys[c] for c in picked), linked_prompts._ids(4, i)], p, policy="query_aware:0.2")
            for i, (picked, p) in enumerate(zip(prompts, params, strict=True))
        ]
        return [list(s) and s.completion.token_ids for s in streams]

    with Engine(tiny("llama"), selftest=False) as engine:
        graphs = counted(engine, 4)
        got = answers(engine)
        assert graphs.taken >= 8
        assert not graphs.refused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epic_engine.engine.make_backend", select.make_backend)
        with Engine(tiny("llama"), selftest=False, attention="torch", cuda_graphs=False) as engine:
            assert engine.backend.name == "torch"
            assert got == answers(engine)


def test_what_does_not_fit_a_captured_step_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from epic_engine.attention import static_step

    ids = linked_prompts._ids(20, 1)
    with Engine(tiny("llama"), selftest=False, policy="full") as engine:
        want = engine.generate([ids], FOREVER).token_ids
        monkeypatch.setattr(static_step, "_SEGMENTS", (0, 0))
        graphs = counted(engine, 2)
        assert engine.generate([ids], FOREVER).token_ids == want
        assert graphs.refused == 9
        assert not graphs.taken


def test_a_captured_step_keeps_nothing_alive() -> None:
    import gc
    import weakref

    with Engine(tiny("llama"), selftest=False, policy="full") as engine:
        counted(engine, 2)
        linked = engine.link([linked_prompts._ids(9, 1)], room=4)
        graphs = engine._loop._graphs
        assert graphs is not None
        assert engine.call(partial(graphs.run, [5], [linked.rows([9])])) is not None
        gone = weakref.ref(linked.private)
        assert isinstance(gone(), PagedKV)
        del linked
        gc.collect()
        assert gone() is None
        engine.drain()
        engine.check_integrity()
        assert engine.stats()["memory"]["pages"]["private"] == 0


# -- which backend ---------------------------------------------------------------------------------------------


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epic_engine.engine.make_backend", select.make_backend)
    monkeypatch.setattr("epic_engine.scheduling.serving.decode_graphs", lambda *_: None)


@pytest.mark.usefixtures("unpatched")
def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 'auto', 'torch', 'triton'"):
        Engine(tiny("llama"), attention="flash")


@pytest.mark.usefixtures("unpatched")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_on_a_cpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="the model is on cpu, and Triton's kernels run on NVIDIA GPUs"):
        Engine(tiny("llama"), attention="triton", selftest=False)
    with Engine(tiny("llama"), selftest=False) as engine:
        assert engine.backend.name == "torch"


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize(
    ("version", "dtype", "reason"),
    [
        ("3.5.1", torch.float32, "Triton 3.5.1 is too old, 3.6 or later is needed"),
        (None, torch.float64, "the kernels do not compute in float64"),
    ],
)
def test_what_triton_cannot_do(
    version: str | None, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    if version is not None:
        monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ConfigError, match=reason):
        Engine(tiny("llama", dtype), attention="triton", selftest=False)


@pytest.mark.usefixtures("unpatched")
def test_without_triton_a_gpu_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnGpu:
        device = torch.device("cuda")
        spec = None

    made = object()
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(select, "TorchBackend", lambda decoder: made)
    with caplog.at_level(logging.WARNING):
        assert select.make_backend("auto", OnGpu(), 16) is made  # type: ignore[arg-type]
    assert [r.message for r in caplog.records] == [
        "attention runs on torch's kernels, which is slower: Triton is not installed (pip install triton)."
    ]
    with pytest.raises(ConfigError, match="pip install triton"):
        select.make_backend("triton", OnGpu(), 16)  # type: ignore[arg-type]
