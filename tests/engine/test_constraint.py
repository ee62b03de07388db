"""Constrained generation against a small automaton over token ids, stepped by hand on the engine's own logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from epic_engine import ConfigError, Engine, SamplingParams, TokenConstraint
from epic_engine.sampler import Sampler
from torch import Tensor

from tests.engine.models import tiny
from tests.engine.tokenizers_for_tests import TOKENIZERS

TOKENIZER = TOKENIZERS["byte-level"]
QUESTION = [17, 98, 45, 120, 66, 31]
VOCAB, END = 199, 2


class Automaton:
    """States, and the tokens that lead from one to the next; end tokens follow the states where it may end."""

    def __init__(
        self, moves: Mapping[int, Mapping[int, int]], final: Collection[int], ends: Collection[int] = (END,)
    ) -> None:
        self.moves, self.final, self.ends = moves, final, ends
        self.state = 0
        self.taken: list[int] = []

    def legal(self, state: int) -> set[int]:
        return set(self.moves.get(state, {})) | (set(self.ends) if state in self.final else set())

    def mask(self, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -math.inf)
        for token in self.legal(self.state):
            masked[token] = logits[token]
        return masked

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)
        if token_id in self.ends:
            self.state = -1
        else:
            self.state = self.moves[self.state][token_id]

    @property
    def finished(self) -> bool:
        return not self.moves.get(self.state)


def branching() -> Automaton:
    """Three tokens of {10…29}, then any number of {40…49}, then one of {60…64} that ends it."""
    first: dict[int, dict[int, int]] = {n: dict.fromkeys(range(10, 30), n + 1) for n in range(3)}
    first[3] = {**dict.fromkeys(range(40, 50), 3), **dict.fromkeys(range(60, 65), 4)}
    return Automaton(first, final={3, 4})


def endless() -> Automaton:
    return Automaton({0: dict.fromkeys(range(30, 60), 0)}, final=())


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny("llama"), tokenizer=TOKENIZER, selftest=False) as made:
        yield made


def by_hand(engine: Engine, automaton: Automaton, most: int, bias: Mapping[int, float] = {}) -> tuple[list[int], str]:
    """Greedy decoding over the legal set, on logits of teacher forcing."""
    state, tokens = 0, []
    while len(tokens) < most:
        if not automaton.moves.get(state):
            return tokens, "stop"
        logits = engine.score([QUESTION], [*tokens, 0])[-1].numpy()
        best = max(sorted(automaton.legal(state)), key=lambda t: logits[t] + bias.get(t, 0.0))
        if best in automaton.ends:
            return tokens, "stop"
        tokens.append(best)
        state = automaton.moves[state][best]
    return tokens, "stop" if not automaton.moves.get(state) else "length"


@pytest.mark.parametrize(
    "bias", [{}, {END: 30.0}, {END: -30.0}, {41: 50.0, END: -9.0}, {62: 40.0}, {11: 5.0, 150: 99.0}]
)
def test_greedy_takes_the_best_of_what_is_legal(engine: Engine, bias: dict[int, float]) -> None:
    want, reason = by_hand(engine, branching(), 12, bias)
    constraint = branching()
    done = engine.generate([QUESTION], SamplingParams(max_tokens=12, logit_bias=bias), constraint=constraint)
    assert list(done.token_ids) == want
    assert done.finish_reason == reason
    free = engine.generate([QUESTION], SamplingParams(max_tokens=12, logit_bias=bias, ignore_eos=True))
    assert list(free.token_ids[: len(want)]) != want  # the constraint did make a difference


def test_the_cases_above_end_in_every_way(engine: Engine) -> None:
    ends = [by_hand(engine, branching(), 12, bias) for bias in ({END: 30.0}, {41: 50.0, END: -9.0}, {62: 40.0})]
    assert [(len(tokens), reason) for tokens, reason in ends] == [(3, "stop"), (12, "length"), (4, "stop")]


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 5.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.05},
        {"temperature": 2.0, "min_p": 0.9},
        {"temperature": 0.7, "top_k": 1, "top_p": 0.01, "min_p": 0.99, "repetition_penalty": 1.7},
    ],
    ids=str,
)
def test_every_draw_is_legal_whatever_the_filters(engine: Engine, filters: dict[str, Any]) -> None:
    for seed in range(8):
        constraint = branching()
        params = SamplingParams(max_tokens=9, seed=seed, **filters)
        done = engine.generate([QUESTION], params, constraint=constraint)
        state = 0
        for token in done.token_ids:
            assert token in constraint.legal(state)
            state = constraint.moves[state][token]
        assert done.finish_reason == ("stop" if END in constraint.taken or state == 4 else "length")
        assert done.finish_reason == "length" or state in constraint.final
        assert [t for t in constraint.taken if t != END] == list(done.token_ids)


def test_draws_follow_the_models_distribution_over_the_legal_set() -> None:
    logits = torch.tensor([9.0, 1.0, 0.5, 8.0, 1.7, -0.3, 0.9])
    legal = [1, 2, 4, 5]
    params = SamplingParams(temperature=1.3, top_k=3, logit_bias={5: 1.2}, seed=11)
    biased = {1: 1.0, 2: 0.5, 4: 1.7, 5: 0.9}
    top = sorted(legal, key=lambda t: -biased[t])[:3]
    weights = np.array([math.exp(biased[t] / 1.3) for t in top])
    sampler = Sampler(params, [], Automaton({0: dict.fromkeys(legal, 0)}, ()))
    draws = [sampler.draw(logits).token_id for _ in range(4000)]
    assert set(draws) == set(top)
    shares = np.array([draws.count(t) / len(draws) for t in top])
    assert np.abs(shares - weights / weights.sum()).max() < 0.03


def test_the_penalty_comes_before_the_mask() -> None:
    automaton = Automaton({0: {1: 0, 2: 0}}, final=(), ends=())
    sampler = Sampler(SamplingParams(repetition_penalty=4.0), [1], automaton)
    assert sampler.draw(torch.tensor([9.0, 4.0, 2.0])).token_id == 2  # 4 / 4 is less than 2
    assert sampler.draw(torch.tensor([9.0, 4.0, 2.0])).token_id == 1  # both punished now


def test_a_finished_constraint_ends_without_an_end_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    forward = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda *a, **k: steps.append(a[0]) or forward(*a, **k))
    chain = Automaton({n: {20 + n: n + 1} for n in range(5)}, final=(), ends=())
    done = engine.generate([QUESTION], SamplingParams(max_tokens=50), constraint=chain)
    assert done.token_ids == (20, 21, 22, 23, 24)
    assert done.finish_reason == "stop"
    assert chain.taken == [20, 21, 22, 23, 24]
    assert len(steps) == 1 + 4  # the prompt, and every token but the last
    assert done.text == TOKENIZER.decode([20, 21, 22, 23, 24])
    assert done.stats.generated == 5


@pytest.mark.parametrize(("most", "reason"), [(4, "length"), (5, "stop"), (6, "stop")])
def test_a_text_that_is_complete_at_the_last_token_stopped(engine: Engine, most: int, reason: str) -> None:
    chain = Automaton({n: {20 + n: n + 1} for n in range(5)}, final={5})
    done = engine.generate([QUESTION], SamplingParams(max_tokens=most), constraint=chain)
    assert (len(done.token_ids), done.finish_reason) == (min(most, 5), reason)


def test_without_an_end_the_tokens_run_out(engine: Engine) -> None:
    done = engine.generate([QUESTION], SamplingParams(max_tokens=7), constraint=endless())
    assert (len(done.token_ids), done.finish_reason) == (7, "length")


def test_a_constraint_for_the_empty_text_gives_the_empty_text(engine: Engine) -> None:
    stream = engine.stream([QUESTION], SamplingParams(max_tokens=7), constraint=Automaton({}, final={0}))
    assert list(stream) == []
    assert stream.completion.text == ""
    assert stream.completion.finish_reason == "stop"
    assert stream.completion.stats.prompt == len(QUESTION)


def test_a_stream_gives_what_generate_gives_and_two_do_not_disturb_each_other(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4)
    want = [engine.generate([QUESTION], params, constraint=c).token_ids for c in (branching(), endless())]
    streams = [engine.stream([QUESTION], params, constraint=c) for c in (branching(), endless())]
    got: list[list[int]] = [[], []]
    for pair in itertools.zip_longest(*streams):
        for ids, event in zip(got, pair, strict=True):
            ids += [event.token_id] if event else []
    assert [tuple(ids) for ids in got] == want
    assert want[0] != want[1]


def test_logprobs_are_those_of_the_model_without_the_constraint(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, logit_bias={41: 20.0})
    done = engine.generate([QUESTION], params, constraint=branching())
    raw = torch.log_softmax(engine.score([QUESTION], done.token_ids), dim=-1)
    assert len(done.logprobs) == len(done.token_ids) == 6
    for row, entry in zip(raw, done.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
    assert any(t not in branching().legal(0) for t, _ in done.logprobs[0].top)


def test_stop_strings_and_stop_tokens_still_end_it(engine: Engine) -> None:
    a, b, c = (TOKENIZER.convert_tokens_to_ids(x) for x in "abc")
    chain = Automaton({0: {a: 1}, 1: {b: 2}, 2: {c: 0}}, final=())
    done = engine.generate([QUESTION], SamplingParams(max_tokens=9, stop="bc"), constraint=chain)
    assert (done.text, done.finish_reason) == ("a", "stop")
    ends = Automaton({0: {a: 1}, 1: {b: 2}, 2: {c: 0}}, final={2}, ends=(150,))
    params = SamplingParams(max_tokens=9, stop_token_ids=(150,), logit_bias={150: 99.0})
    done = engine.generate([QUESTION], params, constraint=ends)
    assert (done.text, done.finish_reason) == ("ab", "stop")
    assert ends.taken == [a, b, 150]


class Bytes:
    """A tokenizer of three tokens, one of which ends inside a character."""

    pieces = {5: b"x", 6: b"y\xc3", 7: b"\xa9"}  # noqa: RUF012

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(("ids", "text"), [((5, 6), "xy"), ((5, 6, 7), "xyé")])
def test_text_held_back_comes_once(ids: tuple[int, ...], text: str) -> None:
    chain = Automaton({n: {token: n + 1} for n, token in enumerate(ids)}, final={len(ids)})
    with Engine(tiny("llama"), tokenizer=Bytes(), selftest=False) as engine:
        stream = engine.stream([QUESTION], SamplingParams(max_tokens=9), constraint=chain)
        pieces = [event.text for event in stream]
    assert "".join(pieces) == stream.completion.text == text
    assert stream.completion.token_ids == ids


# -- what cannot work ----------------------------------------------------------------------------------------------


def test_an_automaton_is_a_constraint() -> None:
    assert isinstance(branching(), TokenConstraint)


@pytest.mark.parametrize("wrong", [Automaton, branching, "json", 7, object()])
def test_what_is_no_constraint_is_refused_at_once(engine: Engine, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="no TokenConstraint"):
        engine.stream([QUESTION], constraint=wrong)


def test_going_on_past_the_end_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        engine.stream([QUESTION], SamplingParams(ignore_eos=True), constraint=branching())


def test_a_ban_of_all_that_is_legal_is_told(engine: Engine) -> None:
    only = Automaton({0: {20: 1}, 1: {21: 2}}, final={2})
    params = SamplingParams(logit_bias={21: -math.inf})
    stream = engine.stream([QUESTION], params, constraint=only)
    assert next(stream).token_id == 20
    with pytest.raises(ConfigError, match="logit_bias bans"):
        next(stream)
    assert stream.completion.token_ids == (20,)
    assert stream.completion.finish_reason == "cancelled"


class Broken(Automaton):
    def __init__(self, how: str) -> None:
        super().__init__({0: {20: 0}}, final=())
        self.how = how

    def mask(self, logits: Tensor) -> Tensor:
        if self.how == "short":
            return super().mask(logits)[:100]
        if self.how == "dead":
            return torch.full_like(logits, -math.inf)
        raise RuntimeError("lost its place")


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("short", ConfigError, "keep the shape"),
        ("dead", ConfigError, "allows no token"),
        ("raises", RuntimeError, "lost its place"),
    ],
)
def test_a_broken_constraint_is_told_and_leaves_the_engine_usable(
    engine: Engine, how: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        engine.generate([QUESTION], constraint=Broken(how))
    assert engine.generate([QUESTION], SamplingParams(max_tokens=3), constraint=endless()).stats.generated == 3
