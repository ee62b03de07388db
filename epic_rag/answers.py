"""What a question gives back: an answer, where it came from and what it cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epic_engine import ChunkNotFoundError, Completion, RequestStats, Stream

__all__ = ["Answer", "AnswerStream", "Source"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A chunk that an answer was given from.

    Attributes
    ----------
    chunk_id, doc_id
        Its ids in the registry.
    source
        Where the document came from.
    text
        The chunk's text.
    score
        Similarity to the question, -1 to 1.
    """

    chunk_id: str
    doc_id: str
    source: str
    text: str
    score: float


@dataclass(frozen=True)
class Answer:
    """An answer with its sources and its cost.

    Attributes
    ----------
    text
        The model's answer.
    sources
        Chunks in the prompt, in prompt order.
    stats
        Token counts, reuse kind and stage times.
    finish_reason
        ``stop``, ``length`` or ``cancelled``.
    """

    text: str
    sources: tuple[Source, ...]
    stats: RequestStats
    finish_reason: str


class AnswerStream:
    """An answer as it is generated; made by :meth:`EpicRAG.stream`. ``close()`` cancels it."""

    def __init__(self, start: Callable[[], Stream], sources: tuple[Source, ...], tokenise_seconds: float) -> None:
        self.sources = sources
        self._start = start
        self._tokenise = tokenise_seconds
        self._stream = start()
        self._pieces = self._run()

    def _run(self) -> Iterator[str]:
        first = None
        attempts = len(self.sources) + 2
        for attempt in range(attempts):
            try:
                if attempt:
                    self._stream = self._start()
                first = next(self._stream, None)
                break
            except ChunkNotFoundError as error:
                # A stored chunk turned out to be damaged and was set aside: it is compiled again. There may be more,
                # and the next one may be found out while the prompt is put together again.
                if attempt == attempts - 1:
                    raise
                logger.warning("%s", error)
        if first is not None and first.text:
            yield first.text
        for event in self._stream:
            if event.text:
                yield event.text

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel; what was generated so far stays in :attr:`answer`."""
        self._stream.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended."""
        done: Completion = self._stream.completion
        done.stats.times.tokenise = self._tokenise
        return Answer(done.text.strip(), self.sources, done.stats, done.finish_reason)
