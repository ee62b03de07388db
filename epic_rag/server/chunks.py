"""Chunks that clients made: named by their content, with metadata and an end."""

from __future__ import annotations

import builtins
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epic_engine.chunks import content_digest
from epic_engine.compiler import pack

from epic_rag.registry import ListedDocument
from epic_rag.server.errors import ApiError, not_found
from epic_rag.texts import CompiledTexts, TextItem

__all__ = ["Chunk", "ChunkShelf", "NewChunk"]

_PREFIX = "chunk-"
_ID_DIGITS = 40
_ID = re.compile(f"{_PREFIX}[0-9a-f]{{{_ID_DIGITS}}}")
# Names among the metadata of a text.
_METADATA = "metadata"
_EXPIRES = "expires"


@dataclass(frozen=True)
class NewChunk:
    """A chunk to compile.

    Attributes
    ----------
    text
        As it will stand in prompts; empty if only token ids are given.
    token_ids
        Compiled as they are; None tokenises the text.
    seconds
        After which it is forgotten; None keeps it.
    metadata
        Kept with it.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    seconds: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A compiled chunk as clients see it.

    Attributes
    ----------
    id
        Says what its tokens are.
    tokens
        How many.
    created, expires
        Seconds since the epoch; None does not expire.
    metadata
        As it was given.
    """

    id: str
    tokens: int
    created: float
    expires: float | None
    metadata: Mapping[str, Any]

    @property
    def has_expired(self) -> bool:
        """Whether its end has come: it is not there any more, though it may not be deleted yet."""
        return self.expires is not None and self.expires <= time.time()


class ChunkShelf:
    """The chunks that clients of one namespace made. Any number of threads may use one; several processes the same.

    Parameters
    ----------
    texts
        Where they are compiled and kept.
    prefix
        Of their names among the texts of a prompt.
    """

    def __init__(self, texts: CompiledTexts, prefix: str) -> None:
        self._texts = texts
        self._registry = texts.registry
        self._prefix = prefix
        # Between looking at an end and acting on it, nobody may move it.
        self._lock = threading.Lock()

    def add(self, new: Sequence[NewChunk], progress: Callable[[int, int], None]) -> list[Chunk]:
        """Compile chunks; those that are there get a new end and new metadata and cost nothing else.

        Parameters
        ----------
        new
            What to compile. They may become each other's neighbours where the compile context has them.
        progress
            Called with tokens done and tokens in all, first with 0, between batches that are kept whatever happens to
            the next; what it raises ends the work.

        Returns
        -------
        list of Chunk
            In the order given; equal chunks are one.

        Raises
        ------
        ApiError
            400 if a chunk is empty, too long or holds ids outside the vocabulary; before anything is compiled.
        InsufficientResourcesError
            If the store has no room for the next batch.
        """
        items = [self._item(place, one) for place, one in enumerate(new)]
        ids = [item.token_ids or () for item in items]
        done, total = 0, sum(map(len, ids))
        progress(0, total)
        for batch in pack(list(map(len, ids)), self._texts.engine.config.rows_per_step):
            with self._lock:
                self._texts.add([items[place] for place in batch], among=items)
            done += sum(len(ids[place]) for place in batch)
            progress(done, total)
        return [self.get(item.text_id) for item in items]

    def _item(self, place: int, new: NewChunk) -> TextItem:
        """A chunk as it is compiled, checked."""
        engine, tokenizer = self._texts.engine, self._texts.composer.tokenizer
        where = f"chunks.{place}"
        if new.token_ids is None:
            text, ids = new.text.strip(), self._texts.encode(new.text)
        else:
            ids = new.token_ids
            if ids and not 0 <= min(ids) <= max(ids) < engine.spec.vocab_size:
                raise _bad(where, f"chunk {place} holds token ids outside 0 to {engine.spec.vocab_size - 1}.")
            text = tokenizer.decode(ids).strip()
            # A text is found in prompts wherever it stands: only ids that it really has may take its place there.
            text = text if tuple(tokenizer.encode_text(text)) == ids else ""
        if not ids:
            raise _bad(where, f"chunk {place} is empty: give a text or token ids.")
        room = engine.max_model_len - len(engine.parse_context(self._texts.compiler.plain_context()).token_ids)
        if len(ids) > room:
            raise ApiError(
                400,
                f"chunk {place} has {len(ids)} tokens, and this gateway takes {room}: split it.",
                code="context_length_exceeded",
                param=where,
            )
        described = {_METADATA: json.dumps(dict(new.metadata))}
        if new.seconds is not None:
            described[_EXPIRES] = repr(time.time() + new.seconds)
        chunk_id = _PREFIX + content_digest(ids)[:_ID_DIGITS]
        return TextItem(chunk_id, text, token_ids=ids, metadata=described)

    def name_of(self, chunk_id: str, *, param: str | None = None) -> str:
        """The name of a chunk's text for prompts.

        Raises
        ------
        ApiError
            404 if there is none of this id here, whoever else may have one.
        """
        self.get(chunk_id, param=param)
        return f"{self._prefix}{chunk_id}#0"

    def get(self, chunk_id: str, *, param: str | None = None) -> Chunk:
        """A chunk; raises as :meth:`name_of`."""
        listed = self._registry.listed_document(chunk_id) if _ID.fullmatch(chunk_id) else None
        chunk = None if listed is None else _chunk(listed)
        if chunk is None or chunk.has_expired:
            raise not_found("chunk", chunk_id, param=param)
        return chunk

    def list(self, after: str, limit: int) -> builtins.list[Chunk]:
        """The next chunks in the order of their ids.

        Parameters
        ----------
        after
            The last id that was seen; empty to begin.
        limit
            Most chunks to return.
        """
        found: builtins.list[Chunk] = []
        after = max(after, _PREFIX)
        while len(found) < limit:
            # Applications keep texts of their own beside the chunks.
            page = [one for one in self._registry.listed(after, limit) if one.document.doc_id.startswith(_PREFIX)]
            if not page:
                break
            found += [c for one in page if _ID.fullmatch(one.document.doc_id) and not (c := _chunk(one)).has_expired]
            after = page[-1].document.doc_id
        return found[:limit]

    def delete(self, chunk_id: str) -> None:
        """Forget a chunk and its KV; raises as :meth:`name_of`."""
        with self._lock:
            self.get(chunk_id)
            self._texts.remove([chunk_id])

    def sweep(self) -> int:
        """Forget what has expired; returns how many there were."""
        with self._lock:
            ended = self._registry.ending_before(_EXPIRES, time.time())
            return self._texts.remove(chunk_id for chunk_id in ended if _ID.fullmatch(chunk_id))


def _chunk(listed: ListedDocument) -> Chunk:
    document = listed.document
    expires = document.metadata.get(_EXPIRES)
    return Chunk(
        document.doc_id,
        listed.tokens,
        document.added_at,
        None if expires is None else float(expires),
        json.loads(document.metadata.get(_METADATA, "{}")),
    )


def _bad(where: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=where)
