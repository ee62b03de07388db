"""The answer to a prompt whose compiled texts are linked, as it is generated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from epic_engine import (
    ChunkNotFoundError,
    Completion,
    Engine,
    LinkPolicy,
    SamplingParams,
    Stream,
    StreamEvent,
    TokenConstraint,
)

from epic_rag.prompt import PromptComposer, TextPart
from epic_rag.texts import CompiledTexts, Prompt

__all__ = [
    "PromptStream",
    "PromptTexts",
    "chat_stream",
    "chat_streams",
    "part_streams",
    "text_stream",
    "text_streams",
    "with_call_marks",
]

logger = logging.getLogger(__name__)

Parts = Sequence[tuple[int, ...] | TextPart]


class PromptTexts(Protocol):
    """What answers a prompt that is cut already; :class:`~epic_rag.texts.CompiledTexts` does."""

    engine: Engine
    composer: PromptComposer
    policy: LinkPolicy

    def prompt(self, parts: Parts) -> Prompt:
        """Segments for the engine: compiled texts by their keys, everything else by its token ids."""
        ...


@dataclass(frozen=True)
class _Question:
    """A prompt, cut and checked, and how its answers are made.

    ``constraint`` makes a new one for each answer and each attempt: it has state.
    """

    texts: PromptTexts
    parts: Parts
    sampling: SamplingParams
    policy: str | LinkPolicy
    constraint: Callable[[], TokenConstraint] | None
    priority: int
    timeout: float | None

    def start(self, n: int = 1) -> list[Stream]:
        """Begin ``n`` answers; without a constraint they share the prompt."""
        constraint = None if self.constraint is None else self.constraint()
        return self.texts.engine.streams(
            self.texts.prompt(self.parts),
            self.sampling,
            n,
            policy=self.policy,
            constraint=constraint,
            priority=self.priority,
            timeout=self.timeout,
        )

    def answer(self, index: int) -> _Question:
        """The same for one of several answers."""
        seed = self.sampling.seed
        return self if seed is None else replace(self, sampling=replace(self.sampling, seed=seed + index))


class PromptStream:
    """Pieces of an answer's text; made by :func:`chat_stream` and its like.

    Iterate over it in a thread, or with ``async for`` in an event loop. ``close()`` cancels, from any thread.

    Attributes
    ----------
    parts
        The prompt: token ids, and the compiled texts among them.
    """

    def __init__(self, question: _Question, stream: Stream, tokenise_seconds: float) -> None:
        self.parts = question.parts
        self._question = question
        self._stream = stream
        self._tokenise_seconds = tokenise_seconds
        self._attempts = 0
        self._began = False
        self._cancelled = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            try:
                event = next(self._stream)
            except ChunkNotFoundError as error:
                self._start_again(error)
                continue
            self._began = True
            if event.text:
                return event.text

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while True:
            event = await self.next_event()
            if event.text:
                return event.text

    async def next_event(self) -> StreamEvent:
        """The next token, whether or not text became certain with it; StopAsyncIteration at the end."""
        while True:
            try:
                event = await anext(self._stream)
            except ChunkNotFoundError as error:
                await asyncio.to_thread(self._start_again, error)
                continue
            self._began = True
            return event

    def _start_again(self, error: ChunkNotFoundError) -> None:
        """A stored chunk turned out to be damaged and was set aside: have it compiled again.

        There may be more, and the next one may be found out while the prompt is put together again.
        """
        while not self._began and self._attempts < len(self.parts):
            self._attempts += 1
            logger.warning("%s", error)
            try:
                self._stream = self._question.start()[0]
                if self._cancelled:
                    self._stream.close()
                return
            except ChunkNotFoundError as again:
                error = again
        raise error

    def close(self) -> None:
        """Cancel; what was generated so far stays in :attr:`completion`."""
        self._cancelled = True
        self._stream.close()

    async def aclose(self) -> None:
        """As :meth:`close`; the event loop goes on meanwhile."""
        self._cancelled = True
        await self._stream.aclose()

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


def part_streams(
    texts: PromptTexts,
    parts: Parts,
    sampling: SamplingParams,
    n: int,
    *,
    policy: str | LinkPolicy | None = None,
    constraint: Callable[[], TokenConstraint] | None = None,
    priority: int = 0,
    timeout: float | None = None,
    begin: float | None = None,
) -> list[PromptStream]:
    """Answer a prompt that is cut already ``n`` times.

    Parameters
    ----------
    texts
        Compiled texts, and their engine.
    parts
        Token ids, and the compiled texts among them.
    sampling, n, policy, constraint, priority, timeout
        As for :func:`chat_streams`.
    begin
        ``time.perf_counter()`` when work on the prompt began; now by default.

    Raises
    ------
    ContextLengthError
        If prompt and answer exceed the model's context.
    """
    started = time.perf_counter() if begin is None else begin
    stop_ids = tuple({*sampling.stop_token_ids, *texts.composer.stop_token_ids})
    question = _Question(
        texts,
        list(parts),
        replace(sampling, stop_token_ids=stop_ids),
        texts.policy if policy is None else policy,
        constraint,
        priority,
        timeout,
    )
    each = [question.answer(index) for index in range(n)]
    streams = question.start(n) if constraint is None else [one.start()[0] for one in each]
    seconds = time.perf_counter() - started
    return [PromptStream(one, stream, seconds) for one, stream in zip(each, streams, strict=True)]


def with_call_marks(sampling: SamplingParams, texts: PromptTexts) -> SamplingParams:
    """Sampling whose text keeps the control tokens that mark calls of tools."""
    visible = {*sampling.visible_token_ids, *texts.composer.call_token_ids}
    return replace(sampling, visible_token_ids=tuple(visible))


def chat_streams(
    texts: CompiledTexts,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    n: int,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    constraint: Callable[[], TokenConstraint] | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> list[PromptStream]:
    """Answer a conversation ``n`` times; compiled texts are found wherever they stand in it.

    Parameters
    ----------
    texts
        Compiled texts, and their engine.
    messages : sequence of {"role", "content"}
        As for :meth:`PromptComposer.segments <epic_rag.prompt.PromptComposer.segments>`.
    sampling
        How to draw tokens; a seed is raised by one from answer to answer.
    n
        How many answers; they share the prompt's memory unless they have a constraint.
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
    timeout
        Seconds after which an answer ends with what there is, ``finish_reason="timeout"``.

    Raises
    ------
    RagError
        If the messages and tools cannot be made a prompt.
    ContextLengthError
        If prompt and answer exceed the model's context.
    """
    begin = time.perf_counter()
    find = texts.finder(text_ids) if text_ids else texts.find
    return part_streams(
        texts,
        texts.composer.segments(messages, find, tools=tools),
        with_call_marks(sampling, texts) if tools else sampling,
        n,
        policy=policy,
        constraint=constraint,
        priority=priority,
        timeout=timeout,
        begin=begin,
    )


def chat_stream(
    texts: CompiledTexts, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, **options: Any
) -> PromptStream:
    """As :func:`chat_streams`, for one answer."""
    return chat_streams(texts, messages, sampling, 1, **options)[0]


def text_streams(
    texts: CompiledTexts,
    text: str,
    sampling: SamplingParams,
    n: int,
    *,
    policy: str | LinkPolicy | None = None,
    text_ids: Sequence[str] = (),
    constraint: Callable[[], TokenConstraint] | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> list[PromptStream]:
    """As :func:`chat_streams`, for a prompt that carries its chat template already."""
    begin = time.perf_counter()
    find = texts.finder(text_ids) if text_ids else texts.find
    return part_streams(
        texts,
        texts.composer.formatted_segments(text, find),
        sampling,
        n,
        policy=policy,
        constraint=constraint,
        priority=priority,
        timeout=timeout,
        begin=begin,
    )


def text_stream(texts: CompiledTexts, text: str, sampling: SamplingParams, **options: Any) -> PromptStream:
    """As :func:`text_streams`, for one answer."""
    return text_streams(texts, text, sampling, 1, **options)[0]
