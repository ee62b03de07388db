"""Scores of an answer's text, and distances between two models' predictions.

Text scores follow LongBench's definitions (Bai et al., ACL 2024, ``LongBench/metrics.py``), ROUGE-L included, which
there is the summary-level score of the PyPI package ``rouge`` 1.0.1. Predictions are compared in float64.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "SCORERS",
    "contains",
    "exact_match",
    "kl_divergence",
    "log_softmax",
    "negative_log_likelihood",
    "normalize",
    "rouge_l",
    "score_answer",
    "token_f1",
    "top1_agreement",
]

Floats = NDArray[np.float64]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORDS = re.compile(r"\w+")


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are equal once normalised, else 0."""
    return float(normalize(prediction) == normalize(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised words, counted as often as they occur."""
    found, wanted = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def contains(prediction: str, answer: str) -> float:
    """1 if the answer's words stand behind each other in the prediction, else 0; case and punctuation do not count.

    Compares whole words: ``"48"`` is not found in ``"485"``.
    """
    found, wanted = _WORDS.findall(prediction.lower()), _WORDS.findall(answer.lower())
    if not wanted:
        return 0.0
    return float(any(found[at : at + len(wanted)] == wanted for at in range(len(found) - len(wanted) + 1)))


def rouge_l(prediction: str, answer: str) -> float:
    """Summary-level ROUGE-L F as LongBench reports it (Lin 2004, section 3.2, with sets of words).

    Sentences end at full stops, case and other punctuation count. The longest common subsequences of every pair of
    sentences are united and compared with the sets of words on either side. 0 where a side is empty.
    """
    found, wanted = _sentences(prediction), _sentences(answer)
    found_words, wanted_words = set().union(*found), set().union(*wanted)
    if not found_words or not wanted_words:
        return 0.0
    common: set[str] = set()
    for reference in wanted:
        for sentence in found:
            common.update(_common_subsequence(reference, sentence))
    precision, recall = len(common) / len(found_words), len(common) / len(wanted_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # As in ``rouge``, blanks between two full stops are a sentence of one empty word, which counts.
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """One longest common subsequence; among equals the one that ``rouge`` takes."""
    table = np.zeros((len(a) + 1, len(b) + 1), np.int64)
    for i, word in enumerate(a, start=1):
        for j, other in enumerate(b, start=1):
            table[i, j] = table[i - 1, j - 1] + 1 if word == other else max(table[i - 1, j], table[i, j - 1])
    words = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1, j] > table[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return words[::-1]


SCORERS: dict[str, Callable[[str, str], float]] = {
    "exact": exact_match,
    "f1": token_f1,
    "rougeL": rouge_l,
    "contains": contains,
}
"""Scores of a prediction against one answer, 0 to 1, by name."""


def score_answer(scorer: str, prediction: str, answers: Sequence[str]) -> float:
    """The best score over all accepted answers; 0 without answers."""
    return max((SCORERS[scorer](prediction, answer) for answer in answers), default=0.0)


def log_softmax(logits: ArrayLike) -> Floats:
    """Log-probabilities along the last axis, in float64."""
    values = np.asarray(logits, dtype=np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def kl_divergence(reference: ArrayLike, other: ArrayLike) -> Floats:
    """KL(reference ‖ other) per row, in nats.

    Parameters
    ----------
    reference, other
        Logits, ``(tokens, vocab)``.

    Returns
    -------
    ndarray
        ``(tokens,)`` float64, at least 0.
    """
    p, q = log_softmax(reference), log_softmax(other)
    # A banned token (−inf) has no probability and adds nothing; −inf − −inf would be NaN.
    terms = np.exp(p) * np.where(np.isneginf(p), 0.0, np.where(np.isneginf(p), 0.0, p) - q)
    return np.maximum(terms.sum(axis=-1), 0.0)


def top1_agreement(reference: ArrayLike, other: ArrayLike) -> NDArray[np.bool_]:
    """Per row, whether both hold the same token most likely."""
    agree: NDArray[np.bool_] = np.asarray(reference).argmax(axis=-1) == np.asarray(other).argmax(axis=-1)
    return agree


def negative_log_likelihood(logits: ArrayLike, tokens: Sequence[int]) -> Floats:
    """Negative log-likelihood of each token under the row of logits that predicts it, in nats, ``(tokens,)``."""
    logp: Any = log_softmax(logits)
    result: Floats = -logp[np.arange(len(tokens)), np.asarray(tokens)]
    return result
