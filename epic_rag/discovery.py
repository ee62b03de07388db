"""Finds the texts of compiled chunks in any prompt: frameworks flatten documents, and ids are gone by then.

A chunk is known by a few of its characters (its *anchor*, chosen where it is rare) and proven by all of them: a
candidate counts only if the prompt holds the chunk's whole text. White space at a chunk's ends does not belong to it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Match", "TextIndex", "best_cover"]

# Texts begin to be told apart by so many characters; shorter ones have an index of their own.
_ANCHOR = 32
_SHORT_ANCHOR = 8
# Places of a text that are tried for its anchor: headers repeat across a file's chunks, bodies do not.
_TRIED = 6
_WORD_START = re.compile(r"(?<!\w)\w")


@dataclass(frozen=True)
class Match:
    """A chunk's text in a prompt.

    Attributes
    ----------
    start, stop
        Where it stands.
    name
        As it was added.
    """

    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class _Known:
    text_digest: bytes
    length: int
    anchor: str
    offset: int
    ending: str


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class TextIndex:
    """Chunks' texts, to be found in prompts. Any number of threads may use one.

    Texts are kept as digests. A text of less than eight characters, or without a word, cannot be found.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._by_anchor: dict[int, dict[str, list[str]]] = {_ANCHOR: {}, _SHORT_ANCHOR: {}}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def add(self, name: str, text: str) -> bool:
        """Know a text from now on, in place of an earlier one of the same name.

        Parameters
        ----------
        name
            Names the chunk.
        text
            Its text.

        Returns
        -------
        bool
            Whether it can be found in prompts.
        """
        text = text.strip()
        digest = _digest(text)
        with self._lock:
            known = self._known.get(name)
            if known is not None and known.text_digest == digest:
                return True
            self._forget(name)
            starts = [m.start() for m in _WORD_START.finditer(text)]
            fitting = {width: [at for at in starts if at + width <= len(text)] for width in self._by_anchor}
            width = next((width for width in fitting if fitting[width]), None)  # the long one if it fits anywhere
            if width is None:
                return False
            table, places = self._by_anchor[width], _spread(fitting[width])
            offset = min(places, key=lambda place: len(table.get(text[place : place + width], ())))
            anchor = text[offset : offset + width]
            table.setdefault(anchor, []).append(name)
            self._known[name] = _Known(digest, len(text), anchor, offset, text[-_ANCHOR:])
        return True

    def discard(self, names: Iterable[str]) -> None:
        """Forget texts; unknown names are fine."""
        with self._lock:
            for name in names:
                self._forget(name)

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is None:
            return
        table = self._by_anchor[len(known.anchor)]
        table[known.anchor].remove(name)
        if not table[known.anchor]:
            del table[known.anchor]

    def find(self, prompt: str) -> list[Match]:
        """Where known texts stand in a prompt, in order and without overlap.

        Of texts that overlap, those are taken that cover most of the prompt. Of copies, the one added first counts.

        Parameters
        ----------
        prompt
            Any text.
        """
        return best_cover(self.matches(prompt))

    def matches(self, prompt: str) -> list[Match]:
        """Wherever known texts stand in a prompt, however they overlap."""
        with self._lock:
            return list(self._candidates(prompt))

    def _candidates(self, prompt: str) -> Iterator[Match]:
        starts = [match.start() for match in _WORD_START.finditer(prompt)]
        for width, table in self._by_anchor.items():
            if not table:
                continue
            for at in starts:
                for name in table.get(prompt[at : at + width], ()):
                    known = self._known[name]
                    start, stop = at - known.offset, at - known.offset + known.length
                    # The ending is compared first: of a corpus with many boilerplate sentences, few texts get further.
                    if start < 0 or not prompt.startswith(known.ending, stop - len(known.ending)):
                        continue
                    if _digest(prompt[start:stop]) == known.text_digest:
                        yield Match(start, stop, name)


def _spread(places: list[int]) -> list[int]:
    """At most so many of the places as are tried, from all over the text, the middle ones first."""
    if len(places) <= _TRIED:
        return places
    step = len(places) / _TRIED
    chosen = [places[int((i + 0.5) * step)] for i in range(_TRIED)]
    return sorted(chosen, key=lambda place: abs(place - places[len(places) // 2]))


def best_cover(found: Sequence[Match]) -> list[Match]:
    """The matches without overlap that cover most characters, in order; of several in one place the first counts."""
    first = {(m.start, m.stop): m for m in reversed(found)}
    matches = sorted(first.values(), key=lambda m: (m.stop, m.start))
    stops = [m.stop for m in matches]
    best = [0]
    before: list[int] = []
    for index, match in enumerate(matches):
        before.append(bisect_right(stops, match.start, 0, index))
        best.append(max(best[index], best[before[index]] + match.stop - match.start))
    chosen: list[Match] = []
    index = len(matches)
    while index:
        if best[index] == best[index - 1]:
            index -= 1
        else:
            chosen.append(matches[index - 1])
            index = before[index - 1]
    return chosen[::-1]
