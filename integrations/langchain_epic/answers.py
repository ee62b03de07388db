"""An answer on its way: the model's pieces as LangChain's chunks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from epic_engine import Completion, TokenLogprob
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from epic_rag.call_syntax import InvalidToolCall, ToolCall
from epic_rag.prompt_stream import PromptStream
from epic_rag.tool_calls import ToolCallStream

__all__ = ["PROVIDER", "AnswerChunks"]

PROVIDER = "epic"

Call = ToolCall | InvalidToolCall


class AnswerChunks:
    """Chunks of one answer; works when it is iterated over, and ``close()`` cancels it from any thread.

    Parameters
    ----------
    name
        The model's, for metadata.
    stream
        The answer's text.
    calls
        Finds tool calls in it; None leaves it as it is.
    timeout
        Seconds after which the answer is given up; None waits for ever.
    decode
        Text of one token, for log-probabilities; None leaves them out.

    Raises
    ------
    TimeoutError
        While iterating, if the time is up.
    """

    def __init__(
        self,
        name: str,
        stream: PromptStream,
        calls: ToolCallStream | None,
        *,
        timeout: float | None = None,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        self._name = name
        self._stream = stream
        self._calls = calls
        self._timeout = timeout
        self._decode = decode
        self._text = ""
        self._made: list[Call] = []
        self._late = threading.Event()
        self._timer: threading.Timer | None = None
        if timeout is not None:
            self._timer = threading.Timer(timeout, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        self._chunks = self._run()

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        return self

    def __next__(self) -> ChatGenerationChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel."""
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()

    @property
    def result(self) -> ChatResult:
        """The whole answer, once the chunks have ended."""
        message = AIMessage(
            content=self._text,
            tool_calls=[
                {"name": c.name, "args": c.arguments, "id": c.call_id, "type": "tool_call"}
                for c in self._made
                if isinstance(c, ToolCall)
            ],
            invalid_tool_calls=[
                {"name": c.name, "args": c.text, "id": None, "error": c.error, "type": "invalid_tool_call"}
                for c in self._made
                if isinstance(c, InvalidToolCall)
            ],
            usage_metadata=_usage(self._stream.completion),
            response_metadata=self._metadata(self._stream.completion),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _give_up(self) -> None:
        self._late.set()
        self._stream.close()

    def _run(self) -> Iterator[ChatGenerationChunk]:
        try:
            for piece in self._stream:
                text, calls = (piece, []) if self._calls is None else self._calls.push(piece)
                if text or calls:
                    yield ChatGenerationChunk(message=self._message(text, calls))
            if self._late.is_set():
                raise TimeoutError(f"the answer took longer than timeout={self._timeout:g} seconds.")
            text, calls = ("", []) if self._calls is None else self._calls.finish()
            last = self._message(text, calls)
            last.chunk_position = "last"
            last.usage_metadata = _usage(self._stream.completion)
            last.response_metadata = self._metadata(self._stream.completion)
            yield ChatGenerationChunk(message=last)
        finally:
            self.close()

    def _message(self, text: str, calls: Sequence[Call]) -> AIMessageChunk:
        self._text += text
        pieces = []
        for call in calls:
            # LangChain completes broken JSON as best it can; a JSON string is an invalid call and stays one.
            args = json.dumps(call.arguments if isinstance(call, ToolCall) else call.text, ensure_ascii=False)
            call_id = call.call_id if isinstance(call, ToolCall) else None
            pieces.append(tool_call_chunk(name=call.name, args=args, id=call_id, index=len(self._made)))
            self._made.append(call)
        return AIMessageChunk(content=text, tool_call_chunks=pieces)

    def _metadata(self, done: Completion) -> dict[str, Any]:
        stats = done.stats
        called = any(isinstance(call, ToolCall) for call in self._made)
        found: dict[str, Any] = {
            "model_name": self._name,
            "model_provider": PROVIDER,
            "finish_reason": "tool_calls" if called and done.finish_reason == "stop" else done.finish_reason,
            "epic": {
                "policy": stats.policy,
                "reuse": stats.reuse,
                "linked_tokens": stats.linked,
                "recomputed_tokens": stats.recomputed,
                "ttft_s": stats.times.first_token,
                "total_s": stats.times.total,
            },
        }
        if self._decode is not None:
            found["logprobs"] = {"content": [_logprob(one, self._decode) for one in done.logprobs]}
        return found


def _usage(done: Completion) -> UsageMetadata:
    stats = done.stats
    return UsageMetadata(
        input_tokens=stats.prompt,
        output_tokens=stats.generated,
        total_tokens=stats.prompt + stats.generated,
        input_token_details={"cache_read": stats.reused},
    )


def _logprob(one: TokenLogprob, decode: Callable[[int], str]) -> dict[str, Any]:
    """In OpenAI's form, which LangChain's users know."""
    top = [{"token": decode(token), "logprob": value} for token, value in one.top]
    return {"token": decode(one.token_id), "logprob": one.logprob, "top_logprobs": top}
