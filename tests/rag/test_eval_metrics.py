"""Scores and distances against values worked out by hand and against brute force."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from epic_rag.evaluation.intervals import bootstrap_difference, bootstrap_mean, wilson
from epic_rag.evaluation.metrics import (
    SCORERS,
    contains,
    exact_match,
    kl_divergence,
    negative_log_likelihood,
    normalize,
    rouge_l,
    score_answer,
    token_f1,
    top1_agreement,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's, a hat!", "cats hat"),
        ("An apple\nA day", "apple day"),
        ("theatre", "theatre"),
        ("7:40", "740"),
        ("the", ""),
    ],
)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "f1"),
    [
        ("The cat sat", "cat sat down", 0, 0.8),  # precision 1, recall 2/3
        ("b b c", "b c c", 0, 2 / 3),  # repeated words count as often as both have them
        ("Paris.", "paris", 1, 1),
        ("London", "Paris", 0, 0),
        ("", "Paris", 0, 0),
    ],
)
def test_exact_match_and_f1_by_hand(prediction: str, answer: str, exact: float, f1: float) -> None:
    assert exact_match(prediction, answer) == exact
    assert token_f1(prediction, answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "answer", "f"),
    [
        ("a b c d", "a c d e", 0.75),
        # Lin (2004), section 3.2: the union of both sentences' subsequences is w1 w2 w3 w5, of 5 and of 8 words.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 0.8 * 0.5 / 1.3),
        ("A b", "a b", 0.5),  # case counts
        ("x x x", "x", 1.0),  # sets of words
        ("", "a", 0.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l_by_hand(prediction: str, answer: str, f: float) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(f, abs=1e-7)


def test_f1_and_rouge_against_brute_force() -> None:
    rng = random.Random(3)
    for _ in range(60):
        a, b = (rng.sample("pqrstuvw", rng.randint(1, 7)) for _ in range(2))
        longest = max(
            size
            for size in range(len(a) + 1)
            if any(list(c) == d for c in itertools.combinations(a, size) for d in _ordered_parts(b, size))
        )
        p, r = longest / len(a), longest / len(b)
        expected = 2 * p * r / (p + r) if longest else 0.0
        assert rouge_l(" ".join(a), " ".join(b)) == pytest.approx(expected, abs=1e-7)

        a, b = ([rng.choice("pqr") for _ in range(rng.randint(1, 6))] for _ in range(2))
        left, hits = list(b), 0
        for word in a:
            if word in left:
                left.remove(word)
                hits += 1
        assert token_f1(" ".join(a), " ".join(b)) == pytest.approx(2 * hits / (len(a) + len(b)))


def _ordered_parts(words: list[str], size: int) -> list[list[str]]:
    return [list(c) for c in itertools.combinations(words, size)]


def test_contains_wants_whole_words() -> None:
    assert contains("It is 2857, I think.", "2857")
    assert contains("It opens at 7:40 in the morning", "7:40")
    assert contains("new york city", "New York")
    assert not contains("It is 28571.", "2857")
    assert not contains("New and York", "New York")
    assert not contains("anything", "")


def test_the_best_answer_counts() -> None:
    assert score_answer("exact", "Rome", ["Roma", "rome"]) == 1
    assert score_answer("f1", "Rome", []) == 0
    assert set(SCORERS) == {"exact", "f1", "rougeL", "contains"}


def test_distances_against_brute_force() -> None:
    rng = np.random.default_rng(5)
    p, q = (rng.normal(scale=4, size=(3, 11)).astype(np.float32) for _ in range(2))
    tokens = [4, 0, 10]

    def probabilities(row: np.ndarray) -> list[float]:
        powers = [math.exp(float(x)) for x in row]
        return [x / math.fsum(powers) for x in powers]

    for i in range(3):
        a, b = probabilities(p[i]), probabilities(q[i])
        assert kl_divergence(p, q)[i] == pytest.approx(
            math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True)), rel=1e-6
        )
        assert negative_log_likelihood(q, tokens)[i] == pytest.approx(-math.log(b[tokens[i]]), rel=1e-6)
        assert top1_agreement(p, q)[i] == (a.index(max(a)) == b.index(max(b)))
    assert kl_divergence(p, p).tolist() == [0, 0, 0]
    # By hand: KL((1/2, 1/2) ‖ (3/4, 1/4)) = ½ ln(2/3) + ½ ln 2.
    assert kl_divergence([[0, 0]], [[math.log(3), 0]])[0] == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_distances_of_extreme_logits() -> None:
    assert kl_divergence([[1e4, 0.0]], [[0.0, 1e4]])[0] == pytest.approx(1e4)
    assert kl_divergence([[0.0, -np.inf]], [[0.0, -np.inf]])[0] == 0
    assert kl_divergence([[0.0, -np.inf]], [[0.0, 0.0]])[0] == pytest.approx(math.log(2))
    assert kl_divergence([[0.0, 0.0]], [[0.0, -np.inf]])[0] == np.inf


def test_wilson_known_values() -> None:
    eight = wilson(8, 10)
    assert (eight.mean, eight.low, eight.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert (wilson(0, 10).low, wilson(0, 10).high) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson(10, 10).high == pytest.approx(1)
    assert math.isnan(wilson(0, 0).mean)


def test_bootstrap_is_seeded_and_as_wide_as_theory_says() -> None:
    data = np.random.default_rng(0).normal(size=400)
    first, again = bootstrap_mean(data, seed=1), bootstrap_mean(data, seed=1)
    assert first == again
    assert first.mean == pytest.approx(data.mean())
    assert first.high - first.low == pytest.approx(2 * 1.96 * data.std() / math.sqrt(400), rel=0.1)
    # All resamples of two values: 0, ½, ½, 1.
    assert bootstrap_mean([0, 1]).low == 0
    assert bootstrap_mean([0, 1]).high == 1
    assert bootstrap_mean([2.0]).low == bootstrap_mean([2.0]).high == 2
    assert bootstrap_mean([1.0, math.nan]).mean == 1
    assert math.isnan(bootstrap_mean([]).mean)


def test_variations_of_an_example_are_no_independent_evidence() -> None:
    data = np.random.default_rng(1).normal(size=30)
    clusters = [str(i) for i in range(30) for _ in range(4)]
    once, often = bootstrap_mean(data), bootstrap_mean(np.repeat(data, 4), clusters=clusters)
    assert (often.mean, often.low, often.high) == pytest.approx((once.mean, once.low, once.high))


def test_paired_difference_is_narrower_than_its_parts() -> None:
    base = np.random.default_rng(2).normal(size=50)
    difference = bootstrap_difference(base + 0.1, base)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1))
