"""The answer to a prompt whose compiled texts are linked, as it is generated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epic_engine import (
    ChunkNotFoundError,
    Completion,
    LinkPolicy,
    SamplingParams,
    Stream,
    StreamEvent,
    TokenConstraint,
)

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
        constraint: Callable[[], TokenConstraint] | None = None,
        priority: int = 0,
    ) -> None:
        begin = time.perf_counter()
        self.parts = list(cut())
        self._texts = texts
        self._policy = texts.policy if policy is None else policy
        stop_ids = tuple({*sampling.stop_token_ids, *texts.composer.stop_token_ids})
        self._sampling = replace(sampling, stop_token_ids=stop_ids)
        self._constraint = constraint
        self._priority = priority
        self._cancelled = False
        self._stream = self._start()
        self._tokenise_seconds = time.perf_counter() - begin
        self._began = False

    def _start(self) -> Stream:
        # A second start begins the answer anew, and so must its constraint.
        constraint = None if self._constraint is None else self._constraint()
        stream = self._texts.engine.stream(
            self._texts.prompt(self.parts),
            self._sampling,
            policy=self._policy,
            constraint=constraint,
            priority=self._priority,
        )
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
        for attempt in range(len(self.parts)):
            try:
                if attempt:
                    self._stream = self._start()
                return next(self._stream)
            except ChunkNotFoundError as error:
                # A stored chunk turned out to be damaged and was set aside: it is compiled again. There may be more,
                # and the next one may be found out while the prompt is put together again.
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
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    constraint: Callable[[], TokenConstraint] | None = None,
    priority: int = 0,
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
    tools
        What the model may call, in OpenAI's form. Calls come as the model writes them, their marks included:
        :class:`~epic_rag.tool_calls.ToolCallStream` reads them.
    constraint
        Makes what limits the answer's tokens, such as ``lambda: texts.grammars.json_schema(schema)``; called for
        every attempt at an answer.
    priority
        Higher goes first.

    Raises
    ------
    RagError
        If the messages and tools cannot be made a prompt.
    ContextLengthError
        If prompt and answer exceed the model's context.
    """
    find = texts.finder(text_ids) if text_ids else texts.find
    if tools:
        visible = {*sampling.visible_token_ids, *texts.composer.call_token_ids}
        sampling = replace(sampling, visible_token_ids=tuple(visible))
    return PromptStream(
        texts, lambda: texts.composer.segments(messages, find, tools=tools), sampling, policy, constraint, priority
    )


def text_stream(
    texts: CompiledTexts,
    text: str,
    sampling: SamplingParams,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
    constraint: Callable[[], TokenConstraint] | None = None,
    priority: int = 0,
) -> PromptStream:
    """As :func:`chat_stream`, for a prompt that carries its chat template already."""
    find = texts.finder(text_ids) if text_ids else texts.find
    return PromptStream(
        texts, lambda: texts.composer.formatted_segments(text, find), sampling, policy, constraint, priority
    )
