"""The tiny stack behind LlamaIndex's interfaces, what is recorded of its calls, and what they ought to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_index.core.instrumentation as instrument
from epic_engine import ChunkKey, Engine, SamplingParams
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index_epic import EpicLLM

from epic_rag.prompt_stream import PromptStream
from tests.rag.stack import TEXTS, BagOfWords, model, tokenizer

POLICY = "legolink:4"
TOKENS = 8


class BagEmbedding(BaseEmbedding):
    """:class:`BagOfWords` as LlamaIndex wants it."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return BagOfWords().embed([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class ScriptedLLM(EpicLLM):
    """Puts given words in place of the model's where a prompt holds a marker: a random model makes no choices.

    All else of such a call is real: the prompt, the forward passes, the counts, the events.
    """

    script: dict[str, str] = Field(default_factory=dict)

    def _chat(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Callable[[], PromptStream]:
        start = super()._chat(messages, options)
        words = [words for marker, words in self.script.items() if marker in (messages[-1].content or "")]
        return (lambda: _reworded(start(), words[0])) if words else start


def _reworded(stream: PromptStream, words: str) -> PromptStream:
    for _ in stream:
        pass
    object.__setattr__(stream.completion, "text", words)
    return stream


def tiny_llm(store: Path | None = None, kind: type[EpicLLM] = EpicLLM, **settings: Any) -> EpicLLM:
    """An LLM on the tiny model."""
    settings = {"context": "isolated", "policy": POLICY, "max_tokens": TOKENS, **settings}
    return kind.from_loaded(model(), tokenizer(), store=store, engine_options={"selftest": False}, **settings)


def text_nodes() -> list[TextNode]:
    """A node a text, with metadata that stands in its prompt."""
    return [TextNode(id_=name, text=text, metadata={"file_name": f"{name}.md"}) for name, text in TEXTS.items()]


def prompted(node: BaseNode) -> str:
    """What of a node stands in a prompt."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


@dataclass
class Calls:
    """Chats of an LLM, as LlamaIndex's own instrumentation saw them."""

    started: list[Sequence[ChatMessage]] = field(default_factory=list)
    ended: list[tuple[Sequence[ChatMessage], ChatResponse]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Calls]:
    """Records LLM events while it is open."""
    calls = Calls()

    class Recorder(BaseEventHandler):
        def handle(self, event: BaseEvent, **_: Any) -> None:
            if event.class_name().startswith(("LLMChat", "LLMCompletion")) and "Progress" not in event.class_name():
                calls.names.append(event.class_name())
            if isinstance(event, LLMChatStartEvent):
                calls.started.append(event.messages)
            if isinstance(event, LLMChatEndEvent):
                calls.ended.append((event.messages, event.response))

    root = instrument.get_dispatcher()
    recorder = Recorder()
    root.add_event_handler(recorder)
    try:
        yield calls
    finally:
        root.event_handlers.remove(recorder)


def expected(
    engine: Engine, messages: Sequence[ChatMessage], texts: Sequence[str], policy: str = POLICY
) -> tuple[str, list[str], int]:
    """Straight from the engine: the answer, which texts the prompt holds, and how many tokens they have.

    The prompt is rendered by the tokenizer's own template and cut with ``str.split``.
    """
    hf = tokenizer()
    plain = [{"role": m.role.value, "content": m.content or ""} for m in messages]
    parts: list[str] = [hf.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)]
    for text in texts:
        parts = [piece for part in parts for piece in (_cut(part, text) if part not in texts else [part])]
    prompt: list[list[int] | ChunkKey] = []
    found, tokens = [], 0
    for part in parts:
        ids = hf(part, add_special_tokens=False)["input_ids"]
        if part in texts:
            found.append(part)
            tokens += len(ids)
            prompt.append(engine.compile(ids, "isolated"))
        else:
            prompt.append(ids)
    stop = tuple(hf.convert_tokens_to_ids(["<|im_end|>"]))
    done = engine.generate(prompt, SamplingParams(max_tokens=TOKENS, stop_token_ids=stop), policy=policy)
    return done.text, found, tokens


def _cut(part: str, text: str) -> list[str]:
    pieces = part.split(text)
    return [x for piece in pieces for x in (piece, text)][:-1]


def check_answers(
    ended: Sequence[tuple[Sequence[ChatMessage], ChatResponse]], engine: Engine, texts: Sequence[str]
) -> list[set[str]]:
    """Every answer is the engine's for the same token ids, with the texts in its prompt linked; returns those."""
    seen = []
    for messages, response in ended:
        text, found, tokens = expected(engine, messages, texts)
        usage, epic = response.raw["usage"], response.raw["epic"]
        assert response.message.content == text
        assert epic["reuse"] == ("composed" if found else "none")
        assert usage["linked_tokens"] >= 0.9 * tokens
        seen.append(set(found))
    return seen
