"""Which chunks a chunk meets while it is compiled: those that it is most likely to be confused with.

Facts of one form in separately compiled chunks collide: each of "the passcode of the Oslo office is 4821" and "the
passcode of the Lisbon office is 1730" looks like the only one of its kind. So a chunk's first neighbour is the one that
holds the sentence most like one of its own, word for word; where there is no such sentence, and for every second
neighbour, it is the one that is nearest in meaning as a whole.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from epic_rag.retrieval import Vectors

__all__ = ["FormIndex", "Pool", "choose_neighbours"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"\w+")
# Pairs of words that two sentences share, of all that they have (Jaccard). In 356 paragraphs of technical prose the
# best match of three in four stays below 0.2; facts of one form reach 0.25 with four words in common.
_ALIKE = 0.22
# A sentence whose pairs are nearly all in another one is that sentence, perhaps cut, and no other fact.
_SAME = 0.95
# Sentences remembered per pair of words: of a form that stands in thousands of chunks, any will do.
_REMEMBERED = 64
# Rows of the similarity matrix made at a time.
_BLOCK = 1024
# The nearest chunks of a chunk are its own copies; so many are looked past.
_COPIES = 8

Shape = frozenset[tuple[int, int]]


class FormIndex:
    """Finds the texts that hold a sentence of the same form as a given text's.

    Parameters
    ----------
    texts
        What is searched.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._words: dict[str, int] = {}
        self._shapes: dict[str, list[Shape]] = {}
        self._where: dict[tuple[int, int], deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self.keep(texts)

    def keep(self, texts: Iterable[str]) -> None:
        """Hold exactly these texts from now on; those that are held already cost nothing."""
        wanted = dict.fromkeys(texts)
        for text in self._shapes.keys() - wanted.keys():
            del self._shapes[text]
        for text in wanted:
            if text not in self._shapes:
                self._shapes[text] = self._of(text)
                for number, shape in enumerate(self._shapes[text]):
                    for pair in shape:
                        self._where[pair].append((text, number))

    def _of(self, text: str) -> list[Shape]:
        """Pairs of consecutive words of each sentence."""
        shapes = []
        for sentence in _SENTENCE_END.split(text):
            words = [self._words.setdefault(word, len(self._words)) for word in _WORD.findall(sentence.lower())]
            if len(words) > 2:
                shapes.append(frozenset(pairwise(words)))
        return shapes

    def nearest(self, text: str) -> list[str]:
        """Texts with a sentence of the same form, best first; copies of the text and of its sentences do not count."""
        best: dict[str, float] = {}
        for shape in self._shapes.get(text) or self._of(text):
            for other, number in {place for pair in shape for place in self._where.get(pair, ())}:
                if other == text or other not in self._shapes:
                    continue
                against = self._shapes[other][number]
                shared = len(shape & against)
                alike = shared / len(shape | against)
                if alike >= _ALIKE and shared < _SAME * min(len(shape), len(against)):
                    best[other] = max(best.get(other, 0.0), alike)
        return sorted(best, key=lambda other: (-best[other], other))


@dataclass(frozen=True)
class Pool:
    """Chunks that may become neighbours.

    Attributes
    ----------
    texts, vectors
        Their texts, and unit vectors ``(n, dim)``.
    resolve
        Token ids of the chunks at the given places; asked for candidates only.
    forms
        Index of the texts.
    """

    texts: Sequence[str]
    vectors: Vectors
    resolve: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    forms: FormIndex = field(default_factory=FormIndex)

    def __post_init__(self) -> None:
        """Let the index hold these texts."""
        self.forms.keep(self.texts)

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each text stands; the first place of copies."""
        return {text: place for place, text in reversed(list(enumerate(self.texts)))}


def choose_neighbours(
    ids: Sequence[Sequence[int]], texts: Sequence[str], vectors: Vectors, pool: Pool, count: int
) -> list[list[tuple[int, ...]]]:
    """For each chunk, the chunks of a pool that it should meet, without itself and its copies.

    Parameters
    ----------
    ids, texts, vectors
        Token ids, texts and unit vectors ``(len(ids), dim)`` of the chunks.
    pool
        Chunks that may become neighbours; may hold the chunks themselves.
    count
        Neighbours per chunk.

    Returns
    -------
    list of list of tuple of int
        Token ids of the neighbours; the first choice last, next to the chunk.
    """
    by_form = [[pool.places[t] for t in pool.forms.nearest(text)[: count + _COPIES]] for text in texts]
    by_meaning = _by_meaning(vectors, pool, count + _COPIES)
    wanted = sorted({place for order in chain(by_form, by_meaning) for place in order})
    tokens = {place: tuple(t) for place, t in zip(wanted, pool.resolve(wanted), strict=True)}
    found: list[list[tuple[int, ...]]] = []
    for own, form, meaning in zip(ids, by_form, by_meaning, strict=True):
        mine = tuple(own)
        others: dict[tuple[int, ...], None] = {}
        sources = [iter([tokens[p] for p in order if tokens[p] != mine]) for order in (form, meaning) if order]
        while sources and len(others) < count:
            source = sources.pop(0)
            choice = next((t for t in source if t not in others), None)
            if choice is not None:
                others[choice] = None
                sources.append(source)
        found.append(list(others)[:count][::-1])
    return found


def _by_meaning(vectors: Vectors, pool: Pool, width: int) -> list[list[int]]:
    """Places of the nearest chunks, nearest first; equally near ones by their texts, so that order does not matter."""
    size = len(pool.vectors)
    if not pool.vectors.shape[-1]:  # no embeddings
        return [[] for _ in range(len(vectors))]
    width = min(size, width)
    ranked: list[list[int]] = []
    for start in range(0, len(vectors), _BLOCK):
        scores = np.asarray(vectors[start : start + _BLOCK]) @ np.asarray(pool.vectors).T
        for row in scores.round(6):
            near = np.argpartition(-row, width - 1)[:width] if width < size else np.arange(size)
            ranked.append(sorted(near.tolist(), key=lambda place: (-row[place], pool.texts[place])))
    return ranked
