"""Choosing neighbours, against a search through all pairs of sentences and all inner products."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from epic_rag.evaluation.filler import prose
from epic_rag.neighbours import FormIndex, Pool, choose_neighbours
from tests.rag.stack import BagOfWords


def pairs(sentence: str) -> set[tuple[str, str]]:
    words = re.findall(r"\w+", sentence.lower())
    return set(pairwise(words)) if len(words) > 2 else set()


def slow_best(text: str, texts: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for other in texts:
        for own in re.split(r"(?<=[.!?])\s+|\n+", text):
            for against in re.split(r"(?<=[.!?])\s+|\n+", other):
                a, b = pairs(own), pairs(against)
                if other == text or not a or not b:
                    continue
                alike = len(a & b) / len(a | b)
                if alike >= 0.22 and len(a & b) < 0.95 * min(len(a), len(b)):
                    found[other] = max(found.get(other, 0), alike)
    return found


words = st.sampled_from(["the", "passcode", "of", "Oslo", "Lisbon", "office", "is", "4821", "1730", "red"])
sentences = st.lists(words, min_size=1, max_size=8).map(lambda w: " ".join(w) + ".")
chunks = st.lists(st.lists(sentences, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=8, unique=True)


@settings(max_examples=200, deadline=None)
@given(chunks, st.data())
def test_the_index_finds_what_a_search_through_all_pairs_finds(texts: list[str], data: st.DataObject) -> None:
    index = FormIndex(data.draw(chunks))
    index.keep(texts)  # what was held before must not be found
    for text in texts:
        want = slow_best(text, texts)
        got = index.nearest(text)
        assert set(got) == set(want)
        assert [want[t] for t in got] == sorted(want.values(), reverse=True)


def facts(places: list[str], seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    paragraphs = [" ".join(p) for p in rng.sample(list(prose()), len(places))]
    return [
        f"{p} The passcode of the {place} office is {rng.randrange(10000)}."
        for p, place in zip(paragraphs, places, strict=True)
    ]


def embed(texts: list[str]) -> np.ndarray:
    return BagOfWords().embed(texts)


def choose(texts: list[str], pool: list[str], count: int) -> list[list[str]]:
    """Neighbours as texts, the first choice first."""
    made = Pool(pool, embed(pool), lambda places: [tuple(pool[i].encode()) for i in places])
    ids = [tuple(t.encode()) for t in texts]
    return [[bytes(n).decode() for n in ns][::-1] for ns in choose_neighbours(ids, texts, embed(texts), made, count)]


def test_a_fact_meets_another_of_its_form_first_and_then_what_is_near_in_meaning() -> None:
    asked = facts(["Oslo", "Lisbon", "Turin", "Cork"])
    noise = [" ".join(p) for p in prose()[:60]]
    pool = noise + asked
    for text, (first, second) in zip(asked, choose(asked, pool, 2), strict=True):
        assert first in asked
        assert first != text
        scores = embed([text])[0] @ embed(pool).T
        assert second == max((p for p in pool if p not in (text, first)), key=lambda p: scores[pool.index(p)])


def test_prose_meets_what_is_near_in_meaning() -> None:
    texts = ["The ferry sails at noon.", "Noon is when a ferry sails, mostly.", "Bakers rise early; bread needs hours."]
    assert choose(texts[:1], texts, 2) == [[texts[1], texts[2]]]


def test_copies_and_cut_sentences_are_no_neighbours() -> None:
    text = "The crane lifts four tonnes on good days. Its driver is Olaf."
    shifted = "lifts four tonnes on good days. Its driver is Olaf. He sleeps late."
    other = "The crane lifts nine tonnes on good days. Nobody drives it."
    assert choose([text], [text, text, shifted, other], 1) == [[other]]
    assert choose([text], [text, text], 3) == [[]]


def test_the_order_of_the_pool_does_not_matter() -> None:
    pool = [*facts(["Oslo", "Lisbon", "Turin", "Cork", "Porto"]), "Bread.", "Bread!", "Rye bread, bread"]
    want = choose(pool, pool, 2)
    for seed in range(5):
        shuffled = random.Random(seed).sample(pool, len(pool))
        assert choose(pool, shuffled, 2) == want


def test_a_form_of_thousands_is_found_without_looking_at_them_all() -> None:
    texts = [f"The price for lot {n} in hall {n % 7} is {3 * n} crowns." for n in range(3000)]
    index = FormIndex(texts)
    found = index.nearest(texts[17])
    assert 1 <= len(found) <= 64 * 12
    assert all(t.startswith("The price for lot") for t in found)
