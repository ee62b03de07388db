"""The answer to a prompt whose compiled texts are linked, as it is generated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from epic_engine import ChunkNotFoundError, Completion, LinkPolicy, SamplingParams, Stream, StreamEvent

from epic_rag.prompt import TextPart
from epic_rag.texts import CompiledTexts

__all__ = ["PromptStream", "chat_stream", "text_stream"]

logger = logging.getLogger(__name__)

Parts = Sequence[tuple[int, ...] | TextPart]


class PromptStream:
    """Pieces of an answer's text; made by :func:`chat_stream` and :func:`text_stream`.

    The prompt is cut and checked at once, the work begins with the first piece. ``close()`` cancels, from any thread.

    Attributes
    ----------
    parts
        The prompt: token ids, and the compiled texts among them.
    """

    def __init__(
        self,
        texts: CompiledTexts,
        cut: Callable[[], Parts],
        sampling: SamplingParams,
        policy: str | LinkPolicy | None,
    ) -> None:
        begin = time.perf_counter()
        self.parts = list(cut())
        self._texts = texts
        self._policy = texts.policy if policy is None else policy
        stop_ids = tuple({*sampling.stop_token_ids, *texts.composer.stop_token_ids})
        self._sampling = replace(sampling, stop_token_ids=stop_ids)
        self._cancelled = False
        self._stream = self._start()
        self._tokenise_seconds = time.perf_counter() - begin
        self._began = False

    def _start(self) -> Stream:
        stream = self._texts.engine.stream(self._texts.prompt(self.parts), self._sampling, policy=self._policy)
        if self._cancelled:
            stream.close()
        return stream

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            event = next(self._stream) if self._began else self._first()
            if event.text:
                return event.text

    def _first(self) -> StreamEvent:
        self._began = True
        for _ in self.parts:
            try:
                return next(self._stream)
            except ChunkNotFoundError as error:
                # A stored chunk turned out to be damaged and was set aside: it is compiled again. There may be more.
                logger.warning("%s", error)
                self._stream = self._start()
        return next(self._stream)

    def close(self) -> None:
        """Cancel; what was generated so far stays in :attr:`completion`."""
        self._cancelled = True
        self._stream.close()

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended.

        Raises
        ------
        ConfigError
            If it has not.
        """
        done = self._stream.completion
        done.stats.times.tokenise = self._tokenise_seconds
        return done


def chat_stream(
    texts: CompiledTexts,
    messages: Sequence[Mapping[str, str]],
    sampling: SamplingParams,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
) -> PromptStream:
    """Answer a conversation; compiled texts are found wherever they stand in it.

    Parameters
    ----------
    texts
        Compiled texts, and their engine.
    messages : sequence of {"role", "content"}
        As for :meth:`PromptComposer.segments <epic_rag.prompt.PromptComposer.segments>`.
    sampling
        How to draw tokens.
    policy
        Link policy; None takes that of the texts.
    text_ids
        Ids of texts that the messages are known to hold, in order.

    Raises
    ------
    RagError
        If the messages cannot be made a prompt.
    ContextLengthError
        If prompt and answer exceed the model's context.
    """
    find = texts.finder(text_ids) if text_ids else texts.find
    return PromptStream(texts, lambda: texts.composer.segments(messages, find), sampling, policy)


def text_stream(
    texts: CompiledTexts,
    text: str,
    sampling: SamplingParams,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
) -> PromptStream:
    """As :func:`chat_stream`, for a prompt that carries its chat template already."""
    find = texts.finder(text_ids) if text_ids else texts.find
    return PromptStream(texts, lambda: texts.composer.formatted_segments(text, find), sampling, policy)
