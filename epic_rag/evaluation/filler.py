"""Real prose to hide facts in: the paragraphs of Python's language reference, which every Python brings along."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache
from pydoc_data.topics import topics

__all__ = ["Filler", "prose"]

_BLANK_LINE = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z\"])")
_SHORTEST_PARAGRAPH = 120
# Texts end with a sentence, so long sentences would make their lengths imprecise.
_LONGEST_SENTENCE = 250


@lru_cache(maxsize=1)
def prose() -> tuple[tuple[str, ...], ...]:
    """Paragraphs of running text, each as its sentences; code, grammar and lists are left out."""
    found: dict[tuple[str, ...], None] = {}
    for _, topic in sorted(topics.items()):
        for paragraph in _BLANK_LINE.split(topic):
            running = re.match(r"[A-Z]", paragraph) and not re.search(r"^\s", paragraph, re.MULTILINE)
            text = " ".join(paragraph.split())
            if running and "::=" not in text and len(text) >= _SHORTEST_PARAGRAPH and text.endswith("."):
                sentences = tuple(_SENTENCE_END.split(text))
                if max(map(len, sentences)) <= _LONGEST_SENTENCE:
                    found[sentences] = None
    return tuple(found)


class Filler:
    """Draws prose without repeating a paragraph before all were used.

    Parameters
    ----------
    rng
        Source of all choices.
    count_tokens
        Tokens of a text.
    """

    def __init__(self, rng: random.Random, count_tokens: Callable[[str], int]) -> None:
        self._rng = rng
        self._count = count_tokens
        self._left: list[tuple[str, ...]] = []

    def sentences(self, tokens: int) -> list[str]:
        """Consecutive sentences of ``tokens`` tokens in all, to the nearest sentence; at least one."""
        found: list[str] = []
        used = 0
        while True:
            if not self._left:
                self._left = list(prose())
                self._rng.shuffle(self._left)
            for sentence in self._left.pop():
                size = self._count(sentence)
                if found and used + size - tokens > tokens - used:
                    return found
                found.append(sentence)
                used += size
