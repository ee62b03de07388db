"""Texts to compile under ids of the application's own, and what became of them. Public in :mod:`epic_rag.texts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["AddReport", "Drift", "TextItem"]


@dataclass(frozen=True)
class TextItem:
    """A text to compile.

    Attributes
    ----------
    text_id
        The application's id of it.
    text
        As it will be prompted; white space at its ends does not count. May be empty where token ids are given: such a
        text is prompted by its id and never found in a prompt.
    group
        What it is part of, such as a document's id; deleted as one.
    vector
        Embedding, for compile contexts that look for similar texts; None without one.
    token_ids
        Compiled instead of the text's own; None tokenises it.
    metadata
        Kept with it; may be changed without compiling anything.
    """

    text_id: str
    text: str
    group: str = ""
    vector: Sequence[float] | None = field(default=None, compare=False)
    token_ids: tuple[int, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass
class AddReport:
    """What :meth:`CompiledTexts.add` did: ids of texts."""

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Drift:
    """Where an application's index and the compiled texts disagree.

    Attributes
    ----------
    missing
        Ids that the index has and that were not compiled.
    stale
        Ids that were compiled and that the index has no more.
    changed
        Ids whose text differs.
    lost
        Ids whose KV the store has lost.
    """

    missing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.stale or self.changed or self.lost)
