"""The sampler against a float64 reimplementation, and text that grows by whole characters up to a stop string."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from epic_engine import ConfigError, SamplingParams
from epic_engine.detokenizer import Detokenizer
from epic_engine.sampler import Sampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.tokenizers_for_tests import TEXTS, TOKENIZERS
from tests.engine.tokenizers_for_tests import encode as _tokens

LOGITS = [2.0, -1.0, 0.5, 3.1, -0.2, 2.9, 0.0, 1.7, -4.0, 2.2]
SEEN = (3, 4, 8)  # tokens of the prompt; one with a negative logit


def _scores(params: SamplingParams) -> np.ndarray:
    scores = np.array(LOGITS, dtype=np.float64)
    if params.repetition_penalty != 1:
        for token in SEEN:  # Keskar et al. 2019, section 4.1, with the usual treatment of negative logits
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def _distribution(params: SamplingParams) -> np.ndarray:
    """What the next token should be drawn from, written token by token."""
    scores = _scores(params) / params.temperature
    allowed = sorted(range(len(scores)), key=lambda i: -scores[i])
    if params.top_k:
        allowed = allowed[: params.top_k]
    weights = {i: math.exp(scores[i]) for i in allowed}
    total = sum(weights.values())
    if params.top_p < 1:
        kept, reached = [], 0.0
        for i in allowed:
            kept.append(i)
            reached += weights[i] / total
            if reached >= params.top_p:
                break
        allowed = kept
    if params.min_p:
        best = max(weights.values())
        allowed = [i for i in allowed if weights[i] >= params.min_p * best]
    result = np.zeros(len(scores))
    for i in allowed:
        result[i] = weights[i]
    return result / result.sum()


CASES = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 50},
    {"top_p": 0.75},
    {"top_p": 0.1},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"logit_bias": {8: 7.0, 3: -100.0}},
    {
        "temperature": 1.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "logit_bias": {1: 2.5},
    },
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_follow_the_distribution(case: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **case})
    want = _distribution(params)
    draws = 3000
    counts = np.zeros(len(LOGITS))
    sampler = Sampler(params, SEEN)
    start = sampler._seen
    for _ in range(draws):
        sampler._seen = start  # each draw is the first after the prompt
        counts[sampler.draw(torch.tensor(LOGITS)).token_id] += 1
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(want))
    # Every token that should come up at least twenty times does.
    assert set(np.flatnonzero(counts)) >= set(np.flatnonzero(want * draws > 20))
    often = want * draws >= 5
    statistic = (((counts - want * draws) ** 2)[often] / (want * draws)[often]).sum()
    freedom = max(int(often.sum()) - 1, 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_the_statistics_would_notice_another_temperature() -> None:
    a, b = (_distribution(SamplingParams(temperature=t)) for t in (1.0, 1.2))
    assert 3000 * ((a - b) ** 2 / b).sum() > 40


@pytest.mark.parametrize("case", CASES, ids=str)
def test_temperature_0_takes_the_most_likely(case: dict[str, Any]) -> None:
    params = SamplingParams(**{**case, "temperature": 0.0})
    assert Sampler(params, SEEN).draw(torch.tensor(LOGITS)).token_id == int(_scores(params).argmax())


def test_a_tiny_temperature_is_nearly_greedy_and_a_ban_holds() -> None:
    params = SamplingParams(temperature=1e-45, logit_bias={3: -math.inf})
    assert Sampler(params, []).draw(torch.tensor(LOGITS)).token_id == 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-320),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1.0, min_p=1 - 1e-16, top_p=5e-324),
    ],
    ids=str,
)
def test_settings_that_float32_takes_for_nothing_leave_the_most_likely(params: SamplingParams) -> None:
    assert Sampler(params, []).draw(torch.tensor(LOGITS)).token_id == int(np.argmax(LOGITS))


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
@pytest.mark.parametrize("sign", [1, -1])
def test_penalties_beyond_float32_still_leave_something_to_draw(penalty: float, sign: int) -> None:
    params = SamplingParams(temperature=0.01, repetition_penalty=penalty, seed=0)
    logits = [sign * (1.0 + n) for n in range(len(LOGITS))]
    assert (Sampler(params, [0, 1]).draw(torch.tensor(logits)).token_id in (0, 1)) == (penalty < 1)


@pytest.mark.parametrize(("logits", "drawn"), [([1.0, 0.8], 1), ([-1.0, -1.5], 1), ([-1.0, -2.5], 0)])
def test_the_penalty_lowers_negative_logits_too(logits: list[float], drawn: int) -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0])
    assert sampler.draw(torch.tensor(logits)).token_id == drawn


def test_the_penalty_counts_the_answer_too() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=10.0), [])
    drawn = [sampler.draw(torch.tensor(LOGITS)).token_id for _ in range(4)]
    assert drawn == [3, 5, 9, 0]  # in order of their logits, for each is punished once drawn


def test_the_same_seed_gives_the_same_tokens() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed), [])
        return [sampler.draw(torch.tensor(LOGITS)).token_id for _ in range(30)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_a_seed_is_its_own_and_not_torchs() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Sampler(SamplingParams(temperature=1.0), []).draw(torch.tensor(LOGITS))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("top", [0, 3, 50])
def test_logprobs_are_those_of_the_raw_logits(top: int) -> None:
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias={8: 50.0}, logprobs=top)
    got = Sampler(params, SEEN).draw(torch.tensor(LOGITS))
    logits = np.array(LOGITS)
    want = logits - np.log(np.exp(logits).sum())
    assert got.token_id == 8
    assert got.logprob == pytest.approx(want[8], abs=1e-5)
    order = np.argsort(-want)[:top]
    assert [t for t, _ in got.top] == order.tolist()
    assert [p for _, p in got.top] == pytest.approx(want[order].tolist(), abs=1e-5)


def test_drawing_leaves_the_logits_alone() -> None:
    logits = torch.tensor(LOGITS)
    Sampler(SamplingParams(temperature=0.3, repetition_penalty=2.0, logit_bias={8: 50.0}), SEEN).draw(logits)
    assert logits.tolist() == torch.tensor(LOGITS).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logprobs", -1),
        ("stop", ("a", "")),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})


def test_settings_are_frozen_copies() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop="end", stop_token_ids=[4], logit_bias=bias)  # type: ignore[arg-type]
    bias[3] = 9.0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4,)
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[3] = 2.0  # type: ignore[index]


# -- text ------------------------------------------------------------------------------------------------------


def _pieces(name: str, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(TOKENIZERS[name], stop)
    pieces = [text.push(t) for t in ids]
    pieces.append(text.finish())
    return pieces, text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_make_up_the_text(name: str, text: str) -> None:
    ids = _tokens(name, text)
    pieces, whole = _pieces(name, ids)
    assert "".join(pieces) == whole.text == text
    assert TOKENIZERS[name].decode(ids) == text
    assert all("\ufffd" not in piece for piece in pieces)
    if not text.isascii():
        assert len([p for p in pieces if p]) < len(ids)  # some characters came in several tokens


def test_text_comes_as_soon_as_it_is_certain() -> None:
    pieces, _ = _pieces("metaspace", _tokens("metaspace", "Hello world, Hello."))
    assert pieces == ["Hello", " world", ",", " Hello", ".", ""]
    pieces, _ = _pieces("byte-level", _tokens("byte-level", "é!"))
    assert pieces == ["", "é", "!", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_half_a_character_at_the_end_is_dropped(name: str) -> None:
    pieces, _ = _pieces(name, _tokens(name, "Hello 🎉")[:-1])
    assert "".join(pieces) == "Hello "


@pytest.mark.parametrize("name", TOKENIZERS)
def test_broken_bytes_do_not_stop_what_follows(name: str) -> None:
    broken = [_tokens(name, "🎉")[-1]]
    ids = _tokens(name, "Hello") + broken + _tokens(name, " world")
    pieces, _ = _pieces(name, ids)
    assert "".join(pieces) == TOKENIZERS[name].decode(ids)
    assert "\ufffd" in "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_no_text_and_cost_no_space(name: str) -> None:
    tool = TOKENIZERS[name].convert_tokens_to_ids("<tool>")
    hello, world = _tokens(name, "Hello"), _tokens(name, "Hello world")[len(_tokens(name, "Hello")) :]
    for ids in ([*hello, tool, *world], [*hello, tool, tool, *world], [*hello, *world, tool]):
        pieces, _ = _pieces(name, ids)
        assert "".join(pieces) == TOKENIZERS[name].decode(ids, skip_special_tokens=True) == "Hello world"


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = Detokenizer(None)
    assert text.push(3) == text.finish() == text.text == ""


# -- stop strings ----------------------------------------------------------------------------------------------


def _check_stop(name: str, text: str, stop: tuple[str, ...]) -> None:
    ids = _tokens(name, text)
    detokenizer = Detokenizer(TOKENIZERS[name], stop)
    emitted, used = "", 0
    for token in ids:
        emitted += detokenizer.push(token)
        used += 1
        if detokenizer.stopped:
            break
        assert not any(s in emitted for s in stop)
    emitted += detokenizer.finish()
    # The one that is complete first counts.
    _, cut = min(((text.index(s) + len(s), text.index(s)) for s in stop if s in text), default=(0, len(text)))
    assert emitted == detokenizer.text == text[:cut]
    assert detokenizer.stopped == (cut < len(text))
    if detokenizer.stopped:  # not a token later than needed
        assert not any(s in TOKENIZERS[name].decode(ids[: used - 1]) for s in stop)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Hello world, STOP here", ("STOP",)),
        ("STOP here", ("STOP",)),  # at the very beginning
        ("Hello", ("Hello",)),
        ("Hello world", ("o w",)),  # over a border of tokens
        ("STSTOP", ("STOP",)),  # begins twice
        ("ST and STO but never the word", ("STOP",)),
        ("one two", ("two", "one")),  # the first in the text wins, not the first in the list
        ("Hello world", ("world!", "wor")),
        ("ends with ST", ("STOP",)),
        ("中文和日本", ("和日",)),
        ("a🎉b", ("🎉",)),
        ("lines\n\nafter", ("\n\n",)),
    ],
)
def test_text_ends_before_the_stop_string(name: str, text: str, stop: tuple[str, ...]) -> None:
    _check_stop(name, text, stop)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.text(alphabet="ab和🎉 ", min_size=1, max_size=14).filter(lambda t: not t.startswith(" ")),
    st.lists(st.text(alphabet="ab和🎉 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_is_ever_emitted(name: str, text: str, stop: list[str]) -> None:
    _check_stop(name, text, tuple(stop))


def test_after_a_stop_nothing_more_comes() -> None:
    text = Detokenizer(TOKENIZERS["byte-level"], ("lo",))
    for token in _tokens("byte-level", "Hello world"):
        text.push(token)
    assert (text.text, text.stopped, text.push(40), text.finish()) == ("Hel", True, "", "")


def test_a_known_best_token_is_taken_where_it_is_all_that_is_wanted() -> None:
    """Logits that are still on a GPU are then not fetched."""
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert Sampler(SamplingParams(), ()).draw(logits, best=1).token_id == 1
    assert Sampler(SamplingParams(), ()).draw(torch.empty(0, device="meta"), best=7).token_id == 7
    for params in (
        SamplingParams(logit_bias={2: 9.0}),
        SamplingParams(repetition_penalty=9.0),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=1e-3),
    ):
        drawn = Sampler(params, (1,)).draw(logits, best=0)
        assert drawn.token_id in (1, 2)
