"""Placeholders that stand in for texts while a chat template is rendered."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["DOCUMENTS_SLOT", "Piece", "Slots", "spells_slot"]

# Alphanumeric, so that templates that trim or inspect the content leave it whole, and never looked up in a text,
# only in what the template made of it. The quotation mark in some shows how often the template made JSON of the
# text: each time puts a backslash before the mark and doubles those that are there.
_NAME = "EpicSlot7f3a91c2N"
_SLOT = re.compile(_NAME + r'(\d+)((?:\\*")?)E')
DOCUMENTS_SLOT = f"{_NAME}0E"


def spells_slot(text: str) -> bool:
    """Whether a text could be taken for a placeholder, so that it must stand behind one itself."""
    return _NAME in text


@dataclass(frozen=True)
class Piece:
    """A piece of a rendered prompt.

    Attributes
    ----------
    text
        The text, as it was given.
    is_template
        Whether it comes from the template, which alone yields control tokens.
    escapes
        How often the template made a JSON string of it.
    searched
        Whether it is a message's content, in which compiled texts are looked for.
    """

    text: str
    is_template: bool
    escapes: int = 0
    searched: bool = True

    @property
    def shown(self) -> str:
        """The text as the prompt holds it."""
        return self.escape(self.text)

    def escape(self, part: str) -> str:
        """A part of the text as the prompt holds it."""
        for _ in range(self.escapes):
            part = json.dumps(part, ensure_ascii=False)[1:-1]
        return part


class Slots:
    """The texts that stand behind the placeholders of one rendering.

    Attributes
    ----------
    texts
        By their placeholders' numbers; number 0 belongs to the documents.
    """

    def __init__(self) -> None:
        self.texts = [""]
        self._contents = {0}

    def hide(self, text: str, *, may_be_json: bool = False, content: bool = True) -> str:
        """Put a placeholder in the text's place; white space around it stays, to be stripped or kept.

        Parameters
        ----------
        text
            To be hidden.
        may_be_json
            Whether the template may write it as a JSON string; the placeholder then holds a quotation mark.
        content
            Whether it is a message's content, in which compiled texts are looked for.
        """
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        if content:
            self._contents.add(len(self.texts))
        self.texts.append(core)
        mark = '"' if may_be_json else ""
        return f"{text[:start]}{_NAME}{len(self.texts) - 1}{mark}E{text[start + len(core) :]}"

    def pieces(self, rendered: str) -> tuple[list[Piece], list[int]]:
        """Split at the placeholders, template text and hidden text in turn; also gives the placeholders' numbers."""
        pieces: list[Piece] = []
        numbers: list[int] = []
        at = 0
        for found in _SLOT.finditer(rendered):
            number, mark = int(found[1]), found[2]
            numbers.append(number)
            pieces.append(Piece(rendered[at : found.start()], True))
            # 0, 1, 3, 7, … backslashes.
            pieces.append(
                Piece(self.texts[number], False, len(mark).bit_length() - 1 if mark else 0, number in self._contents)
            )
            at = found.end()
        return [*pieces, Piece(rendered[at:], True)], numbers
