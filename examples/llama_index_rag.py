"""LlamaIndex with epic-rag: an index, an LLM, questions. Run: python examples/llama_index_rag.py [STORE]."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index_epic import EpicLLM, EpicVectorStore, use_tokenizer

from epic_rag.retrieval import MiniLMEmbedder

QUESTIONS = [
    "In which year was the workshop founded?",
    "How much does a full service cost?",
    "How long is every repair guaranteed?",
]


class MiniLM(BaseEmbedding):
    _embedder: Any = PrivateAttr(default_factory=MiniLMEmbedder)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed(texts).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LastChat(BaseEventHandler):
    """Keeps the LLM's last prompt and response: what a query engine does not hand on."""

    last: Any = None

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.last = event


store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="epic-rag-")
chats = LastChat()
instrument.get_dispatcher().add_event_handler(chats)

with EpicLLM(model="smollm2", store=store, max_tokens=60) as llm:
    use_tokenizer(llm)
    corpus = Path(__file__).parent / "corpus"
    documents = [Document(text=path.read_text(), doc_id=path.name) for path in sorted(corpus.glob("*.md"))]
    index = VectorStoreIndex.from_documents(
        documents,
        storage_context=StorageContext.from_defaults(vector_store=EpicVectorStore(SimpleVectorStore(), llm)),
        # Short nodes: a 135M model does not find a fact in long ones.
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0)],
        embed_model=MiniLM(),
    )
    index.vector_store.reconcile(index)  # forgets the nodes of an earlier run on this store
    print(f"{len(llm.texts.ids())} nodes compiled")

    engine = index.as_query_engine(llm=llm, similarity_top_k=4)
    for question in QUESTIONS:
        print(f"\n{question}\n  {engine.query(question)}")
        chat = chats.last
        usage, cost = chat.response.raw["usage"], chat.response.raw["epic"]
        full = llm.chat(chat.messages, policy="full", max_tokens=1).raw["epic"]
        print(
            f"  {usage['reused_tokens']} of {usage['prompt_tokens']} prompt tokens reused ({cost['reuse']}); "
            f"first token after {cost['ttft_s']:.2f} s, {full['ttft_s']:.2f} s when all is computed"
        )
