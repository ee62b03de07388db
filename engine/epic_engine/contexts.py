"""Compile contexts: what a chunk sees while it is compiled. Their KV is dropped afterwards.

====================  ==========================================================================
``isolated``          nothing (EPIC's default: the chunk's first tokens become attention sinks)
``sink:n``            n dummy tokens, so that the sinks fall on tokens that are dropped (EPIC's LegoLink-0)
``head``              the prompt's real head, as given to the engine
``neighbours:n``      the head and n other chunks, likely to be retrieved with it: the chunk learns
                      that it is not alone. Needs somebody who knows which:
                      :meth:`Engine.compile_neighbours <epic_engine.Engine.compile_neighbours>`
====================  ==========================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .chunks import ChunkKey, content_digest
from .errors import ConfigError

__all__ = ["CompileContext", "identity_behind", "parse_context"]


@dataclass(frozen=True)
class CompileContext:
    """Tokens that stand before a chunk while it is compiled.

    Attributes
    ----------
    name
        As written by the user: ``isolated``, ``sink:4``, ``head``.
    token_ids
        The tokens; empty for ``isolated``.
    neighbours
        Keys of chunks, compiled behind ``token_ids``, that stand between these and the chunk.
    """

    name: str
    token_ids: tuple[int, ...] = ()
    neighbours: tuple[ChunkKey, ...] = ()

    @property
    def identity(self) -> str:
        """What a chunk key records: the tokens, and the keys of neighbours, for these alone shape the KV."""
        own = content_digest(self.token_ids) if self.token_ids else "isolated"
        return identity_behind(own, self.neighbours)


def identity_behind(own: str, neighbours: Sequence[ChunkKey]) -> str:
    """Identity of a context with neighbours.

    Parameters
    ----------
    own
        Identity of the context without them.
    neighbours
        Their keys, in order; may be empty.
    """
    if not neighbours:
        return own
    return hashlib.sha256("/".join([own, *(key.hex for key in neighbours)]).encode()).hexdigest()


def parse_context(text: str | CompileContext, *, head: Sequence[int], sink_token: int) -> CompileContext:
    """A compile context from its string form.

    Parameters
    ----------
    text
        ``"isolated"``, ``"sink:n"`` (n ≥ 1 tokens) or ``"head"``; a context is passed through.
    head
        Token ids of the prompt's head, for ``"head"``.
    sink_token
        Token repeated by ``"sink:n"``.

    Raises
    ------
    ConfigError
        If the name is unknown, n is no positive number, or the head is empty.
    """
    if isinstance(text, CompileContext):
        return text
    name, _, argument = text.partition(":")
    if name == "isolated" and not argument:
        return CompileContext("isolated")
    if name == "head" and not argument:
        if not head:
            raise ConfigError("context='head' needs the head's token ids: pass head=[…] to Engine().")
        return CompileContext("head", tuple(head))
    if name == "sink":
        try:
            count = int(argument)
        except ValueError:
            count = 0
        if count < 1:
            raise ConfigError(f"context={text!r} needs a number of tokens of at least 1, as in 'sink:4'.")
        return CompileContext(text, (sink_token,) * count)
    if name == "neighbours":
        raise ConfigError(
            f"context={text!r} needs the neighbours of each chunk: call compile_neighbours(), or let EpicRAG choose "
            "them by their embeddings."
        )
    raise ConfigError(f"unknown compile context {text!r}: use 'isolated', 'sink:n', 'head' or 'neighbours:n'.")
