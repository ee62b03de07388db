"""Answers from nodes that keep their ids up to the prompt, for query engines and chat engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from epic_engine import ContextLengthError
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms.llm import astream_chat_response_to_tokens, stream_chat_response_to_tokens
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from epic_rag.prompt import TextPart
from epic_rag.texts import cut_known
from llama_index_epic.llm import EpicLLM
from llama_index_epic.nodes import compile_nodes, prompted_text
from llama_index_epic.responses import plain_messages

__all__ = ["EpicCondensePlusContextChatEngine", "EpicContextChatEngine", "EpicSynthesizer"]

logger = logging.getLogger(__name__)


class EpicSynthesizer(CompactAndRefine):
    """Puts nodes into one prompt and links them by their ids: ``as_query_engine(response_synthesizer=…)``.

    Nodes that are not compiled yet are compiled now. If the prompt would exceed the model's context, nodes are left
    out whole, those with the lowest scores first, and a warning names them. Structured answers, and LLMs other than
    :class:`EpicLLM`, get what ``CompactAndRefine`` does.

    Parameters
    ----------
    llm
        An :class:`EpicLLM`; like all others, this parameter is that of ``CompactAndRefine``.
    """

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes.

        Raises
        ------
        ContextLengthError
            If not even the best node fits the context.
        """
        if self._links() and nodes:
            nodes, response_kwargs = self._prepare(query, nodes, response_kwargs)
        return super().synthesize(query, nodes, additional_source_nodes, **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As :meth:`synthesize`; the event loop goes on."""
        if self._links() and nodes:
            nodes, response_kwargs = await asyncio.to_thread(self._prepare, query, nodes, response_kwargs)
        return await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        text_ids: Sequence[str] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts; with ``text_ids``, the ids of their nodes, in one prompt."""
        llm = self._llm
        if text_ids is None or not isinstance(llm, EpicLLM):
            return super().get_response(query_str, text_chunks, prev_response, **response_kwargs)
        messages = self._messages(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return stream_chat_response_to_tokens(llm.stream_chat(messages, text_ids=text_ids))
        return self._text(llm.chat(messages, text_ids=text_ids).message)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        text_ids: Sequence[str] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As :meth:`get_response`."""
        llm = self._llm
        if text_ids is None or not isinstance(llm, EpicLLM):
            return await super().aget_response(query_str, text_chunks, prev_response, **response_kwargs)
        messages = self._messages(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return await astream_chat_response_to_tokens(await llm.astream_chat(messages, text_ids=text_ids))
        return self._text((await llm.achat(messages, text_ids=text_ids)).message)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def _links(self) -> bool:
        # Synthesizers of llama-index-core 0.14.0 know nothing of several modes.
        multimodal = getattr(self, "_multimodal", False)
        plain = self._output_cls is None and not self._structured_answer_filtering and not multimodal
        return isinstance(self._llm, EpicLLM) and plain

    def _messages(self, query: str, texts: Sequence[str], variables: dict[str, Any]) -> list[ChatMessage]:
        context = "\n\n".join(text.strip() for text in texts if text.strip())
        template = self._text_qa_template.partial_format(query_str=query)
        return self._llm._get_messages(template, context_str=context, **variables)

    def _text(self, message: ChatMessage) -> str:
        return self._llm._parse_output(message.content or "") or "Empty Response"

    def _prepare(
        self, query: QueryType, nodes: Sequence[NodeWithScore], variables: dict[str, Any]
    ) -> tuple[list[NodeWithScore], dict[str, Any]]:
        """The nodes that fit, compiled, and the variables with their ids."""
        asked = query.query_str if isinstance(query, QueryBundle) else query
        kept = self._fitting(asked, nodes, variables)
        compile_nodes(self._epic, [n.node for n in kept if n.node.node_id not in self._epic.texts])
        return kept, {**variables, "text_ids": [n.node.node_id for n in kept]}

    @property
    def _epic(self) -> EpicLLM:
        assert isinstance(self._llm, EpicLLM)
        return self._llm

    def _fitting(self, query: str, nodes: Sequence[NodeWithScore], variables: dict[str, Any]) -> list[NodeWithScore]:
        kept = list(nodes)
        room = self._epic.engine.max_model_len - self._epic.max_tokens
        while (length := self._length(query, kept, variables)) > room:
            if len(kept) == 1:
                raise ContextLengthError(
                    f"the node {kept[0].node.node_id} makes a prompt of {length} tokens, and {room} fit beside "
                    f"max_tokens={self._epic.max_tokens}: split documents into smaller nodes, or lower max_tokens."
                )
            # Of equal scores the last one goes: nodes come in the order in which they were found.
            worst = min(reversed(range(len(kept))), key=lambda i: _score(kept[i]))
            del kept[worst]
        if len(kept) < len(nodes):
            left_out = ", ".join(n.node.node_id for n in nodes if n not in kept)
            logger.warning("the prompt would exceed %d tokens, left out: %s", room, left_out)
        return kept

    def _length(self, query: str, nodes: Sequence[NodeWithScore], variables: dict[str, Any]) -> int:
        """Tokens of the prompt, as it would be cut."""
        composer = self._epic.texts.composer
        known = [(n.node.node_id, prompted_text(n.node)) for n in nodes]
        messages = plain_messages(self._messages(query, [text for _, text in known], variables))
        parts = composer.segments(messages, lambda text: cut_known(text, known))
        return sum(len(composer.tokenizer.encode_text(p.text) if isinstance(p, TextPart) else p) for p in parts)


def _score(node: NodeWithScore) -> float:
    return float("-inf") if node.score is None else node.score


class _LinksNodes:
    """For chat engines: answers come from an :class:`EpicSynthesizer` with the engine's own prompts."""

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> CompactAndRefine:
        made = super()._get_response_synthesizer(chat_history, streaming=streaming)  # type: ignore[misc]
        return EpicSynthesizer(
            llm=made._llm,
            callback_manager=made._callback_manager,
            text_qa_template=made._text_qa_template,
            refine_template=made._refine_template,
            streaming=streaming,
        )


class EpicContextChatEngine(_LinksNodes, ContextChatEngine):
    """LlamaIndex's context chat engine, with nodes linked by their ids.

    ``EpicContextChatEngine.from_defaults(retriever=index.as_retriever(), llm=llm)``.
    """


class EpicCondensePlusContextChatEngine(_LinksNodes, CondensePlusContextChatEngine):
    """LlamaIndex's condense-plus-context chat engine, with nodes linked by their ids.

    ``EpicCondensePlusContextChatEngine.from_defaults(retriever=index.as_retriever(), llm=llm)``.
    """
