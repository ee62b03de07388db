"""Policies that look first, damping, combinations and neighbours, against plain Hugging Face."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from epic_engine import (
    ConfigError,
    ContextLengthError,
    Engine,
    MemoryStore,
    SamplingParams,
    parse_policies,
    parse_policy,
)
from epic_engine.contexts import CompileContext
from epic_engine.linking.layout import Body, Layout
from epic_engine.linking.policies import Choice, LinkPolicy
from epic_engine.linking.probe import Probe
from epic_engine.linking.selective import QueryAware, top_slots, top_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.models import tiny
from tests.engine.oracle import Piece, linked_logits, plain_logits, stale_attention, untouched

KINDS = ["llama-yarn", "qwen3", "cohere2", "phi3-partial"]


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


A, B, HEAD, QUESTION = _ids(40, 2), _ids(33, 3), _ids(11, 5), _ids(9, 4)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def _probe(engine: Engine) -> Probe:
    return Probe(engine.decoder, engine.backend, engine._loop.run, 16)


def _layout(engine: Engine) -> Layout:
    kv_a, kv_b = (engine.chunk(engine.compile(x)).kv for x in (A, B))
    return Layout([(HEAD, None), (A, Body(kv_a, ())), (B, Body(kv_b, ())), (A, Body(kv_a, ())), (QUESTION, None)])


@pytest.mark.parametrize("policy", ["query_aware:1", "cacheblend:1", "legolink:all", "legolink:3+query_aware:1.0"])
def test_recomputing_all_is_full(kind: str, policy: str) -> None:
    with Engine(tiny(kind)) as engine:
        keys = engine.compile_many([A, B])
        got = engine.score([HEAD, *keys, keys[0], QUESTION], [7], policy=policy)
    want = plain_logits(untouched(tiny(kind)), HEAD + A + B + A + QUESTION)[-1:]
    assert (got - want).abs().max() < 1e-4


def test_question_attention_is_hugging_faces(kind: str) -> None:
    depth = tiny(kind).config.num_hidden_layers
    with Engine(tiny(kind)) as engine:
        got = _probe(engine).question_attention(_layout(engine), (0.5, 1.0))
    pieces = [Piece(tuple(HEAD)), *(Piece(tuple(x), frozenset()) for x in (A, B, A)), Piece(tuple(QUESTION))]
    want = stale_attention(untouched(tiny(kind)), pieces, len(QUESTION), range(depth // 2, depth))
    assert sorted(got) == sorted(want) == [1, 2, 3]
    for index, scores in got.items():
        assert (scores - want[index]).abs().max() < 1e-4
        assert want[index].max() > 0.01


def test_second_layer_deviation_is_hugging_faces() -> None:
    model = untouched(tiny("llama-yarn"))

    def second_layer(ids: list[int]) -> torch.Tensor:
        seen = []
        attention = model.model.layers[1].self_attn
        hooks = [
            p.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
            for p in (attention.k_proj, attention.v_proj)
        ]
        plain_logits(model, ids)
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, dim=-1)

    with Engine(tiny("llama-yarn")) as engine:
        got = _probe(engine).second_layer_deviation(_layout(engine))
        scale = float(engine.decoder.tables[0].factors.abs()[0, 0])  # YaRN scales stored keys, raw projections not
    whole = second_layer(HEAD + A + B + A + QUESTION)
    at = len(HEAD)
    for index, chunk in ((1, A), (2, B), (3, A)):
        difference = whole[at : at + len(chunk)] - second_layer(chunk)
        keys, values = difference.chunk(2, dim=-1)
        # Both are rotated to the same slots, which keeps the length of their difference.
        want = scale**2 * keys.square().sum(-1) + values.square().sum(-1)
        assert torch.allclose(got[index], want, rtol=1e-3, atol=1e-5)
        at += len(chunk)


def test_probing_counts_as_computed_rows() -> None:
    with Engine(tiny("llama")) as engine:
        keys = engine.compile_many([A, B])
        prompt = [HEAD, *keys, QUESTION]
        naive, aware, blend = (
            engine.generate(prompt, SamplingParams(max_tokens=1), policy=p).stats
            for p in ("naive", "query_aware:0.2", "cacheblend:0.2")
        )
    chosen = round(0.2 * (len(A) + len(B)))
    assert (aware.recomputed, blend.recomputed) == (chosen, chosen)
    assert aware.rows == 2 * naive.rows + chosen
    assert blend.rows == naive.rows + chosen + (len(HEAD + A + B + QUESTION) + 1) // 2  # one layer of two


@pytest.mark.parametrize("policy", ["query_aware:0.3", "cacheblend:0.3", "legolink:2+query_aware:0.1"])
def test_chosen_rows_equal_one_forward(kind: str, policy: str) -> None:
    chosen: dict[int, list[int]] = {}

    class Spy(LinkPolicy):
        name = "spy"
        usage = "spy"

        def select(self, layout):
            raise NotImplementedError

        def choose(self, layout, probe) -> Choice:
            made = parse_policy(policy).choose(layout, probe)
            chosen.update(made.recompute)
            return made

    with Engine(tiny(kind)) as engine:
        keys = engine.compile_many([A, B])
        got = engine.score([HEAD, *keys, keys[0], QUESTION], [7], policy=Spy())
    pieces = [
        Piece(tuple(HEAD)),
        *(Piece(tuple(x), frozenset(chosen.get(i, ()))) for i, x in enumerate((A, B, A), start=1)),
        Piece(tuple(QUESTION)),
    ]
    assert any(chosen.values())
    assert (got - linked_logits(untouched(tiny(kind)), pieces)[-1:]).abs().max() < 1e-4


@pytest.mark.parametrize(("policy", "first"), [("damp:1.5,4", 0), ("damp:0.7,6+legolink:2", 2), ("damp:3,1", 0)])
def test_damping_equals_one_forward_at_link_and_decode(kind: str, policy: str, first: int) -> None:
    amount, tokens = policy.partition("+")[0].removeprefix("damp:").split(",")
    with Engine(tiny(kind)) as engine:
        keys = engine.compile_many([A, B])
        prompt = [HEAD, *keys, keys[0], QUESTION]
        got = engine.score(prompt, [7], policy=policy)
        undamped = engine.score(prompt, [7], policy=f"legolink:{first}")
        generated = engine.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), policy=policy).token_ids
    slots = frozenset(range(first))
    twin = untouched(tiny(kind))
    damp = (float(amount), int(tokens))

    def want(tail: list[int]) -> torch.Tensor:
        pieces = [Piece(tuple(HEAD)), *(Piece(tuple(x), slots) for x in (A, B, A)), Piece(tuple(QUESTION + tail))]
        return linked_logits(twin, pieces, damp)[-1:]

    assert (got - want([])).abs().max() < 1e-4
    assert (got - undamped).abs().max() > 1e-3
    for step, token in enumerate(generated):
        assert int(want(list(generated[:step])).argmax()) == token


def test_the_prompts_first_token_and_exact_chunks_are_not_damped() -> None:
    with Engine(tiny("llama")) as engine:
        key = engine.compile(A)
        exact = engine.score([key, QUESTION], [7], policy="damp:2,4")
        assert torch.equal(exact, engine.score([key, QUESTION], [7], policy="naive"))
        sunk = engine.compile(A, "sink:2")  # at the beginning, yet not exact: only its first token is spared
        got = engine.score([sunk, QUESTION], [7], policy="damp:2,4")
    sink = tiny("llama").config.bos_token_id
    pieces = [Piece(tuple(A), frozenset(), (sink, sink)), Piece(tuple(QUESTION))]
    assert (got - linked_logits(untouched(tiny("llama")), pieces, (2.0, 4))[-1:]).abs().max() < 1e-4


def test_neighbours_see_what_they_stand_behind(kind: str) -> None:
    with Engine(tiny(kind)) as engine:
        one, two = engine.compile_neighbours([A, B], [[B], [A]], head=HEAD)
        got = engine.score([HEAD, one, two, QUESTION], [7], policy="naive")
        exact = engine.generate(
            [HEAD, engine.compile(B, CompileContext("head", tuple(HEAD))), one, QUESTION], policy="naive"
        )
    pieces = [
        Piece(tuple(HEAD)),
        Piece(tuple(A), frozenset(), tuple(HEAD + B)),
        Piece(tuple(B), frozenset(), tuple(HEAD + A)),
        Piece(tuple(QUESTION)),
    ]
    assert (got - linked_logits(untouched(tiny(kind)), pieces)[-1:]).abs().max() < 1e-4
    assert exact.stats.reuse == "exact"  # head, B, A: just what A was compiled behind


def test_neighbours_keys_erasure_and_errors() -> None:
    c = _ids(20, 9)
    with Engine(tiny("llama"), store=MemoryStore()) as engine:
        alone = engine.compile_neighbours([A], [[]], head=HEAD)[0]
        assert alone == engine.compile(A, CompileContext("head", tuple(HEAD)))
        behind_b, behind_c, again = (engine.compile_neighbours([A], [[x]], head=HEAD)[0] for x in (B, c, B))
        assert behind_b == again
        assert len({alone, behind_b, behind_c}) == 3
        assert engine.find(A, CompileContext("head", tuple(HEAD))) == alone
        assert engine.find(A) in (behind_b, behind_c)
        assert engine.erase([B]) == 2  # its own head form, and what was compiled behind it
        assert not engine.has(behind_b)
        assert engine.has(behind_c)
        assert engine.has(alone)
        with pytest.raises(ConfigError, match="one per chunk"):
            engine.compile_neighbours([A, B], [[B]])
        with pytest.raises(ConfigError, match="compile_neighbours"):
            engine.compile(A, "neighbours:1")
    with Engine(tiny("llama"), max_model_len=90) as engine, pytest.raises(ContextLengthError, match="fewer neighbours"):
        engine.compile_neighbours([A], [[B, c]], head=HEAD)


def slow_windows(scores: dict[int, torch.Tensor], budget: int, window: int, floor: float) -> dict[int, list[int]]:
    """The rule as it reads, window by window."""
    weighed = {i: (s.double() / s.double().sum() ** 0.75).tolist() for i, s in scores.items()}
    size = {i: min(window, len(s)) for i, s in weighed.items()}
    windows = [(-sum(s[a : a + size[i]]), i, a) for i, s in weighed.items() for a in range(len(s) - size[i] + 1)]
    windows.sort(key=lambda w: (round(w[0], 12), w[1], w[2]))
    chosen: list[tuple[int, int]] = []

    def take(i: int, a: int) -> int:
        new = [(i, slot) for slot in range(a, a + size[i]) if (i, slot) not in chosen]
        if 2 * len(new) < size[i]:
            return 0
        new = new[: budget - len(chosen)]
        chosen.extend(new)
        return len(new)

    total = sum(map(len, weighed.values()))
    for segment, values in weighed.items():
        sure = int(floor * budget * len(values) / total)
        for _, i, a in windows:
            if i == segment and sure >= size[i]:
                sure -= take(i, a)
    for _, i, a in windows:
        if len(chosen) < budget:
            take(i, a)
    single = sorted((-v, i, slot) for i, s in weighed.items() for slot, v in enumerate(s) if (i, slot) not in chosen)
    chosen += [(i, slot) for _, i, slot in single[: budget - len(chosen)]]
    return {i: sorted(s for j, s in chosen if j == i) for i in sorted({i for i, _ in chosen})}


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    share=st.floats(0.01, 1.0),
    window=st.integers(1, 9),
    floor=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_windows_keep_the_budget_and_starve_nobody(
    lengths: list[int], share: float, window: int, floor: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = {i: torch.tensor(rng.random(n), dtype=torch.float32) for i, n in enumerate(lengths)}
    budget = round(share * sum(lengths))
    chosen = top_windows(scores, budget, window, floor)
    flat = [(i, s) for i, slots in chosen.items() for s in slots]
    assert len(flat) == len(set(flat)) == budget
    assert all(0 <= s < lengths[i] for i, s in flat)
    for i, n in enumerate(lengths):
        sure = int(floor * budget * n / sum(lengths))
        width = min(window, n)
        assert len(chosen.get(i, [])) >= sure - width + 1
    assert chosen == slow_windows(scores, budget, window, floor)
    # Without a floor and with single slots it is a plain top-k of the weighed scores.
    plain = top_windows(scores, budget, 1, 0.0)
    weighed = {i: s.double() / s.double().sum() ** 0.75 for i, s in scores.items()}
    assert {(i, s) for i, slots in plain.items() for s in slots} == {
        (i, s) for i, slots in top_slots(weighed, budget).items() for s in slots
    }


def test_string_forms() -> None:
    for text in (
        "legolink:1p",
        "legolink:all",
        "cacheblend:0.15",
        "query_aware:0.1",
        "damp:1.5,4",
        "legolink:4+query_aware:0.1",
    ):
        assert str(parse_policy(text)) == text
    assert str(parse_policy("damp:2")) == "damp:2,4"
    assert isinstance(parse_policy("query_aware:0.1"), QueryAware)
    for wrong in (
        "query_aware:0",
        "query_aware:1.5",
        "cacheblend:",
        "damp:0",
        "damp:x",
        "full+naive",
        "damp:1+damp:2",
        "legolink:-1p",
    ):
        with pytest.raises(ConfigError):
            parse_policy(wrong)


def test_page_form_equals_the_token_form() -> None:
    with Engine(tiny("llama")) as engine:
        prompt = [HEAD, *engine.compile_many([A, B]), QUESTION]
        assert torch.equal(
            engine.score(prompt, [7], policy="legolink:1p"), engine.score(prompt, [7], policy="legolink:16")
        )


def test_lists_of_policies_keep_their_commas() -> None:
    assert [str(p) for p in parse_policies("full, damp:1,4,legolink:4+damp:2,3 ,naive")] == [
        "full",
        "damp:1,4",
        "legolink:4+damp:2,3",
        "naive",
    ]
