"""Answers as OpenAI's objects, whole or in pieces."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from epic_engine import Completion, StreamEvent, TokenLogprob

from epic_rag.call_syntax import InvalidToolCall, ToolCall
from epic_rag.prompt_stream import PromptStream
from epic_rag.server.answering import Answers
from epic_rag.server.logprobs import TextLogprobs, chat_logprobs
from epic_rag.tool_calls import ToolCallStream

__all__ = ["ChatResponse", "CompletionResponse"]

Call = ToolCall | InvalidToolCall

_FINGERPRINT_DIGITS = 16


async def _events(streams: Sequence[PromptStream]) -> AsyncGenerator[tuple[int, StreamEvent | None]]:
    """Tokens of several answers as they come, each with its answer's number; None ends an answer."""
    arrived: asyncio.Queue[tuple[int, StreamEvent | None] | BaseException] = asyncio.Queue()

    async def read(index: int, stream: PromptStream) -> None:
        try:
            while True:
                arrived.put_nowait((index, await stream.next_event()))
        except StopAsyncIteration:
            arrived.put_nowait((index, None))
        except BaseException as error:
            arrived.put_nowait(error)

    readers = [asyncio.create_task(read(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            left -= item[1] is None
            yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*(s.aclose() for s in streams), return_exceptions=True)


def _usage(done: Sequence[Completion]) -> dict[str, Any]:
    prompt, generated = done[0].stats.prompt, sum(c.stats.generated for c in done)
    cached = done[0].stats.reused + done[0].stats.continued
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _reason(done: Completion) -> str:
    return "stop" if done.finish_reason == "stop" else "length"


class _Response:
    """What both kinds of responses have in common."""

    kind: str
    prefix: str

    def __init__(self, answers: Answers, model: str) -> None:
        self.answers = answers
        self._streams = list(answers.streams)
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{answers.tenant.engine.decoder.fingerprint[:_FINGERPRINT_DIGITS]}",
        }

    def _epic(self) -> dict[str, Any]:
        """What the gateway adds to a response."""
        done = self._streams[0].completion
        stats = done.stats
        return {
            "policy": stats.policy,
            "reuse": stats.reuse,
            "linked_tokens": stats.linked,
            "recomputed_tokens": stats.recomputed,
            "reused_tokens": stats.reused,
            "reused_spans": [list(span) for span in stats.reused_spans],
            "rows": stats.rows,
            "timed_out": any(s.completion.finish_reason == "timeout" for s in self._streams),
            "times": asdict(stats.times),
            "chunks": [asdict(chunk) for chunk in self.answers.chunks],
            **self._sources(),
        }

    def _sources(self) -> dict[str, Any]:
        return {"sources": [asdict(source) for source in self.answers.sources]}

    def _decode(self, token: int) -> str:
        return self.answers.tenant.texts.composer.tokenizer.decode([token])

    def _ended(self) -> list[Completion]:
        return [stream.completion for stream in self._streams]

    @property
    def texts(self) -> list[str]:
        """What the answers say, once they have ended."""
        return [done.text for done in self._ended()]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, in OpenAI's terms; once all answers have ended."""
        return _usage(self._ended())


class _Choice:
    """One answer of a chat as it grows."""

    def __init__(self, parser: ToolCallStream | None) -> None:
        self.text = ""
        self.calls: list[ToolCall] = []
        self._parser = parser

    def push(self, text: str) -> dict[str, Any]:
        """What a piece of the answer adds to the message; empty if nothing is certain yet."""
        return self._delta(*((text, []) if self._parser is None else self._parser.push(text)))

    def finish(self) -> dict[str, Any]:
        """What the end adds."""
        return {} if self._parser is None else self._delta(*self._parser.finish())

    def _delta(self, text: str, found: Sequence[Call]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls = []
        for call in found:
            if isinstance(call, InvalidToolCall):  # the model's words stand for themselves
                text += call.text
                continue
            calls.append({"index": len(self.calls), **_call(call)})
            self.calls.append(call)
        if text:
            self.text += text
            delta["content"] = text
        return delta | ({"tool_calls": calls} if calls else {})

    def reason(self, done: Completion) -> str:
        """Why it ended."""
        found = _reason(done)
        return "tool_calls" if self.calls and found == "stop" else found

    def message(self) -> dict[str, Any]:
        """The whole message."""
        calls = {"tool_calls": [_call(c) for c in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.text or (None if self.calls else ""), "refusal": None, **calls}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class ChatResponse(_Response):
    """A chat's answers, for :func:`~epic_rag.server.answering.begin_chat`.

    Parameters
    ----------
    answers
        On their way.
    model
        The name that the client knows.
    logprobs
        Whether it asked for log-probabilities.
    """

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, answers: Answers, model: str, *, logprobs: bool = False) -> None:
        super().__init__(answers, model)
        self._logprobs = logprobs
        parsers = [answers.form.parser(answers.tenant.compiled) for _ in answers.streams]
        self._choices = [_Choice(parser) for parser in parsers]

    def whole(self) -> dict[str, Any]:
        """Everything at once, when the pieces have ended."""
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "finish_reason": choice.reason(done),
                "logprobs": chat_logprobs(done.logprobs or (), self._decode) if self._logprobs else None,
            }
            for index, (choice, done) in enumerate(zip(self._choices, self._ended(), strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self.usage, "epic": self._epic()}

    async def pieces(self, *, usage: bool) -> AsyncGenerator[dict[str, Any]]:
        """Chunks of a stream; closing it early cancels the answers.

        Parameters
        ----------
        usage
            Whether a last chunk without choices says what it took.
        """
        head = {**self._head, "object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
        pending: list[list[TokenLogprob]] = [[] for _ in self._choices]
        began = False
        async with aclosing(_events(self._streams)) as events:
            async for index, event in events:
                if not began:  # what goes wrong before the first token is an error of the request, not of the stream
                    began = True
                    for number in range(len(self._choices)):
                        first = {"epic": self._sources()} if self.answers.sources and not number else {}
                        yield {**head, "choices": [_piece(number, {"role": "assistant", "content": ""})], **first}
                choice = self._choices[index]
                delta = choice.finish() if event is None else choice.push(event.text)
                if event is not None and event.logprob is not None:
                    pending[index].append(event.logprob)
                if delta or (event is None and pending[index]):
                    shown = chat_logprobs(pending[index], self._decode) if self._logprobs else None
                    pending[index] = []
                    yield {**head, "choices": [_piece(index, delta, logprobs=shown)]}
                if event is None:
                    yield {**head, "choices": [_piece(index, {}, reason=choice.reason(self._done(index)))]}
        if usage:
            yield {**head, "choices": [], "usage": self.usage, "epic": self._epic()}

    def _done(self, index: int) -> Completion:
        return self._streams[index].completion


def _piece(
    index: int, delta: dict[str, Any], *, reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionResponse(_Response):
    """A completion's answers; several prompts have their answers numbered through.

    Parameters
    ----------
    answers
        Of each prompt.
    model
        The name that the client knows.
    """

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, answers: Sequence[Answers], model: str) -> None:
        super().__init__(answers[0], model)
        self._prompts = answers
        self._streams = [stream for one in answers for stream in one.streams]

    def whole(self) -> dict[str, Any]:
        """Everything at once, when the pieces have ended."""
        choices = [
            {
                "index": index,
                "text": done.text,
                "finish_reason": _reason(done),
                "logprobs": self._text_logprobs().shown(done.logprobs) if done.logprobs else None,
            }
            for index, done in enumerate(self._ended())
        ]
        return {**self._head, "choices": choices, "usage": self.usage, "epic": self._epic()}

    async def pieces(self, *, usage: bool) -> AsyncGenerator[dict[str, Any]]:
        """Chunks of a stream, as :meth:`ChatResponse.pieces`."""
        pending: list[list[TokenLogprob]] = [[] for _ in self._streams]
        logprobs = [self._text_logprobs() for _ in self._streams]
        async with aclosing(_events(self._streams)) as events:
            async for index, event in events:
                reason = None if event is not None else _reason(self._streams[index].completion)
                if event is not None and event.logprob is not None:
                    pending[index].append(event.logprob)
                if event is not None and not event.text:
                    continue
                shown = logprobs[index].shown(pending[index]) if pending[index] else None
                pending[index] = []
                choice = {"index": index, "text": event.text if event else "", "finish_reason": reason}
                yield {**self._head, "choices": [{**choice, "logprobs": shown}], **({"usage": None} if usage else {})}
        if usage:
            yield {**self._head, "choices": [], "usage": self.usage, "epic": self._epic()}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and answers."""
        each = [_usage([stream.completion for stream in one.streams]) for one in self._prompts]
        total = {name: sum(u[name] for u in each) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in each)
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}

    def _text_logprobs(self) -> TextLogprobs:
        return TextLogprobs(self.answers.tenant.engine.tokenizer, self._decode)
